"""The keys of a partition, one function each. All keys of a partition share a hash tag and thus a cluster's slot.

The tag of a queue's first partition is ``{queue}``. With ``?partitions=``, the other partitions have the tags
``{queue#1}``, ``{queue#2}`` and so on. A queue's name cannot contain a ``#``.

A job's *place* is its member in a sorted set. It consists of the job's sequence number, priority and id.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_PREFIX = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


def prefix(text: str) -> str:
    """Parse the option ``?prefix=``, the text that all keys begin with.

    Braces are refused because they would change the hash tag. Stars and brackets are refused because SCAN would take
    them as patterns.
    """
    if not _PREFIX.fullmatch(text):
        raise ValueError("must be 1 to 64 letters, digits, or any of _ . : -")
    return text


def jobs(base: str) -> str:
    """Hash: id -> record (lua/include/record.lua). The key exists exactly while the partition holds a job."""
    return f"{base}:jobs"


def bodies(base: str) -> str:
    """Hash: id -> body, for jobs whose body is too large for the record; id + 0x01 -> the job's memo; id + 0x02 -> the
    reason why the job is doomed. Also: unique key -> id of the job that took the key last
    (lua/include/key_and_gates.lua)."""
    return f"{base}:bodies"


def reasons(base: str) -> str:
    """Hash: id -> the reason of the job's last release, bury or abandon, if there is one; id + 0x01 -> the job's
    detail."""
    return f"{base}:reasons"


def ready(base: str) -> str:
    """Sorted set of places. The score is the priority."""
    return f"{base}:ready"


def delayed(base: str) -> str:
    """Sorted set of places. The score is the due time, in microseconds since 1970."""
    return f"{base}:delayed"


def reserved(base: str) -> str:
    """Sorted set of places. The score is the lease's end, in microseconds since 1970."""
    return f"{base}:reserved"


def buried(base: str) -> str:
    """Sorted set of places in the order in which the jobs were buried."""
    return f"{base}:buried"


def held(base: str) -> str:
    """Sorted set of the places of held jobs, all with the score 0."""
    return f"{base}:held"


def terms(base: str) -> str:
    """Hash: id of a held job -> the arrivals for which it waits (lua/include/holds.lua)."""
    return f"{base}:terms"


def arrived(base: str) -> str:
    """Sorted set of the members that have arrived at held jobs (lua/include/holds.lua), all with the score 0."""
    return f"{base}:arrived"


def litter(base: str) -> str:
    """Sorted set of the jobs whose members in ``arrived`` are to be deleted, all with the score 0."""
    return f"{base}:litter"


def unique_holds(base: str) -> str:
    """Hash: unique key that is held by time -> the end of this time, and the id of the key's job
    (lua/include/unique.lua)."""
    return f"{base}:unique_holds"


def hold_expiry(base: str) -> str:
    """Sorted set of the keys in ``unique_holds``. The score is the end of the hold, in microseconds since 1970."""
    return f"{base}:hold_expiry"


def limits(base: str) -> str:
    """Hash: name -> the limit's quota (lua/include/open_gates.lua)."""
    return f"{base}:limits"


def lines(base: str) -> str:
    """Sorted set of the parked jobs, each in the line of a gate, all with the score 0 (lua/include/parked.lua)."""
    return f"{base}:lines"


def parked(base: str) -> str:
    """Hash: id of a parked job -> the gate in whose line it is."""
    return f"{base}:parked"


def line_states(base: str) -> str:
    """Hash: gate of a line -> its turn, and its first job if the line is open (lua/include/open_gates.lua)."""
    return f"{base}:line_states"


def open_lines(base: str) -> str:
    """Sorted set of the lines whose gates may be open. The score is the priority of the line's first job."""
    return f"{base}:open_lines"


def fair_lines(base: str) -> str:
    """Sorted set of the open lines of fair limits, in the order of their turns, all with the score 0."""
    return f"{base}:fair_lines"


def blocked(base: str) -> str:
    """Sorted set of the lines of fair limits whose first jobs wait for another gate, all with the score 0."""
    return f"{base}:blocked"


def slot_counts(base: str) -> str:
    """Hash: gate or group of leases -> number of live leases (lua/include/slot_entries.lua)."""
    return f"{base}:slot_counts"


def slot_ends(base: str) -> str:
    """Sorted set of leases and groups of leases (lua/include/slot_entries.lua). The score is the end of the lease, or
    the first end in the group, in microseconds since 1970."""
    return f"{base}:slot_ends"


def slot_ids(base: str) -> str:
    """Hash: group of leases -> the ids of its jobs (lua/include/slot_entries.lua)."""
    return f"{base}:slot_ids"


