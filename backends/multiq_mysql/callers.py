"""Enqueuing inside a transaction of the caller's own, on the caller's own connection.

The driver adds rows and nothing else: it neither commits nor rolls back what the caller did. Whatever the session's
modes, zone, character set and isolation are, the statement means the same (``statements`` tells why).

Such jobs are put among those that became ready again: the caller may commit any time later, when consumers believe
that they have seen all that is as old (``floors``).
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import pymysql

from multiq.errors import BackendTimeout, MultiqError, OptionInvalid

from .failures import code_of, explain
from .jobs import AGAIN, inserts
from .replay import CHANGED, DEADLOCK, REFUSED_BY_GROUP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from multiq.backend import NewJob

    from .connection import Database
    from .login import Login

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
        with self._explained():
            self._check_server()
        table = f"`{self._database.login.database.replace('`', '``')}`.multiq_jobs"
        chunk = (self._database.max_packet or 0) // 2
        statements = inserts(queue, jobs, self._database.true_now, ready=AGAIN, table=table, chunk=chunk)
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
        begin, end, undo = ("START TRANSACTION", "COMMIT", "ROLLBACK") if commits_by_itself else _SAVEPOINT
        self._execute(begin)
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # the server may have undone everything itself
                self._execute(undo)
            raise
        self._execute(end)

    def _check_server(self) -> None:
        """Raises ``OptionInvalid`` for another server than the URL's: nobody would find the job there.

        Asked once for each of the caller's sessions, with statements that read no table: that would begin a snapshot.
        """
        session = self._driver.thread_id()
        if _checked.get(self._driver) == (self._database.login, session):
            return
        (theirs,) = _rows(self._driver, _WHERE)
        if theirs != self._database.incarnation[:-1]:
            with self._database.borrowed() as connection:
                ours, groups = connection.ask(_WHERE)[0], [connection.ask(text) for text in _GROUPS]
            same_group = any(
                rows and rows[0][1] and rows == _rows(self._driver, text)
                for text, rows in zip(_GROUPS, groups, strict=True)
            )
            if theirs != ours and not same_group:
                raise OptionInvalid(
                    f"connection= leads to the server {theirs[0]}:{theirs[1]}, and the URL to {ours[0]}:{ours[1]} "
                    f"({self._database.login.place}): pass a connection to the URL's server, or name the other one"
                )
        _checked[self._driver] = (self._database.login, session)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except MultiqError:
            raise
        except Exception as exc:
            cause = exc if isinstance(exc, pymysql.MySQLError) else getattr(exc, "orig", exc)
            if not isinstance(cause, pymysql.MySQLError | OSError):
                raise OptionInvalid(f"connection= cannot be used: {exc}") from exc
            if code_of(cause) == _READ_ONLY:
                raise OptionInvalid(
                    f"connection= is in a transaction that was begun READ ONLY ({cause}): begin it READ WRITE"
                ) from exc
            if code_of(cause) in {DEADLOCK, CHANGED, REFUSED_BY_GROUP}:
                raise BackendTimeout(
                    f"the server has rolled back the transaction of connection= ({cause}): run all of it again"
                ) from exc
            raise explain(cause, f"connection= to {self._driver.host_info}", self._database.timeout) from exc


_READ_ONLY = 1792
_WHERE = "SELECT @@hostname, @@port"
_GROUPS = (
    "SHOW GLOBAL STATUS LIKE 'wsrep_cluster_state_uuid'",
    "SHOW GLOBAL VARIABLES LIKE 'group_replication_group_name'",
)
"""Nodes of one cluster have the same rows."""

_checked: weakref.WeakKeyDictionary[Any, tuple[Login, int]] = weakref.WeakKeyDictionary()
"""Sessions of callers that lead to the server of this login."""

_SAVEPOINT = ("SAVEPOINT multiq", "RELEASE SAVEPOINT multiq", "ROLLBACK TO SAVEPOINT multiq")


def _opened(connection: Any) -> tuple[Callable[[str], Any], Any]:
    """How to run a statement, and PyMySQL's connection. SQLAlchemy runs it itself: else it knows of no transaction."""
    if isinstance(connection, pymysql.connections.Connection):
        return lambda text: _rows(connection, text), connection
    try:
        inner = connection.connection
        if callable(inner):  # an SQLAlchemy Session
            connection = inner()
            inner = connection.connection
        driver, execute = inner.driver_connection, lambda text: connection.exec_driver_sql(text.replace("%", "%%"))
    except AttributeError:
        driver = None
    if isinstance(driver, pymysql.connections.Connection):
        return execute, driver
    raise OptionInvalid(
        "connection= must be a connection of PyMySQL's, or an SQLAlchemy Connection or Session over one "
        f"(mysql+pymysql://), not a {type(connection).__name__}"
    )


def _rows(connection: pymysql.connections.Connection[Any], text: str) -> tuple[Any, ...]:
    with pymysql.cursors.Cursor(connection) as cursor:  # theirs may make anything of it
        cursor.execute(text)
        return tuple(cursor.fetchall())
