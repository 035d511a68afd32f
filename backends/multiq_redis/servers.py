"""The servers of a URL: what all kinds of URL share, and the URL that names one server.

``sentinel.py`` has the servers behind sentinels, and ``cluster.py`` the nodes of a cluster. Nothing in these files
needs a lock. Each value is stored by one assignment, and two threads may store the same value twice.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from .opening import open_connection

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import hiredis

    from multiq.driverkit.net import Address

    from .connection import Connection
    from .connection_settings import ConnectionSettings

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

    def redirected(self, exc: hiredis.ReplyError, partition: str, sender: Address | None) -> Address | None:  # noqa: ARG002
        """The node to which an error reply of *sender* redirects a call, or None. Only a cluster redirects calls."""
        return None

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


def with_deadlines(addresses: Sequence[Address], deadline: float) -> Iterator[tuple[Address, float]]:
    """Yields each server with its own deadline, so that a server that hangs leaves time for the others."""
    for address in addresses:
        now = time.monotonic()
        yield address, now + max((deadline - now) * _SHARE, 0.001)


def format_address(address: Address) -> str:
    """An address as messages show it, ``host:port`` or a path."""
    return address if isinstance(address, str) else f"{address[0]}:{address[1]}"


def format_addresses(addresses: Sequence[Address]) -> str:
    return ", ".join(map(format_address, addresses))
