"""The connections of one backend: idle ones are lent to whichever thread needs one, the last used first."""

from __future__ import annotations

import contextlib
import time
import weakref
from typing import TYPE_CHECKING

from multiq.driverkit.fork import forks
from multiq.errors import BackendError, MultiqError

from .connection import open_wire
from .errors import FAILURES, explain, refused, shown
from .server_info import server_facts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from multiq.driverkit.net import Address

    from .connection import Reply, Wire
    from .server_info import Facts

_FRESH = 0.02  # seconds since a connection was last taken in which it is not looked at before it is used again
_MAX_IDLE = 8  # connections kept for the next thread


class Wires:
    """Opens, lends and closes connections to one server. Nothing is locked: a list's append and pop are atomic."""

    def __init__(self, address: Address, timeout: float) -> None:
        self.address = address
        self.timeout = timeout
        """Seconds that a call may take."""
        self._idle: list[Wire] = []
        self._generation = forks.generation
        self._kept: weakref.WeakKeyDictionary[Wire, None] = weakref.WeakKeyDictionary()

    @property
    def shown(self) -> str:
        """The server as messages name it."""
        return shown(self.address)

    def deadline(self) -> float:
        """When a call that begins now has to be over; monotonic."""
        return time.monotonic() + self.timeout

    def take(self, deadline: float) -> Wire:
        """An idle connection that is still alive, or a new one. Raises ``BackendError``."""
        self._forget_parents()
        while True:
            try:
                wire = self._idle.pop()
            except IndexError:
                return self.open(deadline)
            taken_at, wire.taken_at = wire.taken_at, deadline
            if deadline - taken_at < _FRESH or wire.is_alive():
                return wire

    def put_back(self, wire: Wire) -> None:
        """Lend it to somebody else, if it is good for that."""
        if wire.is_closed:
            return
        if len(self._idle) < _MAX_IDLE and self._generation == forks.generation:
            self._idle.append(wire)
        else:
            wire.close()

    def open(self, deadline: float, *, to_keep: bool = False) -> Wire:
        """A new connection; one *to_keep* is closed with the others. Raises ``BackendError``."""
        try:
            wire = open_wire(self.address, deadline)
        except FAILURES as exc:
            raise explain(exc, self.address, self.timeout) from exc
        if to_keep:
            self._kept[wire] = None
        return wire

    def get_to_know(self, wire: Wire, deadline: float) -> tuple[Wire, Facts]:
        """What the server says of itself, and the connection that it was asked on, another one if this one breaks.

        Raises ``BackendError``.
        """
        try:
            try:
                ((line, body),) = wire.ask(b"stats\r\n", 1, deadline)
            except ConnectionError:
                wire = self.open(deadline)
                ((line, body),) = wire.ask(b"stats\r\n", 1, deadline)
            if not line.startswith(b"OK "):
                wire.close()
                raise refused(line, self.address)
            wire.facts = server_facts(body)
        except FAILURES as exc:
            wire.close()
            raise explain(exc, self.address, self.timeout) from exc
        return wire, wire.facts

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[Session]:
        """A connection for a call of several round trips, all within one deadline.

        Raises ``BackendError`` for what goes wrong with it.
        """
        session = Session(self, self.deadline())
        try:
            yield session
        except FAILURES as exc:
            session.close()
            raise explain(exc, self.address, self.timeout) from exc
        except BackendError:
            session.close()  # somebody who gives strange answers may be out of step
            raise
        except MultiqError:
            raise
        except BaseException:
            session.close()
            raise
        finally:
            session.end()

    def ask(self, *commands: bytes, tube: str | None = None) -> list[Reply]:
        """The replies to commands that do no harm when they are sent twice. Raises ``BackendError``."""
        with self.borrowed() as session:
            return session.ask(*commands, tube=tube, is_safe=True)

    def close(self) -> None:
        """Close all connections, those that others keep included."""
        self._forget_parents()
        while self._idle:
            with contextlib.suppress(IndexError):
                self._idle.pop().close()
        for reference in self._kept.keyrefs():  # a copy, as other threads may open some meanwhile
            wire = reference()
            if wire is not None:
                wire.hang_up()

    def _forget_parents(self) -> None:
        """In a forked child: what is said on the parent's connections is not for us."""
        if self._generation != forks.generation:
            self._generation = forks.generation
            self._idle, idle = [], self._idle
            for wire in idle:
                wire.close()
            self._kept = weakref.WeakKeyDictionary()


class Session:
    """One call's use of a connection."""

    def __init__(self, wires: Wires, deadline: float) -> None:
        self.wires = wires
        self.deadline = deadline
        self._wire: Wire | None = None

    @property
    def wire(self) -> Wire:
        """The connection. Raises ``BackendError``."""
        if self._wire is None:
            self._wire = self.wires.take(self.deadline)
        return self._wire

    def ask(self, *commands: bytes, tube: str | None = None, is_safe: bool = False) -> list[Reply]:
        """The replies to *commands*, sent together, with *tube* as the one in use.

        With *is_safe* they are sent once more if the connection breaks. Raises ``OSError``, ``ProtocolError``,
        ``BackendError``.
        """
        try:
            return self._ask(commands, tube)
        except ConnectionError:
            if not is_safe:
                raise
        self.renew()
        return self._ask(commands, tube)

    def renew(self) -> None:
        """Go on with another connection. Raises ``BackendError``."""
        self.close()
        self._wire = self.wires.open(self.deadline)

    def close(self) -> None:
        """Nobody shall use this connection any more."""
        if self._wire is not None:
            self._wire.close()

    def use(self, tube: str) -> None:
        """Have *tube* in use before anything is put, as a ``use`` that is refused leaves the one before in use.

        Raises ``OSError``, ``ProtocolError``, ``BackendError``.
        """
        if self.wire.used != tube:
            self.ask(tube=tube)

    def go_on(self) -> None:
        """A further packet of a call that takes as long as there are jobs: it has a deadline of its own."""
        self.deadline = self.wires.deadline()

    def facts(self, *, is_safe: bool = False) -> Facts:
        """What the server says of itself, asked once on each connection; another one only if that *is_safe*.

        Raises ``OSError``, ``ProtocolError``, ``BackendError``.
        """
        facts = self.wire.facts
        if facts is None:
            ((line, body),) = self.ask(b"stats", is_safe=is_safe)
            if not line.startswith(b"OK "):
                raise refused(line, self.wires.address)
            facts = self.wire.facts = server_facts(body)
        return facts

    def end(self) -> None:
        """The connection is for somebody else."""
        if self._wire is not None:
            self.wires.put_back(self._wire)

    def _ask(self, commands: Sequence[bytes], tube: str | None) -> list[Reply]:
        wire = self.wire
        if tube is None or wire.used == tube:
            return wire.ask(b"%b\r\n" % b"\r\n".join(commands), len(commands), self.deadline)
        packet = b"%b\r\n" % b"\r\n".join((b"use %b" % tube.encode(), *commands))
        (used, _), *replies = wire.ask(packet, len(commands) + 1, self.deadline)
        if not used.startswith(b"USING "):
            wire.close()
            raise refused(used, self.wires.address)
        wire.used = tube
        return replies
