"""Finds the server of a queue. A URL names one server, sentinels and their service, or a cluster.

Nothing here needs a lock. Each value is stored by one assignment, and two threads may store the same value twice.
"""

from __future__ import annotations

import binascii
import contextlib
import random
import select
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import hiredis

from multiq.driverkit.fork import forks
from multiq.errors import BackendUnavailable

from .connection import pack
from .errors import FAILURES, code_of, explain, redirection
from .opening import open_connection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from multiq.driverkit.net import Address

    from .connection import Connection
    from .connection_settings import ConnectionSettings

SLOTS = 16384
_ASK_EVERY = 1.0  # seconds between two requests to the sentinels
_ASK_WITHIN = 0.25  # seconds within which a sentinel must answer such a request
_SILENT_FOR = 10.0  # for this number of seconds, a silent sentinel gets no request
_SHARE = 0.25  # one of several servers must answer within this share of the remaining time


class Servers(ABC):
    """The servers of one URL."""

    has_others = False
    """Whether another server may replace a server that failed."""

    look_every = 4.5
    """Seconds after which a waiting consumer polls the queues without a notification."""

    is_cluster = False
    """Whether partitions may be on different servers."""

    only_address: Address | None = None
    """The address of the only server. None if there may be several servers."""

    def __init__(self, settings: ConnectionSettings, timeout: float) -> None:
        self.settings = settings
        self.timeout = timeout
        """Seconds that a call may take."""

    @abstractmethod
    def address(self, partition: str, deadline: float) -> Address:
        """The address of a partition's server. May ask sentinels or nodes. Raises ``BackendUnavailable``."""

    def close(self) -> None:  # noqa: B027 - others keep none
        """Close the connections to sentinels. The next request to the sentinels opens them again."""

    @abstractmethod
    def all_addresses(self, deadline: float) -> Sequence[Address]:
        """The addresses of all servers that hold queues."""

    def known(self, partition: str) -> Address | None:  # noqa: ARG002
        """The last known node of the partition in a cluster, or None. Asks no server."""
        return None

    def suspect(self, address: Address | None) -> None:  # noqa: B027 - OneServer has no other
        """Before the next call, find out again which server to use. *address*: the failed server. None: the failed
        server is not known."""

    def moved(self, partition: str, address: Address) -> None:  # noqa: B027 - only in a cluster
        """Record that the partition is now at *address*, as a MOVED error says."""

    def redirected(self, exc: hiredis.ReplyError, partition: str, sender: tuple[str, int]) -> Address:
        """The node that a MOVED or ASK error of the node *sender* names. After MOVED, the partition stays there."""
        host, port = redirection(exc)
        there = self.remapped((host, port)) if host else (sender[0], port)
        if code_of(exc) == "MOVED":
            self.moved(partition, there)
        return there

    def remapped(self, address: Address) -> Address:
        """The address to connect to, for a node that reports *address* as its own."""
        return address

    def attempt_deadline(self, deadline: float) -> float:
        """The deadline of one attempt of a call that has to end at *deadline*.

        A stopped server accepts connections, but does not answer. If another server may replace the stopped server, the
        attempt ends early enough to leave time for the other server.
        """
        if not self.has_others:
            return deadline
        now = time.monotonic()
        return now + (deadline - now) * _SHARE

    def open(self, address: Address, deadline: float) -> Connection:
        """Open a connection. Raises the same errors as ``opening.open_connection``."""
        return open_connection(address, self.settings, self.attempt_deadline(deadline))


class OneServer(Servers):
    """``redis://``, ``rediss://``, ``redis+unix://``."""

    def __init__(self, address: Address, settings: ConnectionSettings, timeout: float) -> None:
        super().__init__(settings, timeout)
        self.only_address = self._address = address

    def address(self, partition: str, deadline: float) -> Address:  # noqa: ARG002
        return self._address

    def all_addresses(self, deadline: float) -> Sequence[Address]:  # noqa: ARG002
        return [self._address]


class _SentinelReply(NamedTuple):
    primary: Address
    epoch: int
    """A larger number means a newer answer. 0: the number is not known."""


