"""Enqueuing inside a transaction of the caller's own, on the caller's own connection.

The driver adds rows and nothing else: it neither commits nor rolls back what the caller did. Whatever the session's
modes, zone, character set and isolation are, the statement means the same (``statements`` tells why).

Such jobs are put among those that became ready again: the caller may commit any time later, when consumers believe
that they have seen all that is as old (``floors``).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pymysql

from multiq.errors import BackendTimeout, OptionInvalid

from .failures import code_of, explain
from .jobs import AGAIN, inserts
from .replay import CHANGED, DEADLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from multiq.backend import NewJob

    from .connection import Database

_IN_TRANSACTION, _AUTOCOMMIT = 0x1, 0x2  # in the server's status, which comes with each reply


class CallersTransaction:
    """A caller's connection as a place to enqueue to. Raises ``OptionInvalid`` if it is not one."""

    def __init__(self, database: Database, connection: Any) -> None:
        self._database = database
        self._execute, self._driver = _opened(connection)

    def enqueue(self, queue: str, jobs: Sequence[NewJob]) -> None:
        """Add jobs. They exist once the caller commits, or at once if the connection commits by itself."""
        if self._database.max_packet is None:
            with self._database.borrowed() as ours:  # makes the tables, which would end the caller's transaction
                ours.ask("SELECT 1")
        table = f"`{self._database.login.database.replace('`', '``')}`.multiq_jobs"
        chunk = (self._database.max_packet or 0) // 2
        statements = inserts(queue, jobs, self._database.now, ready=AGAIN, table=table, chunk=chunk)
        with self._explained(), self._whole(len(statements)):
            for statement in statements:
                self._execute(statement)

    @contextlib.contextmanager
    def _whole(self, statements: int) -> Iterator[None]:
        """Several statements are all carried out or none, also for a caller who catches the error and commits."""
        if statements <= 1:
            yield
            return
        status = self._driver.server_status
        commits_by_itself = status & _AUTOCOMMIT and not status & _IN_TRANSACTION
        begin, end, undo = ("BEGIN", "COMMIT", "ROLLBACK") if commits_by_itself else _SAVEPOINT
        self._execute(begin)
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # the server may have undone everything itself
                self._execute(undo)
            raise
        self._execute(end)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as exc:
            cause = exc if isinstance(exc, pymysql.MySQLError) else getattr(exc, "orig", exc)
            if not isinstance(cause, pymysql.MySQLError | OSError):
                raise OptionInvalid(f"connection= cannot be used: {exc}") from exc
            if code_of(cause) in {DEADLOCK, CHANGED}:
                raise BackendTimeout(
                    f"the server has rolled back the transaction of connection= ({cause}): run all of it again"
                ) from exc
            raise explain(cause, f"connection= to {self._driver.host_info}", self._database.timeout) from exc


_SAVEPOINT = ("SAVEPOINT multiq", "RELEASE SAVEPOINT multiq", "ROLLBACK TO SAVEPOINT multiq")


def _opened(connection: Any) -> tuple[Callable[[str], Any], Any]:
    """How to run a statement, and PyMySQL's connection. SQLAlchemy runs it itself: else it knows of no transaction."""
    if isinstance(connection, pymysql.connections.Connection):
        return lambda text: _run(connection, text), connection
    try:
        inner = connection.connection
        if callable(inner):  # an SQLAlchemy Session
            connection = inner()
            inner = connection.connection
        driver, execute = inner.driver_connection, connection.exec_driver_sql
    except AttributeError:
        driver = None
    if isinstance(driver, pymysql.connections.Connection):
        return execute, driver
    raise OptionInvalid(
        "connection= must be a connection of PyMySQL's, or an SQLAlchemy Connection or Session over one "
        f"(mysql+pymysql://), not a {type(connection).__name__}"
    )


def _run(connection: pymysql.connections.Connection[Any], text: str) -> None:
    with pymysql.cursors.Cursor(connection) as cursor:  # theirs may make anything of it
        cursor.execute(text)
