"""The pool of clients of one backend. A thread borrows a client for each call. A consumer has its own client."""

from __future__ import annotations

import contextlib
import time
import weakref
from typing import TYPE_CHECKING, Any

from multiq.errors import BackendError

from .client import Client

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .connection import Word
    from .servers import Servers

_FEW_IDLE = 8  # idle clients that the pool always keeps
_IDLE_FOR = 30.0  # seconds for which the pool keeps idle clients beyond _FEW_IDLE


class Pool:
    """The clients of one backend. A thread borrows the idle client that was used last. If no client is idle, it borrows
    a new one."""

    def __init__(self, servers: Servers, prefix: str) -> None:
        self.servers = servers
        self.prefix = prefix
        self._idle: list[Client] = []  # append and pop are atomic
        self._lent: weakref.WeakKeyDictionary[Client, None] = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[Client]:
        """Borrow a client for several calls."""
        client = self._take()
        try:
            yield client
        finally:
            self._put_back(client)

    def call(self, verb: str, partition: str, arguments: Sequence[Word] = (), *, state: str | None = None) -> Any:
        """Make one call with an idle client. The parameters are those of ``Client.call``."""
        client = self._take()
        try:
            return client.call(verb, partition, arguments, state=state)
        finally:
            self._put_back(client)

    def call_each(self, verb: str, partitions: Sequence[str], arguments: Sequence[Word] = ()) -> list[Any]:
        """Make the same call for several partitions, in one round trip.

        The first ``BackendError`` is raised after all calls are done.
        """
        if len(partitions) == 1:
            return [self.call(verb, partitions[0], arguments)]
        with self.borrowed() as client:
            replies = client.perform_each([client.new_call(verb, partition, arguments) for partition in partitions])
        for reply in replies:
            if isinstance(reply, BackendError):
                raise reply
        return replies

    def dedicated(self) -> Client:
        """A client that the caller keeps. ``close`` shuts its connections down."""
        client = Client(self.servers, self.prefix)
        self._lent[client] = None
        return client

    def close(self) -> None:
        """Close all connections, including those of dedicated clients."""
        self.servers.close()
        while self._idle:
            with contextlib.suppress(IndexError):
                self._idle.pop().close()
        for reference in self._lent.keyrefs():  # a copy: other threads may take dedicated clients meanwhile
            client = reference()
            if client is not None:
                client.hang_up()

    def _take(self) -> Client:
        try:
            return self._idle.pop()
        except IndexError:
            return Client(self.servers, self.prefix)

    def _put_back(self, client: Client) -> None:
        if len(self._idle) >= _FEW_IDLE:
            self._thin_out(client)
        self._idle.append(client)

    def _thin_out(self, client: Client) -> None:
        """If more than ``_FEW_IDLE`` clients are idle, close the client that has been idle for the longest time. It is
        closed only if it has been idle for ``_IDLE_FOR`` seconds.

        If two threads do this at the same time, another idle client may be closed. This does no harm.
        """
        client.idle_since = now = time.monotonic()
        with contextlib.suppress(IndexError):
            if now - self._idle[_FEW_IDLE].idle_since > _IDLE_FOR:
                self._idle.pop(_FEW_IDLE).close()
