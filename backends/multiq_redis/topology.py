"""Which server holds a queue: the only one, the primary that the sentinels name, or a node of a cluster.

Nothing here is locked: what was learned is put in place in one assignment, and learning it twice does no harm.
"""

from __future__ import annotations

import binascii
import contextlib
import random
import select
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import hiredis

from multiq.driverkit.fork import forks
from multiq.errors import BackendUnavailable

from .connection import open_wire, pack
from .errors import FAILURES, explain

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from multiq.driverkit.net import Address

    from .connection import Wire
    from .dsn import Login

SLOTS = 16384
_ASK_EVERY = 1.0  # seconds
_ASK_WITHIN = 0.25  # seconds
_SILENT_FOR = 10.0  # seconds
_SHARE = 0.25  # of the time left, for one of several servers to answer a question about the others


class Servers(ABC):
    """The servers of one URL."""

    has_others = False
    """Whether, when one fails, another may take its place."""

    look_every = 4.5
    """Seconds after which a sleeping consumer looks for itself."""

    is_cluster = False
    """Whether two lines may be on two servers."""

    def __init__(self, login: Login, timeout: float) -> None:
        self.login = login
        self.timeout = timeout
        """Seconds that a call may take."""

    @abstractmethod
    def address(self, line: str, deadline: float) -> Address:
        """Where a line is. May ask around. Raises ``BackendUnavailable``."""

    def close(self) -> None:  # noqa: B027 - nothing is kept
        """Close what is kept open for asking; it opens again when it is needed."""

    @abstractmethod
    def all_addresses(self, deadline: float) -> Sequence[Address]:
        """All servers that hold queues."""

    def known(self, line: str) -> Address | None:  # noqa: ARG002
        """Where a line was last, in a cluster, without asking anybody. None: elsewhere, or not known."""
        return None

    def suspect(self, address: Address | None) -> None:  # noqa: B027 - one server is the only one, whatever it does
        """Something was wrong there: ask anew before the next call."""

    def moved(self, line: str, address: Address) -> None:  # noqa: B027 - only a cluster's nodes say so
        """A server says that the line is there."""

    def one_try(self, deadline: float) -> float:
        """Until when to wait for one server, of a call that has to end at *deadline*.

        A server that was stopped still accepts: where another may have taken its place, there is time left to ask.
        """
        if not self.has_others:
            return deadline
        now = time.monotonic()
        return now + (deadline - now) * _SHARE

    def open(self, address: Address, deadline: float) -> Wire:
        """A new connection. Raises as ``wire.open_wire`` does."""
        return open_wire(address, self.login, self.one_try(deadline))


class OneServer(Servers):
    """``redis://``, ``rediss://``, ``redis+unix://``."""

    def __init__(self, address: Address, login: Login, timeout: float) -> None:
        super().__init__(login, timeout)
        self._address = address

    def address(self, line: str, deadline: float) -> Address:  # noqa: ARG002
        return self._address

    def all_addresses(self, deadline: float) -> Sequence[Address]:  # noqa: ARG002
        return [self._address]


class _Told(NamedTuple):
    """What a sentinel says."""

    primary: Address
    epoch: int
    """Of two answers the one with the larger number is newer; 0: it does not tell."""


