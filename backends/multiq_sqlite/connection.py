"""The pool of connections to one file: transactions, waiting for the lock, forks, and a file that is replaced.

====================  ======================================================================  =======================
guarantee             how                                                                     cost
====================  ======================================================================  =======================
no half-done call     ``BEGIN IMMEDIATE`` ... ``COMMIT``, any exception rolls back; or it     one fsync per commit
                      is a single statement
no "database is       the lock is asked for again, a fraction of a millisecond apart at       ``BackendTimeout`` at
locked"               first, until the URL's timeout                                          the deadline
safe forks            every connection is closed before a fork and opens again after it       about 1 ms to reopen
a file that was       device and inode are compared before each use                           one ``stat``, about 1 us
deleted or replaced
====================  ======================================================================  =======================
"""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from multiq.driverkit.fork import forks
from multiq.errors import BackendTimeout, BackendUnavailable

from . import opening
from .disk_space import DiskSpace
from .errors import explain, is_busy, retry_while_locked
from .notifier import Notifier, notifier_of
from .statements import statement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_T = TypeVar("_T")

Parameters: TypeAlias = "Mapping[str, Any] | Sequence[Any]"

MAX_BODY = 1_000_000_000 - 1_000  # bytes: SQLite's own limit is on a whole row

_DATA_VERSION = "PRAGMA data_version"
_READERS_PATIENCE = 5  # milliseconds that a restart of the log waits for readers, and delays writers, at most
_CHECKPOINT_PATIENCE = 0.5  # seconds that a commit waits to checkpoint a long log, while other checkpoints run
_LOG_CHECK_PAUSE = 0.01  # seconds between two checks of the log's size
_CHECKPOINT_PAUSE = 0.05  # seconds without another checkpoint after a failed one
_FORK_PATIENCE = 10.0  # seconds that a fork waits for other threads' calls to end
_MAX_IDLE = 8  # connections kept open for later calls


