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


def conditions() -> str:
    """When and where something was measured, in a sentence."""
    today = dt.datetime.now(dt.UTC).date().isoformat()
    return f"Measured on {today} by Python {platform.python_version()} on {platform.system()} ({platform.machine()})."
