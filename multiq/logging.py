"""Logs the events, as text or as JSON. Arguments of jobs are never logged."""

from __future__ import annotations

import logging
import os
import sys
import textwrap
import time
from typing import TYPE_CHECKING, Any

import msgspec

from . import events as ev
from .failure_record import app_traceback
from .formatting import abridge, many
from .job import running
from .outage_log import OutageLog
from .terminal_escapes import safe

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from .app import App
    from .events import Event
    from .job import JobContext

_log = logging.getLogger("multiq.worker")

NEVER_SLOW = float("inf")

_INDENT = "    "
_LINE_ENDS = "\n\t"  # line ends and tabs are kept, because JSON writes them as escape sequences
_LONGEST_LINE = 8_000  # characters
_LONGEST_TRACE = 16_000  # characters, because the text of an error may be very long


def setup_logging(level: str = "info", format: str = "text", *, over_app: bool = False) -> bool:  # noqa: A002
    """Log to standard error, as text or as lines of JSON, if the program has not set up logging itself.

    If the root logger has handlers, its handlers and its level do not change. *over_app*: replace a level that the
    program has set for the logger ``multiq``, because *level* comes from the command line. Returns whether this call
    has set up the handler and its format.
    """
    add_job_fields()
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "multiq" and isinstance(logger, logging.Logger):
            logger.disabled = False  # dictConfig and fileConfig disable all loggers that they do not name
    ours = logging.getLogger("multiq")
    if over_app or ours.level == logging.NOTSET:
        ours.setLevel(level.upper())
    if logging.root.handlers:
        return False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter(has_colours=_has_colours()))
    logging.root.addHandler(handler)
    if logging.root.level == logging.WARNING:  # Python's own default
        logging.root.setLevel(level.upper())
    return True


def add_job_fields() -> None:
    """Add fields about the running job to each log record.

    The fields are ``multiq_task``, ``multiq_job_id``, ``multiq_queue`` and ``multiq_attempt``. Outside of jobs, the
    fields are empty texts, so any format may use the fields. A second call of ``add_job_fields`` does nothing.
    """
    make = logging.getLogRecordFactory()
    if isinstance(make, _RecordFactory):
        return
    logging.setLogRecordFactory(_RecordFactory(make))


def log_events(app: App, *, each_job: bool = False) -> None:
    """Log an app's events. A second call of ``log_events`` for the same app does nothing.

    ``log_events`` does not subscribe to events that the logger's level would suppress. Finished jobs are logged at the
    level debug, because writing a log line takes as long as a short job. With *each_job*, finished jobs are logged at
    the level info.
    """
    if app.events.logged:
        return
    app.events.logged = True
    for kind, usual in _LEVELS.items():
        level = logging.INFO if each_job and kind is ev.JobDone else usual
        if _log.isEnabledFor(level):
            app.events.subscribe(kind, _Line(level))
    outages = OutageLog(_write_event)
    app.events.subscribe(ev.BackendDown, outages.went_down)
    app.events.subscribe(ev.BackendUp, outages.came_back)
    limit = slow_after(app)

    def look(event: ev.JobFailed) -> None:
        if event.seconds > limit:
            log_slow(event.job, event.seconds)

    if limit < NEVER_SLOW:
        app.events.subscribe(ev.JobFailed, look)


def slow_after(app: App) -> float:
    """Return the seconds after which a job is logged as slow, or ``NEVER_SLOW`` if slow jobs are not logged."""
    limit = app.settings.log.slow_job
    return limit if limit and _log.isEnabledFor(logging.WARNING) else NEVER_SLOW


def log_slow(job: JobContext, seconds: float) -> None:
    """Log a slow job. After a success, the runner calls ``log_slow`` directly, without an event."""
    _write(logging.WARNING, "slow", {**_job_fields(job), "seconds": seconds})