class Pool:
    """The pool of connections to one file, and the settings to open it with. Does no I/O before the first call."""

    def __init__(self, path: str, *, synchronous: str, timeout: float) -> None:
        opening.check_path(path)
        self.path = os.path.abspath(path)  # noqa: PTH100 - no I/O yet; and now, as the process may change its folder
        self.timeout = timeout
        """Seconds that a call waits for the lock."""
        self.synchronous = synchronous
        self.creates = True
        """Whether a missing file, and missing tables, are created."""
        self.next_log_check_at = 0.0
        """When a connection checks the log's size again, by the monotonic clock; one checks for all of them."""
        self.disk_space = DiskSpace()
        self._idle: list[Connection] = []  # append and pop are atomic
        self._connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._notifier: tuple[int, Notifier] | None = None

    @property
    def notifier(self) -> Notifier:
        """The notifier that all connections to this file share in this process."""
        if self._notifier is None or self._notifier[0] != forks.generation:
            self._notifier = (forks.generation, notifier_of(os.path.realpath(self.path)))
        return self._notifier[1]

    def open(self, timeout: float) -> tuple[sqlite3.Connection, opening.FileIdentity]:
        """Open a sqlite3 connection, and return it with the file's identity. Waits *timeout* seconds for a lock."""
        return opening.open_file(self.path, self.synchronous, timeout, creates=self.creates)

    def connection(self) -> Connection:
        """Return a connection for one consumer; it opens when it is first used."""
        connection = Connection(self)
        with _forks.guard:
            self._connections.add(connection)
        return connection

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[Connection]:
        """Lend a connection for one call: the one that was used last, whose pages are still in its cache."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self.connection()
        try:
            yield connection
        finally:
            if len(self._idle) < _MAX_IDLE:
                self._idle.append(connection)
            else:
                connection.close()

    def close(self) -> None:
        """Close all connections; each opens again if it is used again."""
        with _forks.guard:
            connections = list(self._connections)
        for connection in connections:
            connection.close()


class Transaction:
    """An open transaction: runs statements of ``sql/``."""

    __slots__ = ("_sqlite",)

    def __init__(self, sqlite: sqlite3.Connection) -> None:
        self._sqlite = sqlite

    def execute(self, name: str, parameters: Parameters = ()) -> sqlite3.Cursor:
        """Run ``sql/<name>.sql``."""
        return self._sqlite.execute(statement(name), parameters)

    def execute_text(self, text: str, parameters: Parameters = ()) -> sqlite3.Cursor:
        """Run a statement that was built from one of ``sql/``."""
        return self._sqlite.execute(text, parameters)


class Connection:
    """A connection that opens when it is used, and again after a fork, an error, or a change of the file.

    Usable by any thread, one at a time. No code of the application runs while it is locked.
    """

    def __init__(self, pool: Pool) -> None:
        self.opened = 0
        """How often it was opened: SQLite's counters of a connection start over each time."""
        self._pool = pool
        self.log = ""
        """The path of the write-ahead log, which lies beside the file itself, not beside a symbolic link to it."""
        self._sqlite: sqlite3.Connection | None = None
        self._file: opening.FileIdentity = None
        self._lock = threading.Lock()
        _forks.watch(self)

    def select(self, name: str, parameters: Parameters = ()) -> list[Any]:
        """Return the rows that ``sql/<name>.sql`` reads, outside a transaction."""
        text = statement(name)
        return self._use(lambda sqlite: sqlite.execute(text, parameters).fetchall())

    def data_version(self) -> tuple[int, int]:
        """Return a value that differs if another connection has committed since, or this one was reopened."""
        with self._lock:
            if self._sqlite is not None:  # hot path: an idle consumer calls this a hundred times a second
                with contextlib.suppress(sqlite3.Error):
                    return self.opened, self._sqlite.execute(_DATA_VERSION).fetchone()[0]
        return self._use(lambda sqlite: (self.opened, sqlite.execute(_DATA_VERSION).fetchone()[0]))

    def prepare(self, timeout: float) -> bool:
        """Open the file and ensure its tables. False if the file stays locked for *timeout* seconds."""
        try:
            self._use(lambda _: None, timeout)
        except BackendTimeout:
            return False
        return True

    def refuse_if_full(self, size: int) -> None:
        """Raise ``BackendFull`` if the disk lacks room for *size* bytes of new jobs beside what draining needs."""
        disk_space = self._pool.disk_space
        if disk_space.is_due(size):
            self._use(lambda sqlite: disk_space.refuse_if_full(sqlite, self._pool.path, self.log, size))

    def body_limit(self) -> int:
        """Return the largest body in bytes that this build of SQLite takes."""
        return self._use(lambda sqlite: min(MAX_BODY, sqlite.getlimit(sqlite3.SQLITE_LIMIT_LENGTH) - 1_000))

    def write(self, work: Callable[[Transaction], _T]) -> _T:
        """Run *work* in a transaction with the write lock. Commits at the end, rolls back on any exception.

        IMMEDIATE, because a transaction that reads first and writes later fails at once if another one wrote in
        between.
        """

        def transact(sqlite: sqlite3.Connection) -> _T:
            try:
                retry_while_locked(lambda: sqlite.execute("BEGIN IMMEDIATE"), self._pool.timeout, self._pool.path)
                result = work(Transaction(sqlite))
                sqlite.execute("COMMIT")
            except BaseException:
                self._roll_back(sqlite)
                raise
            self._limit_log(sqlite)
            return result

        return self._use(transact, is_repeatable=False)

    def write_single(self, statement: Callable[[Transaction], None]) -> None:
        """Run a single *statement*, which SQLite makes a transaction of its own.

        It is repeated while the file is locked: a refused statement has changed nothing.
        """

        def write(sqlite: sqlite3.Connection) -> None:
            retry_while_locked(lambda: statement(Transaction(sqlite)), self._pool.timeout, self._pool.path)
            self._limit_log(sqlite)

        self._use(write, is_repeatable=False)

    def close(self) -> None:
        """Close the connection until it is used again."""
        with self._lock:
            self._drop()

    def __del__(self) -> None:
        if getattr(self, "_sqlite", None) is not None:
            self._drop()

    def _use(
        self, work: Callable[[sqlite3.Connection], _T], timeout: float | None = None, *, is_repeatable: bool = True
    ) -> _T:
        """Run *work* with the sqlite3 connection, under the lock; if *is_repeatable*, again while the file is locked.

        Not a context manager of ``contextlib``'s: an asynchronous exception (Ctrl-C, a time limit) may be raised
        outside its generator, which then keeps the lock, and the transaction, as long as the traceback is referenced.
        """
        patience = self._pool.timeout if timeout is None else timeout
        with self._lock:
            try:
                sqlite = self._open(patience)
                if not is_repeatable:
                    return work(sqlite)
                return retry_while_locked(lambda: work(sqlite), patience, self._pool.path)
            except sqlite3.Error as exc:
                if not is_busy(exc):
                    self._drop()  # the next call opens a new one
                raise explain(exc, self._pool.path, patience) from exc

    def _open(self, timeout: float) -> sqlite3.Connection:
        if self._sqlite is not None and (self._file is None or self._file != opening.file_identity(self._pool.path)):
            self._drop()  # otherwise writes would go to a file that is not at this path any more
        if self._sqlite is None:
            _forks.refuse(self._pool.path)
            self._sqlite, self._file = self._pool.open(timeout)
            self.log = os.path.realpath(self._pool.path) + "-wal"
            self.opened += 1
        return self._sqlite

    def _limit_log(self, sqlite: sqlite3.Connection) -> None:
        """Restart the log if it is long. SQLite does that only when no connection reads, which does not happen while
        many processes work.

        The size is checked by time, not by commits: one commit of a large batch may write megabytes. After a failed
        checkpoint the pause is longer, so that a reader that stays for hours costs the writers next to nothing.
        """
        now = time.monotonic()
        if now < self._pool.next_log_check_at:
            return
        pause = _LOG_CHECK_PAUSE
        if _size(self.log) > opening.LONG_LOG:
            pause = _CHECKPOINT_PAUSE
            with contextlib.suppress(sqlite3.Error):  # the commit stands; a later commit tries again
                pause = _restart_log(sqlite)
        self._pool.next_log_check_at = time.monotonic() + pause

    def _roll_back(self, sqlite: sqlite3.Connection) -> None:
        try:
            if sqlite.in_transaction:
                sqlite.execute("ROLLBACK")
        except sqlite3.Error:
            self._drop()  # closing rolls back

    def _drop(self) -> None:
        sqlite, self._sqlite = self._sqlite, None
        if sqlite is not None:
            with contextlib.suppress(sqlite3.Error):
                sqlite.close()

    # --- forks ---

    def close_for_fork(self, deadline: float) -> bool:
        """Close and stay locked, so that a child inherits no open file. False if another thread keeps using it."""
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return False
        self._drop()
        return True

    def unlock_in_parent(self) -> None:
        """Unlock after a fork; the next call opens the connection."""
        self._lock.release()

    def reset_in_child(self) -> tuple[sqlite3.Connection | None, opening.FileIdentity]:
        """Take a new lock. Returns the sqlite3 connection that could not be closed before the fork, and its file."""
        self._lock = threading.Lock()
        inherited, self._sqlite = self._sqlite, None
        return inherited, self._file


