"""What an exchange has come to so far, and the words for its verdicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from multiq.backend import Abandon, Ack, Bury, GiveBack, Release, Touch
from multiq.errors import LeaseLost

from .records import whole_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.backend import Lease, Verdict

    from .leases import HeldLease
    from .records import Reserved

#: what the server answers to a verdict that counts
DONE: dict[type[Verdict], bytes] = {
    Ack: b"DELETED",
    Touch: b"TOUCHED",
    Bury: b"BURIED",
    Release: b"RELEASED",
    GiveBack: b"RELEASED",
    Abandon: b"RELEASED",
}


#: what the server answers to a verdict that it cannot carry out, after it has taken the job away from its holder
STRANDED = (b"OUT_OF_MEMORY", b"INTERNAL_ERROR")


class OutOfReach(LeaseLost):
    """The server has no room in its log for the verdict: the job is in no state until it reads its log again."""

    sentence = (
        "job {job_id} of queue {queue!r} is out of reach until the server restarts: it had no room in its log for this "
        "verdict; give its disk room, then restart it, and the job is run again"
    )


class PendingVerdict(NamedTuple):
    """A verdict that goes to the server, its place in the call, and the lease that it is about."""

    at: int
    verdict: Verdict
    held: HeldLease


class Exchange:
    """One call's verdicts with the answers to them, and the jobs that it has got."""

    def __init__(self, verdicts: Sequence[Verdict], limit: int) -> None:
        self.verdicts = verdicts
        self.limit = limit
        self.answers: dict[int, LeaseLost | None] = {}
        self.found: list[Reserved] = []
        self.leases: list[Lease] = []
        self.error: Exception | None = None

    @property
    def wanted(self) -> int:
        """How many more jobs to ask for."""
        return self.limit - len(self.found)

    def refuse(self, at: int, kind: type[LeaseLost] = LeaseLost) -> None:
        """The lease of the verdict in this place is lost."""
        lease = self.verdicts[at].lease
        self.answers[at] = kind(lease.queue, lease.id)


def command(verdict: Verdict) -> bytes:
    """The command for a verdict, with its line's end."""
    lease = verdict.lease
    number = lease.id.encode()
    match verdict:
        case Ack():
            return b"delete %b\r\n" % number
        case Touch():
            return b"touch %b\r\n" % number
        case Bury():
            return b"bury %b %d\r\n" % (number, lease.priority)
        case Release(delay=delay, priority=priority):
            kept = lease.priority if priority is None else priority
            return b"release %b %d %d\r\n" % (number, kept, whole_seconds(delay) if delay else 0)
        case _:
            return b"release %b %d 0\r\n" % (number, lease.priority)
