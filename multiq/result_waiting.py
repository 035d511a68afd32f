"""Reads the statuses and results of jobs, and waits for results by polling.

- No false "unknown": a poll reads the job first and its outcome second, because an ack deletes the job and stores the
  outcome in one step. For a job that is gone, a poll makes a second call.
- No outcome of an earlier job: an outcome is returned only if the store no longer has the job. While the store has the
  job, an outcome may belong to an earlier job with the same id. The check whether the store has the job costs one more
  call for each result.
- Few calls: one thread polls for all waiting handles of a backend, with one call for each queue. Handles that are due
  at nearly the same time are polled together. The pauses of a handle grow from 5 ms to 250 ms, so a result is noticed
  up to 250 ms late.

When the pauses of a handle have grown to 250 ms, only every fourth poll reads the job itself. As a result, a failed job
is noticed up to a second late.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from .backend import JobRecord, State
from .driverkit.fork import forks
from .envelope import decode_json, refusal_of
from .errors import (
    BackendUnavailable,
    JobCancelled,
    JobFailed,
    JobNotFound,
    MultiqError,
    OutcomeUnknown,
    ResultOmitted,
    ResultTimeout,
)
from .outcome import decode_outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .backend import Backend
    from .backend.effects import Outcome

JobStatus: TypeAlias = Literal["queued", "delayed", "held", "running", "failed", "done", "cancelled", "unknown"]

STATUS: dict[State, JobStatus] = {
    State.READY: "queued",
    State.DELAYED: "delayed",
    State.RESERVED: "running",
    State.BURIED: "failed",
    State.HELD: "held",
}
"""Maps the state of a job in the queue to the job's status."""

_FIRST_PAUSE = 0.005  # seconds between two polls for one handle
_LONGEST_PAUSE = 0.25
# the share of a handle's pause by which its next poll may be early, so that it joins another handle's poll
_EARLY = 0.25
_PEEK_EVERY = 4  # during the longest pauses, only one in four polls reads the job itself
_IDS_PER_CALL = 500

_lock = threading.Lock()
"""Guards ``_pollers`` and the lists of waits of all pollers. A thread holds this lock only for a moment."""

_pollers: dict[Backend, _Poller] = {}
"""The polling threads of this process."""

forks.hold(_lock)
forks.register(in_child=_pollers.clear)  # a forked child has none of the parent's threads


class Pending(NamedTuple):
    """The job is not done."""

    status: JobStatus


class Done(NamedTuple):
    """The job is done."""

    value: Any


def status_of(backend: Backend, queue: str, job_id: str) -> JobStatus:
    """Return the status of the job."""
    record = _peek(backend, queue, job_id)
    if record is not None:
        return STATUS[record.state]
    if not backend.declared.outcomes:
        return "unknown"
    (outcome,) = backend.outcomes(queue, [job_id])
    return "unknown" if outcome is None else outcome.kind


def look(backend: Backend, queue: str, job_id: str) -> Done | Pending:
    """Read a job's result, without waiting. Raises the errors of ``JobHandle.result``, except ``ResultTimeout``."""
    record = _peek(backend, queue, job_id)
    if record is not None:
        return _judge_record(record, is_first=True)
    (outcome,) = backend.outcomes(queue, [job_id])
    return _judge_outcome(queue, job_id, outcome)


def wait(backend: Backend, queue: str, job_id: str, left: float | None, timeout: float | None) -> Future[Any]:
    """Return a future of a job's result. The future fails with the errors of ``JobHandle.result``.

    *left*: the seconds until the future fails with ``ResultTimeout``. *timeout*: the seconds that the message of
    ``ResultTimeout`` shows. If *left* is None, the wait has no limit. Cancelling the future ends the wait.
    """
    now = time.monotonic()
    waiting = _Wait(queue, job_id, timeout, float("inf") if left is None else now + left, now)
    with _lock:
        poller = _pollers.get(backend)
        if poller is None:
            poller = _Poller(backend)
            poller.thread.start()
            _pollers[backend] = poller
        poller.waits.append(waiting)
    waiting.future.add_done_callback(poller.note_cancelled)
    poller.woken.set()
    return waiting.future


