"""One connection to a Redis server: RESP over a socket, parsed by hiredis, with one deadline for each whole exchange.

redis-py's own connection bounds each read, not the call, repeats commands by itself, and costs several times what the
command does; see docs/decisions/0006.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar

import hiredis

from multiq.driverkit.net import connect, time_left
from multiq.driverkit.spin import SpinReader
from multiq.driverkit.tls import handshake
from multiq.errors import BackendUnavailable

from .errors import TOO_MANY_CLIENTS

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from multiq.driverkit.net import Address

    from .dsn import Login

_E = TypeVar("_E", bound=BaseException)

Word: TypeAlias = "bytes | str | int"

OLDEST = (6, 2)
_TOO_LATE = "the server did not answer in time"
_ENDED = "the server closed the connection"
_TOO_MUCH = "it answers more than it was asked"
_NOT_FREE = "an earlier call on this connection was interrupted before its last reply"
_NOW = getattr(socket, "MSG_DONTWAIT", 0)
_RECEIVED_AT_ONCE = 65536  # bytes
_LARGEST_REPLY = 640_000_000  # bytes: a body may have 512 MB, and a reply that has no end must not fill the memory
_SENT_AT_ONCE = 16384  # bytes that a socket takes without waiting for its other end

#: the words of one command as RESP; hiredis' own annotation knows commands of one word only
pack: Callable[[tuple[Word, ...]], bytes] = hiredis.pack_command  # type: ignore[assignment]


class Wire:
    """A socket with a session on it: logged in, database chosen."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.version: tuple[int, ...] = OLDEST
        self.is_replica = False
        self._reader = hiredis.Reader()
        self.heads: dict[Hashable, tuple[int, bytes]] = {}
        """Beginnings of commands, ready to be sent, for whoever this connection belongs to."""
        self.is_free = True
        """Open, and no reply outstanding: a call that is interrupted before its last reply leaves it False."""
        self._fed = 0  # bytes of a reply that is not complete
        self._outstanding = 0  # replies to what was sent with ``send``
        self._spin = SpinReader(sock)
        self._send = sock.send
        self._recv = sock.recv
        self._wait: Callable[[float], object] | None = None
        """For milliseconds, until there is something to read. A TLS socket keeps the time itself."""
        self._flags = 0  # of sends and receives that were waited for
        if not isinstance(sock, ssl.SSLSocket):
            sock.setblocking(True)  # those who say so in their flags wait for nothing
            self._flags = _NOW
            poll = select.poll()
            poll.register(sock, select.POLLIN)
            self._wait = poll.poll

    @property
    def is_before_7(self) -> bool:
        return self.version < (7,)

    def ask(self, packed: bytes, deadline: float) -> Any:
        """The reply to one command. Raises ``hiredis.ReplyError``, ``OSError``, ``hiredis.ProtocolError``.

        What is raised has ``unsent`` if the server cannot have the whole of it.
        """
        # the one road that every call takes, and so without detours through the methods below
        if not self.is_free:
            self._refuse()
        self.is_free = False
        data: bytes | None = None
        try:
            left = deadline - monotonic()
            if left <= 0:
                raise TimeoutError(_TOO_LATE)  # noqa: TRY301 - as what is raised by those below
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
            raise _told(TimeoutError(_TOO_LATE), unsent=data is None) from exc
        except BaseException as exc:
            self.close()
            _told(exc, unsent=data is None)
            raise
        if reply is False or self._reader.has_data():  # not complete, or more than one
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
        """Send, and close at whatever goes wrong. The connection is free again when so many replies were read.

        What is raised has ``unsent``, as the server cannot have the last of it.
        """
        if not self.is_free:
            self._refuse()
        self.is_free = False
        self._outstanding = replies
        try:
            self._send_all(packed, deadline)
        except BlockingIOError as exc:
            self.close()
            raise _told(TimeoutError(_TOO_LATE), unsent=True) from exc
        except BaseException as exc:
            self.close()
            _told(exc, unsent=True)
            raise

    def read(self, deadline: float) -> Any:
        """The next reply. Whatever interrupts it closes the connection: a later reply would be taken for this one.

        An error reply is raised, and is no interruption.
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
        """End it. What is sent after that raises ``OSError``."""
        self.is_free = False
        self.sock.close()

    def __del__(self) -> None:
        self.close()

    def hang_up(self) -> None:
        """End it from another thread: whoever waits on it sees that it ended."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def _refuse(self) -> NoReturn:
        """The next reply would be the answer to an earlier call."""
        self.close()
        raise _told(ConnectionResetError(_NOT_FREE), unsent=True)

    def _send_all(self, packed: bytes, deadline: float) -> float:
        """A piece at a time, as the server takes them: the deadline is that of all of them, not of each.

        Returns the seconds that are left.
        """
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
        """Wait in the kernel's poll, as a ``recv`` that a signal ends is repeated for as long again."""
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
            raise hiredis.ProtocolError(f"a reply of more than {_LARGEST_REPLY:,} bytes")
        self._reader.feed(data)

    def _left(self, deadline: float) -> float:
        """Seconds. A TLS socket waits no longer than that in its next send or receive. Raises ``TimeoutError``."""
        left = time_left(deadline)
        if self._wait is None:
            self.sock.settimeout(left)
        return left


def _told(exc: _E, *, unsent: bool) -> _E:
    exc.unsent = unsent  # type: ignore[attr-defined]
    return exc


def _checked(reply: Any) -> Any:
    if isinstance(reply, hiredis.ReplyError):
        try:
            raise reply
        finally:
            del reply  # else it and this frame would keep each other, and the socket, alive
    return reply


def open_wire(address: Address, login: Login, deadline: float) -> Wire:
    """Connect and log in. Raises as ``Wire.ask`` does, and ``BackendUnavailable`` for a server that is too old."""
    sock = connect(address, deadline)
    try:
        if login.tls is not None and isinstance(address, tuple):
            sock = handshake(login.tls, sock, address[0], deadline)
        wire = Wire(sock)
        _greet(wire, login, deadline)
    except BaseException:
        sock.close()
        raise
    return wire


def _greet(wire: Wire, login: Login, deadline: float) -> None:
    greetings = login.greetings
    wire.send(b"".join(pack(words) for words in greetings), deadline, replies=len(greetings))
    replies = [_tolerantly(wire, words, deadline) for words in greetings]
    told = replies[login.hello_at]
    if told is None:
        return  # an ACL without HELLO, or a proxy: the first script shows what the server can do
    facts = dict(zip(told[::2], told[1::2], strict=False))
    wire.version = _version(facts.get(b"version", b""))
    wire.is_replica = facts.get(b"role") == b"replica"
    if wire.version < OLDEST:
        raise BackendUnavailable(
            f"the server is Redis {facts[b'version'].decode()}, but multiq needs 6.2 or newer: upgrade it"
        )


def _tolerantly(wire: Wire, words: Sequence[Word], deadline: float) -> Any:
    try:
        return wire.read(deadline)
    except hiredis.ReplyError as exc:
        if words[0] == "HELLO" and not str(exc).startswith("NOAUTH") and TOO_MANY_CLIENTS not in str(exc):
            return None
        raise


def _version(text: bytes) -> tuple[int, ...]:
    parts = text.split(b".")
    return tuple(int(part) for part in parts if part.isdigit()) or OLDEST
