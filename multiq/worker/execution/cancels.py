"""Cancels: finds the requests to cancel jobs of this process, and interrupts these jobs after their grace.

As long as no job was cancelled, a worker with a sidecar makes no call for this. The sidecar reads a flag with the other
control flags. A worker without a sidecar reads the flag itself, every five seconds while it holds jobs.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from multiq.backend import Ack, Bury
from multiq.cancellation import find_request, listen, requests, withdraw
from multiq.control.flags import Control
from multiq.errors import BackendError, JobCancelled, MultiqError

from .hanging_calls import run_in_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiq.backend import Backend
    from multiq.cancellation import CancelRequest, StoredRequest
    from multiq.timeout_notices import Notice
    from multiq.worker.processes.inflight import Held

    from .fetcher import Fetcher
    from .timeouts import Timeouts

_EVERY = 1.0  # seconds between two searches while there may be requests
_ASK_EVERY = 5.0  # seconds between two reads of the flag without a sidecar


class Cancel:
    """The cancellation of a job that this process holds. Times are ``time.monotonic``."""

    __slots__ = ("grace_ends_at", "is_raised", "is_sent", "notice", "request", "version")

    def __init__(self, stored: StoredRequest) -> None:
        self.request: CancelRequest = stored.request
        self.version = stored.version
        self.grace_ends_at = time.monotonic() + stored.request.grace
        self.is_raised = False
        """Whether a call by the job's own code has raised ``JobCancelled``."""
        self.notice: Notice | None = None
        """The notice of the run that is being interrupted."""
        self.is_sent = False
        """Whether the job was interrupted, or is being interrupted."""

    def renew(self, stored: StoredRequest) -> None:
        """Replace the request by a later request about the same job. A later request may shorten the grace, but cannot
        prolong it."""
        self.request, self.version = stored.request, stored.version
        self.grace_ends_at = min(self.grace_ends_at, time.monotonic() + stored.request.grace)

    def error(self) -> JobCancelled:
        self.is_raised = True
        if self.notice is not None:
            self.notice.is_notified = True  # so that JobCancelled is not raised again during the cleanup
        return JobCancelled(self.request.queue, self.request.id, self.request.reason)


class Cancels:
    """*is_asked*: a function that returns whether there may be requests. The function returns what the sidecar has read
    from the backend. None: there is no sidecar."""

    def __init__(
        self, backend: Backend, fetcher: Fetcher, timeouts: Timeouts, is_asked: Callable[[], bool] | None
    ) -> None:
        self._backend = backend
        self._fetcher = fetcher
        self._timeouts = timeouts
        self._control = Control(backend)
        self._is_possible = bool(backend.declared.notes) and self._control.is_supported
        self._is_asked = is_asked
        self._look_at = time.monotonic() + (_ASK_EVERY if is_asked is None else 0.0)
        self._looking = threading.Lock()
        self._told: list[Held] = []
        self._note = self._look_soon  # stored, because a bound method would be a new object each time
        listen(self._note)

    @property
    def may_have_requests(self) -> bool:
        return self._is_possible and self._is_asked is not None and self._is_asked()

    @property
    def knows_of_none(self) -> bool:
        """Whether there are certainly no requests. Without a sidecar, this process does not know."""
        return not self._is_possible or (self._is_asked is not None and not self._is_asked())

    def check(self) -> None:
        """Look for requests if they are due, and interrupt jobs whose grace is over. The heartbeat calls this."""
        now = time.monotonic()
        if self._told:
            self._interrupt(now)
        if now < self._look_at or not self._is_possible:
            return
        if self._is_asked is not None and not self._is_asked():
            return
        if not self._told and not self._fetcher.held():
            return
        self._look_at = now + (_ASK_EVERY if self._is_asked is None else _EVERY)
        run_in_thread(self._look_once)  # the call may hang, and the heartbeat must not hang

    def look_up(self, held: Held) -> None:
        """Find the request about a job that is about to begin. The last worker of the job may have received the
        request.

        Raises ``BackendError``.
        """
        if self._is_possible and held.cancel is None:
            stored = find_request(self._backend, held.lease)
            if stored is not None:
                self._tell(held, stored)

    def _look_soon(self) -> None:
        self._look_at = 0.0

    def _look_once(self) -> None:
        if not self._looking.acquire(blocking=False):
            return
        try:
            if self._is_asked is not None or self._control.are_cancels_asked():
                self._look()
                self._look_at = min(self._look_at, time.monotonic() + _EVERY)
        except MultiqError:  # the fetcher reports the outage
            return
        finally:
            self._looking.release()

    def _look(self) -> None:
        self._clean_up()
        held_by_job = {(held.lease.queue, held.lease.id): held for held in self._fetcher.held()}
        for stored in requests(self._backend):
            held = held_by_job.get((stored.request.queue, stored.request.id))
            if held is None or (held.cancel is not None and held.cancel.version == stored.version):
                continue
            if stored.is_about_job_there(self._backend):
                self._tell(held, stored)
            elif held.verdict is None:  # the job of this request is gone, and this job has the same id
                withdraw(self._backend, held.lease.queue, held.lease.id, stored.version)

    def _tell(self, held: Held, stored: StoredRequest) -> None:
        if held.cancel is not None:
            held.cancel.renew(stored)
            return
        held.cancel = Cancel(stored)
        self._told.append(held)

    def _interrupt(self, now: float) -> None:
        for held in self._told:
            cancel = held.cancel
            if cancel is None or cancel.is_sent or held.verdict is not None or now < cancel.grace_ends_at:
                continue
            if self._timeouts.cancel(held, cancel):
                cancel.is_sent = True

    def _clean_up(self) -> None:
        """Delete the requests about jobs that have ended in this process. Other requests are deleted when they
        expire."""
        alive = set(self._fetcher.held())
        for held in [held for held in self._told if held not in alive]:
            self._told.remove(held)
            if held.cancel is not None and isinstance(held.verdict, Ack | Bury) and not held.is_lost:
                try:
                    withdraw(self._backend, held.lease.queue, held.lease.id, held.cancel.version)
                except BackendError:
                    return
