"""Enqueues inside the caller's transaction, on the caller's connection.

The driver only adds rows. It neither commits nor rolls back the caller's work. A savepoint makes the batch atomic, even
if the caller catches the driver's error and commits.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from multiq.driverkit.external_transaction import explained, unwrap
from multiq.errors import BackendTimeout, ConnectionElsewhere, OptionInvalid

from . import schema
from .connection import Transaction
from .errors import explain, is_busy, primary_code
from .limits import add_limits, unstored
from .opening import require_library
from .records import size_of
from .unique import insert_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from multiq.backend import NewJob, Quota
    from multiq.driverkit.clock import Clock
    from multiq.driverkit.external_transaction import ExternalConnection
    from multiq.errors import MultiqError

    from .connection import Parameters
    from .pool import Pool

_LEGACY = -1  # sqlite3.LEGACY_TRANSACTION_CONTROL. Python 3.11 has no name for it.

_ACCEPTED = (
    "a sqlite3.Connection, a Connection or Session of SQLAlchemy's over one (sqlite+aiosqlite:// through run_sync, "
    "too), or Django's connection"
)


class ExternalTransaction:
    """Enqueues on a caller's connection. Raises ``OptionInvalid`` if the connection is not open on this file."""

    def __init__(self, pool: Pool, connection: Any) -> None:
        require_library()
        self._pool = pool
        with explained(self._translate):
            self._caller = unwrap(connection, (sqlite3.Connection,), _ACCEPTED)
            self._sqlite = _sqlite_connection(self._caller)

    def enqueue(self, queue: str, jobs: Sequence[NewJob], clock: Clock) -> list[str]:
        """Add jobs, and return the ids that ``Backend.enqueue`` returns.

        The jobs exist when the caller has committed. If the connection commits by itself, they exist when this method
        returns.
        """
        with explained(self._translate):
            # The tables are created first. Any statement on the caller's connection may begin a read transaction. A
            # connection in such a transaction does not see tables that are made later.
            has_tables = self._ensure_tables(size_of(jobs))
            self._caller.begin()
            name = self._schema_name()

            ids: list[str] = []

            def add() -> None:
                if not has_tables:
                    self._create_tables(name)
                ids.extend(insert_all(Transaction(self._sqlite), queue, jobs, clock(), name))

            self._write(add)
        return ids

    def store_limits(self, queue: str, quotas: Mapping[str, Quota]) -> bool:
        """Store limits that are not pinned in the caller's transaction. The caller's transaction may have the write
        lock, so another connection could not store them.

        Returns whether nothing had to be stored, because the committed limits are the same.
        """
        with explained(self._translate):
            has_tables = self._ensure_tables(0)
            if has_tables:
                with self._pool.borrowed() as connection:
                    rows = connection.select("quotas", {"queue": queue})
                if not unstored(rows, quotas):
                    return True
            self._caller.begin()
            name = self._schema_name()

            def add() -> None:
                if not has_tables:
                    self._create_tables(name)
                add_limits(Transaction(self._sqlite), queue, quotas, name)

            self._write(add)
        return False

    # --- the file ---

    def _schema_name(self) -> str:
        """Return the schema name of the pool's file in the caller's connection: main, or the name that the file is
        attached as.
        """
        # The values are read as bytes, because the caller's text_factory may return anything.
        listed = self._cursor().execute(
            "SELECT CAST(name AS BLOB), CAST(file AS BLOB), CAST('x' AS BLOB) FROM pragma_database_list"
        )
        files = [(_decoded(name, x), _decoded(file or b"", x)) for name, file, x in listed]
        for name, file in files:
            if file and _is_same(file, self._pool.path):
                return '"' + name.replace('"', '""') + '"'
        others = " and ".join(file or "an in-memory database" for name, file in files if name != "temp")
        raise ConnectionElsewhere(
            f"connection= is open on {others}, but the jobs are in {self._pool.path}: pass a connection to the jobs' "
            "file, or ATTACH that file to this connection"
        )

    def _ensure_tables(self, size: int) -> bool:
        """Create the tables on a connection of the pool, before the caller's connection is used.

        Returns False if the file is locked. Raises ``BackendFull`` if there is no room for *size* bytes of jobs.
        """
        patience = 0.0 if self._sqlite.in_transaction else self._pool.timeout
        with self._pool.borrowed() as connection:
            if not connection.prepare(patience):
                return False
            connection.refuse_if_full(size)
            return True

    def _create_tables(self, name: str) -> None:
        """Create the tables inside the caller's transaction, which holds the lock. A rollback removes the tables."""
        cursor = self._cursor()
        if name == '"main"':
            schema.upgrade(cursor, self._pool.path)
        elif schema.version(cursor, self._pool.path, name) != schema.VERSION:
            raise BackendTimeout(
                f"{self._pool.path} lacks the tables of this version of multiq, and they cannot be made now, because "
                "this transaction has the file locked: use the queue once before the transaction, for instance ask for "
                "its stats"
            )

    # --- the transaction ---

    def _write(self, work: Callable[[], None]) -> None:
        """Run *work* in the caller's transaction. After an error, nothing that *work* has done takes effect.

        This method is not a generator with ``contextlib.contextmanager``. Ctrl-C or a time limit may raise an exception
        that leaves such a generator suspended when half of the batch is written. The caller may then commit that half
        while it handles the exception.
        """
        began = self._begin_if_python_would()
        # The caller's factories may return anything, and the statements of unique jobs and of limits read rows.
        factories = self._sqlite.row_factory, self._sqlite.text_factory
        try:
            self._sqlite.row_factory, self._sqlite.text_factory = None, str
            self._sqlite.execute("SAVEPOINT multiq")
            work()
            self._sqlite.execute("RELEASE multiq")  # This commits if no transaction was open before the savepoint.
        except BaseException:
            self._try_execute("ROLLBACK TO multiq")
            self._try_execute("RELEASE multiq")
            if began:
                self._try_execute("ROLLBACK")
            raise
        finally:
            self._sqlite.row_factory, self._sqlite.text_factory = factories

    def _begin_if_python_would(self) -> bool:
        """Begin a transaction if sqlite3's legacy mode would begin one. The caller commits the transaction."""
        level = self._sqlite.isolation_level
        if self._sqlite.in_transaction or level is None or getattr(self._sqlite, "autocommit", _LEGACY) != _LEGACY:
            return False
        self._sqlite.execute(f"BEGIN {level}")
        return True

    def _try_execute(self, text: str) -> None:
        """Run a statement that undoes work after an error. The statement fails if SQLite has already rolled back by
        itself."""
        with contextlib.suppress(sqlite3.Error):
            self._sqlite.execute(text)

    def _cursor(self) -> sqlite3.Cursor:
        cursor = self._sqlite.cursor()
        if isinstance(cursor, sqlite3.Cursor):
            cursor.row_factory = None  # The caller's row_factory may return anything.
        return cursor

    def _translate(self, exc: BaseException) -> MultiqError | None:
        if not isinstance(exc, sqlite3.Error) or isinstance(exc, sqlite3.ProgrammingError):
            return None
        if is_busy(exc):
            return BackendTimeout(
                f"connection= could not get the lock to write {self._pool.path} ({exc}): begin the transaction "
                "with BEGIN IMMEDIATE, because one that began with a read cannot write after another connection has "
                "written"
            )
        if primary_code(exc) == sqlite3.SQLITE_READONLY:  # The file itself is writable, because the pool has opened it.
            return OptionInvalid(
                f"connection= must be able to write {self._pool.path}, got a read-only one ({exc}): it must be opened "
                "without mode=ro and immutable=1, and with PRAGMA query_only off"
            )
        return explain(exc, self._pool.path)


