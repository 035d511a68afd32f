"""One connection to a Redis server. hiredis parses the replies. One deadline limits request and reply together.

``opening.py`` opens the connection, and redis-py logs in. The calls do not go through redis-py:

- redis-py limits the time of each read, not of the whole call.
- redis-py repeats commands by itself.
- redis-py takes several times as much CPU time as the command.

See docs/decisions/0006.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar

import hiredis

from multiq.driverkit.net import time_left
from multiq.driverkit.spin import SpinReader

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

_E = TypeVar("_E", bound=BaseException)

Word: TypeAlias = "bytes | str | int"

OLDEST = (6, 2)
_TOO_LATE = "the server did not answer in time"
_ENDED = "the server closed the connection"
_TOO_MUCH = "it sent more replies than there were commands"
_NOT_FREE = "an earlier call on this connection was interrupted before its last reply"
_NOW = getattr(socket, "MSG_DONTWAIT", 0)
_RECEIVED_AT_ONCE = 65536  # bytes
_LARGEST_REPLY = 640_000_000  # bytes: more than the largest body (512 MB); an endless reply must not fill the memory
_SENT_AT_ONCE = 16384  # bytes that a socket takes without waiting for the server

#: packs the words of one command as RESP (hiredis' type annotation wrongly allows only one word)
pack: Callable[[tuple[Word, ...]], bytes] = hiredis.pack_command  # type: ignore[assignment]


class Connection:
    """A socket to one server, authenticated, with its database selected."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.version: tuple[int, ...] = OLDEST
        self.is_replica = False
        self._reader = hiredis.Reader()
        self.heads: dict[Hashable, tuple[int, bytes]] = {}
        """The client's cache of packed beginnings of commands."""
        self.is_free = True
        """Whether the connection is open and has no outstanding reply. After an interrupted call, this is False."""
        self._fed = 0  # bytes of a reply that is not complete
        self._outstanding = 0  # replies to what was sent with ``send``
        self._spin = SpinReader(sock)
        self._send = sock.send
        self._recv = sock.recv
        self._wait: Callable[[float], object] | None = None
        """Waits for data, at most the given number of milliseconds. None for TLS, because a TLS socket has a
        timeout."""
        self._flags = 0  # flags of sends and receives after a poll
        if not isinstance(sock, ssl.SSLSocket):
            sock.setblocking(True)  # MSG_DONTWAIT makes single calls non-blocking
            self._flags = _NOW
            poll = select.poll()
            poll.register(sock, select.POLLIN)
            self._wait = poll.poll

    @property
    def is_before_7(self) -> bool:
        return self.version < (7,)

    def ask(self, packed: bytes, deadline: float) -> Any:
        """Send one command and return its reply. Raises ``hiredis.ReplyError``, ``OSError``, ``hiredis.ProtocolError``.

        The exception's ``unsent`` is true if the server cannot have received the whole command.
        """
        # Hot path, inlined on purpose.
        if not self.is_free:
            self._refuse()
        self.is_free = False
        data: bytes | None = None
        try:
            left = deadline - monotonic()
            if left <= 0:
                raise TimeoutError(_TOO_LATE)  # noqa: TRY301 - handled as what the calls below raise
            wait = self._wait
            if wait is None or len(packed) > _SENT_AT_ONCE:
                left = self._send_all(packed, deadline)
            elif (sent := self._send(packed, _NOW)) < len(packed):
                left = self._send_all(packed[sent:], deadline)
            data = self._spin.receive(_RECEIVED_AT_ONCE)
            if not data:
                if wait is not None and not wait(left * 1000):
                    raise TimeoutError(_TOO_LATE)  # noqa: TRY301
                data = self._recv(_RECEIVED_AT_ONCE, self._flags)
            self._reader.feed(data)
            reply = self._reader.gets()
        except BlockingIOError as exc:
            self.close()
            raise _mark_unsent(TimeoutError(_TOO_LATE), unsent=data is None) from exc
        except BaseException as exc:
            self.close()
            _mark_unsent(exc, unsent=data is None)
            raise
        if reply is False or self._reader.has_data():  # the reply is incomplete, or there are several replies
            return self._read_on(reply, len(data), deadline)
        self.is_free = True
        return _checked(reply) if isinstance(reply, hiredis.ReplyError) else reply

    def _read_on(self, reply: Any, fed: int, deadline: float) -> Any:
        if reply is not False:
            self.close()
            raise hiredis.ProtocolError(_TOO_MUCH)
        self._outstanding = 1
        self._fed = fed
        return self.read(deadline)

    def send(self, packed: bytes, deadline: float, *, replies: int) -> None:
        """Send commands. The server answers them with *replies* replies. Call ``read`` for each reply.

        Any failure closes the connection. In this case the exception's ``unsent`` is true, because the server cannot
        have received the last command.
        """
        if not self.is_free:
            self._refuse()
        self.is_free = False
        self._outstanding = replies
        try:
            self._send_all(packed, deadline)
        except BlockingIOError as exc:
            self.close()
            raise _mark_unsent(TimeoutError(_TOO_LATE), unsent=True) from exc
        except BaseException as exc:
            self.close()
            _mark_unsent(exc, unsent=True)
            raise

    def read(self, deadline: float) -> Any:
        """Return the next reply. An error reply is raised as ``hiredis.ReplyError``, and the connection stays open.

        An interruption closes the connection. If the connection stayed open, a later command would read this reply as
        its own.
        """
        try:
            reply = self._reader.gets()
            while reply is False:  # not complete; RESP 2 has no booleans
                self._receive(deadline)
                reply = self._reader.gets()
        except BaseException:
            self.close()
            raise
        self._fed = 0
        self._outstanding -= 1
        if not self._outstanding:
            if self._reader.has_data():
                self.close()
                raise hiredis.ProtocolError(_TOO_MUCH)
            self.is_free = True
        return _checked(reply)

    def close(self) -> None:
        """Close the socket. A later send raises ``OSError``."""
        self.is_free = False
        self.sock.close()

    def __del__(self) -> None:
        self.close()

    def hang_up(self) -> None:
        """Shut the socket down. Any thread may call this. A thread that waits on the socket sees the end of the
        stream."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def _refuse(self) -> NoReturn:
        """Close the connection, because the next reply may belong to an earlier call."""
        self.close()
        raise _mark_unsent(ConnectionResetError(_NOT_FREE), unsent=True)

    def _send_all(self, packed: bytes, deadline: float) -> float:
        """Send as fast as the server receives, within one deadline. Returns the remaining seconds."""
        rest = memoryview(packed)
        poll: select.poll | None = None
        left = self._left(deadline)
        while rest:
            try:
                rest = rest[self._send(rest, self._flags) :]
            except BlockingIOError:
                if poll is None:
                    poll = select.poll()
                    poll.register(self.sock, select.POLLOUT)
                poll.poll(left * 1000)
            left = self._left(deadline)
        return left

    def _receive(self, deadline: float) -> None:
        """Wait by ``poll``, then receive.

        A ``recv`` with a timeout could wait too long. After a signal, Python repeats ``recv`` with the whole timeout.
        """
        left = self._left(deadline)
        if self._wait is not None and not self._wait(left * 1000):
            raise TimeoutError(_TOO_LATE)
        try:
            self._feed()
        except BlockingIOError as exc:
            raise TimeoutError(_TOO_LATE) from exc

    def _feed(self) -> None:
        data = self._recv(_RECEIVED_AT_ONCE, self._flags)
        if not data:
            raise ConnectionResetError(_ENDED)
        self._fed += len(data)
        if self._fed > _LARGEST_REPLY:
            raise hiredis.ProtocolError(f"a reply has more than {_LARGEST_REPLY:,} bytes")
        self._reader.feed(data)

    def _left(self, deadline: float) -> float:
        """Return the remaining seconds, and set them as the timeout of a TLS socket. Raises ``TimeoutError``."""
        left = time_left(deadline)
        if self._wait is None:
            self.sock.settimeout(left)
        return left


def _mark_unsent(exc: _E, *, unsent: bool) -> _E:
    exc.unsent = unsent  # type: ignore[attr-defined]
    return exc


def _checked(reply: Any) -> Any:
    if isinstance(reply, hiredis.ReplyError):
        try:
            raise reply
        finally:
            del reply  # without this line, the error and this frame would keep the socket alive
    return reply