class SentinelServers(Servers):
    """``redis+sentinel://``: a primary. When the sentinels agree that the primary is gone, they replace it by a
    replica.

    After a planned failover, the old primary accepts writes for ten more seconds, until the sentinels demote it. These
    writes are lost. So the sentinels are asked once a second, and the newest answer counts.
    """

    has_others = True
    look_every = 2.5  # only a poll shows a waiting consumer that its primary has stopped

    def __init__(
        self,
        sentinels: Sequence[Address],
        service: str,
        settings: ConnectionSettings,
        sentinel_settings: ConnectionSettings,
        timeout: float,
    ) -> None:
        super().__init__(settings, timeout)
        self._sentinels = tuple(sentinels)
        self._service = service
        self._sentinel_settings = sentinel_settings
        self._primary: Address | None = None
        self._epoch = 0  # the number of the newest answer
        self._ask_at = 0.0  # monotonic
        self._idle: dict[Address, list[tuple[int, Connection]]] = {
            one: [] for one in self._sentinels
        }  # with the fork generation
        self._silent_until: dict[Address, float] = {}

    def address(self, partition: str, deadline: float) -> Address:  # noqa: ARG002
        primary = self._primary
        if primary is None:
            primary = self._primary = self._ask_sentinels(deadline)
        elif time.monotonic() >= self._ask_at:
            self._ask_at = (
                time.monotonic() + _ASK_EVERY
            )  # set before the request, so that other threads continue with the known primary
            self._refresh(deadline)
            primary = self._primary or primary
        return primary

    def all_addresses(self, deadline: float) -> Sequence[Address]:
        return [self.address("", deadline)]

    def suspect(self, address: Address | None) -> None:
        if address is None or address == self._primary:
            self._primary = None

    def open(self, address: Address, deadline: float) -> Connection:
        connection = super().open(address, deadline)
        if connection.is_replica:
            connection.close()
            raise ConnectionError("the sentinels named a replica: a failover is in progress")
        return connection

    def close(self) -> None:
        for idle in self._idle.values():
            while idle:
                with contextlib.suppress(IndexError):
                    idle.pop()[1].close()

    def _refresh(self, deadline: float) -> None:
        """Ask the sentinels. If a sentinel does not answer, it gets no request for ``_SILENT_FOR`` seconds."""
        for sentinel in self._sentinels:
            now = time.monotonic()
            if now < self._silent_until.get(sentinel, 0):
                continue
            try:
                reply = self._ask(sentinel, min(deadline, now + _ASK_WITHIN))
            except (*FAILURES, hiredis.ReplyError):
                self._silent_until[sentinel] = time.monotonic() + _SILENT_FOR
                continue
            if reply is not None and reply.epoch >= self._epoch and (reply.epoch > self._epoch or not reply.epoch):
                self._epoch, self._primary = reply.epoch, reply.primary

    def _ask_sentinels(self, deadline: float) -> Address:
        failure: Exception = ConnectionError("there is no sentinel")
        older: Address | None = None
        self._ask_at = time.monotonic() + _ASK_EVERY
        for sentinel, until in _with_deadlines(self._sentinels, deadline):
            try:
                reply = self._ask(sentinel, until)
            except (*FAILURES, hiredis.ReplyError) as exc:
                failure = exc
                continue
            if reply is None:
                failure = ConnectionError(f"the sentinels know no service {self._service!r}")
            elif not reply.epoch or reply.epoch >= self._epoch:
                self._epoch = max(reply.epoch, self._epoch)
                return reply.primary
            else:
                older = reply.primary
        if older is not None:  # the other sentinels are out of reach
            return older
        raise explain(failure, f"none of the sentinels {_format_addresses(self._sentinels)}", self.timeout) from failure

    def _ask(self, sentinel: Address, until: float) -> _SentinelReply | None:
        """Ask one sentinel, on a connection that stays open. Returns None if the sentinel does not know the service."""
        connection = self._connection_to(sentinel, until)
        try:
            primary = connection.ask(pack(("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)), until)
            epoch = 0
            if primary is not None:
                with contextlib.suppress(hiredis.ReplyError):  # the account may lack the right to read the epoch
                    reply = connection.ask(pack(("SENTINEL", "MASTER", self._service)), until)
                    epoch = int(dict(zip(reply[::2], reply[1::2], strict=False)).get(b"config-epoch", 0))
        except BaseException:
            connection.close()
            raise
        self._idle[sentinel].append((forks.generation, connection))
        return None if primary is None else _SentinelReply((primary[0].decode(), int(primary[1])), epoch)

    def _connection_to(self, sentinel: Address, until: float) -> Connection:
        idle = self._idle[sentinel]
        while idle:
            with contextlib.suppress(IndexError):  # another thread may have removed the connection
                generation, connection = idle.pop()
                if generation == forks.generation and connection.is_free and not _is_closed(connection):
                    return connection
                connection.close()
        return open_connection(sentinel, self._sentinel_settings, until)


class ClusterServers(Servers):
    """``redis+cluster://``. A partition is on the node that has the slot of the partition's name."""

    has_others = True
    is_cluster = True

    def __init__(
        self,
        seeds: Sequence[Address],
        settings: ConnectionSettings,
        timeout: float,
        *,
        remap: Callable[[Any], Any] | None = None,
    ) -> None:
        """*remap*: redis-py's ``address_remap``. It takes the address that a node reports, and returns the address to
        use."""
        super().__init__(settings, timeout)
        self._seeds = tuple(seeds)
        self._remap = remap
        self._nodes: dict[int, Address] = {}  # by slot
        self._is_stale = True
        self._answered_by: Address | None = None  # the node that answered last

    def address(self, partition: str, deadline: float) -> Address:
        slot = slot_of(partition)
        if self._is_stale or slot not in self._nodes:
            self._nodes, self._is_stale = self._ask_nodes(deadline), False
        try:
            return self._nodes[slot]
        except KeyError:
            self._is_stale = True
            raise BackendUnavailable(
                f"no node of the cluster has slot {slot}, that of queue {partition!r}: see CLUSTER SLOTS"
            ) from None

    def known(self, partition: str) -> Address | None:
        return self._nodes.get(slot_of(partition))

    def all_addresses(self, deadline: float) -> Sequence[Address]:
        self._nodes, self._is_stale = self._ask_nodes(deadline), False
        if not self._nodes:
            raise BackendUnavailable(
                f"no node of the cluster {_format_addresses(self._seeds)} has any slot: see redis-cli --cluster create"
            )
        return list(dict.fromkeys(self._nodes.values()))

    def suspect(self, address: Address | None) -> None:  # noqa: ARG002
        self._is_stale = True

    def remapped(self, address: Address) -> Address:
        if self._remap is None:
            return address
        host, port = self._remap(address)
        return host, port

    def moved(self, partition: str, address: Address) -> None:
        self._nodes[slot_of(partition)] = address

    def _ask_nodes(self, deadline: float) -> dict[int, Address]:
        known = list(dict.fromkeys((*self._nodes.values(), *self._seeds)))
        random.shuffle(known)
        known.sort(key=lambda node: node != self._answered_by)  # the node that answered last comes first
        failure: Exception = ConnectionError("there is no node")
        for node, until in _with_deadlines(known, deadline):
            try:
                connection = open_connection(node, self.settings, until)
                try:
                    reply = connection.ask(pack(("CLUSTER", "SLOTS")), until)
                finally:
                    connection.close()
            except (*FAILURES, hiredis.ReplyError) as exc:
                failure = exc
                continue
            self._answered_by = node
            return self._nodes_by_slot(reply, node)
        raise explain(failure, f"none of the cluster's nodes {_format_addresses(known)}", self.timeout) from failure

    def _nodes_by_slot(self, reply: list[list[object]], asked: Address) -> dict[int, Address]:
        nodes: dict[int, Address] = {}
        for first, last, primary, *_ in reply:
            host, port = primary[:2]  # type: ignore[index]
            # a node may not know its own address; in this case the address in its reply is empty
            there = self.remapped((host.decode(), port)) if host else (str(asked[0]), port)
            slots = range(max(int(first), 0), min(int(last) + 1, SLOTS))  # type: ignore[call-overload]
            nodes.update(dict.fromkeys(slots, there))
        return nodes


def slot_of(partition: str) -> int:
    """The cluster slot of all keys of a partition. The partition's name is the hash tag of its keys."""
    return binascii.crc_hqx(partition.encode(), 0) % SLOTS


def format_address(address: Address) -> str:
    """An address as messages show it, ``host:port`` or a path."""
    return address if isinstance(address, str) else f"{address[0]}:{address[1]}"


def _with_deadlines(servers: Sequence[Address], deadline: float) -> Iterator[tuple[Address, float]]:
    """Yields each server with its own deadline, so that a server that hangs leaves time for the others."""
    for server in servers:
        now = time.monotonic()
        yield server, now + max((deadline - now) * _SHARE, 0.001)


def _is_closed(connection: Connection) -> bool:
    """Whether the server has closed an idle connection. No reply is outstanding, so a connection that is readable has
    been closed."""
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))


def _format_addresses(servers: Sequence[Address]) -> str:
    return ", ".join(map(format_address, servers))
