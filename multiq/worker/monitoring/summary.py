"""The summary: a log line now and then with the jobs that a process has settled since its last line."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from multiq.backend import Ack, Bury, Release
from multiq.logging import log_summary

if TYPE_CHECKING:
    from collections.abc import Mapping

    from multiq.backend import Verdict

_FIRST = 1.0  # seconds until the first line; each interval is twice the one before


class Summary:
    """Logs how many jobs were settled, by verdict.

    *settled*: the counts. *longest*: the seconds between two lines while jobs keep coming; 0: no lines.

    The first line comes soon, and so does the first line after a time without jobs. The worker's loop calls
    ``log_if_due`` once per turn (``WorkerProcess``), not once per job, so that jobs do not become slower.
    """

    def __init__(self, worker: str, settled: Mapping[type[Verdict], int], longest: float) -> None:
        self._worker = worker
        self._settled = settled
        self._longest = longest
        self._pause = min(_FIRST, longest)
        self._logged = self._counts()
        self._since = time.monotonic()

    def log_if_due(self, now: float) -> None:
        """Log a line, if it is time."""
        if now < self._since + self._pause or not self._longest:
            return
        if self.log(now):
            self._pause = min(2 * self._pause, self._longest)
        else:
            self._pause, self._since = min(_FIRST, self._longest), now

    def log(self, now: float) -> bool:
        """Log what was settled since the last line. Returns whether there was anything."""
        counts = self._counts()
        done, retried, buried = (count - logged for count, logged in zip(counts, self._logged, strict=True))
        if not self._longest or counts == self._logged:
            return False
        log_summary(self._worker, now - self._since, done=done, retried=retried, buried=buried)
        self._logged, self._since = counts, now
        return True

    def _counts(self) -> tuple[int, int, int]:
        return self._settled[Ack], self._settled[Release], self._settled[Bury]