class _Wait:
    """One wait for a result. Only the poller's thread changes a ``_Wait``."""

    __slots__ = (
        "deadline",
        "error",
        "future",
        "id",
        "is_checked",
        "looks",
        "next_at",
        "pause",
        "queue",
        "status",
        "timeout",
    )

    def __init__(self, queue: str, job_id: str, timeout: float | None, deadline: float, now: float) -> None:
        self.queue = queue
        self.id = job_id
        self.timeout = timeout
        self.deadline = deadline
        self.future: Future[Any] = Future()
        self.next_at = now
        self.pause = _FIRST_PAUSE
        self.looks = 0
        self.is_checked = False  # whether a poll has read the job and seen that its outcome will be kept
        self.status: JobStatus = "queued"
        self.error: MultiqError | None = None  # the error of the last poll, if a later poll may succeed

    def needs_peek(self, now: float) -> bool:
        return self.pause < _LONGEST_PAUSE or self.looks % _PEEK_EVERY == 0 or now >= self.deadline

    def go_on(self, now: float) -> None:
        """Plan the next poll, or end the wait at its deadline."""
        if now >= self.deadline:
            self.fail(self.error or ResultTimeout(self.queue, self.id, self.status, self.timeout or 0.0))
            return
        self.looks += 1
        self.next_at = min(time.monotonic() + self.pause, self.deadline)
        self.pause = min(2 * self.pause, _LONGEST_PAUSE)

    def finish(self, value: Any) -> None:
        try:
            self.future.set_result(value)
        except InvalidStateError:  # the caller has cancelled the future
            return

    def fail(self, error: BaseException) -> None:
        try:
            self.future.set_exception(error)
        except InvalidStateError:
            return


