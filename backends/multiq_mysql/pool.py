"""The pool of connections to one database. It opens sessions with the driver's settings, and lends connections.

====================  ======================================================================  =======================
guarantee             how                                                                     cost
====================  ======================================================================  =======================
independent of the    each session sets READ COMMITTED, the SQL mode, the time zone and the   one round trip when a
server's defaults     length of lock waits (session_settings.py)                              connection opens
safe forks            a child drops its parent's sessions, and sends nothing on them          none
====================  ======================================================================  =======================
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from pymysql.constants import CLIENT

from multiq.driverkit.fork import forks

from . import schema
from .connection import SHORTEST_TIMEOUT, Connection
from .holds import ArrivalCleanup
from .opening import open_connection
from .pymysql_private import drop, set_deadline
from .session_settings import SESSION_SETTINGS
from .statements import NOW, TRUE_NOW, Sql
from .waiting import pollers

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pymysql

    from multiq.driverkit.clock import Clock

    from .dsn import Dsn
    from .waiting import Poller

_IDLE_FOR = 60.0  # seconds after which an unused connection may be closed
_SERVER_INFO = "SELECT @@max_allowed_packet, @@hostname, @@port, UNIX_TIMESTAMP(); SHOW GLOBAL STATUS LIKE 'Uptime'"
_CLEANUP_INTERVAL = 3600.0  # seconds
_CLEANUP_AGAIN = 1.0  # seconds until the next clean-up, if a clean-up could not delete all old rows


class Pool:
    """The connections to one database. Does no I/O before the first call."""

    def __init__(self, dsn: Dsn, *, timeout: float, create: bool = True, clock: Clock | None = None) -> None:
        self.dsn = dsn
        self.timeout = timeout
        """Seconds that a call waits for the server."""
        self.create = create
        """Whether tables are created in a database that has none."""
        self.max_packet: int | None = None
        """Bytes of the largest statement that the server takes. None until the first connection."""
        self.server_identity: tuple[Any, ...] = ()
        """Host name, port and start time of the server to which the pool connected most recently."""
        self._clock = clock
        self._server_began = 0.0
        """An estimate of the server's time at the zero of this process's monotonic clock."""
        self._cleaned_up_at = float("-inf")
        self.arrivals = ArrivalCleanup()
        self._idle: deque[Connection] = deque()  # deque's methods are atomic
        """Unused connections. The connection that was used last is used next."""
        self._connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._poller: tuple[int, Poller] | None = None
        forks.watch(self)

    @property
    def poller(self) -> Poller:
        """The poller of this database, which all its users in this process share."""
        if self._poller is None or self._poller[0] != forks.generation:
            self._poller = (forks.generation, pollers.of(self.dsn.place, self.dsn.database))
        return self._poller[1]

    @property
    def now(self) -> Sql:
        """The present time in microseconds, as SQL. It comes from the server's clock, or from a test's clock."""
        return NOW if self._clock is None else Sql(self._clock() // 1000)

    @property
    def true_now(self) -> Sql:
        """Like ``now``, but for a session of the caller. ``SET timestamp`` may have stopped the usual clock of such a
        session."""
        return TRUE_NOW if self._clock is None else self.now

    def open(self, timeout: float) -> pymysql.connections.Connection[Any]:
        """Open a session with the driver's settings. Checks the tables, or creates them.

        Raises PyMySQL's errors, ``OSError``, ``MultiqError``.
        """
        ours: dict[str, Any] = {
            "init_command": SESSION_SETTINGS,
            "client_flag": CLIENT.MULTI_STATEMENTS,
            "autocommit": True,
        }
        timeout = max(timeout, SHORTEST_TIMEOUT)
        deadline = time.monotonic() + timeout
        opened = open_connection(self.dsn, timeout, **ours)
        try:
            set_deadline(opened, deadline)
            schema.ensure(opened, create=self.create)
            self._read_server_info(opened)
        except BaseException:
            drop(opened)
            raise
        return opened

    def _read_server_info(self, opened: pymysql.connections.Connection[Any]) -> None:
        with opened.cursor() as cursor:
            cursor.execute(_SERVER_INFO)
            ((self.max_packet, *where, now),) = cursor.fetchall()
            cursor.nextset()
            ((_, uptime),) = cursor.fetchall()
        self.server_identity = (*where, int(now) - int(uptime))
        self._server_began = float(now) - time.monotonic()

    @property
    def minute(self) -> int:
        """Minutes since 1970 by the server's clock. This is an estimate: the clock is read when a connection opens.

        The minutes order receipts by age.
        """
        return int((self._server_began + time.monotonic()) // 60)

    @property
    def server_time(self) -> int:
        """Microseconds since 1970 by the server's clock, or by a test's clock. Like ``minute``, this is an estimate."""
        return int((self._server_began + time.monotonic()) * 1e6) if self._clock is None else self._clock() // 1000

    def is_cleanup_due(self) -> bool:
        """Whether old receipts and arrivals must be deleted. This is due once an hour.

        Only one caller gets True. That caller must then delete the old receipts and arrivals.
        """
        now = time.monotonic()
        if now - self._cleaned_up_at < _CLEANUP_INTERVAL:
            return False
        self._cleaned_up_at = now
        return True

    def clean_up_again_soon(self) -> None:
        """Make the next clean-up due in a second instead of an hour, because there are more rows to delete."""
        self._cleaned_up_at = time.monotonic() - _CLEANUP_INTERVAL + _CLEANUP_AGAIN

    def connection(self) -> Connection:
        """Return a connection for the caller alone. It opens when it is first used."""
        connection = Connection(self)
        with self._lock:
            self._connections.add(connection)
        return connection

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[Connection]:
        """Lend a connection for a ``with`` block."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self.connection()
        try:
            yield connection
        finally:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)
            self._close_surplus()

    def _close_surplus(self) -> None:
        """Find the connection that has been unused for the longest time. Close it if it was unused for over
        ``_IDLE_FOR`` seconds.

        So the pool keeps as many connections as were recently in use at the same time. If callers take turns, they do
        not reconnect.
        """
        with contextlib.suppress(IndexError):  # Another thread took the last connection.
            if time.monotonic() - self._idle[0].idle_since > _IDLE_FOR:
                self._idle.popleft().close()

    def close(self) -> None:
        """Close all connections. A connection opens again if it is used again."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.close()

    def start_over_in_child(self) -> None:
        """After a fork, drop the parent's connections. Also replace the locks, because other threads of the parent may
        have held them."""
        self._lock = threading.Lock()
        self._idle = deque()
        for connection in list(self._connections):
            connection.start_over_in_child()
