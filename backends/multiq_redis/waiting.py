"""Waits at the server for a notification, a timeout, or another thread's interrupt.

A notification is a marker that BZPOPMIN pops (lua/include/notify.lua). The marker contains no job, so that a lost reply
loses no job.

Redis checks the timeouts of blocked commands only ten times a second. To end a wait on time, the waiter puts a marker
into a key of its own. The same BZPOPMIN waits for that key. CLIENT UNBLOCK would do the same, but the waiter never
sends CLIENT UNBLOCK, for two reasons:

- During a failover (CLIENT PAUSE WRITE), CLIENT UNBLOCK crashes servers before Redis 8.2 (redis PR 14164).
- After a failover, the client number in that command may belong to another connection.

A follow-up call may be sent together with BZPOPMIN. The server runs the call as soon as the wait ends, and both replies
arrive together. So the job that ended the wait starts earlier by one round trip.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import hiredis

from multiq.driverkit.fork import forks
from multiq.driverkit.wakeup import Wakeup
from multiq.errors import BackendError, BackendTimeout

from . import keys
from .connection import pack
from .errors import ELSEWHERE, FAILURES, PASSING, REDIRECTIONS, code_of, explain
from .scripts import script

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from .client import Call, Client
    from .connection import Connection
    from .partitions import Partitions
    from .pool import Pool

_COARSE = 0.5  # seconds by which the server's own timeouts may be late
_SHORTEST = 0.02  # seconds; the shortest timeout of BZPOPMIN, because 0 would block for ever
_MARKER_WITHIN = 0.5  # seconds that storing a marker may take
_WAKEUP_LASTS = 60  # seconds until an unused marker in a waiter's own key expires
_NAME_SIZE = 7  # random bytes
_LOCAL_WAIT = 0.1  # seconds of a local wait if a wait at the server is not possible
_HARMLESS = PASSING | ELSEWHERE | REDIRECTIONS | {"UNBLOCKED"}  # UNBLOCKED comes from another program or a failover


class _WaitPoint(NamedTuple):
    """One connection to wait on."""

    client: Client
    partition: str
    marker_keys: tuple[bytes, ...]
    wakeup: bytes
    """The key into which the waiter puts a marker to end its own wait."""


class Waiter:
    """Waits for jobs on behalf of one consumer, on the consumer's connection. In a cluster, each partition has a
    connection on which the waiter waits."""

    def __init__(self, pool: Pool, client: Client, partitions: Partitions, queues: Sequence[str]) -> None:
        self.notified: list[str] = []
        """The partitions whose markers the last wait popped. No other consumer was notified."""
        self.follow_up_reply: Any = None
        """The reply to the follow-up call of the last wait. None without a reply, or after an error."""
        self._pool = pool
        self._servers = pool.servers
        self._client = client
        self._partitions = partitions
        self._queues = queues
        self._marker_keys: dict[bytes, str] = {}  # key -> partition
        self._wait_points: list[_WaitPoint] = []
        self._name = ""
        self._generation = -1
        self._wakeup = Wakeup()

    def wait(
        self, seconds: float, *, exact: bool, follow_up: Call | None = None, excluded: Collection[str] = frozenset()
    ) -> bool:
        """Wait at most *seconds*.

        Returns True if the caller must poll the queues, because a notification came, or may have come. Raises
        ``BackendError``.

        Parameters:
            exact: whether the wait ends on time, to the millisecond. If not, the wait may be up to ``_COARSE`` seconds
                too long.
            follow_up: a call that the server runs when the wait ends.
            excluded: in a cluster, the partitions whose servers must not be asked.
        """
        until = time.monotonic() + seconds
        self.notified, self.follow_up_reply = [], None
        self._find_marker_keys()
        waiting: dict[str, Connection] = {}
        try:
            points = [point for point in self._wait_points if point.partition not in excluded]
            is_degraded = not points or not self._start(points, waiting, seconds + (_COARSE if exact else 0), follow_up)
            if is_degraded:
                until = min(time.monotonic() + _LOCAL_WAIT, until)
            answered = self._poll(waiting.values(), until if exact or is_degraded else until + _COARSE)
            is_to_look = self._finish(points, waiting, answered, follow_up)
        except BaseException:
            for connection in waiting.values():
                connection.close()
            raise
        if is_degraded:
            self._servers.suspect(None)
        return is_to_look or is_degraded

    def pause(self, until: float) -> None:
        """Wait locally, without the server, until the time *until*, or until ``interrupt`` is called."""
        self._poll((), until)

    def can_follow_up(self, partition: str) -> bool:
        """Whether a follow-up call is possible: outside a cluster, with no other partition to wait for."""
        self._find_marker_keys()
        return list(self._marker_keys.values()) == [partition] and not self._servers.is_cluster

    def interrupt(self) -> None:
        """End the wait, if there is one. Callable from any thread."""
        self._wakeup.notify()

    def notify(self, partition: str) -> None:
        """Notify another consumer that waits for this partition."""
        self._leave_marker(self._client, partition, self._marker_key(partition), 0)

    def close(self) -> None:
        """Close all connections and the wake-up pipe. The next wait opens them again."""
        for point in self._wait_points:
            point.client.close()
        self._wakeup.close()

    def __del__(self) -> None:
        if self._wakeup.is_open:
            self.close()

    # --- internals ---

    def _deadline(self) -> float:
        return self._servers.attempt_deadline(time.monotonic() + self._servers.timeout)

    def _marker_deadline(self) -> float:
        return min(time.monotonic() + _MARKER_WITHIN, self._deadline())

    def _marker_key(self, partition: str) -> bytes:
        return keys.hint(keys.base(self._pool.prefix, partition)).encode()

    def _wakeup_key(self, partition: str) -> bytes:
        return keys.wakeup(keys.base(self._pool.prefix, partition), self._name).encode()

    def _find_marker_keys(self) -> None:
        """Find the marker keys of all known partitions. The number of partitions never shrinks."""
        if self._generation != forks.generation:  # a child must not pop its parent's markers
            self._generation, self._name = forks.generation, os.urandom(_NAME_SIZE).hex()
            self._marker_keys.clear()
        partitions = [partition for queue in self._queues for partition in self._partitions.all_of(queue)]
        if len(partitions) == len(self._marker_keys):
            return
        self._marker_keys = {self._marker_key(partition): partition for partition in partitions}
        if self._servers.is_cluster:
            clients = {point.partition: point.client for point in self._wait_points}
            self._wait_points = [
                _WaitPoint(
                    clients.get(partition) or self._pool.dedicated(),
                    partition,
                    (marker_key,),
                    self._wakeup_key(partition),
                )
                for marker_key, partition in self._marker_keys.items()
            ]
        else:
            self._wait_points = [
                _WaitPoint(self._client, partitions[0], tuple(self._marker_keys), self._wakeup_key(partitions[0]))
            ]

    def _start(
        self, points: Sequence[_WaitPoint], waiting: dict[str, Connection], seconds: float, follow_up: Call | None
    ) -> bool:
        """Send BZPOPMIN to all servers. Returns False if a send failed. In this case a poll finds the cause."""
        deadline = self._deadline()
        went_well = True
        for point in points:
            try:
                connection = point.client.connection(point.partition, deadline)
                waiting[point.partition] = connection
                packet = pack(("BZPOPMIN", *point.marker_keys, point.wakeup, f"{max(seconds, _SHORTEST):.3f}"))
                if follow_up is None:
                    connection.send(packet, deadline, replies=1)
                else:
                    connection.send(packet + point.client.packed(follow_up, connection), deadline, replies=2)
            except (*FAILURES, hiredis.ReplyError, BackendError) as exc:
                self._failed(waiting.pop(point.partition, None), exc)
                went_well = False
        return went_well

    def _poll(self, waiting: Iterable[Connection], until: float) -> set[int]:
        """Wait for a reply, an interrupt or the time *until*. Returns the file descriptors that are readable."""
        wakeup = self._wakeup.open()
        poll = select.poll()
        poll.register(wakeup, select.POLLIN)
        for connection in waiting:
            poll.register(connection.sock, select.POLLIN)
        ready = {number for number, _ in poll.poll(max(0.0, (until - time.monotonic()) * 1000))}
        if wakeup in ready:
            self._wakeup.drain()
        return ready

    def _finish(
        self, points: Sequence[_WaitPoint], waiting: dict[str, Connection], answered: set[int], follow_up: Call | None
    ) -> bool:
        """End all waits and read all replies. Returns whether the caller must poll the queues."""
        is_to_look = False
        for point in points:
            connection = waiting.get(point.partition)
            if connection is None:
                continue
            if connection.sock.fileno() not in answered and not self._unblock(point):
                connection.close()
                self._servers.suspect(None)  # another server may have taken the place of the known one
                continue
            try:
                popped = connection.read(self._deadline())
                if popped is not None and popped[0] != point.wakeup:
                    self.notified.append(self._marker_keys[popped[0]])
                    is_to_look = True
                if follow_up is not None:
                    with contextlib.suppress(hiredis.ReplyError):  # the caller repeats the call, which raises the error
                        self.follow_up_reply = connection.read(self._deadline())
            except (*FAILURES, hiredis.ReplyError) as exc:
                self._failed(connection, exc)
                self._servers.suspect(None)
                self._poll((), time.monotonic() + _LOCAL_WAIT)
                is_to_look = True
        return is_to_look

    def _failed(self, connection: Connection | None, exc: Exception) -> None:
        """Close the connection. Raises ``BackendError`` for a failure that a poll of the queues might not show."""
        if connection is not None:
            connection.close()
        if isinstance(exc, hiredis.ReplyError) and code_of(exc) not in _HARMLESS:
            raise explain(exc, "the server", self._servers.timeout) from exc
        if isinstance(exc, (TimeoutError, BackendTimeout)) and len(self._wait_points) == 1:
            self._servers.suspect(None)  # another server may have taken the place of the known one
            raise explain(exc, "the server", self._servers.timeout) from exc

    def _unblock(self, point: _WaitPoint) -> bool:
        """Make the server end the wait. Returns False if the server does not end the wait in time."""
        with self._pool.borrowed() as client:
            return self._leave_marker(client, point.partition, point.wakeup, _WAKEUP_LASTS)

    def _leave_marker(self, client: Client, partition: str, key: bytes, lasts: int) -> bool:
        deadline = self._marker_deadline()
        with contextlib.suppress(*FAILURES, hiredis.ReplyError, BackendError):
            if self._servers.settings.credential_provider is None:
                connection = client.connection(partition, deadline)
            else:  # a login with a credential provider may need more time
                connection = client.connection(partition, self._deadline())
                deadline = self._marker_deadline()
            jobs = keys.jobs(keys.base(self._pool.prefix, partition))
            connection.ask(
                pack(("EVAL", script("notify", before_7=connection.is_before_7).text, 2, key, jobs, lasts)), deadline
            )
            return True
        return False
