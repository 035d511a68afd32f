"""The interface's types for the optional capability ``limits``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_GATES = 4  # of one job
MAX_GATE_TEXT = 200  # characters of a limit's name, and of a key
TOP = 10  # keys that ``LimitState.top`` has
COMPARED = 20
"""The number of keys of a fair limit that a reserve compares: those that have the most urgent jobs, and among them
those whose last turns were longest ago (contract 19.9)."""


class Gate(msgspec.Struct, frozen=True, order=True):
    """A limit and a key that limit when a job may start. A job with gates is handed out only while all of its gates are
    open."""

    limit: str
    """The name of a limit of the job's queue. A limit that is not stored is always open."""
    key: str = ""
    """Any text of at most 200 characters. The limit counts the jobs of each key separately."""

    def __str__(self) -> str:
        return f"limit {self.limit}/{self.key}" if self.key else f"limit {self.limit}"


class Quota(msgspec.Struct, frozen=True):
    """How many jobs a limit admits, for each key. The core has checked the values."""

    slots: int | None = None
    """The largest number of live leases at the same time. None: no bound. 0: no job is handed out."""
    rate: float | None = None
    """The number of jobs that may be handed out in *per* seconds. None: no bound."""
    per: float = 1.0
    burst: int = 1
    """The number of jobs that may be handed out at the same time after a pause. In t seconds, at most burst + rate * t
    / per jobs are handed out."""
    fair: bool = False
    """Whether the keys share the slots. Then the key with the fewest live leases has the next job. Otherwise the oldest
    job is handed out first, whatever its key is."""

    def interval(self, resolution: int) -> int:
        """Return the time between two jobs at the steady rate, in 1/*resolution* seconds, rounded up."""
        from fractions import Fraction  # only few programs have limits with rates

        if self.rate is None:
            return 0
        return -int(-(Fraction(self.per) * resolution / Fraction(self.rate)) // 1)

    def possible_due(self, due: int, now: int, resolution: int) -> int:
        """Return the stored time *due* of a rate, or an earlier time that admits one job now if *due* is too late.

        *due* is the time at which a job would be due at the steady rate. No job of this quota moves it further than
        *burst* intervals into the future. So if it is a second later than that, the store's clock was set back, or the
        rate was slower. Without this bound, no job would be handed out until *due*. Smaller differences are normal,
        because each transaction reads the clock at its own begin. All times are in 1/*resolution* seconds.
        """
        interval = self.interval(resolution)
        if due <= now + self.burst * interval + resolution:
            return due
        return now + (self.burst - 1) * interval


class LimitState(msgspec.Struct, frozen=True, kw_only=True):
    """A stored limit, and the numbers of jobs to which it applies now."""

    name: str
    quota: Quota
    is_pinned: bool
    """Whether an operator has set the quota. In this case, code that has another quota does not change the stored
    one."""
    keys: int
    """The number of keys with a live lease or a parked job."""
    running: int
    """The number of live leases."""
    parked: int
    """The number of ready jobs that wait in a line of this limit. The number includes jobs that the next reserve may
    hand out."""
    top: list[tuple[str, int, int]]
    """At most ten keys, each with its number of live leases and its number of parked jobs. The key with the most parked
    jobs comes first."""


def fair_rank(leases: int, turn: int) -> tuple[int, int]:
    """Return the rank of a key of a fair limit, from its number of live leases and the number of its last turn. The key
    with the lowest rank has the next job.

    Of several keys without a lease, the one whose turn was longest ago is next, so no key waits for ever. Of several
    keys with the same number of leases, the one whose turn was latest is next. So if the slots cannot be shared evenly,
    a key that has begun to wait gets the odd slot, and not the key that has used the slots until now.
    """
    return leases, -turn if leases else turn


def limit_states(
    stored: Iterable[tuple[str, Quota, bool]], counts: dict[str, dict[str, tuple[int, int]]]
) -> list[LimitState]:
    """Return the states, sorted by name.

    - *stored*: the name and the quota of each limit, and whether it is pinned.
    - *counts*: the number of live leases and the number of parked jobs, for each limit's name and key.
    """
    states = []
    for name, quota, is_pinned in sorted(stored, key=lambda one: one[0]):
        of_keys = [(key, *numbers) for key, numbers in counts.get(name, {}).items() if any(numbers)]
        of_keys.sort(key=lambda one: (-one[2], -one[1], one[0]))
        states.append(
            LimitState(
                name=name,
                quota=quota,
                is_pinned=is_pinned,
                keys=len(of_keys),
                running=sum(running for _, running, _ in of_keys),
                parked=sum(parked for *_, parked in of_keys),
                top=of_keys[:TOP],
            )
        )
    return states
