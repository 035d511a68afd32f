"""Waits for a job, on a connection that holds no lease. Another thread can interrupt the wait.

A waiting reserve cannot be cancelled. While it waits, the server answers no other command on the same connection. So to
end a wait early, the driver closes the connection. If the server reserves a job at that moment, the server makes the
job ready again.
"""

from __future__ import annotations

import math
import select
import time
from typing import TYPE_CHECKING

from multiq.driverkit.call_retry import Attempts
from multiq.driverkit.wakeup import Wakeup

from .errors import CONNECTION_ERRORS, classify, explain, reply_error
from .leases import now
from .records import NOTHING_READY, Reserved

if TYPE_CHECKING:
    from .connection import Connection
    from .pool import Pool

_LONGEST = 60  # seconds that one reserve waits
_ABOUT = 0.2  # a wait may be too long by this number of seconds, because the server counts whole seconds


class Waiter:
    """The waits of one consumer. Any thread may call ``interrupt``."""

    def __init__(self, pool: Pool, tubes: tuple[str, ...]) -> None:
        self._pool = pool
        self._tubes = tubes
        self._wakeup = Wakeup()
        self.is_interrupted = False
        """Whether a thread has requested the end of the current wait. If there is no current wait, the request is for
        the next one."""
        self._spares: list[Connection] = []

    def wait(self, main: Connection | None, give_up_at: float) -> tuple[Connection, Reserved] | None:
        """Wait for the next job, on *main* if possible.

        Returns the connection that was used, and the job. Raises ``BackendError``.
        """
        wakeup_fd = self._wakeup.open()
        attempts: Attempts | None = None
        while not self.is_interrupted and (left := give_up_at - time.monotonic()) > 0:
            deadline = self._pool.deadline()
            connection = self._connection(main, deadline)
            try:
                connection.read_noop_replies(deadline)
                job = self._wait_on(connection, wakeup_fd, left, give_up_at)
            except CONNECTION_ERRORS as exc:
                attempts = attempts or Attempts(math.inf)  # no deadline, because this loop ends with the wait
                if not attempts.again(classify(exc)):
                    raise explain(exc, self._pool.address, self._pool.timeout) from exc
            else:
                if job is not None:
                    return connection, job
                if left < _ABOUT:
                    break
        return None

    def interrupt(self) -> None:
        """End the current wait. If there is no current wait, end the next one."""
        self.is_interrupted = True
        self._wakeup.notify()

    def clear_interrupt(self) -> None:
        """Clear the interruption after the interrupted wait."""
        self.is_interrupted = False
        self._wakeup.drain()

    def forget_connections(self) -> None:
        """Forget all connections. In a forked child, the connections belong to the parent."""
        self._spares = []

    def close(self) -> None:
        """Close all connections."""
        for connection in self._spares:
            connection.close()
        self._spares = []
        self._wakeup.close()

    # --- helpers ---

    def _connection(self, main: Connection | None, deadline: float) -> Connection:
        """Return a connection that holds no lease and watches all tubes."""
        if main is not None and len(self._tubes) == 1 and not main.held and not main.is_closed:
            return main
        self._spares = [connection for connection in self._spares if not connection.is_closed]
        for connection in self._spares:
            if not connection.held and connection.is_alive():
                return connection
        connection = self._pool.open(deadline, close_with_pool=True)
        try:
            packet, count = connection.watch(self._tubes)
            for line, _ in connection.ask(packet, count, deadline):
                if not line.startswith(b"WATCHING "):
                    raise reply_error(line, self._pool.address)
        except CONNECTION_ERRORS as exc:
            raise explain(exc, self._pool.address, self._pool.timeout) from exc
        self._spares.append(connection)
        return connection

    def _wait_on(self, connection: Connection, wakeup_fd: int, left: float, give_up_at: float) -> Reserved | None:
        """Wait with one reserve. Returns None if no job arrived, or if another thread ended the wait."""
        seconds = min(math.floor(left + _ABOUT), _LONGEST)
        drop_at = give_up_at if seconds == 0 else math.inf  # the server cannot wait for less than a second
        asked_at, deadline = now(), time.monotonic() + max(1, seconds) + self._pool.timeout
        try:
            connection.send(b"reserve-with-timeout %d\r\n" % max(1, seconds), deadline)
            if not self._is_answered(connection, wakeup_fd, min(drop_at, deadline)) and time.monotonic() < deadline:
                connection.abort()
                return None
            line, body = connection.read(deadline)
        except BaseException:
            connection.abort()
            raise
        if line.startswith(b"RESERVED "):
            return Reserved(line.split()[1], body, asked_at)
        if line not in NOTHING_READY:
            connection.close()
            raise reply_error(line, self._pool.address)
        return None

    def _is_answered(self, connection: Connection, wakeup_fd: int, until: float) -> bool:
        """Wait until the server answers. Returns False at the end of the time or after an interruption."""
        poll = select.poll()
        poll.register(connection.sock, select.POLLIN)
        poll.register(wakeup_fd, select.POLLIN)
        while True:
            left = until - time.monotonic()
            readable = [number for number, _ in poll.poll(max(0.0, left * 1000))]
            if connection.sock.fileno() in readable:
                return True
            self._wakeup.drain()
            if self.is_interrupted or left <= 0:
                return False
