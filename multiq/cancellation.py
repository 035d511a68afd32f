"""Cancels jobs. A job that has not started is deleted. To cancel a running job, multiq sends a request to the job's
worker.

A cancel request is a note, because only the consumer of a running job can change the job. A control flag says that
cancel requests exist. While the flag is not set, workers read no notes. A cancel request is kept for an hour.
"""

from __future__ import annotations

import hashlib
import time
import weakref
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from .backend import MAX_STEPS, Drop, Put, State
from .control.flags import Control
from .driverkit.fork import forks
from .errors import JobEnded, JobNotFound, JobReserved, OptionInvalid
from .formatting import shown
from .validation import check_reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .backend import Backend, Lease, Note
    from .flows.followers import Followers

CancelAnswer: TypeAlias = Literal["deleted", "requested"]
"""The answer of ``JobHandle.cancel``. ``"deleted"``: the job had not started, and was deleted. ``"requested"``: the job
is running, and its worker was asked to cancel the job."""

GRACE_DEFAULT = 5.0
"""The default grace, in seconds. The grace begins when a running job can see that it is cancelled. The job is
interrupted at the end of the grace."""

HOME = "multiq.cancel"
"""The home of the notes that hold cancel requests. All queues share one home, so a worker reads all requests with one
call."""

REQUEST_KEPT = 3600.0  # seconds
_TRIES = 20  # the most attempts to cancel a job whose state changes between the attempts
_PAGE = 1000  # requests
_LOOKS = 3  # the most reads of a job whose age is compared with a request's age


class CancelRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request to cancel a running job."""

    queue: str
    id: str
    grace: float
    reason: str
    followers: Literal["go", "stop"] = "stop"
    """What happens to the jobs of a flow that wait for this job. ``"go"``: the waiting jobs run. ``"stop"``: the
    waiting jobs are cancelled."""


class StoredRequest(msgspec.Struct, frozen=True):
    request: CancelRequest
    age: float
    """Seconds since the request, by the server's clock."""
    version: str
    """The version of the request's note."""

    read_at: float
    """The value of ``time.monotonic()`` when the request was read."""

    def is_about_job_there(self, backend: Backend) -> bool:
        """Whether the request is about the job that now has the id in the request. Raises ``BackendError``.

        A later job may have the same id as the job in the request. A later job with the same id is younger than the
        request. The ages of the job and of the request are by the server's clock. A worker knows a job's age less
        exactly than the server. The worker does not know the moment at which the server handed out the job.

        The server reads the job's age at an unknown moment during the call. If the call took longer than the difference
        of the two ages, the answer is uncertain, and the call is repeated. After several uncertain answers, the method
        returns True, because a request that the worker wrongly ignores is lost.
        """
        # beanstalkd counts ages in whole seconds; the store beside beanstalkd counts ages in fractions of a second
        step = backend.declared.delay_resolution
        for _ in range(_LOOKS):
            began = time.monotonic()
            try:
                age = backend.peek(self.request.queue, self.request.id).age
            except JobNotFound:
                return False
            if age is None:
                return True
            as_old_at = self.read_at + age + step - self.age  # after this moment, the request is older than the job
            if time.monotonic() <= as_old_at:
                return True
            if as_old_at < began:
                return False
        return True


def cancel_job(
    backend: Backend, queue: str, job_id: str, *, followers: Followers, grace: float, reason: str
) -> CancelAnswer:
    """Cancel a job. The parameters and the errors are the same as in ``JobHandle.cancel``."""
    for _ in range(_TRIES):
        try:
            _delete(backend, queue, job_id, followers, reason)
        except JobReserved:
            pass
        except JobNotFound:
            raise _ended(backend, queue, job_id) from None
        else:
            return "deleted"
        check_supported(backend)
        _check_followers(backend, queue, job_id, followers)
        request = CancelRequest(queue, job_id, grace, reason, "go" if followers == "go" else "stop")
        backend.carry_out([_put(request)])
        try:
            state = backend.peek(queue, job_id).state
        except JobNotFound:
            withdraw(backend, queue, job_id)
            raise _ended(backend, queue, job_id) from None
        if state is State.RESERVED:
            _ask_workers(backend)
            return "requested"
        withdraw(backend, queue, job_id)  # the run has just ended; the next attempt deletes the job
    raise JobReserved(queue, job_id)


