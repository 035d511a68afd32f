"""The summary: a periodic log line that counts the jobs a process has settled since the previous line."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from multiq.backend import Ack, Bury, Release
from multiq.logging import log_summary

if TYPE_CHECKING:
    from collections.abc import Mapping

    from multiq.backend import Verdict

_FIRST = 1.0  # seconds until the first line; each interval doubles the one before


class Summary:
    """Logs the number of settled jobs, by verdict.

    *settled* has the running totals. *longest* is the maximum number of seconds between two lines while jobs keep
    coming. 0 means no lines.

    The intervals begin at one second again after an interval without jobs. The worker's loop calls ``log_if_due`` once
    per turn (``WorkerProcess``) instead of once per job, which would slow down jobs.
    """

    def __init__(self, worker: str, settled: Mapping[type[Verdict], int], longest: float) -> None:
        self._worker = worker
        self._settled = settled
        self._longest = longest
        self._pause = min(_FIRST, longest)
        self._logged = self._counts()
        self._since = time.monotonic()

    def log_if_due(self, now: float) -> None:
        if now < self._since + self._pause or not self._longest:
            return
        if self.log(now):
            self._pause = min(2 * self._pause, self._longest)
        else:
            self._pause, self._since = min(_FIRST, self._longest), now

    def log(self, now: float) -> bool:
        """Log the jobs settled since the last line. Returns False if there were none."""
        counts = self._counts()
        done, retried, buried = (count - logged for count, logged in zip(counts, self._logged, strict=True))
        if not self._longest or counts == self._logged:
            return False
        log_summary(self._worker, now - self._since, done=done, retried=retried, buried=buried)
        self._logged, self._since = counts, now
        return True

    def _counts(self) -> tuple[int, int, int]:
        return self._settled[Ack], self._settled[Release], self._settled[Bury]
