"""Over how many lines a queue goes, and which of them a job stands in (docs/decisions/0008).

Every URL says over how many lines it enqueues: ``?partitions=``. The server remembers the largest number that anybody
has used, in a key of the queue's first line; everybody reads from that many, whatever his own URL says. So the number
can be changed at any time, on one side first, and no job is left behind.
"""

from __future__ import annotations

import time
import zlib
from typing import TYPE_CHECKING

from multiq.backend import Finding
from multiq.errors import BackendUnavailable

from . import keys

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from .client import Callers

MOST = 64
_SAY_AGAIN = 30.0  # seconds until the server is told once more: it may have forgotten, in a failover or by hand
_SAY_AGAIN_SOON = 5.0  # seconds, if it could not be told
_WITHIN = 1.0  # seconds that one node of a cluster has to hear it
_MOST_SAID = 10_000  # queues that are remembered to have been told of


def how_many(text: str) -> int:
    """Reads the option."""
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= MOST):
        raise ValueError(f"must be a whole number from 1 to {MOST}")
    return int(text)


class Lines:
    """What one backend knows of its queues' lines."""

    def __init__(self, callers: Callers, spread: int) -> None:
        self.spread = spread
        """Over how many lines this backend enqueues."""
        self._callers = callers
        self._known: dict[str, int] = {}  # queue -> how many lines it has, where they are more than our own
        self._said_at: dict[str, float] = {}  # queue -> when the server was told of ours; monotonic
        self._to_pause: dict[str, list[str]] = {}  # queue -> new lines that may lack its pause

    def home(self, queue: str, packed_id: bytes) -> str:
        """The line that a job of this id is enqueued in."""
        if self.spread == 1:
            return queue
        return keys.line(queue, zlib.crc32(packed_id) % self.spread)

    def of(self, queue: str) -> list[str]:
        """All lines that the queue is known to have."""
        return self._lines(queue, 0, self._known.get(queue, self.spread))

    def are_several(self, queue: str) -> bool:
        """Whether a queue has more than one."""
        return self._known.get(queue, self.spread) > 1

    def learn(self, queue: str, told: bytes) -> list[str]:
        """Hear from the server's answer over how many lines the queue goes. Returns those that were not known."""
        known = self._known.get(queue, self.spread)
        number = _number(told)
        if number <= known:
            return []
        self._known[queue] = number
        return self._lines(queue, known, number)

    def asked(self, queue: str) -> list[str]:
        """All lines that the queue has, by what the server says now. Raises ``BackendError``."""
        _, told, *_ = self._callers.call("glance", queue)
        self.learn(queue, told)
        return self.of(queue)

    def others(self, queue: str, line: str) -> Sequence[str]:
        """All lines but one: where else to look for a job that should be there. Raises ``BackendError``."""
        return [other for other in self.asked(queue) if other != line]

    def findings(self, queues: Iterable[str]) -> Iterator[Finding]:
        """For the doctor: of these queues, which have been spread otherwise than this URL says."""
        for queue in sorted(queues):
            number = _number(self._callers.call("glance", queue)[1])
            if number <= self.spread:
                continue
            sizes = [reply[:4] for reply in self._callers.call_each("stats", self._lines(queue, self.spread, number))]
            held = sum(map(sum, sizes))
            why = f"queue {queue!r} goes over {number} lines, and this URL enqueues over {self.spread}: all are read"
            if held:
                yield Finding("ok", "partitions", f"{why}; {held:,} jobs are in the lines that others use, or used")
            else:
                advice = f"if no other program enqueues over more, delete the key {keys.partitions(self._base(queue))}"
                yield Finding("ok", "partitions", f"{why}; the lines beyond that are empty", advice)

    def say(self, queue: str) -> None:
        """Before jobs go to several lines: let everybody know. Raises ``BackendError``.

        Where the node of the first line does not answer, the lines on others take their jobs all the same. Readers
        whose URLs name fewer lines hear of the rest with the first enqueue after it is back.
        """
        now = time.monotonic()
        if now - self._said_at.get(queue, -_SAY_AGAIN) < _SAY_AGAIN:
            return
        early = 0.0
        try:
            with self._callers.borrowed() as caller:
                before, pause = caller.perform(caller.new_call("widen", queue, (0,)), now + self._patience())
        except BackendUnavailable:
            if not self._callers.servers.is_cluster:
                raise
            early = _SAY_AGAIN - _SAY_AGAIN_SOON
        else:
            self._widen(queue, before, pause)
        if len(self._said_at) >= _MOST_SAID:
            self._said_at.clear()
        self._said_at[queue] = time.monotonic() - early

    def _widen(self, queue: str, before: int, pause: bytes) -> None:
        """New lines are paused before anybody hears of them, and after that, if a pause began in between."""
        more = self._lines(queue, before, self.spread)
        if more:
            self._pause(more, pause)
            self._to_pause[queue] = more
            _, pause = self._callers.call("widen", queue, (self.spread,))
        if queue in self._to_pause:
            self._pause(self._to_pause[queue], pause)
            self._to_pause.pop(queue, None)

    def _pause(self, lines: Sequence[str], pause: bytes) -> None:
        if pause != b"0":
            self._callers.call_each("pause", lines, (pause,))

    def _patience(self) -> float:
        servers = self._callers.servers
        return min(servers.timeout, _WITHIN) if servers.is_cluster else servers.timeout

    def _base(self, queue: str) -> str:
        return keys.base(self._callers.prefix, queue)

    @staticmethod
    def _lines(queue: str, first: int, end: int) -> list[str]:
        return [keys.line(queue, number) for number in range(first, end)]


def _number(told: bytes) -> int:
    """Over how many lines a queue goes, by what the server has stored. What is no number is not multiq's."""
    return min(int(told[:9]), MOST) if told.isdigit() else 1
