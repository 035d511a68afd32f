"""The task that rings."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from examples.app import app

#: where rings are noted, a line each: stands for a pager
SIREN = Path(os.environ.get("ALARM_SIREN", "siren.jsonl"))


@app.task(queue="alarms", priority=0)
def ring(what: str) -> None:
    """Runs when the deadline has passed, and only if the alarm was not resolved."""
    with SIREN.open("a") as siren:
        siren.write(json.dumps({"what": what, "at": time.time()}) + "\n")


def rings() -> dict[str, list[float]]:
    """When each alarm rang, in seconds since 1970."""
    heard: dict[str, list[float]] = {}
    for line in SIREN.read_text().splitlines() if SIREN.exists() else []:
        entry = json.loads(line)
        heard.setdefault(entry["what"], []).append(entry["at"])
    return heard