def log_summary(worker: str, seconds: float, **counts: int) -> None:
    """Log how many jobs a worker process has settled in *seconds*. *counts*: how many jobs have ended in each way, such
    as ``done=3``.

    Counts of 0 are left out, except the counts of ``_ALWAYS_COUNTED``.
    """
    jobs = sum(counts.values())
    rate = round(jobs / seconds, 1) if seconds > 0 else None
    shown = {word: number for word, number in counts.items() if number or word in _ALWAYS_COUNTED}
    _write(logging.INFO, "summary", {"worker": worker, "jobs": jobs, "seconds": seconds, "rate": rate, **shown})


_ALWAYS_COUNTED = ("done", "retried", "buried")


class TextFormatter(logging.Formatter):
    """Formats each record as a line of text, in local time.

    The messages of other loggers begin with the logger's name. Messages of a job's code end with the job's task and id.
    """

    def __init__(self, *, has_colours: bool = False) -> None:
        super().__init__()
        self._has_colours = has_colours

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        level = f"{record.levelname.lower():<7}"
        if self._has_colours and record.levelno in _COLOURS:
            level = f"\x1b[{_COLOURS[record.levelno]}m{level}\x1b[0m"
        message = record.getMessage()
        if record.name.partition(".")[0] != "multiq":
            message = f"{record.name}: {message}"
        job = _job_of(record)
        if job:
            message += f" ({job['task']} [{job['queue']}] {job['job_id']} attempt {job['attempt']})"
        # ``safe``, because an error's text may contain terminal codes
        line = f"{clock}.{int(record.msecs):03} {level} {safe(_cut(message))}"
        if record.exc_info:
            # indented, because the text of an error may contain a line that looks like another record
            trace = abridge(self.formatException(record.exc_info), _LONGEST_TRACE)
            line += "\n" + textwrap.indent(safe(trace, keep="\n"), _INDENT, lambda _: True)
        return line


class JsonFormatter(logging.Formatter):
    """Formats each record as a line with a JSON object.

    The fields are ``time`` (seconds since 1970), ``level``, ``logger``, ``message``, and the fields of an event. A
    record from a job's code also has the job's ``task``, ``queue``, ``job_id`` and ``attempt``. The values that the
    program's code passes as ``extra`` are fields, too, unless they have the name of one of these fields.
    """

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            **{name: value for name, value in vars(record).items() if name not in _OWN_ATTRIBUTES},
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_job_of(record),
            **getattr(record, "multiq", {}),
        }
        plain = {name: _plain(value) for name, value in fields.items()}
        if record.exc_info:
            trace = abridge(self.formatException(record.exc_info), _LONGEST_TRACE)
            plain["traceback"] = safe(trace, keep=_LINE_ENDS)
        return msgspec.json.encode(plain).decode()


#: the attributes of a record that are no ``extra`` of the program
_OWN_ATTRIBUTES = frozenset(
    {*vars(logging.LogRecord("", 0, "", 0, "", (), None)), "message", "asctime", "taskName", "multiq"}
    | {f"multiq_{name}" for name in ("task", "queue", "job_id", "attempt")}
)


def _cut(text: str) -> str:
    """Cut the middle out of a text that is too long for a log line."""
    if len(text) <= _LONGEST_LINE:
        return text
    half = _LONGEST_LINE // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"


def _plain(value: Any) -> Any:
    """Convert a field's value to a type of JSON. Escape characters that a terminal does not print."""
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return safe(_cut(value if isinstance(value, str) else str(value)), keep=_LINE_ENDS)


class _RecordFactory:
    """Calls the program's own record factory, and adds the running job to the record."""

    def __init__(self, make: Callable[..., logging.LogRecord]) -> None:
        self._make = make

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = self._make(*args, **kwargs)
        job = running.get(None)
        # with a prefix, because logging raises an error if a field of the program's own `extra` has the same name
        record.multiq_task = "" if job is None else job.task
        record.multiq_job_id = "" if job is None else job.id
        record.multiq_queue = "" if job is None else job.queue
        record.multiq_attempt = "" if job is None else job.attempt
        return record


