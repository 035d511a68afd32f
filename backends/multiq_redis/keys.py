"""The keys of a partition, one function each. All keys of a partition share a hash tag and thus a cluster's slot.

The tag of a queue's first partition is ``{queue}``. With ``?partitions=``, the other partitions have the tags
``{queue#1}``, ``{queue#2}`` and so on. A queue's name cannot contain a ``#``.

A job's *place*, its member in a sorted set, consists of the job's sequence number, priority and id.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_PREFIX = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


def prefix(text: str) -> str:
    """Parse the option ``?prefix=``, the text that all keys begin with.

    Braces are refused because they would change the hash tag. Stars and brackets are patterns for SCAN.
    """
    if not _PREFIX.fullmatch(text):
        raise ValueError("must be 1 to 64 letters, digits, or any of _ . : -")
    return text


def jobs(base: str) -> str:
    """Hash: id -> record (lua/include/record.lua). The key exists exactly while the partition holds a job."""
    return f"{base}:jobs"


def bodies(base: str) -> str:
    """Hash: id -> body, for jobs whose body is too large for the record."""
    return f"{base}:bodies"


def reasons(base: str) -> str:
    """Hash: id -> the reason of the job's last release, bury or abandon, if it had one."""
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
    """Sorted set of places in the order in which the jobs were buried."""
    return f"{base}:buried"


def unreadable(base: str) -> str:
    """Hash: id -> why the job could not be read, a newline, and what was stored (lua/include/validate.lua)."""
    return f"{base}:unreadable"


def sequence(base: str) -> str:
    """Counter that numbers new jobs and burials. The key is deleted with the last job."""
    return f"{base}:sequence"


def paused(base: str) -> str:
    """When the pause ends, in microseconds since 1970. The key expires by itself."""
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
    """What all keys of a partition begin with."""
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
        sequence,
        paused,
        hint,
        partitions,
    )
}
