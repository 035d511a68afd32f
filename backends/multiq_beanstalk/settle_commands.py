"""The commands of verdicts, and the server's replies to these commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiq.backend import Abandon, Ack, Bury, GiveBack, Release, Touch
from multiq.errors import LeaseLost

from .records import whole_seconds

if TYPE_CHECKING:
    from multiq.backend import Verdict

#: verdict -> the server's reply if the verdict was carried out
DONE: dict[type[Verdict], bytes] = {
    Ack: b"DELETED",
    Touch: b"TOUCHED",
    Bury: b"BURIED",
    Release: b"RELEASED",
    GiveBack: b"RELEASED",
    Abandon: b"RELEASED",
}


#: replies to a verdict after which the lease has ended, but the verdict was not carried out
STRANDED = (b"OUT_OF_MEMORY", b"INTERNAL_ERROR")


class OutOfReach(LeaseLost):
    """The server had no room in its log for the verdict. The job is in no queue until the server restarts."""

    sentence = (
        "job {job_id} of queue {queue!r} is out of reach until the server restarts: the server had no room in its log "
        "for this verdict; make room on its disk, then restart it, and the job is run again"
    )


def command(verdict: Verdict) -> bytes:
    """Return the command for a verdict, including the line's end."""
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
        case GiveBack(delay=delay):
            return b"release %b %d %d\r\n" % (number, lease.priority, whole_seconds(delay) if delay else 0)
        case _:
            return b"release %b %d 0\r\n" % (number, lease.priority)
