"""The pump: the one owner of a consumer. Batches go through it, leases are kept alive by it, outages end in it."""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING

from multiq.backend import Touch
from multiq.errors import BackendError
from multiq.events import BackendDown, BackendUp, JobLost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.backend import Consumer, Lease, Verdict
    from multiq.events import Events

    from .ledger import Ledger

_FIRST_PAUSE = 0.1  # seconds between two tries to reach a backend that is gone...
_LONGEST_PAUSE = 1.0  # ...growing to this: what was down for an hour is back at work within a second, too

#: a lease is touched when a third of its ttr has passed: two touches may fail before it ends
_TOUCH_SHARE = 1 / 3


class Pump:
    """Reserves and settles for one worker process. A lock lets a heartbeat's thread in between two calls.

    With a *ledger*, what is held and when it is touched next can be read by those outside of the process.
    """

    def __init__(self, consumer: Consumer, events: Events, worker: str, ledger: Ledger | None = None) -> None:
        self._consumer = consumer
        self._events = events
        self._worker = worker
        self._ledger = ledger
        self._lock = threading.Lock()
        self._unsettled: list[Verdict] = []  # what an outage has held up
        self._is_partial = False  # whether only a part of the backend is gone
        self._touch_at: dict[int, tuple[Lease, float]] = {}  # by identity: a job may be leased to us twice in turn
        self._next_touch = float("inf")
        self._tries = 0
        self._retry_at = 0.0
        self._nudge = threading.Event()

    def exchange(self, verdicts: Sequence[Verdict], limit: int, timeout: float) -> list[Lease]:
        """Settle these, then reserve up to *limit* jobs. While the backend is gone: wait a little, return nothing.

        While only a part of it is gone, the verdicts for that part wait, and the rest has jobs.
        """
        with self._lock:
            waiting: list[Verdict] = []
            if self._is_partial and time.monotonic() < self._retry_at:
                waiting, self._unsettled = self._unsettled, waiting
            to_settle = self._collect(verdicts)
            try:
                lost, leases = self._consumer.exchange(to_settle, limit, timeout)
            except BackendError as exc:
                self._unsettled = waiting + to_settle
                self._is_partial = exc.is_partial
                failure = exc
                leases = self._reserve_elsewhere(limit) if exc.is_partial else []
                if leases:
                    self._went_down(failure)
                    return leases
            else:
                self._unsettled = waiting
                self._settled(to_settle, lost)
                if leases:
                    self._hold(leases)
                return leases
        self._wait_out(failure)
        return []

    def settle(self, verdicts: Sequence[Verdict]) -> bool:
        """Settle these now. False: the backend is gone, they go along with the next call."""
        with self._lock:
            to_settle = self._collect(verdicts)
            if not to_settle:
                return True
            if time.monotonic() < self._retry_at:
                self._unsettled = to_settle
                return False
            try:
                lost = self._consumer.settle(to_settle)
            except BackendError as exc:
                self._unsettled = to_settle
                self._is_partial = exc.is_partial
                self._went_down(exc)
                return False
            self._settled(to_settle, lost)
            return True

    def beat(self) -> None:
        """Touch every lease of which a third has passed."""
        if time.monotonic() < self._next_touch:
            return
        with self._lock:
            now = time.monotonic()
            due = [lease for lease, at in self._touch_at.values() if at <= now]
            try:
                lost = self._consumer.settle([Touch(lease) for lease in due]) if due else []
            except BackendError as exc:
                self._plan(now + self._went_down(exc))
                return
            for lease, error in zip(due, lost, strict=True):
                if error is None:
                    self._touch_at[id(lease)] = (lease, now + lease.ttr * _TOUCH_SHARE)
                else:
                    self._touch_at.pop(id(lease), None)  # the verdict will be refused, and that is told then
            self._plan(min((at for _, at in self._touch_at.values()), default=float("inf")))

    def next_beat_in(self) -> float:
        """Seconds until ``beat`` has something to do."""
        return max(0.0, self._next_touch - time.monotonic())

    def interrupt(self) -> None:
        """End a wait, or skip the next one."""
        self._nudge.set()
        self._consumer.interrupt()

    @property
    def owes(self) -> bool:
        """Whether verdicts wait for the backend to come back."""
        return bool(self._unsettled)

    @property
    def is_down(self) -> bool:
        """Whether the last call did not reach the backend."""
        return self._tries > 0

    def close(self) -> None:
        self._consumer.close()

    def _collect(self, verdicts: Sequence[Verdict]) -> list[Verdict]:
        collected, self._unsettled = [*self._unsettled, *verdicts], []
        for verdict in verdicts:
            self._touch_at.pop(id(verdict.lease), None)
        return collected

    def _reserve_elsewhere(self, limit: int) -> list[Lease]:
        """Jobs of those servers that answer, while another one owes an answer about verdicts."""
        try:
            leases = self._consumer.reserve(limit, 0) if limit > 0 else []
        except BackendError:
            return []
        if leases:
            self._hold(leases)
        return leases

    def _hold(self, leases: Sequence[Lease]) -> None:
        now = time.monotonic()
        next_touch = self._next_touch
        for lease in leases:
            at = now + lease.ttr * _TOUCH_SHARE
            self._touch_at[id(lease)] = (lease, at)
            next_touch = min(next_touch, at)
        if self._ledger is not None:
            self._ledger.hold([lease for lease, _ in self._touch_at.values()])
        self._plan(next_touch)

    def _plan(self, next_touch: float) -> None:
        self._next_touch = next_touch
        if self._ledger is not None:
            self._ledger.touched_until(next_touch)

    def _settled(self, verdicts: Sequence[Verdict], lost: Sequence[BaseException | None]) -> None:
        for verdict, error in zip(verdicts, lost, strict=True):
            if error is not None:
                self._events.emit(JobLost(queue=verdict.lease.queue, job_id=verdict.lease.id))
        if self._tries and not self._unsettled:
            self._tries = 0
            self._is_partial = False
            self._events.emit(BackendUp(worker=self._worker))

    def _wait_out(self, failure: BackendError) -> None:
        """Pause before the next try, but not beyond an interruption."""
        self._nudge.wait(self._went_down(failure))
        self._nudge.clear()

    def _went_down(self, failure: BackendError) -> float:
        """Note a failed call. Returns the pause before the next, longer each time, with jitter against stampedes."""
        longest = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0**self._tries)
        pause = longest * (1 - random.random() / 2)  # noqa: S311 - spreads load, guards nothing
        self._tries = min(self._tries + 1, 20)
        self._retry_at = time.monotonic() + pause
        self._events.emit(BackendDown(worker=self._worker, error=failure, retry_in=pause))
        return pause
