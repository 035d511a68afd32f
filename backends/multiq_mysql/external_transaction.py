"""Enqueues inside the caller's transaction, on the caller's connection.

The driver only adds rows. It neither commits nor rolls back the caller's work. Its statements mean the same in every
SQL mode, time zone, character set and isolation level of the caller's session. ``statements`` explains why.

Such jobs are inserted in the state AGAIN. The caller may commit much later, when the consumers' cursors have already
passed jobs of the same age. ``scan_window`` explains the cursors.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from typing import TYPE_CHECKING, Any

import pymysql
from pymysql.connections import Connection
from pymysql.cursors import Cursor

from multiq.driverkit.external_transaction import driver_error, explained, unwrap
from multiq.errors import BackendTimeout, ConnectionElsewhere, OptionInvalid

from .errors import CHANGED, DEADLOCK, REFUSED_BY_GROUP, code_of, explain
from .records import AGAIN, have_keys, insert_statements
from .unique import judge_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from multiq.backend import NewJob
    from multiq.driverkit.external_transaction import ExternalConnection
    from multiq.errors import MultiqError

    from .dsn import Dsn
    from .pool import Pool

_ACCEPTED = (
    "a connection of PyMySQL or mysqlclient, SQLAlchemy's Connection or Session over one of them "
    "(mysql+pymysql, mysql+mysqldb; mysql+aiomysql and mysql+asyncmy through run_sync), or Django's connection"
)


class ExternalTransaction:
    """Enqueues on the caller's connection. Raises ``OptionInvalid`` if the connection cannot be used."""

    def __init__(self, pool: Pool, connection: Any) -> None:
        self._pool = pool
        with explained(self._translate):
            theirs = unwrap(connection, (Connection, *_mysqlclients()), _ACCEPTED)
            self._driver = theirs.driver
            self._execute = _statement_runner(theirs)

    def enqueue(self, queue: str, jobs: Sequence[NewJob]) -> list[str]:
        """Add jobs, and return the ids that ``Backend.enqueue`` returns.

        The jobs exist when the caller has committed. If the connection commits by itself, they exist when this method
        returns.
        """
        if self._pool.max_packet is None:
            # This creates the tables. DDL on the caller's connection would end its transaction.
            with self._pool.borrowed() as ours:
                ours.select("SELECT 1")
        with explained(self._translate):
            self._check_server()
        if have_keys(jobs):
            return self._enqueue_unique(queue, jobs)
        statements = self._inserts(queue, jobs)
        with explained(self._translate), self._whole(len(statements)):
            for statement in statements:
                self._execute(statement)
        return [job.id for job in jobs]

    def _enqueue_unique(self, queue: str, jobs: Sequence[NewJob]) -> list[str]:
        with explained(self._translate), self._whole(_SEVERAL):
            judgement = judge_in(self._execute, self._pool, [(queue, job) for job in jobs])
            new = [job for job in judgement.new if job is not None]
            changes = judgement.statements(self._pool.true_now, self._pool.dsn.database)
            for statement in [*changes, *self._inserts(queue, new)]:
                self._execute(statement)
        return judgement.ids

    def _inserts(self, queue: str, jobs: Sequence[NewJob]) -> list[str]:
        table = f"`{self._pool.dsn.database.replace('`', '``')}`.multiq_jobs"
        chunk = (self._pool.max_packet or 0) // 2
        return insert_statements(queue, jobs, self._pool.true_now, ready=AGAIN, table=table, chunk=chunk)

    @contextlib.contextmanager
    def _whole(self, statements: int) -> Iterator[None]:
        """Run all statements in the block. After an error, none of them takes effect, even if the caller catches the
        error and commits."""
        if statements <= 1:
            yield
            return
        begin, end, undo = ("START TRANSACTION", "COMMIT", "ROLLBACK") if self._commits_by_itself() else _SAVEPOINT
        self._execute(begin)
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # The server may already have rolled everything back.
                self._execute(undo)
            raise
        self._execute(end)

    def _commits_by_itself(self) -> bool:
        """Whether no transaction is open. Each statement is then a transaction, and a savepoint ends with it."""
        begin, end, _ = _SAVEPOINT
        self._execute(begin)
        try:
            self._execute(end)
        except Exception as exc:
            if code_of(driver_error(exc)) != _NO_SUCH_SAVEPOINT:
                raise
            return True
        return False

    def _check_server(self) -> None:
        """Raise ``OptionInvalid`` if the connection leads to another server than the URL names.

        No worker of the URL reads jobs from the other server.

        Each of the caller's sessions is checked once. The check reads no table, because that would begin a snapshot in
        the caller's transaction.
        """
        session = self._driver.thread_id()
        if _checked.get(self._driver) == (self._pool.dsn, session):
            return
        (theirs,) = self._execute(_WHERE)
        if theirs != self._pool.server_identity[:-1]:
            with self._pool.borrowed() as connection:
                ours, groups = connection.select(_WHERE)[0], [connection.select(text) for text in _GROUPS]
            same_group = any(
                rows and rows[0][1] and rows == tuple(self._execute(text))
                for text, rows in zip(_GROUPS, groups, strict=True)
            )
            if theirs != ours and not same_group:
                raise ConnectionElsewhere(
                    f"connection= leads to the server {theirs[0]}:{theirs[1]}, and the URL to {ours[0]}:{ours[1]} "
                    f"({self._pool.dsn.place}): pass a connection to the URL's server, or change the URL"
                )
        _checked[self._driver] = (self._pool.dsn, session)

    def _translate(self, exc: BaseException) -> MultiqError | None:
        if code_of(exc) is None and not isinstance(exc, pymysql.MySQLError | OSError):
            return None
        if code_of(exc) == _READ_ONLY:
            return OptionInvalid(
                f"connection= is in a transaction that was begun READ ONLY ({exc}): begin it READ WRITE"
            )
        if code_of(exc) in {DEADLOCK, CHANGED, REFUSED_BY_GROUP}:
            return BackendTimeout(
                f"the server has rolled back the transaction of connection= ({exc}): run all of it again"
            )
        return explain(exc, f"connection= to {self._pool.dsn.place}", self._pool.timeout)


