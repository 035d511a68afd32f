"""The leases that a consumer holds: refuses late verdicts with ``LeaseLost``, and sends no-ops when leases end.

The server lets a client delete a job whose lease has ended, even if another consumer has the job now. So the driver
sends no verdict on a lease that has ended by the client's clock. For the client, a lease begins at the moment before
the reserve was sent. So the lease ends for the client at the same time as for the server, or earlier.

beanstalkd may miss the end of a lease. The server's timer for a connection fires at the microsecond of a reservation's
end. If the reservation is not quite over at that moment, the server does not set the timer again until the client sends
something on the connection. An idle server misses most ends in this way (issues 262 and 380, pull request 334 of
beanstalkd; seen with 1.12). So a thread, the lease timer, sends no-ops on the connection of a lease that has ended.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from multiq.backend import Ack, Lease, Touch
from multiq.driverkit.fork import forks
from multiq.errors import LeaseLost

from .stats import parse_job_stats

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from multiq.backend import Verdict

    from .connection import Connection
    from .records import Reserved
    from .replies import Reply
    from .stats import JobStats

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

#: Seconds by a clock that continues while the machine is suspended. The server's clock does the same. A system without
#: such a clock uses the monotonic clock.
now = functools.partial(time.clock_gettime, _CLOCK)

#: the times at which no-ops are sent: seconds after the end of a lease, by the client's clock
NOOP_DELAYS = (0.01, 0.1, 0.4, 0.9)

_RETRY_BUSY = 0.02  # seconds until a consumer that is in a call is checked again


@dataclass(slots=True)
class HeldLease:
    """One lease, with the job's stats from the beginning of the lease."""

    connection: Connection
    ends_at: float
    stats: JobStats
    noops_sent: int = 0
    """The number of no-ops sent since the end of the lease."""

    def extend(self, touched_at: float) -> None:
        """Extend the lease by a touch that was sent at *touched_at*."""
        self.ends_at = touched_at + self.stats.ttr

    def is_late(self, verdict: Verdict, received_at: float) -> bool:
        """Whether a verdict is refused although the server has carried it out. Its reply arrived at *received_at*.

        After the end of the lease, the server refuses all verdicts except an ack. It may have deleted the job under
        another consumer's lease.
        """
        if isinstance(verdict, Touch):
            return self.connection.is_closed
        return isinstance(verdict, Ack) and received_at >= self.ends_at


class PendingVerdict(NamedTuple):
    """A verdict that is still to be sent."""

    at: int
    verdict: Verdict
    held: HeldLease