class _Forks:
    """Closes every connection before a fork: SQLite records held locks per process, and a child that inherits the
    record takes its parent's locks for its own.

    A connection that another thread uses for too long stays open. The child keeps the copy for ever, as closing it
    would roll back the parent's transaction in the memory that both share. The child never uses that file: a write
    would wait for ever for a lock of that transaction, and a read would take no lock.
    """

    def __init__(self) -> None:
        self.guard = threading.Lock()
        """Held while a set of connections changes or is read."""
        self._connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._closed: list[Connection] = []
        self._inherited: list[tuple[sqlite3.Connection, opening.FileIdentity]] = []
        forks.register(before=self._before, in_parent=self._in_parent, in_child=self._in_child)

    def watch(self, connection: Connection) -> None:
        with self.guard:
            self._connections.add(connection)

    def refuse(self, path: str) -> None:
        """Raise ``BackendUnavailable`` in a child that has inherited an open connection to the file at *path*."""
        if self._inherited and opening.file_identity(path) in [identity for _, identity in self._inherited]:
            raise BackendUnavailable(
                f"{path} cannot be used in this process: it was forked while another thread of its parent was in a "
                f"call on that file for more than {_FORK_PATIENCE:g} s; fork when no thread waits for a locked file, "
                'or start a new interpreter ("spawn" in multiprocessing)'
            )

    def _before(self) -> None:
        self.guard.acquire()
        deadline = time.monotonic() + _FORK_PATIENCE
        self._closed = [connection for connection in self._connections if connection.close_for_fork(deadline)]
        opening.create_lock.acquire()  # last: a thread that holds it waits for no other lock

    def _in_parent(self) -> None:
        for connection in self._closed:
            connection.unlock_in_parent()
        self._release()

    def _in_child(self) -> None:
        kept = [connection.reset_in_child() for connection in self._connections]
        self._inherited += [(sqlite, file) for sqlite, file in kept if sqlite is not None]
        self._release()

    def _release(self) -> None:
        self._closed = []
        opening.create_lock.release()
        self.guard.release()