def _job_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields of the job whose code made the record. For an event's record, the dict is empty, because the
    event already has the job's fields."""
    if not getattr(record, "multiq_job_id", "") or hasattr(record, "multiq"):
        return {}
    return {name: getattr(record, f"multiq_{name}") for name in ("task", "queue", "job_id", "attempt")}


def _has_colours() -> bool:
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return not is_plain and sys.stderr is not None and sys.stderr.isatty()


class _Line:
    """Logs events at one level."""

    def __init__(self, level: int) -> None:
        self._level = level

    def __call__(self, event: Event) -> None:
        # the author of a failed job needs the error's traceback
        trace = event.error if isinstance(event, ev.JobFailed) else None
        _write(self._level, *_describe(event), trace)


def _write_event(level: int, event: Event, more: dict[str, Any]) -> None:
    word, fields = _describe(event)
    _write(level, word, fields | more)


def _write(level: int, word: str, fields: dict[str, Any], trace: BaseException | None = None) -> None:
    parts = [f"{word:<9}"]
    parts += [
        _PHRASES[name](value) if name in _PHRASES else f"{name} {value}"
        for name, value in fields.items()
        if value is not None
    ]
    exc_info = None if trace is None else (type(trace), trace, _of_the_app(trace))
    _log.log(level, " ".join(parts), extra={"multiq": {"event": word, **fields}}, exc_info=exc_info)


def _of_the_app(error: BaseException) -> TracebackType | None:
    """Return the traceback of the task's own code, or the whole traceback if the level is debug."""
    return error.__traceback__ if _log.isEnabledFor(logging.DEBUG) else app_traceback(error)


_COLOURS = {logging.DEBUG: 2, logging.WARNING: 33, logging.ERROR: 31, logging.CRITICAL: 31}  # codes of terminal colours

_LEVELS: dict[type[Event], int] = {
    ev.JobStarted: logging.DEBUG,
    ev.JobDone: logging.DEBUG,
    ev.JobFailed: logging.WARNING,
    ev.JobRetried: logging.WARNING,
    ev.JobBuried: logging.ERROR,
    ev.JobSnoozed: logging.INFO,
    ev.JobExpired: logging.WARNING,
    ev.JobCancelled: logging.INFO,
    ev.JobTimedOut: logging.WARNING,
    ev.JobOverdue: logging.ERROR,
    ev.JobCrashed: logging.ERROR,
    ev.JobLost: logging.WARNING,
    ev.WorkerStarted: logging.INFO,
    ev.WorkerPaused: logging.INFO,
    ev.WorkerResumed: logging.INFO,
    ev.WorkerStopping: logging.INFO,
    ev.WorkerStopped: logging.INFO,
}

_WORDS: dict[type[Event], str] = {
    ev.JobStarted: "start",
    ev.JobDone: "done",
    ev.JobFailed: "failed",
    ev.JobRetried: "retry",
    ev.JobBuried: "buried",
    ev.JobSnoozed: "snoozed",
    ev.JobExpired: "expired",
    ev.JobCancelled: "cancelled",
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
            if not isinstance(event, ev.JobFailed):  # the log record of a failed job has the traceback instead
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
    "age": lambda seconds: f"after {_duration(seconds)}",
    "expires": lambda seconds: f"of {_duration(seconds)} at most",
    "retry_in": lambda seconds: f"again in {_duration(seconds)}",
    "down_for": lambda seconds: f"still, after {_duration(seconds)}",
    "was_down_for": lambda seconds: f"again, after {_duration(seconds)}",
    "tries": lambda number: f"and {number} {'try' if number == 1 else 'tries'}",
    "reason": lambda text: f"({text})",
    "error": lambda text: f"({text})",
}


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
