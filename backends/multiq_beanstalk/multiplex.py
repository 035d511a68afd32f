"""Reads each reply of several connections when it arrives, so that no connection waits for another connection."""

from __future__ import annotations

import contextlib
import select
import time
from typing import TYPE_CHECKING, TypeAlias

from .errors import CONNECTION_ERRORS
from .replies import NO_ANSWER

if TYPE_CHECKING:
    from collections.abc import Generator

    from .connection import Connection
    from .replies import Reply

    Steps: TypeAlias = Generator[tuple[bytes, int], list[Reply], None]
    """A generator that runs the exchange on one connection.

    It yields packets, each with the number of its one-line replies, and receives these replies. If the connection
    fails, one of ``CONNECTION_ERRORS`` is raised in the generator. The exception's ``partly_read`` has the replies that
    arrived before the failure.
    """


class _Channel:
    def __init__(self, connection: Connection, steps: Steps) -> None:
        self.connection = connection
        self.steps = steps
        self.rest = memoryview(b"")
        """The part of the packet that is not sent yet."""
        self.count = 0
        self.replies: list[Reply] = []


class Multiplexer:
    """Runs the ``Steps`` of several connections at the same time.

    After an exception, call ``abort`` to close the connections that wait for a reply.
    """

    def __init__(self) -> None:
        self._channels: dict[int, _Channel] = {}  # by the socket's file descriptor
        self._poll = select.poll()

    def add(self, connection: Connection, steps: Steps) -> None:
        """Begin the steps of a connection, and send their first packet."""
        channel = _Channel(connection, steps)
        number = connection.sock.fileno()
        self._channels[number] = channel
        self._poll.register(number, 0)
        self._advance(number, channel)

    def is_done(self, connection: Connection) -> bool:
        """Whether this connection waits for no reply."""
        return all(channel.connection is not connection for channel in self._channels.values())

    def run(self, until: float) -> None:
        """Run until all steps are done, at most until the time *until*.

        Replies that have already arrived are read even if this time is over.
        """
        left = 1.0
        while self._channels and left > 0:
            left = until - time.monotonic()
            for number, event in self._poll.poll(max(0.0, left * 1000)):
                self._step(number, event)

    def give_up(self) -> None:
        """End the steps that still wait for a reply, with a ``TimeoutError``."""
        for number, channel in tuple(self._channels.items()):
            self._fail(number, channel, TimeoutError(NO_ANSWER))

    def abort(self) -> None:
        """Close the connections that wait for a reply. Nothing is raised in their steps."""
        for channel in self._channels.values():
            channel.connection.abort()
        self._channels.clear()

    def _step(self, number: int, event: int) -> None:
        channel = self._channels[number]
        try:
            if channel.rest and event & select.POLLOUT:
                channel.rest = channel.connection.send_nowait(channel.rest)
            if event & ~select.POLLOUT:
                channel.replies += channel.connection.read_nowait(channel.count - len(channel.replies))
        except CONNECTION_ERRORS as exc:
            self._fail(number, channel, exc)
        else:
            self._continue(number, channel)

    def _continue(self, number: int, channel: _Channel) -> None:
        if len(channel.replies) == channel.count:
            self._advance(number, channel)
        else:
            self._poll.modify(number, select.POLLIN | (select.POLLOUT if channel.rest else 0))

    def _advance(self, number: int, channel: _Channel) -> None:
        """Pass the replies to the steps, and send the next packet."""
        replies, channel.replies = channel.replies, []
        try:
            packet, channel.count = channel.steps.send(replies) if channel.count else next(channel.steps)
        except StopIteration:
            self._end(number)
            return
        try:
            channel.rest = channel.connection.send_nowait(memoryview(packet))
        except CONNECTION_ERRORS as exc:
            self._fail(number, channel, exc)
        else:
            self._poll.modify(number, select.POLLIN | (select.POLLOUT if channel.rest else 0))

    def _fail(self, number: int, channel: _Channel, exc: Exception) -> None:
        self._end(number)
        channel.connection.abort()
        exc.partly_read = channel.replies  # type: ignore[attr-defined]
        with contextlib.suppress(StopIteration):
            channel.steps.throw(exc)

    def _end(self, number: int) -> None:
        self._poll.unregister(number)
        del self._channels[number]