_forks = _Forks()


def _restart_log(sqlite: sqlite3.Connection) -> float:
    """Let the next commit write to the log's beginning, unless a reader prevents it. Returns the seconds to pause.

    ``PASSIVE`` moves frames into the file and waits for no reader. ``RESTART`` keeps the write lock while it waits for
    readers, so it is only used when all frames are moved: a reader that needs one of them may stay for hours.

    A file takes one checkpoint at a time, and SQLite does not wait for the end of another one. This loop does, without
    a lock: with many writers a checkpoint runs at nearly any time, and writers that wait here write nothing.
    """
    give_up_at = time.monotonic() + _CHECKPOINT_PATIENCE
    (page,) = sqlite.execute("PRAGMA page_size").fetchone()
    while time.monotonic() < give_up_at:
        _, frames, moved = _checkpoint(sqlite, "PASSIVE")
        if 0 <= frames * page < opening.LONG_LOG:
            return 0.0  # another connection has restarted it, and no commit has truncated the file yet
        if moved < frames:
            return _CHECKPOINT_PAUSE
        if frames > 0 and _checkpoint(sqlite, "RESTART")[0] == 0:
            return 0.0
        time.sleep(random.uniform(0.0002, 0.001))  # noqa: S311 - jitter, not for security
    return _CHECKPOINT_PAUSE


def _checkpoint(sqlite: sqlite3.Connection, mode: str) -> tuple[int, int, int]:
    """Run a checkpoint.

    Returns whether it was blocked, the frames in the log, and those moved; -1 if another one runs.
    """
    sqlite.execute(f"PRAGMA busy_timeout = {_READERS_PATIENCE if mode == 'RESTART' else 0}")
    try:
        busy, frames, moved = sqlite.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
    finally:
        sqlite.execute("PRAGMA busy_timeout = 0")
    return busy, frames, moved


def _size(path: str) -> int:
    """Return the size of a file in bytes, 0 if it does not exist."""
    try:
        return os.stat(path).st_size  # noqa: PTH116 - half the cost of Path.stat
    except OSError:
        return 0
