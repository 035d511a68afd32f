"""The heartbeat: a thread that checks timeouts, renews leases and settles finished jobs while jobs run.

A lease is renewed by a touch. The fetcher makes the calls of ``LeaseTouches`` under its lock.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from multiq.backend import After, Touch
from multiq.errors import BackendError, PayloadTooLarge

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from multiq.backend import Consumer
    from multiq.errors import LeaseLost
    from multiq.worker.processes.inflight import Held, InflightWriter

_log = logging.getLogger("multiq.worker")

#: Seconds between two heartbeats while jobs are held.
TICK = 0.025

#: A lease is touched when this share of its ttr has passed. Two touches may fail before the lease ends.
TOUCH_SHARE = 1 / 3


class Heartbeat:
    """Calls *tick* every 25 ms in a separate thread while ``holding`` is set."""

    def __init__(self, tick: Callable[[], None], on_death: Callable[[], None]) -> None:
        self._tick = tick
        self._on_death = on_death
        self._closed = False
        self.holding = threading.Event()
        self._pause = threading.Event()
        self._thread = threading.Thread(target=self._run, name="multiq-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        self._pause.set()
        self.holding.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closed:
                self.holding.wait()
                self._tick()
                self._pause.wait(TICK)
        except BaseException:  # noqa: BLE001 - logged; the worker stops
            # Without the heartbeat, leases would end while their jobs run, so the worker must stop.
            _log.exception("the heartbeat died; the worker stops")
            self._on_death()


class LeaseTouches:
    """Finds the leases of a worker process that are due to be renewed, and sends the touches. Not thread-safe.

    *held*: the jobs with held leases. *inflight*: the table in which the supervisor and the sidecar see the leases.
    """

    def __init__(self, consumer: Consumer, held: dict[Held, None], inflight: InflightWriter | None) -> None:
        self._consumer = consumer
        self._held = held
        self._inflight = inflight
        self.next_touch = float("inf")
        self.next_memo = float("inf")
        """When to store memos that have changed since ``next_touch`` was computed."""

    @property
    def due_at(self) -> float:
        """The monotonic time of the next touch."""
        return min(self.next_touch, self.next_memo)

    def take_due(self, now: float) -> list[Held]:
        """Return the jobs whose leases are due. The caller must touch these leases now."""
        due = []
        for held in self._held:
            if _touch_at(held) > now or held.verdict is not None:
                continue
            if held.ends_at <= now and not held.began_at:
                held.touch_at = float("inf")  # this job never begins here, and the sidecar may give it back at any time
                continue
            due.append(held)
            self.announce(held, now)
        return due

    def announce(self, held: Held, now: float) -> None:
        """Write the new end of a lease into the in-flight table. This comes before the call, because the sidecar relies
        on the new end."""
        if self._inflight is not None:
            self._inflight.touch(held, now + held.lease.ttr)

    def send(
        self, due: Sequence[Held], now: float, *, with_memos: bool = True, are_memos_done: bool = True
    ) -> list[LeaseLost | None]:
        """Touch these leases, and store the memos that have changed.

        *are_memos_done*: whether a memo that this call does not send counts as sent until it changes.
        """
        taken = [None if held.memo is None else held.memo.take() for held in due]
        lost = self._consumer.settle(
            [
                Touch(held.lease, After(memo=memo[1]))
                if with_memos and memo is not None and memo[1] is not None
                else Touch(held.lease)
                for held, memo in zip(due, taken, strict=True)
            ]
        )
        for held, memo, error in zip(due, taken, lost, strict=True):
            if error is None:
                held.reserved = held.reserved_at
                held.touch_at = now + held.lease.ttr * TOUCH_SHARE
                held.ends_at = now + held.lease.ttr
                if memo is not None and held.memo is not None and are_memos_done:
                    held.memo.sent(memo[0])  # a memo that was left out counts as sent, too
            else:
                # the backend will refuse the verdict on this job, and this refusal is reported
                held.touch_at = float("inf")
        return lost

    def send_safely(self, due: Sequence[Held], now: float) -> list[LeaseLost | None]:
        """Touch these leases. If the backend refuses a memo as too large, the memos are left out."""
        try:
            return self.send(due, now)
        except PayloadTooLarge as exc:
            _log.error("the memos of running jobs are not stored: %s", exc)
            return self.send(due, now, with_memos=False)

    def send_without_memos(self, due: Sequence[Held], now: float) -> bool:
        """If memos are pending, touch these leases without the memos. This may succeed while the backend cannot store
        memos. Returns whether the leases were touched. If the leases were touched, the memos are sent later."""
        if all(held.memo is None or not held.memo.is_pending for held in due):
            return False
        try:
            self.send(due, now, with_memos=False, are_memos_done=False)
        except BackendError:
            return False
        return True

    def find_next(self) -> None:
        """Set the time of the next touch to that of the first lease that will be due."""
        times = (_touch_at(held) for held in self._held if held.verdict is None)
        self.set_next(min(times, default=float("inf")))

    def set_next(self, moment: float) -> None:
        """Set the time of the next touch, which the supervisor sees, too."""
        self.next_touch = moment
        if self._inflight is not None:
            self._inflight.set_next_touch(moment)


def _touch_at(held: Held) -> float:
    """Return the time of the lease's next touch. If the memo has changed and the lease is not lost, this time is
    earlier."""
    memo, at = held.memo, held.touch_at
    return at if memo is None or at == float("inf") else min(at, memo.next_touch)
