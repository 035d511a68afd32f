"""Renew the tables of ``docs/reliability.md``: each script writes its own table between a pair of marks."""

from __future__ import annotations

import datetime as dt
import platform
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


def renew(name: str, text: str, *, page: Path = PAGE) -> None:
    """Replace what the page has between the marks of this name by *text*."""
    head, mark, rest = page.read_text().partition(f"<!-- {name}: begin -->\n")
    _, end, tail = rest.partition(f"<!-- {name}: end -->\n")
    assert end, f"{page} has no place for {name}"
    page.write_text(f"{head}{mark}\n{text.strip()}\n\n{end}{tail}")


def conditions(short_of: str = "") -> str:
    """When and where the measurement was made; for a short run also the size of the full run."""
    today = dt.datetime.now(dt.UTC).date().isoformat()
    short = f" **A short run**: the whole one is {short_of}." if short_of else ""
    where = f"Python {platform.python_version()} on {platform.system()} ({platform.machine()})"
    return f"Measured on {today} by {where}.{short}"
