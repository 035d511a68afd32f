"""The fetcher: the only user of a process's consumer.

The fetcher asks middleware whether jobs may be reserved (``before_fetch``), reserves jobs in batches, settles finished
jobs in the same calls (``settling.py``), renews leases (``heartbeat.py``), and repeats failed calls.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from multiq import timeout_notices
from multiq.errors import BackendError, LeaseLost, MultiqError, PayloadTooLarge
from multiq.worker.processes.inflight import Held

from .backend_backoff import LONGEST_PAUSE, BackendBackoff
from .hanging_calls import run_in_thread
from .heartbeat import TOUCH_SHARE, LeaseTouches
from .settling import Settling, verdicts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from multiq.backend import Consumer, Lease
    from multiq.events import Event, Events
    from multiq.worker.processes.inflight import InflightWriter

_log = logging.getLogger("multiq.worker")

VETO_PAUSE = 1.0  # seconds between two calls of a before_fetch hook that refuses

_INTERRUPT_EVERY = 0.002  # seconds between two interrupts of the worker's loop by a job's thread that needs the lock
_YIELD_EVERY = 0.0005  # seconds between two checks whether waiting threads of jobs have got the lock
_LEAST_PAUSE = 0.01  # seconds between two attempts to store a memo

_EMIT_WAIT = 0.25  # seconds that a call waits for subscribers of its events
_MAX_PENDING_EVENTS = 1000  # maximum number of events that wait while a subscriber hangs; the oldest ones are dropped


class Fetcher:
    """Reserves and settles jobs for one worker process. A lock admits one thread at a time.

    *inflight*: the table in which the supervisor and the sidecar see the held leases and the time of the next touch.
    """

    def __init__(self, consumer: Consumer, events: Events, worker: str, inflight: InflightWriter | None = None) -> None:
        self._consumer = consumer
        self._events = events
        self._worker = worker
        self._inflight = inflight
        self._lock = threading.Lock()
        self._claims: set[object] = set()  # one for each job's thread that waits for the lock in order to store a memo
        self._held: dict[Held, None] = {}  # ordered by the time of their reservation
        self._touches = LeaseTouches(consumer, self._held, inflight)
        self._interrupted = threading.Event()
        self._hides_errors = False  # whether the last exchange has settled verdicts
        self._pending_events: deque[Event] = deque(maxlen=_MAX_PENDING_EVENTS)
        self._backoff = BackendBackoff(worker, self._pending_events)
        self.settling = Settling(consumer, self._held, self._backoff, self._pending_events, inflight)
        self._emitting = threading.Lock()

    def may_fetch(self, before_fetch: Sequence[Callable[[str], object]]) -> bool:
        """Whether jobs may be reserved. Middleware refuses this if its ``before_fetch`` returns False.

        The worker's loop calls this in each turn that has room for jobs. After a refusal, an idle loop waits for
        ``VETO_PAUSE``, and the next turn asks again.
        """
        for hook in before_fetch:
            try:
                if hook(self._worker) is False:
                    return False
            except BaseException:  # noqa: BLE001 - logged; middleware that fails does not veto
                _log.exception("middleware failed in before_fetch(); the worker goes on and reserves jobs")
        return True

    def exchange(
        self, finished: Sequence[Held], limit: int, timeout: float, most_gated: int | None = None
    ) -> list[Held]:
        """Settle *finished*, and reserve up to *limit* jobs, of which at most *most_gated* have gates.

        While the backend is down, this method waits a little and returns no jobs. If one part of the backend is down,
        the verdicts for this part wait, and the other parts still deliver jobs.
        """
        with self._lock:
            self._consumer.most_gated = most_gated
            if self.settling.on_settled is not None and any(held.has_permit for held in finished):
                self.settling.settle(finished)  # the reserve may wait long, and the permits must be free for other jobs
                finished = []
            jobs, pause = self._exchange(finished, limit, timeout)
        if self._claims:
            self._yield_lock()
        self._emit_events()
        if pause:  # wait for the next attempt, unless interrupted
            self._interrupted.wait(pause)
            self._interrupted.clear()
        return jobs

    def _exchange(self, finished: Sequence[Held], limit: int, timeout: float) -> tuple[list[Held], float]:
        """Return the jobs, and the seconds until the next attempt."""
        settling = self.settling
        pause = self._backoff.left()
        if pause and self._backoff.is_partial:
            timeout = min(timeout, pause)
        to_settle = settling.collect(finished, pause)
        self._hides_errors = bool(to_settle)
        if pause and not self._backoff.is_partial:
            settling.unsettled = to_settle
            return [], pause
        if self._backoff.is_down and not settling.waiting:
            timeout = 0.0  # without a wait, the answer comes immediately and shows that the backend is up
        try:
            lost, leases = self._consumer.exchange(verdicts_of(to_settle), limit, timeout)
        except PayloadTooLarge as exc:
            settling.shrink(to_settle, exc)
            return [], 0.0
        except BackendError as exc:
            settling.keep(to_settle, exc)
            jobs = self._reserve_elsewhere(limit) if exc.is_partial else []
            pause = self._backoff.failed(exc)
            return jobs, 0.0 if jobs else pause
        settling.accept(to_settle, lost)
        if leases or not to_settle:
            settling.note_answer()
        return self._hold(leases) if leases else [], 0.0

    def settle(self, finished: Sequence[Held]) -> bool:
        """Settle *finished* now. Returns False if the backend is down. In this case the next call settles these
        jobs."""
        with self._lock:
            is_settled = self.settling.settle(finished)
        self._emit_events()
        return is_settled

    def settle_if_free(self, take: Callable[[], Sequence[Held]]) -> None:
        """Settle the jobs that *take* returns.

        Does nothing while another thread makes a call. The worker's loop settles the jobs after that call.
        """
        if self._lock.acquire(blocking=False):
            try:
                self.settling.settle(take())
            finally:
                self._lock.release()
            self._emit_events()

    def touch_due(self) -> None:
        """Touch every lease whose next touch is due.

        Does nothing while another thread makes a call. The other thread's call ends in time for the next touch.
        """
        if time.monotonic() < self._touches.due_at or not self._lock.acquire(blocking=False):
            return
        try:
            self._touch(time.monotonic())
        finally:
            self._lock.release()
        self._emit_events()

    def touch_at(self, held: Held, moment: float) -> None:
        """Let the heartbeat touch a lease and store its memo at *moment* or earlier. Raises ``LeaseLost``."""
        if held.touch_at == float("inf") or held not in self._held:
            raise LeaseLost(held.lease.queue, held.lease.id)
        self._touches.next_memo = min(self._touches.next_memo, moment)

    def store_memo(self, held: Held) -> None:
        """Touch a lease now, and store its memo. Called in the job's thread.

        This method repeats the call until the backend answers. Raises ``SoftTimeout`` at the job's timeout, and
        ``BackendError`` after the lease's end. Also raises ``LeaseLost``, ``PayloadTooLarge``.
        """
        while True:
            self._claim()
            try:
                error = self._touch_now(held)
                if time.monotonic() >= self._touches.due_at:  # with many steps, the heartbeat may never get the lock
                    self._touch(time.monotonic())
            finally:
                self._lock.release()
            self._emit_events()
            if error is None:
                return
            if isinstance(error, LeaseLost) or time.monotonic() >= held.ends_at:
                raise error
            time.sleep(max(_LEAST_PAUSE, self._backoff.left()))
            if timeout_notices.pending:
                timeout_notices.raise_if_pending()

    def held_of(self, lease: Lease) -> Held | None:
        """Return the held job of this lease. None: it is settled. Thread-safe."""
        return next((held for held in list(self._held) if held.lease is lease), None)

    def next_touch_in(self) -> float:
        return max(0.0, self._touches.due_at - time.monotonic())

    def interrupt(self) -> None:
        """End the current wait, or skip the next one."""
        self._interrupted.set()
        self._consumer.interrupt()

    @property
    def has_unsettled(self) -> bool:
        """Whether verdicts wait for the end of an outage."""
        return bool(self.settling.unsettled)

    def held(self) -> list[Held]:
        """Return all jobs with held leases, ordered by the time of their reservation. Thread-safe."""
        return list(self._held)

    def retry_in(self) -> float:
        """Seconds until waiting verdicts are sent again. Infinite if no verdict waits."""
        return self._backoff.left() if self.settling.unsettled else float("inf")

    @property
    def is_down(self) -> bool:
        """Whether the last call did not reach the backend."""
        return self._backoff.is_down

    @property
    def sees_all(self) -> bool:
        """Whether ``exchange`` looks at all due jobs. False: the backend or a part of it does not answer."""
        return not self.is_down and self._consumer.sees_all

    @property
    def has_seen_all(self) -> bool:
        """Whether an empty result of the last exchange means that no job was due. False: its reserve may have failed.

        If an exchange has settled verdicts, an error of its reserve is raised by the next exchange.
        """
        return self.sees_all and not self._hides_errors

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

    def _reserve_elsewhere(self, limit: int) -> list[Held]:
        """Reserve from the other servers while one server does not accept verdicts."""
        try:
            leases = self._consumer.reserve(limit, 0) if limit > 0 else []
        except BackendError:
            return []
        return self._hold(leases) if leases else []

    def _touch(self, now: float) -> None:
        touches = self._touches
        touches.next_memo = float("inf")  # reset first: each memo that changes after this line sets it again
        pause = self._backoff.left()
        if pause and not self._backoff.is_partial:
            touches.set_next(now + pause)
            return
        due = touches.take_due(now)
        try:
            lost = touches.send_safely(due, now) if due else []
        except BackendError as exc:
            if exc.is_partial and touches.send_without_memos(due, now):
                touches.set_next(now + LONGEST_PAUSE)
                return
            touches.set_next(now + self._backoff.failed(exc))
            return
        touches.find_next()
        if None in lost:
            self.settling.note_answer()

    def _touch_now(self, held: Held) -> MultiqError | None:
        """Touch one lease under the lock. Returns ``LeaseLost`` if the lease has ended, or a ``BackendError`` if a
        later call may succeed."""
        now = time.monotonic()
        if held not in self._held or held.verdict is not None:
            return LeaseLost(held.lease.queue, held.lease.id)
        if self._backoff.left() and not self._backoff.is_partial:
            return self._backoff.last_failure
        self._touches.announce(held, now)
        try:
            (error,) = self._touches.send([held], now)
        except BackendError as exc:
            self._backoff.failed(exc)
            return exc
        if error is None:
            self.settling.note_answer()
        return error

    def _claim(self) -> None:
        """Acquire the lock, and interrupt the worker's loop if it holds the lock while it waits for jobs."""
        if self._lock.acquire(blocking=False):
            return
        claim = object()
        self._claims.add(claim)
        try:
            while not self._lock.acquire(timeout=_INTERRUPT_EVERY):
                self._consumer.interrupt()
        finally:
            self._claims.discard(claim)

    def _yield_lock(self) -> None:
        """Wait until the waiting threads have had the lock. Without this wait, the worker's loop would take the lock
        again immediately.

        The wait ignores claims that are made after its beginning. Jobs with many steps make claims again and again. If
        the wait did not ignore these claims, the loop would hardly settle and reserve jobs.
        """
        waiting = set(self._claims)
        while not waiting.isdisjoint(self._claims):
            time.sleep(_YIELD_EVERY)

    def _hold(self, leases: Sequence[Lease]) -> list[Held]:
        now = self._consumer.asked_at or time.monotonic()
        next_touch = self._touches.next_touch
        taken = []
        for lease in leases:
            ttr = lease.ttr
            touch_at = now + ttr * TOUCH_SHARE
            taken.append(Held(lease, None, touch_at, now + ttr))
            if touch_at < next_touch:  # noqa: PLR1730 - this is done for each job
                next_touch = touch_at
        if self._inflight is not None:
            self._inflight.hold(taken)
        self._held.update(dict.fromkeys(taken))
        self._touches.set_next(next_touch)
        return taken
