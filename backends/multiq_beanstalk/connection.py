"""One connection to beanstalkd. Sends many commands in one packet; replies.py reads the replies.

This module replaces the client library greenstalk. greenstalk waits for each reply before it sends the next command. It
limits the time of each read, but not the time of a call; see docs/decisions/0010. The driver's exceptions still have
greenstalk's exceptions as their causes.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
from typing import TYPE_CHECKING

from multiq.driverkit.net import connect, time_left

from .replies import DONTWAIT, LONGEST_LINE, NO_ANSWER, RECEIVED_AT_ONCE, ReplyReader

if TYPE_CHECKING:
    from multiq.driverkit.net import Address

    from .replies import Reply
    from .stats import ServerInfo

_DEFAULT = "default"
_NOOP = b"list-tube-used\r\n"  # a command without effect, whose reply is one line


class Connection(ReplyReader):
    """A socket, its read buffer, and the connection's state on the server (tubes, leases)."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.used = _DEFAULT
        self.watched: tuple[str, ...] = (_DEFAULT,)
        self.held: set[str] = set()
        """The tokens of this connection's leases. These leases end when the connection ends."""
        self.server_info: ServerInfo | None = None
        """The server info, or None before this connection has asked for it."""
        self.last_acquired_at = -math.inf
        """The deadline of the last call that took the connection from the pool.

        All calls of a pool have the same timeout, so this deadline shows for how long the connection was idle.
        """

    @property
    def is_closed(self) -> bool:
        return self.sock.fileno() < 0

    def is_alive(self) -> bool:
        """Whether the connection is open and has no unread data. Unread replies to no-ops are allowed.

        All data that has arrived is read, because the end of the connection may come after unread replies.
        """
        if self.is_closed:
            return False
        try:
            while (data := self.sock.recv(RECEIVED_AT_ONCE, DONTWAIT)) and self._noops_pending:
                self._buffer, self._at = self._buffer[self._at :] + data, 0
                if (
                    self._buffer.count(b"\r\n") > self._noops_pending
                    or len(self._buffer) > LONGEST_LINE * self._noops_pending
                ):
                    break
        except BlockingIOError:
            return True
        except OSError:
            pass
        self.close()
        return False

    def send_noop(self) -> None:
        """Send a command without effect. The reply is read together with the reply to the next command."""
        with contextlib.suppress(OSError):
            if self.sock.send(_NOOP, DONTWAIT) == len(_NOOP):
                self._noops_pending += 1
            else:
                self.abort()

    def watch(self, tubes: tuple[str, ...]) -> tuple[bytes, int]:
        """Return the commands with which this connection watches exactly *tubes*, and their number.

        The caller must send the commands next.
        """
        if self.watched == tubes:
            return b"", 0
        commands = [b"watch %b\r\n" % tube.encode() for tube in tubes if tube not in self.watched]
        commands += [b"ignore %b\r\n" % tube.encode() for tube in self.watched if tube not in tubes]
        self.watched = tubes
        return b"".join(commands), len(commands)

    def ask(self, packet: bytes, count: int, deadline: float) -> list[Reply]:
        """Send *packet* and return its *count* replies.

        Any exception, such as ``OSError`` or ``ProtocolError``, closes the connection.
        """
        try:
            self.send(packet, deadline)
            return self.read_many(count, deadline)
        except BaseException:  # including exceptions of a signal handler
            self.abort()
            raise

    def send(self, packet: bytes, deadline: float) -> None:
        """Send *packet*.

        Any exception closes the connection. The exception's ``unsent`` is the number of bytes not sent.
        """
        sent = self._received = 0
        try:
            try:
                sent = self.sock.send(packet, DONTWAIT)
            except BlockingIOError:
                sent = 0
            if sent < len(packet):
                self._send_and_receive(memoryview(packet)[sent:], deadline)
        except BaseException as exc:
            self.abort()
            if not hasattr(exc, "unsent"):
                exc.unsent = len(packet) - sent  # type: ignore[attr-defined]
            raise

    def send_nowait(self, rest: memoryview) -> memoryview:
        """Send as much as the kernel accepts without waiting, and return the rest. Raises ``OSError``."""
        try:
            return rest[self.sock.send(rest, DONTWAIT) :]
        except BlockingIOError:
            return rest

    def close(self) -> None:
        """Close the connection. A later send raises ``OSError``."""
        self.sock.close()

    def hang_up(self) -> None:
        """End the connection. Another thread may call this. A thread that waits for data sees the end of the stream."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        self.close()

    # --- helpers ---

    def _send_and_receive(self, rest: memoryview, deadline: float) -> None:
        """Send a packet that is too large for the kernel to accept without waiting.

        The server stops reading when the client does not read the replies. So sending and receiving alternate.
        """
        poll = select.poll()
        poll.register(self.sock, select.POLLIN | select.POLLOUT)
        try:
            while rest:
                events = poll.poll(time_left(deadline) * 1000)
                if not events:
                    raise TimeoutError(NO_ANSWER)  # noqa: TRY301 - handled like the errors of the calls below
                if events[0][1] & select.POLLOUT:
                    with contextlib.suppress(BlockingIOError):
                        rest = rest[self.sock.send(rest, DONTWAIT) :]
                if events[0][1] & ~select.POLLOUT:
                    self._receive(deadline)
        except BaseException as exc:
            exc.unsent = len(rest)  # type: ignore[attr-defined]
            raise


def open_connection(address: Address, deadline: float) -> Connection:
    """Connect. Raises ``OSError``."""
    sock = connect(address, deadline)
    sock.setblocking(True)
    return Connection(sock)
