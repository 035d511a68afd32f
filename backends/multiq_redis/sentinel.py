"""Asks the sentinels for the primary: ``redis+sentinel://``, or a client of ``Sentinel.master_for``."""

from __future__ import annotations

import contextlib
import select
import time
from typing import TYPE_CHECKING, NamedTuple

import hiredis

from multiq.driverkit.fork import forks

from .connection import pack
from .errors import FAILURES, explain
from .opening import open_connection
from .servers import Servers, format_addresses, with_deadlines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.driverkit.net import Address

    from .connection import Connection
    from .connection_settings import ConnectionSettings

_ASK_EVERY = 1.0  # seconds between two requests to the sentinels
_ASK_WITHIN = 0.25  # seconds within which a sentinel must answer such a request
_SILENT_FOR = 10.0  # for this number of seconds, a silent sentinel gets no request


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
        for sentinel, until in with_deadlines(self._sentinels, deadline):
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
        raise explain(failure, f"none of the sentinels {format_addresses(self._sentinels)}", self.timeout) from failure

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


def _is_closed(connection: Connection) -> bool:
    """Whether the server has closed an idle connection. No reply is outstanding, so a connection that is readable has
    been closed."""
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))
