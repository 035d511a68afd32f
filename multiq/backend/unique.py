"""The interface's types for the optional capability ``unique``."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

UniqueUntil: TypeAlias = Literal["gone", "buried", "reserved"]

MAX_KEY = 64  # bytes of a unique key


class UniqueKey(msgspec.Struct, frozen=True):
    """What makes a job unique within its queue.

    A job *has* its key from its enqueue to the event in ``until``. While a job has a key, no job with this key is added
    to the queue. An enqueue of a job with this key returns the id of the job that has the key.
    """

    key: bytes
    """1 to 64 bytes. The core sends 32, a hash of the task's name and its arguments."""
    until: UniqueUntil = "gone"
    """``gone``: the event is an ack or a deletion. ``buried``: the event is an ack, a deletion or a bury. ``reserved``:
    the event is any of these three, or the first reservation that ``attempt`` counts.
    """
    on_conflict: Literal["keep", "replace"] = "keep"
    """What an enqueue does with the job that has the key. ``keep``: nothing. ``replace``: a ready, delayed or held job
    takes the new body, priority, ttr, gates and due time. Its attempts, crashes, kicks, reason, memo and detail start
    over, and it is no longer doomed. A reserved or buried job does not change.
    """
    hold: float = 0.0
    """The key stays taken for at least this number of seconds after the enqueue, whatever happens to the job."""
    max_wait: float | None = None
    """The latest due time that ``replace`` may give the job. This time counts in seconds from the enqueue that began
    the job's age."""
