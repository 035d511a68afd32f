"""Closes every connection before a fork, because SQLite records held locks per process."""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING

from multiq.driverkit.fork import forks
from multiq.errors import BackendUnavailable

from .opening import create_lock, file_identity

if TYPE_CHECKING:
    import sqlite3

    from .connection import Connection
    from .opening import FileIdentity

_FORK_PATIENCE = 10.0  # seconds that a fork waits for other threads' calls to end


class ForkGuard:
    """Closes every connection before a fork.

    SQLite records in the process's memory which locks the process holds. A child that inherits this record would treat
    its parent's locks as its own.

    A connection that another thread uses for too long stays open, and the child gets a copy of it. The child never
    closes the copy. A close would roll back the parent's transaction in the memory that both processes share. The
    child also refuses every call that would use the file of this connection. In the child, a write would wait for ever
    for the lock of that transaction, and a read would take no lock.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """A thread holds this lock while it reads or changes the set of connections of this object or of a pool."""
        self._connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._closed: list[Connection] = []
        self._has_create_lock = False
        self._forking_thread: int | None = None
        self._inherited: list[tuple[sqlite3.Connection, FileIdentity]] = []
        forks.register(before=self._before, in_parent=self._in_parent, in_child=self._in_child)

    def watch(self, connection: Connection) -> None:
        """Close this connection before each fork, for as long as it exists."""
        with self.lock:
            self._connections.add(connection)

    @property
    def is_forking_here(self) -> bool:
        """Whether this thread is between the hooks of a fork. All connections that can be closed are closed then."""
        return self._forking_thread == threading.get_ident()

    def refuse(self, path: str) -> None:
        """Raise ``BackendUnavailable`` in a child that has inherited an open connection to the file at *path*."""
        if self._inherited and file_identity(path) in [identity for _, identity in self._inherited]:
            raise BackendUnavailable(
                f"{path} cannot be used in this process: when its parent forked it, another thread of the parent was "
                f"in a call on that file for more than {_FORK_PATIENCE:g} s, or a signal handler interrupted the fork; "
                'fork when no thread waits for a locked file, or start a new interpreter ("spawn" in multiprocessing)'
            )

    def _before(self) -> None:
        """Lock and close all connections.

        If a signal handler raises an exception in this method, Python still forks. ``_closed`` lists the connections
        that are locked at that time. Exactly these connections are unlocked after the fork.

        After such an exception, the wait for ``self.lock`` continues. The exception is raised again at the end. Another
        thread may hold this lock while it closes connections. A child forked at that time would inherit SQLite's locks.
        """
        held: list[bool] = []
        interruption: BaseException | None = None
        while not held:
            try:
                # C code acquires the lock and extends the list, so no exception can be raised between the two.
                held.extend(map(self.lock.acquire, (True,)))
            except BaseException as exc:  # noqa: BLE001 - raised again below
                interruption = exc
        self._forking_thread = threading.get_ident()
        deadline = time.monotonic() + _FORK_PATIENCE
        try:
            for connection in self._connections:
                if connection.close_for_fork(deadline):
                    self._closed.append(connection)
        finally:
            create_lock.acquire()  # This lock is last: a thread that holds it never waits for another lock.
            self._has_create_lock = True
        if interruption is not None:
            raise interruption

    def _in_parent(self) -> None:
        # If the two differ, a signal handler raised an exception before ``_before`` set ``_forking_thread``.
        if self._forking_thread != threading.get_ident():
            return
        for connection in self._closed:
            connection.unlock_in_parent()
        self._release()

    def _in_child(self) -> None:
        kept = [connection.reset_in_child() for connection in self._connections]
        self._inherited += [(sqlite, file) for sqlite, file in kept if sqlite is not None]
        # If the two differ, a signal handler raised an exception before ``_before`` set ``_forking_thread``. The lock
        # may then belong to another thread, which does not exist in the child.
        if self._forking_thread != threading.get_ident():
            self.lock = threading.Lock()
            self.lock.acquire()
        self._release()

    def _release(self) -> None:
        self._closed = []
        if self._has_create_lock:
            self._has_create_lock = False
            create_lock.release()
        self._forking_thread = None
        self.lock.release()


fork_guard = ForkGuard()
