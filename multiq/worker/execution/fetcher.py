"""The fetcher: the only user of a process's consumer.

The fetcher reserves and settles jobs in batches, renews leases, and handles outages of the backend.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter, deque
from operator import attrgetter
from typing import TYPE_CHECKING

from multiq.backend import Touch
from multiq.envelope import decode_json
from multiq.errors import BackendError
from multiq.events import BackendDown, BackendUp, JobLost
from multiq.job import task_of
from multiq.worker.processes.inflight import Held
from multiq.worker.processes.watchdog import run_in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from multiq.backend import Consumer, Lease, Verdict
    from multiq.errors import LeaseLost
    from multiq.events import Event, Events
    from multiq.worker.processes.inflight import InflightWriter

_FIRST_PAUSE = 0.1  # seconds between two attempts to reach a backend that is down; doubles with each failure
_LONGEST_PAUSE = 0.5  # the maximum of this pause, so that work continues within a second after an outage

_EMIT_WAIT = 0.25  # seconds that a call waits for subscribers of its events
_MAX_PENDING_EVENTS = 1000  # maximum number of events that wait while a subscriber hangs; the oldest ones are dropped

_verdict_of = attrgetter("verdict")

#: A lease is touched when this share of its ttr has passed. Two touches may fail before the lease ends.
_TOUCH_SHARE = 1 / 3


class Fetcher:
    """Reserves and settles jobs for one worker process. A lock admits one thread at a time.

    *inflight* shows the supervisor and the sidecar the held leases and the time of the next touch.
    """

    def __init__(self, consumer: Consumer, events: Events, worker: str, inflight: InflightWriter | None = None) -> None:
        self._consumer = consumer
        self._events = events
        self._worker = worker
        self._inflight = inflight
        self.settled: Counter[type[Verdict]] = Counter()
        """The number of verdicts that the backend has accepted, by type."""
        self._lock = threading.Lock()
        self._unsettled: list[Held] = []  # verdicts that wait for the end of an outage
        self._is_partial = False  # whether only a part of the backend is down
        self._held: dict[Held, None] = {}  # ordered by the time of their reservation
        self._next_touch = float("inf")
        self._failures = 0
        self._retry_at = 0.0
        self._interrupted = threading.Event()
        self._pending_events: deque[Event] = deque(maxlen=_MAX_PENDING_EVENTS)
        self._emitting = threading.Lock()

    def exchange(self, finished: Sequence[Held], limit: int, timeout: float) -> list[Held]:
        """Settle *finished*, and reserve up to *limit* jobs.

        While the backend is down, this method waits a little and returns no jobs. While only a part of the backend is
        down, the verdicts for that part wait, and the other parts deliver jobs.
        """
        with self._lock:
            jobs, pause = self._exchange(finished, limit, timeout)
        self._emit_events()
        if pause:  # wait for the next attempt, unless interrupted
            self._interrupted.wait(pause)
            self._interrupted.clear()
        return jobs

    def _exchange(self, finished: Sequence[Held], limit: int, timeout: float) -> tuple[list[Held], float]:
        """Return the jobs, and the seconds until the next attempt."""
        waiting: list[Held] = []
        pause = self._pause_left()
        if pause and self._is_partial:
            waiting, self._unsettled = self._unsettled, waiting
            timeout = min(timeout, pause)
        to_settle = self._collect(finished)
        if pause and not self._is_partial:
            self._unsettled = to_settle
            return [], pause
        if self._failures and not waiting:
            timeout = 0.0  # report at once that the backend is up, instead of with the next job
        try:
            lost, leases = self._consumer.exchange(_verdicts(to_settle), limit, timeout)
        except BackendError as exc:
            self._unsettled = waiting + to_settle
            jobs = self._reserve_elsewhere(limit) if exc.is_partial else []
            pause = self._note_failure(exc)
            return jobs, 0.0 if jobs else pause
        self._unsettled = waiting
        self._settled(to_settle, lost)
        if leases or not to_settle:
            self._note_answer()
        return self._hold(leases) if leases else [], 0.0

    def settle(self, finished: Sequence[Held]) -> bool:
        """Settle *finished* now. Returns False if the backend is down. The next call then settles these jobs."""
        with self._lock:
            is_settled = self._settle(finished)
        self._emit_events()
        return is_settled

    def settle_if_free(self, take: Callable[[], Sequence[Held]]) -> None:
        """Settle the jobs that *take* returns.

        Does nothing while another thread makes a call. The worker's loop settles the jobs after that call.
        """
        if self._lock.acquire(blocking=False):
            try:
                self._settle(take())
            finally:
                self._lock.release()
            self._emit_events()

    def touch_due(self) -> None:
        """Touch every lease whose next touch is due.

        Does nothing while another thread makes a call. The other thread's call ends in time for the next touch.
        """
        if time.monotonic() < self._next_touch or not self._lock.acquire(blocking=False):
            return
        try:
            self._touch(time.monotonic())
        finally:
            self._lock.release()
        self._emit_events()

    def next_touch_in(self) -> float:
        return max(0.0, self._next_touch - time.monotonic())

    def interrupt(self) -> None:
        """End the current wait, or skip the next one."""
        self._interrupted.set()
        self._consumer.interrupt()

    @property
    def has_unsettled(self) -> bool:
        """Whether verdicts wait for the end of an outage."""
        return bool(self._unsettled)

    def held(self) -> list[Held]:
        """Return all jobs with held leases, ordered by the time of their reservation. Thread-safe."""
        return list(self._held)

    def retry_in(self) -> float:
        """Seconds until waiting verdicts are sent again. Infinite if no verdict waits."""
        return self._pause_left() if self._unsettled else float("inf")

    @property
    def is_down(self) -> bool:
        """Whether the last call did not reach the backend."""
        return self._failures > 0

    def close(self) -> None:
        self._consumer.close()

    def _emit_events(self) -> None:
        """Emit pending events without the lock and in a separate thread, because a subscriber may hang.

        Only one thread emits at a time, so the events keep their order.
        """
        if self._pending_events and not self._emitting.locked():
            run_in_thread(self._emit_all).wait(_EMIT_WAIT)

    def _emit_all(self) -> None:
        while self._pending_events and self._emitting.acquire(blocking=False):
            try:
                with contextlib.suppress(IndexError):
                    while True:
                        self._events.emit(self._pending_events.popleft())
            finally:
                self._emitting.release()

    def _settle(self, finished: Sequence[Held]) -> bool:
        to_settle = self._collect(finished)
        if not to_settle:
            return True
        if self._pause_left():
            self._unsettled = to_settle
            return False
        try:
            lost = self._consumer.settle(_verdicts(to_settle))
        except BackendError as exc:
            self._unsettled = to_settle
            self._note_failure(exc)
            return False
        self._settled(to_settle, lost)
        return True

    def _reserve_elsewhere(self, limit: int) -> list[Held]:
        """Reserve from the other servers while one server does not accept verdicts."""
        try:
            leases = self._consumer.reserve(limit, 0) if limit > 0 else []
        except BackendError:
            return []
        return self._hold(leases) if leases else []

    def _touch(self, now: float) -> None:
        pause = self._pause_left()
        if pause and not self._is_partial:
            self._set_next_touch(now + pause)
            return
        due = []
        for held in self._held:
            if held.touch_at > now or held.verdict is not None:
                continue
            if held.ends_at <= now and not held.began_at:
                held.touch_at = float("inf")  # this job never begins here, and the sidecar may give it back at any time
                continue
            due.append(held)
            if self._inflight is not None:  # before the call, because the sidecar relies on the new end
                self._inflight.touch(held, now + held.lease.ttr)
        try:
            lost = self._consumer.settle([Touch(held.lease) for held in due]) if due else []
        except BackendError as exc:
            self._set_next_touch(now + self._note_failure(exc))
            return
        for held, error in zip(due, lost, strict=True):
            if error is None:
                held.touch_at = now + held.lease.ttr * _TOUCH_SHARE
                held.ends_at = now + held.lease.ttr
            else:
                held.touch_at = float("inf")  # its verdict will be refused, and the refusal is reported
        self._set_next_touch(min((held.touch_at for held in self._held if held.verdict is None), default=float("inf")))
        if None in lost:
            self._note_answer()

    def _collect(self, finished: Sequence[Held]) -> list[Held]:
        """Return the jobs to settle now, without jobs that an abort has already settled."""
        all_held = self._held
        if not self._unsettled:
            return [held for held in finished if held in all_held]
        collected, self._unsettled = dict.fromkeys([*self._unsettled, *finished]), []
        return [held for held in collected if held in all_held]

    def _hold(self, leases: Sequence[Lease]) -> list[Held]:
        now = self._consumer.asked_at or time.monotonic()
        next_touch = self._next_touch
        taken = []
        for lease in leases:
            ttr = lease.ttr
            touch_at = now + ttr * _TOUCH_SHARE
            taken.append(Held(lease, None, touch_at, now + ttr))
            if touch_at < next_touch:  # noqa: PLR1730 - this is done for each job
                next_touch = touch_at
        if self._inflight is not None:
            self._inflight.hold(taken)
        self._held.update(dict.fromkeys(taken))
        self._set_next_touch(next_touch)
        return taken

    def _set_next_touch(self, next_touch: float) -> None:
        self._next_touch = next_touch
        if self._inflight is not None:
            self._inflight.set_next_touch(next_touch)

    def _settled(self, settled: Sequence[Held], lost: Sequence[LeaseLost | None]) -> None:
        all_held = self._held
        for held in settled:
            del all_held[held]
        counted = settled
        if any(lost):
            refused = [held for held, error in zip(settled, lost, strict=True) if error is not None]
            counted = [held for held, error in zip(settled, lost, strict=True) if error is None]
            self._note_lost(refused)
        self.settled.update(map(type, _verdicts(counted)))
        if self._inflight is not None and settled:
            self._inflight.drop(settled)
        if None in lost:  # a driver may know without a reply that leases are lost
            self._note_answer()

    def _note_lost(self, refused: Sequence[Held]) -> None:
        for held in refused:
            held.is_lost = True
            if held.began_at:  # no work is lost if the job has not begun
                lease = held.lease
                task = task_of(decode_json(lease.body))
                self._pending_events.append(JobLost(queue=lease.queue, job_id=lease.id, task=task))

    def _note_answer(self) -> None:
        """Record that the backend has answered. The backend counts as up, unless verdicts still wait for another part
        of the backend.
        """
        if self._failures and not self._unsettled:
            self._failures = 0
            self._is_partial = False
            self._pending_events.append(BackendUp(worker=self._worker))

    def _pause_left(self) -> float:
        return max(0.0, self._retry_at - time.monotonic()) if self._failures else 0.0

    def _note_failure(self, failure: BackendError) -> float:
        """Record a failed call. Returns the seconds until the next attempt.

        The seconds grow with each failure. Jitter spreads the attempts of many workers.
        """
        self._is_partial = failure.is_partial
        longest = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0**self._failures)
        pause = longest * (1 - random.random() / 2)  # noqa: S311 - spreads load, guards nothing
        self._failures = min(self._failures + 1, 20)
        self._retry_at = time.monotonic() + pause
        self._pending_events.append(BackendDown(worker=self._worker, error=failure, retry_in=pause))
        return pause


def _verdicts(finished: Sequence[Held]) -> list[Verdict]:
    return [verdict for verdict in map(_verdict_of, finished) if verdict is not None]
