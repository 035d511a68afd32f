"""The leases that a consumer holds, each with its end by our own clock.

A lease lasts, here, from the moment before its reserve was sent, so that it never lasts longer here than there. The
server would let us delete a job whose lease has ended, whoever had it since: this clock is what keeps us from it.
"""

from __future__ import annotations

import math
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from multiq.backend import Lease

from .clock import now
from .lease_timer import NOOP_DELAYS, lease_timer
from .server_info import parse_job_stats

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .connection import Connection, Reply
    from .records import Reserved
    from .server_info import JobStats


@dataclass(slots=True)
class HeldLease:
    """A lease, and what its job was like when it began."""

    connection: Connection
    ends_at: float
    stats: JobStats
    noops_sent: int = 0
    """Since its end."""

    def extend(self, touched_at: float) -> None:
        """It was touched by a command that was sent then."""
        self.ends_at = touched_at + self.stats.ttr


class HeldLeases:
    """By token, all leases of one consumer. Whoever says something on their connections has the lock."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._held: dict[str, HeldLease] = {}
        self._prefix = os.urandom(6).hex()
        self._count = 0

    def acquire(self, timeout: float) -> bool:
        """Have the lock. False: others have had it for so many seconds."""
        return self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        """Let others have it; nothing, if this thread has not got it.

        So this can stand in a ``finally`` of which the ``try`` begins before ``acquire``: an exception of a signal's
        handler may come just after it.
        """
        try:  # noqa: SIM105 - for every call, and suppress costs as much as the rest of it
            self._lock.release()
        except RuntimeError:
            pass

    def live(self, lease: Lease, moment: float) -> HeldLease | None:
        """What is known of a lease; None if it has ended, by its time or with its connection, or never was ours.

        One that has ended by its time is kept: the server may not have noticed yet, and has to be reminded.
        """
        held = self._held.get(lease.token)
        if held is None or held.ends_at <= moment:
            return None
        if held.connection.is_closed:
            self.end(lease.token, held)
            return None
        return held

    def end(self, token: str, held: HeldLease) -> None:
        """It has had its verdict, or is lost."""
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
        """The leases of jobs that were reserved, by the replies to ``stats-job``, which was sent at *asked_at*.

        *touched*: those that were touched then, and whether that counted. A job that is not ours any more has no lease,
        nor one whose time was over before we got here: it may be somebody else's.
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
                continue  # the server may not know yet that it is over, and will be reminded
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

    def send_noop(self) -> float:
        """Say a word where a lease has ended. Returns when the next one will have."""
        moment = now()
        due = [
            (token, held) for token, held in self._held.items() if held.ends_at + NOOP_DELAYS[held.noops_sent] <= moment
        ]
        for connection in {held.connection for _, held in due}:
            connection.send_noop()
        for token, held in due:
            held.noops_sent += 1
            if held.noops_sent == len(NOOP_DELAYS):
                # nobody has come for it in all that time; from here on its connection may be used for a wait, where a
                # send_noop would be out of place
                self.end(token, held)
        return min((held.ends_at + NOOP_DELAYS[held.noops_sent] for held in self._held.values()), default=math.inf)
