"""``multiq health``: checks a worker's health file."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import click
import msgspec

from multiq.formatting import duration
from multiq.terminal_escapes import safe

from .durations import Duration
from .exits import FAILED, OK
from .options import json_option, traceback_option
from .output import say

_LARGEST = 1 << 20  # bytes


@click.command(short_help="Check a worker's health file.")
@click.argument("path", metavar="PATH", type=click.Path(path_type=Path))
@click.option(
    "--max-age",
    type=Duration(),
    default="30",
    metavar="TIME",
    help="A worker that was last healthy longer ago than this is unhealthy (30 s). A worker writes every 5 s.",
)
@json_option
@traceback_option
def health(path: Path, max_age: float, as_json: bool) -> int:
    """End with 0 if the worker that writes PATH (multiq worker --health-file PATH) is healthy. End with 1 if the worker
    is not healthy."""
    document, age = _read(path)
    is_well = age is not None and age <= max_age
    say(as_json, safe(_sentence(path, document, age, is_well=is_well)), well=is_well, age=age, report=document)
    return OK if is_well else FAILED


def _read(path: Path) -> tuple[dict[str, Any] | None, float | None]:
    """Return the file's content, and the seconds since the worker was last healthy.

    If no worker writes the file, return None for the content and for the seconds. If the worker was never healthy,
    return None for the seconds.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # O_NONBLOCK: do not wait for a pipe
        with os.fdopen(handle, "rb") as file:
            document = msgspec.json.decode(file.read(_LARGEST) or b"")  # read() returns None for an empty pipe
            well_at = os.fstat(file.fileno()).st_mtime
    except (OSError, ValueError, RecursionError, msgspec.DecodeError):
        return None, None
    if not isinstance(document, dict) or "is_well" not in document:  # another program's file
        return None, None
    return document, (max(0.0, time.time() - well_at) if well_at else None)


def _sentence(path: Path, document: dict[str, Any] | None, age: float | None, *, is_well: bool) -> str:
    if document is None:
        return f"no worker writes {path}"
    waits_for = document.get("waits_for")
    worker, reasons = document.get("worker"), "; ".join(map(str, waits_for if isinstance(waits_for, list) else []))
    if is_well:
        return f"{worker} is {document.get('state')}" + (f"; it waits: {reasons}" if reasons else "")
    since = "has not been well yet" if age is None else f"was last well {duration(age)} ago"
    return f"{worker} {since}" + (f": {reasons}" if reasons else "")
