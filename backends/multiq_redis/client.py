"""Each client makes one call at a time over its own connections. A repeated call has no second effect.

====================  ======================================================================  =======================
guarantee             how                                                                     cost
====================  ======================================================================  =======================
one effect per call   a number per call; the script stores the number and the answer (see     one GET, one SET
                      lua/include/once.lua). After the first lost reply, the client repeats
                      the call at once, on a new connection.
a deadline            one for the whole call, repetitions, redirections and waiting included  none
scripts that vanish   after NOSCRIPT the script's text is sent instead of its digest          one round trip, once
safe forks            a child drops its parent's connections and takes a new name             one comparison
====================  ======================================================================  =======================
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import hiredis

from multiq.driverkit.call_retry import Attempts
from multiq.driverkit.fork import forks
from multiq.errors import BackendError

from . import keys
from .call_retry import CallRetry
from .connection import pack
from .errors import FAILURES, classify_connection_error, explain
from .pipeline import call_pipelined
from .redis_py_import import redis_py
from .scripts import STATES_SET, script
from .servers import format_address

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.driverkit.net import Address

    from .connection import Connection, Word
    from .scripts import Script
    from .servers import Servers

_SLOT_SIZE = 7  # random bytes that identify a client; a token consists of them and of 5 bytes for the number
_FIRST_NUMBER = 10**11  # all numbers have twelve digits: lua/enqueue_one.lua compares them as text
_MOST_HEADS = 1000  # prepared beginnings of commands; an application may have a queue per customer


class Call(NamedTuple):
    """One script to run for one partition."""

    verb: str
    partition: str
    arguments: tuple[Word, ...] = ()
    """The script's ``ARGV``. A numbered script gets the call's number first."""
    state: str | None = None
    """The sorted set to use, for scripts that take one of several sorted sets."""
    also: tuple[str, ...] = ()
    """More partitions on the same server. The script gets the keys of these partitions, too."""


class Client:
    """Makes one thread's calls, one after the other."""

    def __init__(self, servers: Servers, prefix: str) -> None:
        redis_py()  # imported now, to save time in the first call
        self.servers = servers
        self._prefix = prefix
        self._start_over()

        self.idle_since = 0.0
        """The monotonic time at which the pool last took this client back. The pool sets this if many clients are
        idle."""

    def _start_over(self) -> None:
        """Choose a new name and drop all connections.

        Also called in a forked child, so that the calls of parent and child have different names.
        """
        self.slot = os.urandom(_SLOT_SIZE)
        self._name = self.slot.hex()
        self._number = _FIRST_NUMBER
        self._generation = forks.generation
        self._connections: dict[Address, Connection] = {}

    # --- calls ---

    def next_number(self) -> int:
        """Return the number of the next call."""
        if self._generation != forks.generation:
            self._start_over()
        self._number += 1
        return self._number

    def token(self, number: int) -> bytes:
        """The token of the leases that call *number* reserves. No other call of any client has the same token."""
        return self.slot + number.to_bytes(5, "big")

    def call(
        self,
        verb: str,
        partition: str,
        arguments: Sequence[Word] = (),
        *,
        state: str | None = None,
        number: int | None = None,
    ) -> Any:
        """Run a script for a partition and return its reply. Raises ``BackendError``.

        Parameters:
            verb: the script, ``lua/<verb>.lua``.
            partition: the partition whose keys the script uses.
            arguments: the script's ``ARGV``, without the call's number.
            state: the sorted set to use, for scripts that take one of several.
            number: the number of an earlier call, to repeat that call. Default: the next number.
        """
        return self.perform(self.new_call(verb, partition, arguments, state=state, number=number))

    def new_call(
        self,
        verb: str,
        partition: str,
        arguments: Sequence[Word] = (),
        *,
        state: str | None = None,
        number: int | None = None,
    ) -> Call:
        """Make a call without sending it. The parameters are those of ``call``."""
        if number is None:
            number = self.next_number()
        if script(verb).is_numbered:
            return Call(verb, partition, (number, *arguments), state)
        return Call(verb, partition, tuple(arguments), state)

    def perform(self, call: Call, deadline: float | None = None) -> Any:
        """Send a call, retry it as needed, and return its reply. A call that was sent before may be sent again.

        *deadline* is a time of the monotonic clock. The default deadline is the URL's timeout after now. Raises
        ``BackendError``.
        """
        servers = self.servers
        if deadline is None:
            deadline = time.monotonic() + servers.timeout
        address = connection = None
        try:
            address = servers.only_address or servers.address(call.partition, deadline)
            connection = self._connections.get(address)
            if connection is None or not connection.is_free or self._generation != forks.generation:
                connection = None  # if opening a connection fails, nothing was sent
                connection = self.connection_to(address, deadline)
            return connection.ask(
                self.packed(call, connection), servers.attempt_deadline(deadline) if servers.has_others else deadline
            )
        except (hiredis.ReplyError, *FAILURES) as exc:
            retry = CallRetry(self, call, deadline, address, connection)
            retry.handle(exc)
        return retry.run()

    def perform_each(self, calls: Sequence[Call], deadline: float | None = None) -> list[Any]:
        """Send several calls in one round trip. Returns the replies. The reply of a failed call is a ``BackendError``.

        No two numbered calls may be for the same partition. The server remembers one call per client and partition.
        """
        if len(calls) > 1:
            return call_pipelined(self, calls, deadline)
        try:
            return [self.perform(call, deadline) for call in calls]
        except BackendError as exc:
            return [exc]

    def packed(self, call: Call, connection: Connection, *, with_text: bool = False) -> bytes:
        """A call as RESP, with the script's digest or the script's text."""
        verb, partition, arguments, state, also = call
        if with_text:
            wanted = script(verb, before_7=connection.is_before_7)
            names = self._names(call, wanted)
            return pack(("EVAL", wanted.text, len(names), *names, *arguments))
        words, head = connection.heads.get((verb, partition, state, also)) or self._new_head(call, connection)
        packed = pack(arguments)
        return b"*%d\r\n%b%b" % (words + len(arguments), head, packed[packed.index(b"\n") + 1 :])

    def command(self, address: Address, *words: Word) -> Any:
        """Run a command on one server. If the idle connection is dead, a new connection is used.

        Raises ``BackendError``.
        """
        deadline = time.monotonic() + self.servers.timeout
        attempts: Attempts | None = None
        while True:
            connection = None
            try:
                connection = self.connection_to(address, deadline)
                return connection.ask(pack(words), deadline)
            except hiredis.ReplyError as exc:
                raise explain(exc, format_address(address), self.servers.timeout) from exc
            except FAILURES as exc:
                attempts = attempts or Attempts(deadline)
                if not attempts.again(classify_connection_error(exc, is_connected=connection is not None)):
                    raise explain(exc, format_address(address), self.servers.timeout) from exc

    def all_addresses(self) -> Sequence[Address]:
        """The addresses of all servers that hold queues. Raises ``BackendError``."""
        return self.servers.all_addresses(time.monotonic() + self.servers.timeout)

    def connection(self, partition: str, deadline: float) -> Connection:
        """The connection to a partition's server, for requests that are not a ``Call``.

        Raises ``BackendError``, ``OSError``, ``hiredis.ReplyError``.
        """
        return self.connection_to(self.servers.address(partition, deadline), deadline)

    def close(self) -> None:
        """Close all connections. The next call opens new connections."""
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            connection.close()

    def hang_up(self) -> None:
        """Shut all connections down. Any thread may call this. In a forked child, the parent's connections stay
        open."""
        if self._generation != forks.generation:
            return
        for connection in tuple(self._connections.values()):
            connection.hang_up()

    # --- internals ---

    def abandon(self, address: Address | None) -> None:
        """Close the connection to a server that failed."""
        connection = self._connections.pop(address, None) if address is not None else None
        if connection is not None:
            connection.close()
        self.servers.suspect(address)

    def connection_to(self, address: Address, deadline: float) -> Connection:
        """The connection to a server. Raises ``OSError``, ``hiredis.ReplyError``, ``BackendUnavailable``."""
        if self._generation != forks.generation:
            self._start_over()
        connection = self._connections.get(address)
        if connection is not None and not connection.is_free:
            connection.close()
            connection = None
        if connection is None:
            connection = self._connections[address] = self.servers.open(address, deadline)
        return connection

    def _new_head(self, call: Call, connection: Connection) -> tuple[int, bytes]:
        """Pack EVALSHA, the script's digest and the script's keys. Returns the number of these words, and the bytes."""
        if len(connection.heads) >= _MOST_HEADS:
            connection.heads.clear()
        wanted = script(call.verb, before_7=connection.is_before_7)
        names = self._names(call, wanted)
        packed = pack(("EVALSHA", wanted.sha, len(names), *names))
        head = connection.heads[call.verb, call.partition, call.state, call.also] = (
            3 + len(names),
            packed[packed.index(b"\n") + 1 :],
        )
        return head

    def _names(self, call: Call, wanted: Script) -> list[str]:
        return [
            self._key(name, partition, call.state) for partition in (call.partition, *call.also) for name in wanted.keys
        ]

    def _key(self, name: str, partition: str, state: str | None) -> str:
        base = keys.base(self._prefix, partition)
        if name == "call":
            return keys.call(base, self._name)
        if name == STATES_SET:
            assert state is not None  # noqa: S101 - the backend passes it to these scripts
            name = state
        return keys.BY_NAME[name](base)
