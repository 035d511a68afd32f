"""The answers of the status endpoints of all web frameworks."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from multiq.errors import (
    BackendFull,
    BackendUnavailable,
    EnqueuePartial,
    EnqueueUncertain,
    JobNotFound,
    OptionInvalid,
    PayloadInvalid,
)
from multiq.formatting import shown
from multiq.memo import readable_memo
from multiq.outcome import decode_outcome
from multiq.result_waiting import STATUS
from multiq.validation import check_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.app import App
    from multiq.job import JobHandle

_log = logging.getLogger("multiq.web")

TIMEOUT = 5.0
"""Seconds after which a status endpoint answers 503."""

PASSING = (BackendUnavailable, BackendFull, EnqueueUncertain, EnqueuePartial)
"""Errors that a web application answers with 503: the same request may succeed later."""

NO_ANSWER = "The job queue does not answer. Try again later."
UNREADABLE = "the outcome cannot be read"
NOT_FOUND = "There is no such job, or its outcome is no longer kept."

HEADERS = {"Cache-Control": "no-store"}
"""The headers of a job's view. The view must not be cached, because it changes, and other users may not be allowed to
see it."""


def check_queues(queues: Sequence[str] | None) -> frozenset[str] | None:
    """Return the queues whose jobs are shown. None: all. Raises ``OptionInvalid``, ``NameInvalid``."""
    if queues is None:
        return None
    if isinstance(queues, str) or not isinstance(queues, Iterable):
        raise OptionInvalid(f"queues must be a list of names, got {shown(queues)}")
    return frozenset(check_name(name) for name in queues)


def find_handle(app: App, ref: str, queues: frozenset[str] | None) -> JobHandle | None:
    """Return the handle of the job *ref*. None: *ref* is not a reference, or its queue is not shown."""
    try:
        handle = app.job(ref)
    except OptionInvalid:
        return None
    if handle.queue not in queues if queues is not None else handle.queue.startswith("multiq."):  # multiq's own jobs
        return None
    return handle


def view_job(app: App, handle: JobHandle, *, reasons: bool) -> dict[str, Any] | None:
    """Return the view of a job as JSON's types. None: there is neither the job nor an outcome.

    *reasons*: whether the view says why the job has failed or was cancelled. A reason may be the text of an exception.

    Reads the job first and the outcome second, because an ack deletes the job and stores the outcome in one step.
    Raises ``BackendError``.
    """
    try:
        record = handle.peek()
    except JobNotFound:
        return _view_outcome(app, handle, reasons=reasons)
    view = _view(handle, STATUS[record.state])
    progress = readable_memo(record.memo).progress
    if progress is not None:
        view["progress"] = {"fraction": progress.fraction, "message": progress.message}
    if reasons and view["status"] == "failed":
        view["reason"] = record.reason
    return view


def text_of(error: BaseException) -> str:
    """Return the text that a client may read about one of the errors ``PASSING``. The error's own text may name
    hosts."""
    if isinstance(error, EnqueueUncertain):
        return "The job queue did not answer. It is unknown whether the job was enqueued."
    if isinstance(error, EnqueuePartial):
        return "The job queue stored only some of the jobs."
    if isinstance(error, BackendFull):
        return "The job queue is full. Try again later."
    return NO_ANSWER


def may_repeat(error: BaseException) -> bool:
    """Whether the client may repeat the request after this error, because nothing was stored."""
    return not isinstance(error, EnqueueUncertain | EnqueuePartial)


def _view_outcome(app: App, handle: JobHandle, *, reasons: bool) -> dict[str, Any] | None:
    if not app.backend.declared.outcomes:
        return None
    (stored,) = app.backend.outcomes(handle.queue, [handle.id])
    if stored is None:
        return None
    try:
        outcome = decode_outcome(stored)
    except PayloadInvalid as exc:  # another program has stored it, or this program lacks the keys
        _log.warning("the outcome of a job is not shown: %s", exc)
        view = _view(handle, stored.kind)
        if stored.kind == "done" or reasons:
            view["reason"] = UNREADABLE
        return view
    view = _view(handle, outcome.kind)
    view["result"] = outcome.value
    if outcome.kind == "done" or reasons:
        view["reason"] = outcome.omitted
    return view


def _view(handle: JobHandle, status: str) -> dict[str, Any]:
    return {"ref": handle.ref, "status": status, "progress": None, "result": None, "reason": None}