class _AsyncioConnection:
    """Gives an aiosqlite connection the methods of ``sqlite3`` that this module uses. SQLAlchemy's adapter runs the
    methods.
    """

    def __init__(self, caller: ExternalConnection) -> None:
        self._adapter = caller.adapter
        self._driver = caller.driver

    def cursor(self) -> _AsyncioCursor:
        return _AsyncioCursor(self._adapter.cursor())

    @property
    def in_transaction(self) -> bool:
        return bool(self._driver.in_transaction)

    @property
    def isolation_level(self) -> str | None:
        level: str | None = self._driver.isolation_level
        return level

    @property
    def row_factory(self) -> Any:
        return self._driver.row_factory

    @row_factory.setter
    def row_factory(self, factory: Any) -> None:
        self._driver.row_factory = factory

    @property
    def text_factory(self) -> Any:
        return self._driver.text_factory

    @text_factory.setter
    def text_factory(self, factory: Any) -> None:
        self._driver.text_factory = factory

    def execute(self, text: str, parameters: Parameters = ()) -> _AsyncioCursor:
        return self.cursor().execute(text, parameters)


class _AsyncioCursor:
    """A cursor whose ``execute`` returns the cursor itself, like the cursors of ``sqlite3``."""

    def __init__(self, cursor: Any) -> None:
        self._cursor = cursor
        self.fetchone = cursor.fetchone
        self.fetchall = cursor.fetchall

    def execute(self, text: str, parameters: Parameters = ()) -> _AsyncioCursor:
        self._cursor.execute(text, parameters)
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(self.fetchall())


def _sqlite_connection(caller: ExternalConnection) -> sqlite3.Connection:
    """Return the object that runs statements on the driver's connection."""
    if isinstance(caller.driver, sqlite3.Connection):
        return caller.driver
    if caller.library == "aiosqlite":
        return cast("sqlite3.Connection", _AsyncioConnection(caller))
    raise ConnectionElsewhere(f"connection= must be {_ACCEPTED}, got one over a {type(caller.driver).__name__}")


def _decoded(text: bytes, x: bytes) -> str:
    """Decode a database's text. The text is in UTF-8, or in UTF-16 with either byte order.

    *x* is the letter x as the database encodes it. It shows which encoding the database uses.
    """
    if len(x) == 1:
        return os.fsdecode(text)
    return text.decode("utf-16-le" if x[0] else "utf-16-be", "replace")


def _is_same(one: str, other: str) -> bool:
    try:
        return Path(one).samefile(other)
    except OSError:
        return False
