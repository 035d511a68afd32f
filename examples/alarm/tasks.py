"""The task that rings."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from examples.app import app

#: the file that gets a line for each ring, in place of a pager
SIREN = Path(os.environ.get("ALARM_SIREN", "siren.jsonl"))


@app.task(queue="alarms", priority=0, keep=3600)
def ring(what: str) -> str:
    """Runs when the deadline has passed, and only if the alarm was not resolved. Returns the text of the alarm."""
    with SIREN.open("a") as siren:
        siren.write(json.dumps({"what": what, "at": time.time()}) + "\n")
    return what


def rings() -> dict[str, list[float]]:
    """When each alarm rang, in seconds since 1970."""
    heard: dict[str, list[float]] = {}
    for line in SIREN.read_text().splitlines() if SIREN.exists() else []:
        entry = json.loads(line)
        heard.setdefault(entry["what"], []).append(entry["at"])
    return heard