def rates(base: str) -> str:
    """Sorted set of gates. The score is the time at which a job would be due at the steady rate, in microseconds
    since 1970."""
    return f"{base}:rates"


def openings(base: str) -> str:
    """Sorted set of gates. The score is the time at which the next reserve checks the gate's lines, in microseconds
    since 1970."""
    return f"{base}:openings"


def notes(base: str) -> str:
    """Hash: key -> note (lua/include/steps.lua). Only a queue's first partition has notes."""
    return f"{base}:notes"


def note_keys(base: str) -> str:
    """Sorted set of the keys in ``notes``, all with the score 0."""
    return f"{base}:note_keys"


def note_expiry(base: str) -> str:
    """Sorted set of the keys of the notes that expire. The score is the time of expiry, in microseconds since 1970."""
    return f"{base}:note_expiry"


def outbox(base: str) -> str:
    """Sorted set of groups of steps for other slots, in the order in which they are to be carried out."""
    return f"{base}:outbox"


def seen(base: str) -> str:
    """Sorted set of the marks of groups that were carried out here. The score is the time at which the mark is
    forgotten."""
    return f"{base}:seen"


def unreadable(base: str) -> str:
    """Hash: id -> the reason why the job could not be read, a newline, and the stored bytes
    (lua/include/unreadable.lua)."""
    return f"{base}:unreadable"


def outcomes(base: str) -> str:
    """Hash: id -> the outcome of a job that is gone (lua/include/outcomes.lua)."""
    return f"{base}:outcomes"


def expiring(base: str) -> str:
    """Sorted set of the ids in ``outcomes``. The score is the time of expiry, in microseconds since 1970."""
    return f"{base}:expiring"


def sequence(base: str) -> str:
    """Counter that numbers new jobs and burials. The key is deleted with the last job."""
    return f"{base}:sequence"


def paused(base: str) -> str:
    """The time at which the pause ends, in microseconds since 1970. The key expires by itself."""
    return f"{base}:paused"


def hint(base: str) -> str:
    """Sorted set with the marker that notifies a waiting consumer. The key is deleted with the last job."""
    return f"{base}:hint"


def partitions(base: str) -> str:
    """The largest number of partitions over which any client has enqueued jobs of this queue, if more than one.

    Only the queue's first partition has this key.
    """
    return f"{base}:partitions"


def call(base: str, client: str) -> str:
    """The number of a client's last call, and the answer. The key expires by itself."""
    return f"{base}:call:{client}"


def wakeup(base: str, waiter: str) -> str:
    """Sorted set with the marker by which one consumer ends its own wait. The key expires by itself."""
    return f"{base}:wakeup:{waiter}"


def partition(queue: str, number: int) -> str:
    """The name of one of a queue's partitions."""
    return f"{queue}#{number}" if number else queue


def queue_and_number(partition: str) -> tuple[str, int]:
    """The queue of a partition, and the partition's number in it."""
    queue, _, number = partition.partition("#")
    return queue, int(number or 0)


def base(prefix: str, partition: str) -> str:
    """The beginning of all keys of a partition."""
    return f"{prefix}:{{{partition}}}"


def pattern(prefix: str) -> str:
    """The pattern of all partitions' keys, for ``SCAN``."""
    return f"{prefix}:{{*}}:*"


def queue_of(key: str, prefix: str) -> str | None:
    """The queue of a ``jobs`` or a ``paused`` key. None for other keys.

    These keys exist only while a partition of the queue holds a job or is paused.
    """
    head, tail = f"{prefix}:{{", key.rpartition("}:")
    if not key.startswith(head) or tail[2] not in {"jobs", "paused"}:
        return None
    return tail[0][len(head) :].partition("#")[0]


def partitioned_queue_of(key: str, prefix: str) -> str | None:
    """The queue of a ``partitions`` key. None for other keys.

    That key exists only if the queue has several partitions.
    """
    head, tail = f"{prefix}:{{", "}:partitions"
    return key[len(head) : -len(tail)] if key.startswith(head) and key.endswith(tail) else None


#: the headers of the Lua files use these functions' names (``call`` is left out, because it needs a client)
BY_NAME: dict[str, Callable[[str], str]] = {
    function.__name__: function
    for function in (
        jobs,
        bodies,
        reasons,
        ready,
        delayed,
        reserved,
        buried,
        unreadable,
        outcomes,
        expiring,
        held,
        terms,
        arrived,
        litter,
        unique_holds,
        hold_expiry,
        limits,
        lines,
        parked,
        line_states,
        open_lines,
        fair_lines,
        blocked,
        slot_counts,
        slot_ends,
        slot_ids,
        rates,
        openings,
        notes,
        note_keys,
        note_expiry,
        outbox,
        seen,
        sequence,
        paused,
        hint,
        partitions,
    )
}