_READ_ONLY = 1792
_SEVERAL = 2  # statements
_NO_SUCH_SAVEPOINT = 1305
_ASYNCIO = ("aiomysql", "asyncmy")  # asyncio drivers, whose connections SQLAlchemy wraps in synchronous methods
_WHERE = "SELECT @@hostname, @@port"
_GROUPS = (
    "SHOW GLOBAL STATUS LIKE 'wsrep_cluster_state_uuid'",
    "SHOW GLOBAL VARIABLES LIKE 'group_replication_group_name'",
)
"""All nodes of one cluster reply to these statements with the same rows."""

_checked: weakref.WeakKeyDictionary[Any, tuple[Dsn, int]] = weakref.WeakKeyDictionary()
"""Callers' sessions that are known to lead to the server of this DSN."""

_SAVEPOINT = ("SAVEPOINT multiq", "RELEASE SAVEPOINT multiq", "ROLLBACK TO SAVEPOINT multiq")


def _mysqlclients() -> tuple[type, ...]:
    """Return mysqlclient's connection class, if it is loaded. The module ``MySQLdb`` itself may also be PyMySQL."""
    module = sys.modules.get("MySQLdb.connections")
    return (module.Connection,) if module is not None else ()


def _statement_runner(theirs: ExternalConnection) -> Callable[[str], Sequence[tuple[Any, ...]]]:
    """Return a function that runs a statement.

    If SQLAlchemy or Django wraps the database driver, the statement goes through that library, because the library
    tracks transactions.
    """
    driver = theirs.driver
    if isinstance(driver, Connection):
        cursor: Any = Cursor  # The connection's own cursor class may return rows in any form.
        return theirs.execute or (lambda text: _rows(cursor(driver), text))
    if isinstance(driver, _mysqlclients()):
        cursor = sys.modules["MySQLdb.cursors"].Cursor
        return theirs.execute or (lambda text: _rows(cursor(driver), text))
    if theirs.library in _ASYNCIO and theirs.execute is not None:
        return theirs.execute
    raise ConnectionElsewhere(
        f"connection= must be {_ACCEPTED}, got one over a {theirs.library} {type(driver).__name__}"
    )


def _rows(cursor: Any, text: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(cursor):
        cursor.execute(text)
        return list(cursor.fetchall())
