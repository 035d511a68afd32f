"""When a call that failed is attempted again: one policy for all drivers, which only classify their errors.

===============  ======================================================  ==============================================
the failure      what has happened                                       the next attempt
===============  ======================================================  ==============================================
``STALE``        nothing was done, and the connection is of no use: the  the first time in a call: at once, on a new
                 server had closed it while it was idle, or it leads to  connection; later as after ``UNREACHABLE``
                 a server that takes no writes any more
``REPLY_LOST``   the call was sent, and the connection broke before the  as after ``STALE``; ``may_be_done`` is set
                 reply, or the attempt's time was over
``UNREACHABLE``  there is no connection, so nothing was sent             after a pause, if another server may take the
                                                                         failed one's place; else the error is raised
``REJECTED``     the server refuses for the moment: it is starting, is   after a pause
                 busy, has no primary
``CONFLICT``     the call was undone, or did not begin, because of       after a pause, which is shorter
                 another client's lock or change
``FINAL``        anything else; also a lost reply to a call that the     none: the error is raised
                 driver cannot tell from its repetition
===============  ======================================================  ==============================================

The length of a pause is random, from 0.2 to 1 times an upper limit, so that clients that failed together do not come
back together. The upper limit doubles with each pause of the call. An attempt is made only if it begins before the
call's deadline: a pause that would end later is not made, and the error is raised at once.

What only a driver knows stays in the driver: redirections, the text of a script that the server does not know, the
receipts by which a repeated call is recognised. A driver makes ``Attempts`` when the first attempt has failed, so a
call that succeeds costs nothing here.
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
    """How an attempt of a call failed; the module's docstring says what follows."""

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
"""How many repeated attempts this process has made, by the failure of the attempt before."""


class Attempts:
    """The attempts of one call after the first: whether there is another one, and after which pause."""

    def __init__(
        self,
        deadline: float,
        *,
        has_failover: bool = False,
        conflict_pauses: Pauses = CONFLICT_PAUSES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to count.

        Parameters:
            deadline: the end of the whole call, as a value of *clock*.
            has_failover: whether another server may take the place of one that cannot be reached.
            conflict_pauses: the pauses after a ``CONFLICT``; a store whose locks are short takes shorter ones.
            clock: returns seconds.
        """
        self.may_be_done = False
        """Whether the server may have carried out an attempt: it was sent, and its reply was lost. No
        outcome of a later attempt changes this.
        """
        self._deadline = deadline
        self._has_failover = has_failover
        self._conflict_pauses = conflict_pauses
        self._clock = clock
        self._has_reconnected = False
        self._growth = 1

    def again(self, failure: Failure) -> bool:
        """Pause as ``next_pause`` says. False: there is no further attempt, and the caller raises the error."""
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