def request_many(backend: Backend, jobs: Sequence[tuple[str, str]], *, grace: float, reason: str) -> None:
    """Ask the jobs' workers to cancel the jobs. Each job is given as its queue and its id. Raises ``Unsupported``."""
    check_supported(backend)
    requests = [CancelRequest(queue, job_id, grace, reason) for queue, job_id in jobs]
    for at in range(0, len(requests), MAX_STEPS):
        backend.carry_out([_put(request) for request in requests[at : at + MAX_STEPS]])
    if requests:
        _ask_workers(backend)


def check_supported(backend: Backend) -> None:
    """Raise ``Unsupported`` if running jobs cannot be cancelled."""
    for power in ("notes", "holds"):
        if not backend.declared.claim(power):
            raise backend.unsupported(power)
    Control(backend).check()


def check_reason_of(reason: str | None) -> str:
    if reason is not None and not isinstance(reason, str):
        raise OptionInvalid(f"reason must be a text, got {shown(reason)}")
    return check_reason(reason) or "cancelled on request"


def find_request(backend: Backend, lease: Lease) -> StoredRequest | None:
    """Return the request about a reserved job. Raises ``BackendError``."""
    if not backend.declared.notes:
        return None
    note = backend.note(HOME, _key(lease.queue, lease.id))
    stored = None if note is None else _decode(note, time.monotonic())
    return stored if stored is not None and stored.is_about_job_there(backend) else None


def requests(backend: Backend) -> Iterator[StoredRequest]:
    """Yield all requests. Raises ``BackendError``."""
    after: str | None = None
    while True:
        page = backend.notes(HOME, limit=_PAGE, after=after)
        read_at = time.monotonic()
        found = [_decode(note, read_at) for note in page.notes]
        yield from (stored for stored in found if stored is not None)
        if page.after is None:
            return
        after = page.after


def withdraw(backend: Backend, queue: str, job_id: str, version: str | None = None) -> None:
    """Delete a request. *version*: delete the request only if its note still has this version. With None, delete any
    version of the request."""
    from .backend import Version

    key = _key(queue, job_id)
    backend.carry_out([Drop(HOME, key)], when=[] if version is None else [Version(HOME, key, version)])


_listeners: weakref.WeakSet[Callable[[], None]] = weakref.WeakSet()
"""Functions that let the workers of this process look for cancel requests now."""

forks.register(in_child=_listeners.clear)  # a forked child has none of the parent's workers


def listen(look: Callable[[], None]) -> None:
    """Call *look* after each cancel request that this process makes.

    ``listen`` keeps only a weak reference to *look*.
    """
    _listeners.add(look)


def _delete(backend: Backend, queue: str, job_id: str, followers: Followers, reason: str) -> None:
    """Delete a job that does not run. If the job has ``keep``, keep an outcome which says that the job was
    cancelled."""
    from .delete import cancelled_outcome, delete_job

    after = cancelled_outcome(backend, queue, job_id, reason) if backend.declared.outcomes else None
    delete_job(backend, queue, job_id, followers, after)


def _check_followers(backend: Backend, queue: str, job_id: str, followers: Followers) -> None:
    """Raise ``JobAwaited`` if other jobs wait for the job, and *followers* is ``"refuse"``."""
    if followers == "refuse" and "." in job_id:
        from .flows.member_deletion import refuse_awaited

        refuse_awaited(backend, queue, job_id)


def _put(request: CancelRequest) -> Put:
    return Put(HOME, _key(request.queue, request.id), _encoder.encode(request), REQUEST_KEPT)


def _ask_workers(backend: Backend) -> None:
    """Let workers look for cancel requests. The requests must be stored before this call, so that a worker finds the
    requests."""
    Control(backend).ask_cancels(REQUEST_KEPT)
    for look in list(_listeners):
        look()


def _ended(backend: Backend, queue: str, job_id: str) -> JobNotFound:
    """Return the error for a job that is gone. If the job's outcome is kept, the error says how the job has ended."""
    if backend.declared.outcomes:
        (outcome,) = backend.outcomes(queue, [job_id])
        if outcome is not None:
            return JobEnded(queue, job_id, outcome.kind)
    return JobNotFound(queue, job_id)


def _key(queue: str, job_id: str) -> str:
    return hashlib.sha256(f"{queue}\0{job_id}".encode()).hexdigest()  # queue and id together may be too long for a key


def _decode(note: Note, read_at: float) -> StoredRequest | None:
    """Return the request in a note. *read_at*: the time at which the note was read. The result None means that another
    version of multiq wrote the note."""
    try:
        request = _decoder.decode(note.value)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    left = REQUEST_KEPT if note.expires_in is None else note.expires_in
    return StoredRequest(request, max(0.0, REQUEST_KEPT - left), note.version, read_at)


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(CancelRequest)
