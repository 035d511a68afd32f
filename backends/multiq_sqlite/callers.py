"""Enqueuing inside a transaction of the caller's own, on the caller's own connection.

The driver adds rows and nothing else: it neither commits nor rolls back what the caller did. A savepoint makes the
batch whole or nothing also for a caller who catches the error and commits.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multiq.errors import BackendTimeout, OptionInvalid

from . import schema
from .connection import Transaction
from .failures import explain, is_busy, primary_code
from .jobs import insert, size_of
from .opening import require_library

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from multiq.backend import NewJob
    from multiq.clock import Clock

    from .connection import Database

_LEGACY = -1  # sqlite3.LEGACY_TRANSACTION_CONTROL, which Python 3.11 has no name for


class CallersTransaction:
    """A caller's connection as a place to enqueue to. Raises ``OptionInvalid`` if it is not one to this file."""

    def __init__(self, database: Database, connection: Any) -> None:
        require_library()
        self._database = database
        self._sqlite = _sqlite_connection(connection)

    def enqueue(self, queue: str, jobs: Sequence[NewJob], clock: Clock) -> None:
        """Add jobs. They exist once the caller commits, or at once if the connection commits by itself."""
        with self._explained():
            # first: any statement of theirs may pin what they see of the file
            has_tables = self._tables_are_made(size_of(jobs))
            name = self._schema_name()

            def add() -> None:
                if not has_tables:
                    self._make_tables(name)
                insert(Transaction(self._sqlite), queue, jobs, clock(), name)

            self._write(add)

    # --- the file ---

    def _schema_name(self) -> str:
        """What the connection calls our file: main, or the name that it is attached under."""
        # as bytes, because their text_factory may make anything of a text
        listed = self._cursor().execute(
            "SELECT CAST(name AS BLOB), CAST(file AS BLOB), CAST('x' AS BLOB) FROM pragma_database_list"
        )
        files = [(_decoded(name, x), _decoded(file or b"", x)) for name, file, x in listed]
        for name, file in files:
            if file and _is_same(file, self._database.path):
                return '"' + name.replace('"', '""') + '"'
        theirs = " and ".join(file or "an in-memory database" for name, file in files if name != "temp")
        raise OptionInvalid(
            f"connection= is open on {theirs}, but the jobs are in {self._database.path}: pass a connection to that "
            "file, or ATTACH it"
        )

    def _tables_are_made(self, size: int) -> bool:
        """Make the tables by a connection of our own, before theirs is touched. False: they have the file locked.

        Raises ``BackendFull`` if there is no room for *size* bytes of jobs.
        """
        patience = 0.0 if self._sqlite.in_transaction else self._database.timeout
        with self._database.borrowed() as connection:
            if not connection.prepare(patience):
                return False
            connection.refuse_if_full(size)
            return True

    def _make_tables(self, name: str) -> None:
        """Their transaction holds the lock, so the tables can only be made inside it, and go if it rolls back."""
        cursor = self._cursor()
        if name == '"main"':
            schema.bring_up(cursor, self._database.path)
        elif schema.version(cursor, self._database.path, name) != schema.VERSION:
            raise BackendTimeout(
                f"{self._database.path} has not been used with this multiq yet, and this transaction has it locked, "
                "so that its tables cannot be made: use the queue once before, for instance ask for its stats"
            )

    # --- the transaction ---

    def _write(self, work: Callable[[], None]) -> None:
        """Do *work* in their transaction, whole or not at all.

        Not a context manager of ``contextlib``'s, for the reason in ``Connection._use``: they may commit while they
        handle an exception from outside that left its generator, and with it half a batch, as it was.
        """
        began = self._begin_if_python_would()
        try:
            self._sqlite.execute("SAVEPOINT multiq")
            work()
            self._sqlite.execute("RELEASE multiq")  # a COMMIT, if they have no transaction open
        except BaseException:
            self._quietly("ROLLBACK TO multiq")
            self._quietly("RELEASE multiq")
            if began:
                self._quietly("ROLLBACK")
            raise

    def _begin_if_python_would(self) -> bool:
        """By its old rules sqlite3 opens a transaction before it runs an INSERT, for the caller to commit."""
        level = self._sqlite.isolation_level
        if self._sqlite.in_transaction or level is None or getattr(self._sqlite, "autocommit", _LEGACY) != _LEGACY:
            return False
        self._sqlite.execute(f"BEGIN {level}")
        return True

    def _quietly(self, text: str) -> None:
        """Undo after an error, of which SQLite may have undone everything itself."""
        with contextlib.suppress(sqlite3.Error):
            self._sqlite.execute(text)

    def _cursor(self) -> sqlite3.Cursor:
        cursor = self._sqlite.cursor()
        cursor.row_factory = None  # theirs may make anything of a row
        return cursor

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.ProgrammingError as exc:
            raise OptionInvalid(f"connection= cannot be used: {exc}") from exc
        except sqlite3.Error as exc:
            if is_busy(exc):
                raise BackendTimeout(
                    f"connection= could not get the lock to write {self._database.path} ({exc}): begin the transaction "
                    "with BEGIN IMMEDIATE, because one that began by reading cannot write after somebody else has"
                ) from exc
            if primary_code(exc) == sqlite3.SQLITE_READONLY:  # the file itself is not: our own connection has opened it
                raise OptionInvalid(
                    f"connection= may only read {self._database.path} ({exc}): it must be one that may write, opened "
                    "without mode=ro and immutable=1, and with PRAGMA query_only off"
                ) from exc
            raise explain(exc, self._database.path, self._database.timeout) from exc


def _sqlite_connection(connection: Any) -> sqlite3.Connection:
    """The connection itself, or the one inside SQLAlchemy's."""
    inner = getattr(connection, "connection", None)
    for candidate in (
        connection,
        getattr(connection, "driver_connection", None),
        getattr(inner, "driver_connection", None),
    ):
        if isinstance(candidate, sqlite3.Connection):
            return candidate
    raise OptionInvalid(
        "connection= must be a sqlite3.Connection, or an SQLAlchemy connection over one, "
        f"not a {type(connection).__name__}"
    )


def _decoded(text: bytes, x: bytes) -> str:
    """A text of a database whose encoding makes an x of the bytes *x*: UTF-8, or UTF-16 in either order."""
    if len(x) == 1:
        return os.fsdecode(text)
    return text.decode("utf-16-le" if x[0] else "utf-16-be", "replace")


def _is_same(one: str, other: str) -> bool:
    try:
        return Path(one).samefile(other)
    except OSError:
        return False
