"""The keys of a partition, one function each. All of them share a hash tag, and with it a cluster's slot.

A queue has one partition, tagged ``{queue}``, or with ``?partitions=`` several: ``{queue}``, ``{queue#1}``,
``{queue#2}``... No queue's name has a ``#``. A queue with one partition has the first one only.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_PREFIX = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


def prefix(text: str) -> str:
    """Parse the option that all keys begin with. Braces would move the hash tag, stars and brackets break SCAN."""
    if not _PREFIX.fullmatch(text):
        raise ValueError("must be 1 to 64 letters, digits, or any of _ . : -")
    return text


def jobs(base: str) -> str:
    """Hash: id -> record (lua/include/record.lua). It exists exactly while the queue holds a job."""
    return f"{base}:jobs"


def bodies(base: str) -> str:
    """Hash: id -> body, of those jobs whose body is too large for the record."""
    return f"{base}:bodies"


def reasons(base: str) -> str:
    """Hash: id -> the reason of the last release or bury, of those jobs that have one."""
    return f"{base}:reasons"


def ready(base: str) -> str:
    """Sorted set of places by priority."""
    return f"{base}:ready"


def delayed(base: str) -> str:
    """Sorted set of places by due time, in microseconds since 1970."""
    return f"{base}:delayed"


def reserved(base: str) -> str:
    """Sorted set of places by the lease's end, in microseconds since 1970."""
    return f"{base}:reserved"


def buried(base: str) -> str:
    """Sorted set of places by the sequence in which they were buried."""
    return f"{base}:buried"


def unreadable(base: str) -> str:
    """Hash: id -> why the job could not be read, a newline, and what was stored (lua/include/validate.lua)."""
    return f"{base}:unreadable"


def sequence(base: str) -> str:
    """Counter of ages and burials. It is gone with the last job."""
    return f"{base}:sequence"


def paused(base: str) -> str:
    """When the pause ends, in microseconds since 1970. It expires by itself."""
    return f"{base}:paused"


def hint(base: str) -> str:
    """Sorted set with one member, or none: the marker that notifies a waiting consumer. Gone with the last job."""
    return f"{base}:hint"


def partitions(base: str) -> str:
    """The largest number of partitions over which the queue was ever enqueued, if more than one.

    Only the first partition has this key.
    """
    return f"{base}:partitions"


def call(base: str, client: str) -> str:
    """The last call of one client: number and answer. It expires by itself."""
    return f"{base}:call:{client}"


def wakeup(base: str, waiter: str) -> str:
    """Sorted set: the marker by which one consumer ends its own wait. It expires by itself."""
    return f"{base}:wakeup:{waiter}"


def partition(queue: str, number: int) -> str:
    """The name of one of a queue's partitions."""
    return f"{queue}#{number}" if number else queue


def queue_and_number(partition: str) -> tuple[str, int]:
    """The queue of a partition, and the partition's number in it."""
    queue, _, number = partition.partition("#")
    return queue, int(number or 0)


def base(prefix: str, partition: str) -> str:
    """What all keys of a partition begin with."""
    return f"{prefix}:{{{partition}}}"


def pattern(prefix: str) -> str:
    """The pattern of all partitions' keys, for ``SCAN``."""
    return f"{prefix}:{{*}}:*"


def queue_of(key: str, prefix: str) -> str | None:
    """The queue of a key that exists only while a partition of the queue holds a job or is paused; None for others."""
    head, tail = f"{prefix}:{{", key.rpartition("}:")
    if not key.startswith(head) or tail[2] not in {"jobs", "paused"}:
        return None
    return tail[0][len(head) :].partition("#")[0]


def partitioned_queue_of(key: str, prefix: str) -> str | None:
    """The queue of a key that exists only if the queue has several partitions; None for other keys."""
    head, tail = f"{prefix}:{{", "}:partitions"
    return key[len(head) : -len(tail)] if key.startswith(head) and key.endswith(tail) else None


#: the headers of the Lua files name keys by these functions; ``call`` is not here, as it needs a client, too
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
        sequence,
        paused,
        hint,
        partitions,
    )
}
