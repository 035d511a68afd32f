"""Failures of jobs. A *failure* is JSON that a worker stores in a job's detail when it buries the job.

A failure has the form ``{"v": 1, "error": ..., "traceback": ..., "at": ..., "worker": ..., "attempt": ..., "task": ...,
"error_class": ..., "seconds": ...}``. A backend without the capability ``memos`` stores no failure.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from types import TracebackType
from typing import TYPE_CHECKING, Annotated

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

PACKAGES = frozenset({"multiq", "multiq_sqlite", "multiq_redis", "multiq_beanstalk", "multiq_mysql"})
"""The packages whose frames are left out of tracebacks, because a task's author does not need them."""

VERSION = 1

ROOM = 16 * 1024
"""The largest size of a detail, in bytes. The outermost frames of a longer traceback are cut."""

_FRAMES = 400  # the number of innermost frames that are formatted: more frames would not fit into ROOM
_CUT = "[... the outermost frames were cut ...]\n"
_CLASS_ROOM = 300  # the most characters of an error's ``class_path``
_NAME_ROOM = 128  # the most characters of a task's name: another program may write a longer name than multiq allows
_ENTRY_ROOM = 2_000  # the most characters of one entry of a traceback, because the text of an error may be very long


LATEST = 250_000_000_000.0
"""The latest time that is read, in seconds since 1970: the year 9892, so that each time zone has a later hour."""

# Another program may write any number, and a time that datetime cannot have would break each list of failed jobs.
_Time = Annotated[float, msgspec.Meta(ge=0, le=LATEST)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=10_000_000_000)]  # over 300 years


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The reason, the time and the traceback of a bury."""

    v: int = VERSION
    """The version of the failure's format."""
    error: str
    """The reason that is stored with the job."""
    traceback: str = ""
    """The traceback of the error. The text is empty if the task's code raised no error."""
    at: _Time
    """The time at which the job was buried, in seconds since 1970 by the worker's clock."""
    worker: str
    """``host:pid``."""
    attempt: int
    task: str | None = None
    """The name of the job's task. None means that the body was not a valid envelope."""
    error_class: str = ""
    """The module and the name of the error's class, like ``builtins.ValueError``. The text is empty if no error was
    raised."""
    seconds: _Seconds | None = None
    """The duration of the attempt. None means that the attempt did not begin."""


_decoder = msgspec.json.Decoder(Failure)


def encode_failure(
    reason: str,
    *,
    task: str | None,
    attempt: int,
    error: BaseException | None = None,
    stack: str | None = None,
    seconds: float | None = None,
) -> bytes:
    """Return the detail for a job that is being buried. The detail has at most ``ROOM`` bytes. Never raises an
    ``Exception``.

    - *stack*: the stack to store if the error has no traceback.
    - *seconds*: the duration of the attempt. None means that the attempt did not begin.
    """
    failure = Failure(
        error=_writable(reason),
        traceback=_writable(traceback_of(error) or stack or ""),
        at=round(time.time(), 3),
        worker=f"{socket.gethostname()}:{os.getpid()}",
        attempt=attempt,
        task=None if task is None else _writable(task[:_NAME_ROOM]),
        error_class="" if error is None else class_path(error),
        seconds=None if seconds is None else round(seconds, 6),
    )
    detail = msgspec.json.encode(failure)
    while len(detail) > ROOM and failure.traceback:  # escape sequences make the JSON longer than the text
        size = len(failure.traceback)
        kept = max(0, size * ROOM // len(detail) - 2 * len(_CUT))
        text = failure.traceback[size - kept :].partition("\n")[2]  # whole lines
        failure = msgspec.structs.replace(failure, traceback=text and _CUT + text)
        detail = msgspec.json.encode(failure)
    return detail


def decode_failure(detail: bytes | None) -> Failure | None:
    """Return the failure in a job's detail. None means that there is no failure, or that another program has written
    the detail."""
    if not detail:
        return None
    try:
        return _decoder.decode(detail)
    except (msgspec.DecodeError, ValueError):
        return None


def app_traceback(error: BaseException) -> TracebackType | None:
    """Return the traceback of the task's own code, without multiq's frames. If all frames are frames of multiq, return
    all frames."""
    frames: list[TracebackType] = []
    trace = error.__traceback__
    while trace is not None:
        name = str(trace.tb_frame.f_globals.get("__name__", ""))
        if name == "multiq.worker.execution.runner":
            frames.clear()  # drop the frames of event loops and middleware, which are before the task's code
        elif name.partition(".")[0] not in PACKAGES:
            frames.append(trace)
        trace = trace.tb_next
    if not frames:
        return error.__traceback__
    result = None
    for frame in reversed(frames):
        result = TracebackType(result, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return result


def class_path(error: BaseException) -> str:
    """Return the module and the name of an error's class, cut short. Never raises an ``Exception``."""
    kind = type(error)
    try:  # a user's metaclass may override both names
        module, name = type.__getattribute__(kind, "__module__"), type.__getattribute__(kind, "__qualname__")
        return _writable(f"{module}.{name}"[:_CLASS_ROOM])
    except Exception:  # noqa: BLE001 - a metaclass may raise any error
        return ""


def traceback_of(error: BaseException | None) -> str:
    """Return the traceback of the task's own code, cut short. The text is empty if there is no traceback. Never raises
    an exception."""
    if error is None or error.__traceback__ is None:
        return ""
    try:
        trace = app_traceback(error)
        lines = traceback.TracebackException(type(error), error, trace, limit=-_FRAMES, compact=True).format()
        return "".join(_innermost(list(lines)))
    except BaseException:  # noqa: BLE001 - the user's error may have a broken __str__, and the job must be buried anyway
        return ""


def _innermost(entries: list[str]) -> Iterable[str]:
    """Return as many of the last entries of a traceback as fit into ``ROOM``."""
    room, kept = ROOM, list[str]()
    for entry in reversed(entries):
        text = entry if len(entry) <= _ENTRY_ROOM else f"{entry[:_ENTRY_ROOM]}...\n"
        room -= len(text)
        if room < 0:
            kept.append(_CUT)
            break
        kept.append(text)
    return reversed(kept)


def _writable(text: str) -> str:
    """Escape the characters that UTF-8 cannot encode, because the text of an error may have broken Unicode."""
    return text.encode("utf-8", "backslashreplace").decode()
