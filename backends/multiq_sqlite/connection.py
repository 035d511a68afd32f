"""One connection to the file. It opens again after a fork or an error, and runs transactions.

====================  ======================================================================  =======================
guarantee             how                                                                     cost
====================  ======================================================================  =======================
no half-done call     a call is a single statement, or ``BEGIN IMMEDIATE`` ... ``COMMIT``,    one fsync per commit
                      which any exception rolls back
no "database is       a call retries until it has the lock, up to the URL's timeout, with     ``BackendTimeout`` at
locked"               pauses from a fraction of a millisecond on (write_lock.py)              the deadline
safe forks            every connection is closed before a fork and opens again after it       about 1 ms to reopen
                      (forks.py)
a file that was       device and inode are compared before each use                           one ``stat``, about 1 us
deleted or replaced
====================  ======================================================================  =======================
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from multiq.errors import BackendTimeout, PayloadTooLarge

from . import write_ahead_log
from .errors import explain, is_busy
from .forks import fork_guard
from .opening import open_file
from .statements import statement
from .write_lock import lock_timeout, retry_while_locked

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .opening import FileIdentity
    from .pool import Pool

_T = TypeVar("_T")

Parameters: TypeAlias = "Mapping[str, Any] | Sequence[Any]"

MAX_BODY = 1_000_000_000 - 1_000  # bytes. SQLite's own limit is on a whole row.

SURELY_FITS = 1_000_000  # bytes. SQLite can be built with a limit below 1 GB, but not below this size.

_DATA_VERSION = "PRAGMA data_version"


class Transaction:
    """An open transaction. Runs the statements of ``sql/``."""

    __slots__ = ("_sqlite",)

    def __init__(self, sqlite: sqlite3.Connection) -> None:
        self._sqlite = sqlite

    def execute(self, name: str, parameters: Parameters = ()) -> sqlite3.Cursor:
        """Run ``sql/<name>.sql``."""
        return self._sqlite.execute(statement(name), parameters)

    def execute_text(self, text: str, parameters: Parameters = ()) -> sqlite3.Cursor:
        """Run a statement whose text was built from a file in ``sql/``."""
        return self._sqlite.execute(text, parameters)


class Connection:
    """A connection that opens when it is used. It opens again after a fork, an error, or a change of the file.

    Any thread may use it. A lock admits one thread at a time. No code of the application runs under this lock.
    """

    def __init__(self, pool: Pool) -> None:
        self.opened = 0
        """The number of times that the connection was opened. ``PRAGMA data_version`` starts over each time."""
        self._pool = pool
        self.log = ""
        """The path of the write-ahead log. The log lies beside the file itself, not beside a symbolic link to it."""
        self._sqlite: sqlite3.Connection | None = None
        self._file: FileIdentity = None
        self._lock = threading.Lock()
        fork_guard.watch(self)

    def select(self, name: str, parameters: Parameters = ()) -> list[Any]:
        """Return the rows that ``sql/<name>.sql`` reads, outside a transaction."""
        text = statement(name)
        return self._use(lambda sqlite: sqlite.execute(text, parameters).fetchall())

    def data_version(self) -> tuple[int, int]:
        """Return a value that changes when another connection commits, and when this connection opens again."""
        with self._lock:
            if self._sqlite is not None:  # An idle consumer calls this a hundred times a second.
                with contextlib.suppress(sqlite3.Error):
                    return self.opened, self._sqlite.execute(_DATA_VERSION).fetchone()[0]
        return self._use(lambda sqlite: (self.opened, sqlite.execute(_DATA_VERSION).fetchone()[0]))

    def prepare(self, timeout: float) -> bool:
        """Open the file and ensure its tables. Returns False if the file stays locked for *timeout* seconds."""
        try:
            self._use(lambda _: None, timeout)
        except BackendTimeout:
            return False
        return True

    def refuse_if_full(self, size: int) -> None:
        """Raise ``BackendFull`` if *size* bytes of new jobs would leave too little disk space to finish the jobs."""
        disk_space = self._pool.disk_space
        if disk_space.is_due(size):
            self._use(lambda sqlite: disk_space.refuse_if_full(sqlite, self._pool.path, self.log, size))

    def body_limit(self) -> int:
        """Return the largest body in bytes that this build of SQLite takes."""
        return self._use(lambda sqlite: min(MAX_BODY, sqlite.getlimit(sqlite3.SQLITE_LIMIT_LENGTH) - 1_000))

    def refuse_too_large(self, size: int, advice: str) -> None:
        """Raise ``PayloadTooLarge`` if this build of SQLite does not take a value of *size* bytes."""
        if size > SURELY_FITS and size > (limit := self.body_limit()):
            raise PayloadTooLarge(size, limit, advice)

    def write(self, work: Callable[[Transaction], _T]) -> _T:
        """Run *work* in a transaction with the write lock. Commits at the end, and rolls back on any exception.

        ``BEGIN IMMEDIATE`` takes the lock when the transaction begins. A transaction that reads first and takes the
        lock later fails without waiting if another transaction wrote in between.
        """

        def transact(sqlite: sqlite3.Connection) -> _T:
            try:
                _when_unlocked(lambda: sqlite.execute("BEGIN IMMEDIATE"), self._pool.timeout, self._pool.path)
                result = work(Transaction(sqlite))
                sqlite.execute("COMMIT")
            except BaseException:
                self._roll_back(sqlite)
                raise
            self._limit_log(sqlite)
            return result

        return self._use(transact, is_repeatable=False)

    def write_single(self, statement: Callable[[Transaction], None]) -> None:
        """Run a single *statement*. SQLite runs it as a separate transaction.

        The statement is repeated while the file is locked. An attempt that failed because of the lock has changed
        nothing.
        """

        def write(sqlite: sqlite3.Connection) -> None:
            _when_unlocked(lambda: statement(Transaction(sqlite)), self._pool.timeout, self._pool.path)
            self._limit_log(sqlite)

        self._use(write, is_repeatable=False)

    def close(self) -> None:
        """Close the connection until it is used again."""
        if fork_guard.is_forking_here:  # the collector closes a consumer; this thread holds the lock already
            return
        with self._lock:
            self._drop()

    def __del__(self) -> None:
        if getattr(self, "_sqlite", None) is not None:
            self._drop()

    def _use(
        self, work: Callable[[sqlite3.Connection], _T], timeout: float | None = None, *, is_repeatable: bool = True
    ) -> _T:
        """Run *work* with the sqlite3 connection, under the lock. With *is_repeatable*, *work* is repeated while the
        file is locked.

        This method is not a generator with ``contextlib.contextmanager``. Ctrl-C or a time limit may raise an exception
        while such a generator is suspended. The generator would then hold the lock and the transaction for as long as
        the traceback is referenced.
        """
        patience = self._pool.timeout if timeout is None else timeout
        with self._lock:
            try:
                sqlite = self._open(patience)
                if not is_repeatable:
                    return work(sqlite)
                return _when_unlocked(lambda: work(sqlite), patience, self._pool.path)
            except sqlite3.Error as exc:
                if is_busy(exc):
                    raise lock_timeout(exc, self._pool.path, patience) from exc
                self._drop()  # the next call opens a new one
                raise explain(exc, self._pool.path) from exc

    def _open(self, timeout: float) -> sqlite3.Connection:
        if self._sqlite is not None and self._is_replaced():
            self._drop()  # Without this, writes would go to a file that is no longer at this path.
        if self._sqlite is None:
            fork_guard.refuse(self._pool.path)
            self._sqlite, self._file = open_file(
                self._pool.path, self._pool.synchronous, timeout, create=self._pool.create
            )
            self.log = os.path.realpath(self._pool.path) + "-wal"
            self.opened += 1
        return self._sqlite

    def _is_replaced(self) -> bool:
        """Whether the path leads to another file than the open one, or to none."""
        try:
            status = os.stat(self._pool.path)  # noqa: PTH116 - before each call, and half the cost of Path.stat
        except OSError:
            return True
        return self._file != (status.st_dev, status.st_ino)

    def _limit_log(self, sqlite: sqlite3.Connection) -> None:
        """Restart the log if it is long.

        The log's size is checked at intervals of time. It is not checked after a number of commits, because a single
        large batch may have megabytes.
        """
        if time.monotonic() < self._pool.next_log_check_at:
            return
        is_long = _size_of(self.log) > write_ahead_log.LONG
        pause = write_ahead_log.restart(sqlite) if is_long else write_ahead_log.CHECK_PAUSE
        self._pool.next_log_check_at = time.monotonic() + pause

    def _roll_back(self, sqlite: sqlite3.Connection) -> None:
        try:
            if sqlite.in_transaction:
                sqlite.execute("ROLLBACK")
        except sqlite3.Error:
            self._drop()  # closing rolls back

    def _drop(self) -> None:
        sqlite = self._sqlite
        if sqlite is not None:
            try:
                with contextlib.suppress(sqlite3.Error):
                    sqlite.close()
            finally:
                # The attribute is cleared after the close, not before. If a fork happens during the close, the child
                # gets a copy that has locks. The child finds the copy in this attribute, and therefore does not use the
                # file.
                self._sqlite = None

    # --- forks ---

    def close_for_fork(self, deadline: float) -> bool:
        """Close the connection and hold its lock, so that a child inherits no open file.

        Returns False if another thread uses the connection until the deadline.
        """
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return False
        self._drop()
        return True

    def unlock_in_parent(self) -> None:
        """Unlock after a fork. The next call opens the connection."""
        self._lock.release()

    def reset_in_child(self) -> tuple[sqlite3.Connection | None, FileIdentity]:
        """Make a new lock. Returns the sqlite3 connection if the parent could not close it, and the file's identity."""
        self._lock = threading.Lock()
        inherited, self._sqlite = self._sqlite, None
        return inherited, self._file


def _when_unlocked(attempt: Callable[[], _T], timeout: float, path: str) -> _T:
    """Run *attempt* and return its result. While the file at *path* is locked, ``retry_while_locked`` repeats it."""
    try:
        return attempt()
    except sqlite3.OperationalError as exc:
        if not is_busy(exc):
            raise
    return retry_while_locked(attempt, timeout, path)


def _size_of(path: str) -> int:
    """Return the size of a file in bytes. 0 if it does not exist."""
    try:
        return os.stat(path).st_size  # noqa: PTH116 - half the cost of Path.stat
    except OSError:
        return 0