class HeldLeases:
    """All leases of one consumer, by token.

    A thread must hold the lock while the thread uses the connections of these leases.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._held: dict[str, HeldLease] = {}
        self._prefix = os.urandom(6).hex()
        self._count = 0

    def acquire(self, timeout: float) -> bool:
        """Take the lock. Returns False if other threads held the lock for *timeout* seconds."""
        return self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        """Release the lock, if this thread holds the lock.

        A signal handler may raise an exception just after ``acquire``. So call ``acquire`` inside a ``try``, and call
        ``release`` in the ``finally``, even if ``acquire`` has failed.
        """
        try:  # noqa: SIM105 - suppress would double the time of this method
            self._lock.release()
        except RuntimeError:
            pass

    def by_connection(
        self, verdicts: Sequence[Verdict], answers: dict[int, LeaseLost | None]
    ) -> dict[Connection, list[PendingVerdict]]:
        """Group the verdicts by connection. Answers a verdict on a lost lease with ``LeaseLost``, and does not return
        it."""
        pending: dict[Connection, list[PendingVerdict]] = {}
        settled: set[str] = set()
        moment = now()
        for at, verdict in enumerate(verdicts):
            lease = verdict.lease
            held = self._live(lease, moment)
            if held is None or lease.token in settled:
                answers[at] = LeaseLost(lease.queue, lease.id)
                continue
            if not isinstance(verdict, Touch):
                settled.add(lease.token)
            pending.setdefault(held.connection, []).append(PendingVerdict(at, verdict, held))
        return pending

    def end(self, token: str, held: HeldLease) -> None:
        """Forget a lease that was settled or lost."""
        self._held.pop(token, None)
        held.connection.held.discard(token)

    def begin(
        self,
        connection: Connection,
        reserved: Iterable[Reserved],
        replies: Sequence[Reply],
        touched: Mapping[bytes, bool],
        asked_at: float,
    ) -> list[Lease]:
        """Return the leases of reserved jobs.

        If a reservation has ended, on the server or by the client's clock, its job gets no lease. Another consumer may
        have the job.

        Parameters:
            replies: the replies to the ``stats-job`` commands.
            asked_at: the time at which the ``stats-job`` commands were sent.
            touched: for each job that was touched in the same packet, whether the server accepted the touch.
        """
        leases = []
        first_end, moment = math.inf, now()
        for job, (line, body) in zip(reserved, replies, strict=True):
            is_ours = touched.get(job.id)
            if not line.startswith(b"OK ") or is_ours is False:
                continue
            stats = parse_job_stats(body)
            if stats.state != b"reserved":
                continue
            ends_at = (asked_at if is_ours else job.asked_at) + stats.ttr
            first_end = min(first_end, ends_at)
            self._count += 1
            token = f"{self._prefix}.{self._count:x}"
            self._held[token] = HeldLease(connection, ends_at, stats)
            connection.held.add(token)
            if ends_at <= moment:
                continue  # the lease timer sends no-ops, because the server may miss the end
            leases.append(
                Lease(
                    queue=stats.tube.decode(),
                    id=job.id.decode(),
                    token=token,
                    body=job.body,
                    priority=stats.priority,
                    ttr=float(stats.ttr),
                    attempt=max(1, stats.reserves),
                    crashes=stats.crashes,
                    kicks=stats.kicks,
                    age=float(stats.age),
                )
            )
        if first_end < math.inf:
            lease_timer.schedule(self, first_end + NOOP_DELAYS[0])
        return leases

    def send_noops(self) -> float:
        """Send a no-op on each connection with an ended lease. Returns the time at which the next no-op is due."""
        moment = now()
        due = [
            (token, held) for token, held in self._held.items() if held.ends_at + NOOP_DELAYS[held.noops_sent] <= moment
        ]
        for connection in {held.connection for _, held in due}:
            connection.send_noop()
        for token, held in due:
            held.noops_sent += 1
            if held.noops_sent == len(NOOP_DELAYS):
                # All no-ops were sent, and no verdict came. Forget the lease, so that no more no-ops are sent. From now
                # on, a wait may use the connection.
                self.end(token, held)
        return min((held.ends_at + NOOP_DELAYS[held.noops_sent] for held in self._held.values()), default=math.inf)

    def _live(self, lease: Lease, moment: float) -> HeldLease | None:
        """Return the held lease. None: the lease has ended, or the lease belongs to another consumer.

        When the time of a lease is over, the lease stays in the list, because the lease timer has to send no-ops for
        it.
        """
        held = self._held.get(lease.token)
        if held is None or held.ends_at <= moment:
            return None
        if held.connection.is_closed:
            self.end(lease.token, held)
            return None
        return held


class LeaseTimer:
    """Sleeps until the next unsettled lease ends. Its thread starts with the first lease."""

    def __init__(self) -> None:
        self.start_over_in_child()
        forks.watch(self)

    def start_over_in_child(self) -> None:
        """Forget leases and thread. In a forked child there are no leases, and the timer's thread does not run."""
        self._consumers: weakref.WeakSet[HeldLeases] = weakref.WeakSet()
        self._changed = threading.Condition()
        self._next_at = math.inf
        self._is_running = False

    def schedule(self, held_leases: HeldLeases, ends_at: float) -> None:
        """Check this consumer's leases at *ends_at* or earlier."""
        if held_leases in self._consumers and ends_at >= self._next_at and self._is_running:
            return
        with self._changed:
            self._consumers.add(held_leases)
            self._next_at = min(self._next_at, ends_at)
            if not self._is_running:
                threading.Thread(target=self._run, name="multiq-beanstalk-lease-timer", daemon=True).start()
                self._is_running = True  # set after the start, because the system may refuse a thread
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                left = self._next_at - now()
                if left > 0:
                    self._changed.wait(None if left == math.inf else left)
                    continue
                self._next_at = math.inf
                consumers = list(self._consumers)
            next_at = min((self._check(held_leases) for held_leases in consumers), default=math.inf)
            del consumers
            with self._changed:
                self._next_at = min(self._next_at, next_at)

    def _check(self, held_leases: HeldLeases) -> float:
        """Send no-ops for leases that have ended. Returns the time of the next check."""
        if not held_leases.acquire(0):
            return now() + _RETRY_BUSY
        try:
            return held_leases.send_noops()
        finally:
            held_leases.release()


lease_timer = LeaseTimer()
