"""Finds the node of a partition in a cluster, and follows the redirections MOVED and ASK.

A cluster assigns hash slots to its nodes, and all keys of a partition are in one slot. CLUSTER SLOTS says which node
has a slot. A node that does not have the slot of a call answers with a redirection:

- MOVED: another node has the slot, from now on.
- ASK: the slot is being moved to another node. This call goes there, after the command ASKING. The next call begins at
  the old node again.
"""

from __future__ import annotations

import binascii
import random
from typing import TYPE_CHECKING, Any

import hiredis

from multiq.errors import BackendUnavailable

from .connection import pack
from .errors import FAILURES, REDIRECTIONS, code_of, explain
from .opening import open_connection
from .servers import Servers, format_addresses, with_deadlines

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from multiq.driverkit.net import Address

    from .connection import Connection
    from .connection_settings import ConnectionSettings

SLOTS = 16384
_AT_ONCE = 3  # redirections that are followed without a pause
_ASKING = pack(("ASKING",))


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
                f"no node of the cluster {format_addresses(self._seeds)} has any slot: see redis-cli --cluster create"
            )
        return list(dict.fromkeys(self._nodes.values()))

    def suspect(self, address: Address | None) -> None:  # noqa: ARG002
        self._is_stale = True

    def redirected(self, exc: hiredis.ReplyError, partition: str, sender: Address | None) -> Address | None:
        """The node that a MOVED or ASK error of the node *sender* names. After MOVED, the partition stays there."""
        code = code_of(exc)
        if code not in REDIRECTIONS or sender is None:
            return None
        host, port = _node_in(exc)
        there = self._remapped((host, port)) if host else (str(sender[0]), port)
        if code == "MOVED":
            self._nodes[slot_of(partition)] = there
        return there

    def _ask_nodes(self, deadline: float) -> dict[int, Address]:
        known = list(dict.fromkeys((*self._nodes.values(), *self._seeds)))
        random.shuffle(known)
        known.sort(key=lambda node: node != self._answered_by)  # the node that answered last comes first
        failure: Exception = ConnectionError("there is no node")
        for node, until in with_deadlines(known, deadline):
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
        raise explain(failure, f"none of the cluster's nodes {format_addresses(known)}", self.timeout) from failure

    def _nodes_by_slot(self, reply: list[list[object]], asked: Address) -> dict[int, Address]:
        nodes: dict[int, Address] = {}
        for first, last, primary, *_ in reply:
            host, port = primary[:2]  # type: ignore[index]
            # a node may not know its own address; in this case the address in its reply is empty
            there = self._remapped((host.decode(), port)) if host else (str(asked[0]), port)
            slots = range(max(int(first), 0), min(int(last) + 1, SLOTS))  # type: ignore[call-overload]
            nodes.update(dict.fromkeys(slots, there))
        return nodes

    def _remapped(self, address: Address) -> Address:
        """The address to connect to, for a node that reports *address* as its own."""
        if self._remap is None:
            return address
        host, port = self._remap(address)
        return host, port


class Redirections:
    """The redirections of one call."""

    def __init__(self, servers: Servers, partition: str) -> None:
        self._servers = servers
        self._partition = partition
        self._count = 0
        self._ask_node: Address | None = None

    def follow(self, exc: hiredis.ReplyError, sender: Address | None) -> bool:
        """Follow a MOVED or ASK error of the node *sender*. Returns whether to repeat the call without a pause."""
        there = self._servers.redirected(exc, self._partition, sender)
        if there is None:
            return False
        if code_of(exc) == "ASK":
            self._ask_node = there
        self._count += 1
        return self._count <= _AT_ONCE  # two nodes may redirect to each other

    def take_ask_node(self) -> Address | None:
        """The node that the last ASK error has named. Only the next attempt goes there."""
        node, self._ask_node = self._ask_node, None
        return node


def ask_with_asking(connection: Connection, packed: bytes, deadline: float) -> Any:
    """Send a call to the node that an ASK error has named, and return the reply. Raises the errors of
    ``Connection.ask``."""
    connection.send(_ASKING + packed, deadline, replies=2)
    try:
        connection.read(deadline)
    except hiredis.ReplyError:
        connection.close()  # the reply to the call has not been read
        raise
    return connection.read(deadline)


def slot_of(partition: str) -> int:
    """The cluster slot of all keys of a partition. The partition's name is the hash tag of its keys."""
    return binascii.crc_hqx(partition.encode(), 0) % SLOTS


def _node_in(error: hiredis.ReplyError) -> tuple[str, int]:
    """The host and the port in a MOVED or ASK error. An empty host means the host that sent the error."""
    host, _, port = str(error).split()[2].rpartition(":")
    return host, int(port)
