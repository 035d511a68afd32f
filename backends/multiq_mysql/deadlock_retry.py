"""Transactions that are run again: InnoDB may end any of them to break a deadlock, and expects another try."""

from __future__ import annotations

import collections
import random
import time

DEADLOCK, LOCK_WAIT, CHANGED = 1213, 1205, 1020
LOCKED = frozenset({DEADLOCK, LOCK_WAIT, CHANGED})
"""Somebody else's lock, or change. Galera says 1213 at COMMIT, too."""
REFUSED_BY_GROUP, NOT_PREPARED = 3101, 1047
RETRIED = LOCKED | {REFUSED_BY_GROUP, NOT_PREPARED}
"""The server's errors after which the whole transaction is run again: those, and what Group Replication says of a
transaction that lost against another node's, and Galera of a node that is joining."""

retry_counts: collections.Counter[int] = collections.Counter()
"""How often that happened in this process, by the error's number."""

_FIRST_PAUSE = 0.001  # seconds
_LONGEST_PAUSE = 0.1


class DeadlockRetry:
    """The pauses between the tries of one call, growing, spread at random, and never past its deadline."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._pause = _FIRST_PAUSE

    def pause(self, code: int) -> bool:
        """Count and sleep. False: there is no time for another try."""
        retry_counts[code] += 1
        nap = self._pause * random.uniform(0.2, 1.0)  # noqa: S311 - spreads the tries, guards nothing
        if time.monotonic() + nap >= self._deadline:
            return False
        time.sleep(nap)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return True
