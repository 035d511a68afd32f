"""Decides whether and when a failed call is attempted again. All drivers have the same policy. A driver only classifies
errors.

===============  ======================================================  ==============================================
the failure      what has happened                                       the next attempt
===============  ======================================================  ==============================================
``STALE``        the server did nothing, and the connection is useless:  the first time in a call: immediately, on a new
                 the server had closed it while it was idle, or it       connection; later: as after ``UNREACHABLE``
                 leads to a server that no longer accepts writes
``REPLY_LOST``   the call was sent, and then the connection broke or     as after ``STALE``; ``may_be_done`` is set
                 the attempt's time was over before the reply came
``UNREACHABLE``  no connection could be opened, so nothing was sent      after a pause, if another server may take the
                                                                         place of the failed one; otherwise none
``REJECTED``     the server refuses for the moment: it is starting, is   after a pause
                 busy, or has no primary
``CONFLICT``     the call was undone, or did not begin, because of       after a shorter pause
                 another client's lock or change
``FINAL``        any other failure; also a lost reply, if the driver     none
                 cannot tell the call from a repetition of it
===============  ======================================================  ==============================================

If there is no next attempt, the driver raises the error.

The length of a pause is random: from 0.2 to 1 times an upper limit. So clients that failed together do not come back
together. The upper limit doubles with each pause of the call. If a pause would end after the call's deadline, there is
no pause and no further attempt, and the driver raises the error immediately.

The driver itself handles redirections, scripts that the server does not know, and ways to recognise a repeated call. A
driver creates ``Attempts`` only when the first attempt has failed, so a call that succeeds costs nothing here.
"""

from __future__ import annotations

import enum
import random
import time
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


class Failure(enum.Enum):
    """How an attempt of a call failed. The module's docstring has the consequence of each kind."""

    STALE = "stale connection"
    REPLY_LOST = "reply lost"
    UNREACHABLE = "unreachable"
    REJECTED = "rejected for the moment"
    CONFLICT = "conflict"
    FINAL = "final"


class Pauses(NamedTuple):
    """The upper limit of a call's first pause, and the value up to which that limit doubles; both in seconds."""

    first: float
    longest: float


REJECTED_PAUSES = Pauses(0.01, 0.25)
CONFLICT_PAUSES = Pauses(0.001, 0.1)

repetitions: Counter[Failure] = Counter()
"""The numbers of repeated attempts in this process. The keys are the failures of the previous attempts."""


class Attempts:
    """Decides whether a failed call has another attempt, and after which pause. Used for one call."""

    def __init__(
        self,
        deadline: float,
        *,
        has_failover: bool = False,
        conflict_pauses: Pauses = CONFLICT_PAUSES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make this object after the first failed attempt.

        Parameters:
            deadline: the end of the whole call, as a value of *clock*.
            has_failover: whether another server may take the place of one that cannot be reached.
            conflict_pauses: the pauses after a ``CONFLICT``. Use shorter pauses for a store with short locks.
            clock: returns seconds.
        """
        self.may_be_done = False
        """Whether the reply to an attempt was lost. If so, the server may have carried out the call. Later attempts
        never reset this value.
        """
        self._deadline = deadline
        self._has_failover = has_failover
        self._conflict_pauses = conflict_pauses
        self._clock = clock
        self._has_reconnected = False
        self._growth = 1

    def again(self, failure: Failure) -> bool:
        """Sleep until the next attempt. Returns False if there is no next attempt. In this case the caller must raise
        the error."""
        pause = self.next_pause(failure)
        if pause is None:
            return False
        if pause:
            time.sleep(pause)
        return True

    def next_pause(self, failure: Failure) -> float | None:
        """Return the seconds until the next attempt after this failure. None: there is no further attempt."""
        if failure is Failure.REPLY_LOST:
            self.may_be_done = True
        pause = self._pause_after(failure)
        if pause is None or self._clock() + pause >= self._deadline:
            return None
        repetitions[failure] += 1
        return pause

    def _pause_after(self, failure: Failure) -> float | None:
        if failure is Failure.CONFLICT:
            return self._growing(self._conflict_pauses)
        if failure is Failure.REJECTED:
            return self._growing(REJECTED_PAUSES)
        if failure in {Failure.STALE, Failure.REPLY_LOST} and not self._has_reconnected:
            self._has_reconnected = True
            return 0.0
        if failure is not Failure.FINAL and self._has_failover:
            return self._growing(REJECTED_PAUSES)
        return None

    def _growing(self, pauses: Pauses) -> float:
        longest = pauses.first * self._growth
        if longest < pauses.longest:
            self._growth *= 2
        return min(longest, pauses.longest) * random.uniform(0.2, 1.0)  # noqa: S311 - spreads attempts, guards nothing