class SentinelServers(Servers):
    """``redis+sentinel://``: a primary, whose replicas take its place when the sentinels agree that it is gone.

    In a planned failover the old primary goes on taking writes, which are lost, until the sentinels demote it ten
    seconds later. So they are asked once a second, and the newest answer counts.
    """

    has_others = True
    look_every = 2.5  # nothing else tells one who sleeps at a primary that stopped

    def __init__(
        self, sentinels: Sequence[Address], service: str, login: Login, sentinel_login: Login, timeout: float
    ) -> None:
        super().__init__(login, timeout)
        self._sentinels = tuple(sentinels)
        self._service = service
        self._sentinel_login = sentinel_login
        self._primary: Address | None = None
        self._epoch = 0  # of the newest answer
        self._ask_at = 0.0  # monotonic
        self._idle: dict[Address, list[tuple[int, Wire]]] = {
            one: [] for one in self._sentinels
        }  # with the fork's number
        self._silent_until: dict[Address, float] = {}

    def address(self, line: str, deadline: float) -> Address:  # noqa: ARG002
        primary = self._primary
        if primary is None:
            primary = self._primary = self._ask_sentinels(deadline)
        elif time.monotonic() >= self._ask_at:
            self._ask_at = time.monotonic() + _ASK_EVERY  # other threads go on with what is known
            self._look(deadline)
            primary = self._primary or primary
        return primary

    def all_addresses(self, deadline: float) -> Sequence[Address]:
        return [self.address("", deadline)]

    def suspect(self, address: Address | None) -> None:
        if address is None or address == self._primary:
            self._primary = None

    def open(self, address: Address, deadline: float) -> Wire:
        wire = super().open(address, deadline)
        if wire.is_replica:
            wire.close()
            raise ConnectionError("the sentinels named a replica: a failover is under way")
        return wire

    def close(self) -> None:
        for idle in self._idle.values():
            while idle:
                with contextlib.suppress(IndexError):
                    idle.pop()[1].close()

    def _look(self, deadline: float) -> None:
        """Whether there is a new primary. A sentinel that does not answer is left alone for some seconds."""
        for sentinel in self._sentinels:
            now = time.monotonic()
            if now < self._silent_until.get(sentinel, 0):
                continue
            try:
                told = self._ask(sentinel, min(deadline, now + _ASK_WITHIN))
            except (*FAILURES, hiredis.ReplyError):
                self._silent_until[sentinel] = time.monotonic() + _SILENT_FOR
                continue
            if told is not None and told.epoch >= self._epoch and (told.epoch > self._epoch or not told.epoch):
                self._epoch, self._primary = told.epoch, told.primary

    def _ask_sentinels(self, deadline: float) -> Address:
        failure: Exception = ConnectionError("there is no sentinel")
        older: Address | None = None
        self._ask_at = time.monotonic() + _ASK_EVERY
        for sentinel, until in _in_turn(self._sentinels, deadline):
            try:
                told = self._ask(sentinel, until)
            except (*FAILURES, hiredis.ReplyError) as exc:
                failure = exc
                continue
            if told is None:
                failure = ConnectionError(f"the sentinels know no service {self._service!r}")
            elif not told.epoch or told.epoch >= self._epoch:
                self._epoch = max(told.epoch, self._epoch)
                return told.primary
            else:
                older = told.primary
        if older is not None:  # the others are out of reach
            return older
        raise explain(failure, f"none of the sentinels {_listed(self._sentinels)}", self.timeout) from failure

    def _ask(self, sentinel: Address, until: float) -> _Told | None:
        """On a connection that is kept; None: it does not know the service."""
        wire = self._wire_to(sentinel, until)
        try:
            primary = wire.ask(pack(("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)), until)
            epoch = 0
            if primary is not None:
                with contextlib.suppress(hiredis.ReplyError):  # an account may be allowed the other question only
                    told = wire.ask(pack(("SENTINEL", "MASTER", self._service)), until)
                    epoch = int(dict(zip(told[::2], told[1::2], strict=False)).get(b"config-epoch", 0))
        except BaseException:
            wire.close()
            raise
        self._idle[sentinel].append((forks.generation, wire))
        return None if primary is None else _Told((primary[0].decode(), int(primary[1])), epoch)

    def _wire_to(self, sentinel: Address, until: float) -> Wire:
        idle = self._idle[sentinel]
        while idle:
            with contextlib.suppress(IndexError):  # another thread was first
                generation, wire = idle.pop()
                if generation == forks.generation and wire.is_free and not _has_ended(wire):
                    return wire
                wire.close()
        return open_wire(sentinel, self._sentinel_login, until)


class ClusterServers(Servers):
    """``redis+cluster://``: a line is on the node that has the slot of its name."""

    has_others = True
    is_cluster = True

    def __init__(self, seeds: Sequence[Address], login: Login, timeout: float) -> None:
        super().__init__(login, timeout)
        self._seeds = tuple(seeds)
        self._nodes: dict[int, Address] = {}  # by slot
        self._is_stale = True
        self._told_by: Address | None = None  # who answered last

    def address(self, line: str, deadline: float) -> Address:
        slot = slot_of(line)
        if self._is_stale or slot not in self._nodes:
            self._nodes, self._is_stale = self._ask_nodes(deadline), False
        try:
            return self._nodes[slot]
        except KeyError:
            self._is_stale = True
            raise BackendUnavailable(
                f"no node of the cluster has slot {slot}, that of queue {line!r}: see CLUSTER SLOTS"
            ) from None

    def known(self, line: str) -> Address | None:
        return self._nodes.get(slot_of(line))

    def all_addresses(self, deadline: float) -> Sequence[Address]:
        self._nodes, self._is_stale = self._ask_nodes(deadline), False
        if not self._nodes:
            raise BackendUnavailable(
                f"no node of the cluster {_listed(self._seeds)} has any slot: see redis-cli --cluster create"
            )
        return list(dict.fromkeys(self._nodes.values()))

    def suspect(self, address: Address | None) -> None:  # noqa: ARG002
        self._is_stale = True

    def moved(self, line: str, address: Address) -> None:
        self._nodes[slot_of(line)] = address

    def _ask_nodes(self, deadline: float) -> dict[int, Address]:
        known = list(dict.fromkeys((*self._nodes.values(), *self._seeds)))
        random.shuffle(known)
        known.sort(key=lambda node: node != self._told_by)  # not one that does not answer
        failure: Exception = ConnectionError("there is no node")
        for node, until in _in_turn(known, deadline):
            try:
                wire = open_wire(node, self.login, until)
                try:
                    reply = wire.ask(pack(("CLUSTER", "SLOTS")), until)
                finally:
                    wire.close()
            except (*FAILURES, hiredis.ReplyError) as exc:
                failure = exc
                continue
            self._told_by = node
            return _nodes_by_slot(reply, node)
        raise explain(failure, f"none of the cluster's nodes {_listed(known)}", self.timeout) from failure


def slot_of(line: str) -> int:
    """The cluster's slot of all keys of a line, whose name is their hash tag."""
    return binascii.crc_hqx(line.encode(), 0) % SLOTS


def shown(address: Address) -> str:
    """An address as messages have it."""
    return address if isinstance(address, str) else f"{address[0]}:{address[1]}"


def _nodes_by_slot(reply: list[list[object]], asked: Address) -> dict[int, Address]:
    nodes: dict[int, Address] = {}
    for first, last, primary, *_ in reply:
        host, port = primary[:2]  # type: ignore[index]
        # a node that does not know its own address leaves it out: it is the one that was asked
        there = (host.decode() if host else asked[0], port)
        slots = range(max(int(first), 0), min(int(last) + 1, SLOTS))  # type: ignore[call-overload]
        nodes.update(dict.fromkeys(slots, there))
    return nodes


def _in_turn(servers: Sequence[Address], deadline: float) -> Iterator[tuple[Address, float]]:
    """Each with a deadline of its own, so that one that hangs leaves time for the others."""
    for server in servers:
        now = time.monotonic()
        yield server, now + max((deadline - now) * _SHARE, 0.001)


def _has_ended(wire: Wire) -> bool:
    """Whether an idle connection was closed at its other end: nothing else can have come over it."""
    poll = select.poll()
    poll.register(wire.sock, select.POLLIN)
    return bool(poll.poll(0))


def _listed(servers: Sequence[Address]) -> str:
    return ", ".join(map(shown, servers))
