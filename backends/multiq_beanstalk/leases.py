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
from .lease_timer import POKES, sentry
from .server_info import job_facts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .connection import Reply, Wire
    from .records import Reserved
    from .server_info import JobFacts


@dataclass(slots=True)
class Held:
    """A lease, and what its job was like when it began."""

    wire: Wire
    ends_at: float
    facts: JobFacts
    pokes: int = 0
    """Since its end."""

    def extend(self, touched_at: float) -> None:
        """It was touched by a command that was sent then."""
        self.ends_at = touched_at + self.facts.ttr


class Holding:
    """By token, all leases of one consumer. Whoever says something on their connections has the lock."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._held: dict[str, Held] = {}
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

    def live(self, lease: Lease, moment: float) -> Held | None:
        """What is known of a lease; None if it has ended, by its time or with its connection, or never was ours.

        One that has ended by its time is kept: the server may not have noticed yet, and has to be reminded.
        """
        held = self._held.get(lease.token)
        if held is None or held.ends_at <= moment:
            return None
        if held.wire.is_closed:
            self.end(lease.token, held)
            return None
        return held

    def end(self, token: str, held: Held) -> None:
        """It has had its verdict, or is lost."""
        self._held.pop(token, None)
        held.wire.held.discard(token)

    def begin(
        self,
        wire: Wire,
        reserved: Iterable[Reserved],
        stats: Sequence[Reply],
        touched: Mapping[bytes, bool],
        asked_at: float,
    ) -> list[Lease]:
        """The leases of jobs that were reserved, by the replies to ``stats-job``, which was sent at *asked_at*.

        *touched*: those that were touched then, and whether that counted. A job that is not ours any more has no lease,
        nor one whose time was over before we got here: it may be somebody else's.
        """
        leases = []
        first_end, moment = math.inf, now()
        for job, (line, body) in zip(reserved, stats, strict=True):
            is_ours = touched.get(job.id)
            if not line.startswith(b"OK ") or is_ours is False:
                continue
            facts = job_facts(body)
            if facts.state != b"reserved":
                continue
            ends_at = (asked_at if is_ours else job.asked_at) + facts.ttr
            first_end = min(first_end, ends_at)
            self._count += 1
            token = f"{self._prefix}.{self._count:x}"
            self._held[token] = Held(wire, ends_at, facts)
            wire.held.add(token)
            if ends_at <= moment:
                continue  # the server may not know yet that it is over, and will be reminded
            leases.append(
                Lease(
                    queue=facts.tube.decode(),
                    id=job.id.decode(),
                    token=token,
                    body=job.body,
                    priority=facts.priority,
                    ttr=float(facts.ttr),
                    attempt=max(1, facts.reserves),
                    crashes=facts.crashes,
                    kicks=facts.kicks,
                    age=float(facts.age),
                )
            )
        if first_end < math.inf:
            sentry.expect(self, first_end + POKES[0])
        return leases

    def poke(self) -> float:
        """Say a word where a lease has ended. Returns when the next one will have."""
        moment = now()
        due = [(token, held) for token, held in self._held.items() if held.ends_at + POKES[held.pokes] <= moment]
        for wire in {held.wire for _, held in due}:
            wire.poke()
        for token, held in due:
            held.pokes += 1
            if held.pokes == len(POKES):
                # nobody has come for it in all that time; from here on its connection may be used for a wait, where a
                # poke would be out of place
                self.end(token, held)
        return min((held.ends_at + POKES[held.pokes] for held in self._held.values()), default=math.inf)
