"""The summary: a periodic log line that counts the jobs a process has settled since the previous line."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from multiq.backend import Ack, Bury, Release
from multiq.logging import log_summary

if TYPE_CHECKING:
    from collections.abc import Mapping

    from multiq.backend import Verdict

_WORDS: dict[type[Verdict], str] = {Ack: "done", Release: "retried", Bury: "buried"}
_FIRST = 1.0  # seconds until the first line; each interval is twice as long as the previous one


class Summary:
    """Logs the number of settled jobs, by verdict.

    *settled* has the running totals by type of verdict. *not_runs* has running totals by a pair: the word
    ``cancelled``, ``expired``, ``limited`` or ``snoozed``, and the type of verdict. *longest* is the maximum number of
    seconds between two lines while jobs keep coming. 0 means no lines.

    After an interval without jobs, the next interval is one second again. The worker's loop calls ``log_if_due`` once
    per pass. A call for each job would slow down jobs.
    """

    def __init__(
        self,
        worker: str,
        settled: Mapping[type[Verdict], int],
        longest: float,
        not_runs: Mapping[tuple[str, type[Verdict]], int] | None = None,
    ) -> None:
        self._worker = worker
        self._settled = settled
        self._not_runs = {} if not_runs is None else not_runs
        self._longest = longest
        self._pause = min(_FIRST, longest)
        self._logged: dict[str, int] = {}
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
        """Log the jobs settled since the last line. Returns False if no job was settled."""
        counts = self._counts()
        if not self._longest or counts == self._logged:
            return False
        new = {word: number - self._logged.get(word, 0) for word, number in counts.items()}
        log_summary(self._worker, now - self._since, **new)
        self._logged, self._since = counts, now
        return True

    def _counts(self) -> dict[str, int]:
        """Return the totals by outcome. No total may become smaller in the time between the decision and the settlement
        of a verdict."""
        counts = {word: self._settled[verdict] for verdict, word in _WORDS.items()}
        for (word, verdict), number in tuple(self._not_runs.items()):
            counts[word] = counts.get(word, 0) + number
            if verdict in _WORDS:
                counts[_WORDS[verdict]] -= number
        return {word: max(number, self._logged.get(word, 0)) for word, number in counts.items()}
