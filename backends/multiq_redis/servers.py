"""Which server holds a queue: the only one, the primary that the sentinels name, or a node of a cluster.

Nothing here is locked: what was learned is put in place in one assignment, and learning it twice does no harm.
"""

from __future__ import annotations

import binascii
import random
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import hiredis

from multiq.errors import BackendUnavailable

from .failures import FAILURES, explain
from .wire import open_wire, pack

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from multiq.sockets import Address

    from .login import Login
    from .wire import Wire

SLOTS = 16384
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


class SentinelServers(Servers):
    """``redis+sentinel://``: a primary, whose replicas take its place when the sentinels agree that it is gone."""

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

    def address(self, line: str, deadline: float) -> Address:  # noqa: ARG002
        primary = self._primary
        if primary is None:
            primary = self._primary = self._ask_sentinels(deadline)
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

    def _ask_sentinels(self, deadline: float) -> Address:
        failure: Exception = ConnectionError("there is no sentinel")
        for sentinel, until in _in_turn(self._sentinels, deadline):
            try:
                wire = open_wire(sentinel, self._sentinel_login, until)
                try:
                    reply = wire.ask(pack(("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)), until)
                finally:
                    wire.close()
            except (*FAILURES, hiredis.ReplyError) as exc:
                failure = exc
                continue
            if reply is not None:
                return reply[0].decode(), int(reply[1])
            failure = ConnectionError(f"the sentinels know no service {self._service!r}")
        raise explain(failure, f"none of the sentinels {_listed(self._sentinels)}", self.timeout) from failure


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
        nodes.update(dict.fromkeys(range(int(first), int(last) + 1), there))  # type: ignore[call-overload]
    return nodes


def _in_turn(servers: Sequence[Address], deadline: float) -> Iterator[tuple[Address, float]]:
    """Each with a deadline of its own, so that one that hangs leaves time for the others."""
    for server in servers:
        now = time.monotonic()
        yield server, now + max((deadline - now) * _SHARE, 0.001)


def _listed(servers: Sequence[Address]) -> str:
    return ", ".join(map(shown, servers))
