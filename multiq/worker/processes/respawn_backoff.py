"""How long the supervisor waits until it replaces a child that has died soon after its start."""

from __future__ import annotations

YOUNG = 5.0  # seconds; an older child did not die because of its start
_FIRST = 0.1  # seconds until a child that died young is replaced; the delay doubles with each early death
_LONGEST = 30.0  # maximum if the child had no job
_LONGEST_WORKING = 1.0  # maximum if the child had a job; max_crashes then limits the deaths


def respawn_backoff(early_deaths: int, *, had_jobs: bool) -> float:
    """Return the seconds until a child is replaced, after *early_deaths* successive early deaths in its slot.

    After the first early death, the child is replaced immediately, because jobs may be waiting. The child may have been
    killed from outside.
    """
    longest = _LONGEST_WORKING if had_jobs else _LONGEST
    return min(longest, _FIRST * 2.0 ** min(early_deaths - 2, 20)) if early_deaths > 1 else 0.0
