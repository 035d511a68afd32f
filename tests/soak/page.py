"""``docs/reliability.md``: its tables are written by the scripts that measure them, each between a pair of marks."""

from __future__ import annotations

import datetime as dt
import platform
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


def renew(name: str, text: str, *, page: Path = PAGE) -> None:
    """Put *text* where the page has what this script wrote last."""
    head, mark, rest = page.read_text().partition(f"<!-- {name}: begin -->\n")
    _, end, tail = rest.partition(f"<!-- {name}: end -->\n")
    assert end, f"{page} has no place for {name}"
    page.write_text(f"{head}{mark}\n{text.strip()}\n\n{end}{tail}")


def conditions(short_of: str = "") -> str:
    """When and where something was measured; and, if it was a short run, what the whole one is."""
    today = dt.datetime.now(dt.UTC).date().isoformat()
    short = f" **A short run**: the whole one is {short_of}." if short_of else ""
    where = f"Python {platform.python_version()} on {platform.system()} ({platform.machine()})"
    return f"Measured on {today} by {where}.{short}"
