"""Several connections at the same time: the replies are read as they come, so that a silent one delays no other."""

from __future__ import annotations

import contextlib
import select
import time
from typing import TYPE_CHECKING, TypeAlias

from .errors import FAILURES

if TYPE_CHECKING:
    from collections.abc import Generator

    from .connection import Reply, Wire

    Steps: TypeAlias = Generator[tuple[bytes, int], list[Reply], None]
    """What is said on one connection: yields a packet and the number of its replies, of one line each, and gets these.

    What ends the connection (``FAILURES``) is raised in it, with the replies before on it as ``partly_read``.
    """

_TOO_LATE = "the server did not answer in time"


class _Turn:
    """One connection's part."""

    def __init__(self, wire: Wire, steps: Steps) -> None:
        self.wire = wire
        self.steps = steps
        self.rest = memoryview(b"")
        """What is still to be sent."""
        self.count = 0
        self.replies: list[Reply] = []


class Parallel:
    """Carries steps out on several connections. Whatever is raised out of it closes all that wait for a reply."""

    def __init__(self) -> None:
        self._turns: dict[int, _Turn] = {}  # by the number of the socket
        self._poll = select.poll()

    def add(self, wire: Wire, steps: Steps) -> None:
        """Begin with these; the first packet is sent at once."""
        turn = _Turn(wire, steps)
        number = wire.sock.fileno()
        self._turns[number] = turn
        self._poll.register(number, 0)
        self._advance(number, turn)

    def is_done(self, wire: Wire) -> bool:
        """Whether this connection waits for nothing."""
        return all(turn.wire is not wire for turn in self._turns.values())

    def run(self, until: float) -> None:
        """Until all is said and answered, or time is up; what has come by then is read in any case."""
        left = 1.0
        while self._turns and left > 0:
            left = until - time.monotonic()
            for number, event in self._poll.poll(max(0.0, left * 1000)):
                self._step(number, event)

    def give_up(self) -> None:
        """End those that still wait for a reply."""
        for number, turn in tuple(self._turns.items()):
            self._fail(number, turn, TimeoutError(_TOO_LATE))

    def drop(self) -> None:
        """The same, when nobody wants to know."""
        for turn in self._turns.values():
            turn.wire.drop()
        self._turns.clear()

    def _step(self, number: int, event: int) -> None:
        turn = self._turns[number]
        try:
            if turn.rest and event & select.POLLOUT:
                turn.rest = turn.wire.push(turn.rest)
            if event & ~select.POLLOUT:
                turn.replies += turn.wire.pull(turn.count - len(turn.replies))
        except FAILURES as exc:
            self._fail(number, turn, exc)
        else:
            self._go_on(number, turn)

    def _go_on(self, number: int, turn: _Turn) -> None:
        if len(turn.replies) == turn.count:
            self._advance(number, turn)
        else:
            self._poll.modify(number, select.POLLIN | (select.POLLOUT if turn.rest else 0))

    def _advance(self, number: int, turn: _Turn) -> None:
        """On to the next packet."""
        replies, turn.replies = turn.replies, []
        try:
            packet, turn.count = turn.steps.send(replies) if turn.count else next(turn.steps)
        except StopIteration:
            self._end(number)
            return
        try:
            turn.rest = turn.wire.push(memoryview(packet))
        except FAILURES as exc:
            self._fail(number, turn, exc)
        else:
            self._poll.modify(number, select.POLLIN | (select.POLLOUT if turn.rest else 0))

    def _fail(self, number: int, turn: _Turn, exc: Exception) -> None:
        self._end(number)
        turn.wire.drop()
        exc.partly_read = turn.replies  # type: ignore[attr-defined]
        with contextlib.suppress(StopIteration):
            turn.steps.throw(exc)

    def _end(self, number: int) -> None:
        self._poll.unregister(number)
        del self._turns[number]
