"""``multiq health``: a probe on a worker's health file."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from multiq.text import duration, safe

from .exits import FAILED, OK
from .options import Duration, json_option, traceback_option
from .output import say


@click.command(short_help="Tell whether the worker of a health file is well.")
@click.argument("path", metavar="PATH", type=click.Path(path_type=Path))
@click.option(
    "--max-age",
    type=Duration(),
    default="30",
    metavar="TIME",
    help="Since it was last well; 30 (seconds) unless given. Workers write every 5 s.",
)
@json_option
@traceback_option
def health(path: Path, max_age: float, as_json: bool) -> int:
    """End with 0 if the worker that writes PATH (multiq worker --health-file PATH) is well, and with 1 if not."""
    document, age = _read(path)
    is_well = age is not None and age <= max_age
    say(as_json, safe(_sentence(path, document, age, is_well=is_well)), well=is_well, age=age, report=document)
    return OK if is_well else FAILED


def _read(path: Path) -> tuple[dict[str, Any] | None, float | None]:
    """What the file says, and how many seconds ago the worker was well; None: nobody writes there, or it never was."""
    try:
        document = json.loads(path.read_bytes())
        well_at = path.stat().st_mtime
    except (OSError, ValueError):
        return None, None
    return (document if isinstance(document, dict) else None), (max(0.0, time.time() - well_at) if well_at else None)


def _sentence(path: Path, document: dict[str, Any] | None, age: float | None, *, is_well: bool) -> str:
    if document is None:
        return f"no worker writes {path}"
    worker, reasons = document.get("worker"), "; ".join(map(str, document.get("waits_for", [])))
    if is_well:
        return f"{worker} is {document.get('state')}" + (f"; it waits: {reasons}" if reasons else "")
    since = "has not been well yet" if age is None else f"was last well {duration(age)} ago"
    return f"{worker} {since}" + (f": {reasons}" if reasons else "")
