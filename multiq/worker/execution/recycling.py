"""Recycling: ends a worker process after a number of jobs, after some time, or if it uses too much memory."""

from __future__ import annotations

import logging
import random
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from multiq.worker.processes.exits import EXIT_MEMORY, EXIT_RECYCLED

if TYPE_CHECKING:
    from multiq.worker.processes.process import ProcessSettings

_log = logging.getLogger("multiq.worker")

_JITTER = 0.1  # a random share is subtracted from each limit, so children that started together do not end together
_LOOK = 0.02  # seconds between two measurements of the memory; each takes some microseconds
_STATM = Path("/proc/self/statm")
_PAGE = resource.getpagesize()


class Recycling:
    """The limits of a process, checked between jobs. If ``is_reached``, then ``reason`` and ``code`` describe the
    limit.
    """

    def __init__(self, settings: ProcessSettings) -> None:
        now = time.monotonic()
        self.reason = ""
        self.code = 0
        self._jobs = _less(settings.recycle_jobs)
        self._recycle_at = now + _less(settings.recycle_time)
        self._end_at = settings.end_at
        self._memory = settings.memory
        self._look_at = now
        self._used = 0.0
        if settings.memory is not None:
            self._warn_of_little(settings.memory)

    def is_reached(self, jobs: int) -> bool:
        """Whether the process should end now, after *jobs* jobs."""
        now = time.monotonic()
        if now >= self._end_at:
            self.reason = "its time is over"
        elif jobs >= self._jobs:
            self.reason, self.code = f"ran {jobs} jobs", EXIT_RECYCLED
        elif now >= self._recycle_at:
            self.reason, self.code = "ran for long enough", EXIT_RECYCLED
        elif jobs and self.is_memory_used_up():
            self.reason = f"uses {self._used:.0f} MiB of memory and may use {self._memory:g}"
            self.code = EXIT_MEMORY
        return bool(self.reason)

    def is_memory_used_up(self) -> bool:
        """Whether the process uses more memory than its limit.

        A call for every job is cheap, because the memory is measured only every ``_LOOK`` seconds.
        """
        if self._memory is None:
            return False
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _LOOK
            self._used = resident_mib()
        return self._used > self._memory

    def ends_in(self) -> float:
        """Seconds until a time limit is reached."""
        return max(0.0, min(self._end_at, self._recycle_at) - time.monotonic())

    def _warn_of_little(self, memory: float) -> None:
        """Log an error if the process uses more than the limit before its first job. Each process of this worker would
        then end after one job."""
        used = resident_mib()
        if used > memory:
            _log.error(
                "memory must be more than this process uses before its first job, got %g MiB, and the process uses "
                "%.0f MiB: it ends after each job. Add room for the largest job",
                memory,
                used,
            )


def resident_mib() -> float:
    """The resident memory of this process in MiB. Without /proc, the maximum so far."""
    try:
        return int(_STATM.read_text().split()[1]) * _PAGE / 2**20
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most / 2**20 if sys.platform == "darwin" else most / 2**10


def _less(limit: float | None) -> float:
    """Return *limit* minus a random part of it, or infinity for None."""
    return float("inf") if limit is None else limit * (1 - random.random() * _JITTER)  # noqa: S311 - guards nothing
