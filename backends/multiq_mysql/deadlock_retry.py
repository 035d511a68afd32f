"""Retries transactions that the server has rolled back: InnoDB ends one of them to break a deadlock."""

from __future__ import annotations

import collections
import random
import time

DEADLOCK, LOCK_WAIT, CHANGED = 1213, 1205, 1020
LOCKED = frozenset({DEADLOCK, LOCK_WAIT, CHANGED})
"""Another transaction's lock or change. Galera reports 1213 at COMMIT, too."""
REFUSED_BY_GROUP, NOT_PREPARED = 3101, 1047
RETRIED = LOCKED | {REFUSED_BY_GROUP, NOT_PREPARED}
"""The server's errors after which the whole transaction is retried: those, the error of Group Replication for a
transaction that conflicts with another node's, and the error of a Galera node that is joining."""

retry_counts: collections.Counter[int] = collections.Counter()
"""Retries in this process, by the error's number."""

_FIRST_PAUSE = 0.001  # seconds
_LONGEST_PAUSE = 0.1


class DeadlockRetry:
    """The pauses between the attempts of one call: growing, randomised, and never past the call's deadline."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._pause = _FIRST_PAUSE

    def pause(self, code: int) -> bool:
        """Count the retry and sleep. False: no time is left for another attempt."""
        retry_counts[code] += 1
        nap = self._pause * random.uniform(0.2, 1.0)  # noqa: S311 - spreads the attempts, guards nothing
        if time.monotonic() + nap >= self._deadline:
            return False
        time.sleep(nap)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return True
