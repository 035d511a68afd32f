"""A diary of what workers did, kept by subscribing to their events, as logging and metrics do."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from multiq import events

if TYPE_CHECKING:
    from pathlib import Path

    from multiq import App


class Entry(NamedTuple):
    """One line: ``what`` is done, retried or buried."""

    what: str
    queue: str
    job_id: str
    attempt: int
    reason: str | None


def keep_diary(app: App, path: Path) -> None:
    """Append a line to the file for each job that is done, retried or buried."""

    def note(what: str, event: events.JobEvent, reason: str | None = None) -> None:
        job = event.job
        line = json.dumps(Entry(what, job.queue, job.id, job.attempt, reason)._asdict())
        with path.open("a") as diary:  # one short write in append mode: lines of several threads do not mix
            diary.write(line + "\n")

    app.on(events.JobDone)(lambda event: note("done", event))
    app.on(events.JobRetried)(lambda event: note("retried", event, event.reason))
    app.on(events.JobBuried)(lambda event: note("buried", event, event.reason))


def read_diary(path: Path, queue: str) -> list[Entry]:
    """The text that was written about one queue's jobs so far."""
    if not path.exists():
        return []
    whole_lines = path.read_text().rpartition("\n")[0].splitlines()
    entries: list[dict[str, Any]] = [json.loads(line) for line in whole_lines]
    return [Entry(**entry) for entry in entries if entry["queue"] == queue]
