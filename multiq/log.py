"""Logging: a subscriber to the events, and two formats for the command line. Arguments of jobs are never logged."""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec

from . import events as ev
from .text import abridge, many, safe

if TYPE_CHECKING:
    from collections.abc import Callable

    from .app import App
    from .events import Event
    from .job import JobContext

_log = logging.getLogger("multiq.worker")

NEVER_SLOW = float("inf")

_LONGEST_TRACE = 16_000  # characters: an error's text may be as long as whatever it complains of


def setup_logging(level: str = "info", format: str = "text") -> None:  # noqa: A002 - the option's own name
    """Send the log of multiq, and warnings of everything else, to standard error, as text or as lines of JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("multiq").setLevel(level.upper())


def log_events(app: App, *, each_job: bool = False) -> None:
    """Have an app's events logged, each kind only if the log's level lets it through. Once per app.

    A job that is done is told at the level debug, and at info with *each_job*: a line for each costs as much as a
    short job does.
    """
    if app.events.logged:
        return
    app.events.logged = True
    for kind, usual in _LEVELS.items():
        level = logging.INFO if each_job and kind is ev.JobDone else usual
        if _log.isEnabledFor(level):
            app.events.subscribe(kind, _Line(level))
    limit = slow_after(app)

    def look(event: ev.JobFailed) -> None:
        if event.seconds > limit:
            log_slow(event.job, event.seconds)

    if limit < NEVER_SLOW:
        app.events.subscribe(ev.JobFailed, look)


def slow_after(app: App) -> float:
    """Seconds beyond which a job is told of as slow; ``NEVER_SLOW`` where nobody would read it."""
    limit = app.settings.log.slow_job
    return limit if limit and _log.isEnabledFor(logging.WARNING) else NEVER_SLOW


def log_slow(job: JobContext, seconds: float) -> None:
    """A job took so long, to its end or into an error. No event: a runner asks ``slow_after`` once, and compares."""
    _write(logging.WARNING, "slow", {**_job_fields(job), "seconds": seconds})


def log_summary(worker: str, seconds: float, *, done: int, retried: int, buried: int) -> None:
    """What a worker process has worked off in so many seconds."""
    jobs = done + retried + buried
    rate = round(jobs / seconds, 1) if seconds > 0 else None
    counts = {"done": done, "retried": retried, "buried": buried}
    _write(logging.INFO, "summary", {"worker": worker, "jobs": jobs, "seconds": seconds, "rate": rate, **counts})


class TextFormatter(logging.Formatter):
    """``12:00:01.234 info  done      send_reset_mail 0190f... attempt 1 in 3 ms``"""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        # what a job raised may hold anything, terminal codes too
        line = f"{clock}.{int(record.msecs):03} {record.levelname.lower():<7} {safe(record.getMessage())}"
        if record.exc_info:
            line += "\n" + safe(abridge(self.formatException(record.exc_info), _LONGEST_TRACE), keep="\n")
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``time`` (seconds since 1970), ``level``, ``logger``, ``message``, an event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "multiq", {}),
        }
        if record.exc_info:
            fields["traceback"] = abridge(self.formatException(record.exc_info), _LONGEST_TRACE)
        return msgspec.json.encode(fields, enc_hook=str).decode()


class _Line:
    """Logs events at one level."""

    def __init__(self, level: int) -> None:
        self._level = level

    def __call__(self, event: Event) -> None:
        # a failed job's traceback is what its author needs
        trace = event.error if isinstance(event, ev.JobFailed) else None
        _write(self._level, *_describe(event), trace)


def _write(level: int, word: str, fields: dict[str, Any], trace: BaseException | None = None) -> None:
    parts = [f"{word:<9}"]
    parts += [
        _PHRASES[name](value) if name in _PHRASES else f"{name} {value}"
        for name, value in fields.items()
        if value is not None
    ]
    _log.log(level, " ".join(parts), extra={"multiq": {"event": word, **fields}}, exc_info=trace)


_LEVELS: dict[type[Event], int] = {
    ev.JobStarted: logging.DEBUG,
    ev.JobDone: logging.DEBUG,
    ev.JobFailed: logging.WARNING,
    ev.JobRetried: logging.WARNING,
    ev.JobBuried: logging.ERROR,
    ev.JobTimedOut: logging.WARNING,
    ev.JobOverdue: logging.ERROR,
    ev.JobCrashed: logging.ERROR,
    ev.JobLost: logging.WARNING,
    ev.WorkerStarted: logging.INFO,
    ev.WorkerPaused: logging.INFO,
    ev.WorkerResumed: logging.INFO,
    ev.WorkerStopping: logging.INFO,
    ev.WorkerStopped: logging.INFO,
    ev.BackendDown: logging.ERROR,
    ev.BackendUp: logging.WARNING,
}

_WORDS: dict[type[Event], str] = {
    ev.JobStarted: "start",
    ev.JobDone: "done",
    ev.JobFailed: "failed",
    ev.JobRetried: "retry",
    ev.JobBuried: "buried",
    ev.JobTimedOut: "timed out",
    ev.JobOverdue: "overdue",
    ev.JobCrashed: "crashed",
    ev.JobLost: "lost",
    ev.WorkerStarted: "working",
    ev.WorkerPaused: "paused",
    ev.WorkerResumed: "resumed",
    ev.WorkerStopping: "stopping",
    ev.WorkerStopped: "stopped",
    ev.BackendDown: "down",
    ev.BackendUp: "up",
}


def _describe(event: Event) -> tuple[str, dict[str, Any]]:
    fields: dict[str, Any] = {}
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if name == "job":
            fields.update(_job_fields(value))
        elif name == "error":
            if not isinstance(event, ev.JobFailed):  # that one brings its traceback
                fields["error"] = f"{type(value).__name__}: {value}"
        else:
            fields[name] = value
    return _WORDS[type(event)], fields


def _job_fields(job: JobContext) -> dict[str, Any]:
    return {"task": job.task, "queue": job.queue, "job_id": job.id, "attempt": job.attempt}


_PHRASES: dict[str, Callable[[Any], str]] = {
    "task": str,
    "job_id": str,
    "worker": str,
    "jobs": lambda number: many(number, "job"),
    "rate": lambda number: f"{number:,} a second",
    "queue": lambda queue: f"[{queue}]",
    "queues": lambda queues: "on " + ", ".join(queues),
    "seconds": lambda seconds: f"in {_duration(seconds)}",
    "delay": lambda seconds: f"again in {_duration(seconds)}",
    "timeout": lambda seconds: f"after {_duration(seconds)}",
    "retry_in": lambda seconds: f"again in {_duration(seconds)}",
    "reason": lambda text: f"({text})",
    "error": lambda text: f"({text})",
}


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
