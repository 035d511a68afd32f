"""How long a consumer parks the ready jobs of fair limits before it hands out one of them, and when it searches for
jobs of other keys instead (fair_search.py).
"""

from __future__ import annotations

import time
from typing import Protocol

from .gated_claim import DEEPEST

# seconds after which a consumer no longer parks the ready jobs of fair limits before it hands out one of them: less
# than the half second after which a waiting consumer has its job (3.10)
PARKING_TIME = 0.3
PARKING_PAUSE = 1.0  # seconds without such parking, after a call has used up its time
# seconds after which a call ends although it has found no job yet, because a worker must touch its leases; more than
# PARKING_TIME
LOOKING_TIME = 0.5
SEARCH_PAUSE = 5.0  # seconds without a search, after a search that has not reached the last ready job
_QUICK_TIME = 1.5  # seconds


class ClaimResult(Protocol):
    """What a claim has seen and done. ``Claim`` explains the attributes."""

    seeks_keys: bool
    knows_all_keys: bool
    search_failed: bool
    has_parked_first: bool


class Parking:
    """The times at which a consumer parks jobs and searches, queue by queue."""

    def __init__(self) -> None:
        self._parks_until: dict[str, float] = {}
        """Queue -> the time from which a call no longer parks its ready jobs of fair limits first, for a while."""
        self._first_turns: dict[str, int] = {}
        """Queue -> the turn of a claim with which the next call begins, because the last call has ended too early."""
        self._searching_since: dict[str, float] = {}
        """Queue -> the time of the first of the calls in a row whose search for other keys of fair limits has found all
        keys. The next call begins with a search."""
        self._no_search_until: dict[str, float] = {}
        """Queue -> the time from which a call may search again. The last search has not found all keys."""

    def begin(self, queue: str, call_began: float) -> tuple[int, bool]:
        """Return the turn of a claim with which a call begins, and whether the call begins with a search."""
        since = self._searching_since.get(queue)
        own = 0 if since is None else _first_turn(call_began - since)
        return max(self._first_turns.pop(queue, 0), own), since is not None

    def may_search(self, queue: str) -> bool:
        return time.monotonic() >= self._no_search_until.get(queue, 0.0)

    def end(self, queue: str, call_began: float) -> float:
        """Return the time from which the calls for a queue no longer park its jobs first. After this time, and a pause,
        a call may do so again.

        While other consumers park jobs, their locks hide the open gates, and this consumer's calls find nothing. If
        each call had a new time, the consumers could hold each other up until all jobs are parked.
        """
        until = self._parks_until.get(queue)
        if until is not None and time.monotonic() >= until + PARKING_PAUSE:
            until = None
            del self._parks_until[queue]
        return call_began + PARKING_TIME if until is None else until

    def note_claim(self, queue: str, claim: ClaimResult, began: float, call_began: float, *, has_found: bool) -> None:
        """Record a claim that began at *began*. *has_found*: whether it has reserved jobs."""
        if claim.knows_all_keys:
            self._searching_since.setdefault(queue, began)
        elif claim.seeks_keys:
            self._searching_since.pop(queue, None)
        if claim.search_failed:
            self._no_search_until[queue] = time.monotonic() + SEARCH_PAUSE
        if claim.has_parked_first:
            until = self._parks_until.get(queue, call_began + PARKING_TIME)
            self._parks_until[queue] = max(until, time.monotonic())  # the pause begins when the claim has ended
        elif has_found and time.monotonic() < self._parks_until.get(queue, 0.0):
            del self._parks_until[queue]  # the parking ended in time

    def ended_early(self, queue: str, turn: int) -> None:
        """Let the next call begin with the turn after this one, because a slow server otherwise gets no further."""
        self._first_turns[queue] = min(turn + 1, DEEPEST)


def _first_turn(searching: float) -> int:
    """Return the first turn of a call that begins with a search. *searching*: the seconds since the first of the calls
    in a row that have searched.

    At first, such calls park few jobs, because jobs of other keys wait for them. Later calls park many, so that there
    are soon fewer jobs to search: each search takes longer the more jobs are not parked yet.
    """
    return 1 if searching < _QUICK_TIME else DEEPEST