class _Poller:
    """The thread that polls for all waits on one backend. The thread ends when no waits are left."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.waits: list[_Wait] = []
        self.woken = threading.Event()
        self.thread = threading.Thread(target=self._run, name="multiq-results", daemon=True)

    def note_cancelled(self, future: Future[Any]) -> None:
        if future.cancelled():
            self.woken.set()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as exc:  # if the error were not passed to the waits, the waits would never end
            for waiting in self._end():
                waiting.fail(exc)
            raise

    def _turn(self) -> bool:
        """Poll for the waits whose next poll is due. Returns False if no waits are left."""
        self.woken.clear()
        now = time.monotonic()
        with _lock:
            self.waits = [waiting for waiting in self.waits if not waiting.future.done()]
            if not self.waits:
                self._leave()
                return False
            next_at = min(waiting.next_at for waiting in self.waits)
            due = [waiting for waiting in self.waits if waiting.next_at <= now + waiting.pause * _EARLY]
        if next_at > now:
            self.woken.wait(max(0.0, next_at - now))
            return True
        queues: defaultdict[str, list[_Wait]] = defaultdict(list)
        for waiting in due:
            queues[waiting.queue].append(waiting)
        for queue, waits in queues.items():
            for first in range(0, len(waits), _IDS_PER_CALL):
                self._look_safely(queue, waits[first : first + _IDS_PER_CALL], now)
        return True

    def _look_safely(self, queue: str, waits: Sequence[_Wait], now: float) -> None:
        try:
            self._look(queue, waits, now)
        except BackendUnavailable as exc:  # the backend may answer again before the waits' deadlines
            for waiting in waits:
                if not waiting.future.done():
                    waiting.error = exc
                    waiting.go_on(now)
        except Exception as exc:  # noqa: BLE001 - any error ends the waits
            for waiting in waits:
                waiting.fail(exc)

    def _look(self, queue: str, waits: Sequence[_Wait], now: float) -> None:
        outcomes = self._backend.outcomes(queue, [waiting.id for waiting in waits])
        gone: list[_Wait] = []
        left: list[_Wait] = []
        for waiting, outcome in zip(waits, outcomes, strict=True):
            if outcome is None and not waiting.needs_peek(now):
                left.append(waiting)
                continue
            record = _peek(self._backend, queue, waiting.id)
            if record is None:
                gone.append(waiting)
            elif self._note_record(waiting, record):
                left.append(waiting)
        if gone:
            outcomes = self._backend.outcomes(queue, [waiting.id for waiting in gone])
            for waiting, outcome in zip(gone, outcomes, strict=True):
                self._note_outcome(waiting, outcome)
        for waiting in left:
            waiting.error = None
            waiting.go_on(now)

    def _note_record(self, waiting: _Wait, record: JobRecord) -> bool:
        """Return whether the wait continues."""
        try:
            waiting.status = _judge_record(record, is_first=not waiting.is_checked).status
        except MultiqError as exc:
            waiting.fail(exc)
            return False
        waiting.is_checked = True
        return True

    def _note_outcome(self, waiting: _Wait, outcome: Outcome | None) -> None:
        try:
            waiting.finish(_judge_outcome(waiting.queue, waiting.id, outcome).value)
        except MultiqError as exc:
            waiting.fail(exc)

    def _end(self) -> Iterable[_Wait]:
        with _lock:
            self._leave()
            left, self.waits = self.waits, []
        return left

    def _leave(self) -> None:
        if _pollers.get(self._backend) is self:  # false in a forked child, whose _pollers is empty
            del _pollers[self._backend]


def _peek(backend: Backend, queue: str, job_id: str) -> JobRecord | None:
    try:
        return backend.peek(queue, job_id)
    except JobNotFound:
        return None


def _judge_record(record: JobRecord, *, is_first: bool) -> Pending:
    """Return the status of a job that may still become done. Raises ``JobFailed``, ``OutcomeUnknown``.

    *is_first*: also read the job's envelope, to check that the job's outcome will be kept.
    """
    if record.state is State.BURIED:
        raise JobFailed(record.queue, record.id, record.reason, _traceback(record.detail))
    if is_first and (refusal := refusal_of(record.body)) is not None:
        raise OutcomeUnknown(record.queue, record.id, f"the job is {STATUS[record.state]}; {refusal}")
    if is_first and not _is_kept(record.body):
        raise OutcomeUnknown(
            record.queue,
            record.id,
            f"the job is {STATUS[record.state]}, and its outcome will not be kept: give its task keep=, a number of "
            "seconds",
        )
    return Pending(STATUS[record.state])


def _traceback(detail: bytes | None) -> str | None:
    """Return the traceback that is stored in a buried job's detail. A detail that is not JSON is returned as text."""
    if not detail:
        return None
    value = decode_json(detail)
    if isinstance(value, dict):
        return str(value.get("traceback") or "") or None
    return detail.decode("utf-8", "replace")


def _is_kept(body: bytes) -> bool:
    value = decode_json(body)
    return isinstance(value, dict) and "multiq" in value and bool(value.get("keep"))


def _judge_outcome(queue: str, job_id: str, outcome: Outcome | None) -> Done:
    """Return the value of a job that is gone. Raises ``OutcomeUnknown``, ``ResultOmitted``, ``JobCancelled``."""
    if outcome is None:
        raise OutcomeUnknown(
            queue,
            job_id,
            "there is neither the job nor its outcome: it was deleted, its outcome was not kept or has expired, or it "
            "was never enqueued",
        )
    decoded = decode_outcome(outcome)
    if decoded.kind == "cancelled":
        raise JobCancelled(queue, job_id, decoded.omitted or None)
    if decoded.omitted is not None:
        raise ResultOmitted(queue, job_id, decoded.omitted)
    return Done(decoded.value)
