"""Handles the argument ``connection=`` of an enqueue: an application's connection of a database driver, SQLAlchemy or
Django.

A connection of SQLAlchemy or Django contains a connection of a database driver, such as PyMySQL. multiq uses this inner
connection, but SQLAlchemy or Django must run the first statement. SQLAlchemy begins its transaction with this
statement, and commits only transactions that it has begun. Django checks that its transaction can still be committed.
multiq imports neither SQLAlchemy nor Django. It recognizes their objects by documented attributes.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from multiq.errors import MultiqError, OptionInvalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RUN_SYNC = (
    "an asynchronous connection cannot be used here: await queue.aenqueue(body, connection=...), with an "
    "AsyncConnection or AsyncSession of SQLAlchemy's, or "
    "connection.run_sync(lambda c: queue.enqueue(body, connection=c))"
)

TWO_PHASE = (
    "connection= must be in a transaction of one phase, got one of two phases: until the second phase, its jobs "
    "would neither exist nor be gone"
)

_PERCENT = ("format", "pyformat")  # parameter styles in which a percent sign must be written twice


class ExternalConnection:
    """The application's connection, unwrapped."""

    def __init__(self, driver: Any, adapter: Any, execute: Callable[[str], list[tuple[Any, ...]]] | None) -> None:
        self.driver = driver
        """The database driver's own connection."""
        self.adapter = adapter
        """The same connection. For an asyncio driver: SQLAlchemy's adapter, which gives this connection the interface
        of the DB API."""
        self.execute = execute
        """Runs a statement without parameters through SQLAlchemy or Django, and returns its rows. None: the application
        passed the database driver's own connection.
        """

    @property
    def library(self) -> str:
        """The name of the database driver's package."""
        return type(self.driver).__module__.partition(".")[0]

    def begin(self) -> None:
        """Let the library begin its transaction, if it has not begun one. Raises the library's error if the transaction
        cannot be committed.
        """
        if self.execute is not None:
            self.execute("SELECT 1")


def unwrap(connection: Any, drivers: tuple[type, ...], expected: str) -> ExternalConnection:
    """Return the database driver's connection that *connection* contains.

    *drivers* are the connection classes that need no unwrapping. *expected* describes the accepted connections, for the
    error message. Raises the library's own errors, and ``OptionInvalid`` if *connection* contains no such connection.
    """
    if isinstance(connection, drivers):
        return ExternalConnection(connection, connection, None)
    if _is_of(connection, "sqlalchemy.ext.asyncio", "aiosqlite", "aiomysql", "asyncmy", "asyncio"):
        raise OptionInvalid(f"connection= got a {_name(connection)}: {RUN_SYNC}")
    if isinstance(connection, type) or _is_of(connection, "sqlalchemy.orm.session.sessionmaker"):
        raise OptionInvalid(f"connection= got a {_name(connection)}, which makes connections: call it")
    if _has(connection, "dispose", "raw_connection"):
        raise OptionInvalid(
            f"connection= got an {_name(connection)}, which has many connections: pass the one that your transaction "
            "runs on, as in `with engine.begin() as connection:`"
        )
    if _is_of(connection, "django"):
        if hasattr(connection, "ensure_connection"):
            return _django(connection)
        raise OptionInvalid(
            f"connection= got a {_name(connection)}: pass django.db.connection, or connections['name'] of "
            "django.db.connections"
        )
    if _has(connection, "get_bind", "connection"):  # Session, scoped_session
        _refuse_outside_run_sync(connection.get_bind())
        connection = connection.connection()
    if _has(connection, "exec_driver_sql"):
        return _of_sqlalchemy(connection)
    if _has(connection, "driver_connection", "dbapi_connection"):  # Engine.raw_connection()
        return ExternalConnection(connection.driver_connection, connection.dbapi_connection, None)
    raise OptionInvalid(f"connection= must be {expected}, got a {type(connection).__name__}")


def is_asyncio(connection: Any) -> bool:
    """Whether *connection* is an ``AsyncSession``, ``async_scoped_session`` or ``AsyncConnection`` of SQLAlchemy's."""
    return _is_of(connection, "sqlalchemy.ext.asyncio") and not isinstance(connection, type)


def of_asyncio(connection: Any) -> Any:
    """Return the session or connection that has the method ``run_sync``. An ``async_scoped_session`` is a function that
    returns its session."""
    return connection if hasattr(type(connection), "run_sync") else connection()


@contextlib.contextmanager
def explained(translate: Callable[[BaseException], MultiqError | None]) -> Iterator[None]:
    """Translate errors of the application's connection into multiq's errors while the block lasts.

    *translate* gets the database driver's error, and returns multiq's error. If *translate* returns None, the error
    does not come from the database. In this case ``OptionInvalid`` is raised, because the connection cannot be used.
    """
    try:
        yield
    except MultiqError:
        raise
    except Exception as exc:
        raise translate(driver_error(exc)) or OptionInvalid(f"connection= cannot be used: {exc}") from exc


def driver_error(exc: BaseException) -> BaseException:
    """If *exc* is an error of SQLAlchemy or Django, return the database driver's error that it contains. Otherwise
    return *exc*."""
    inner = getattr(exc, "orig", None)
    if isinstance(inner, BaseException):
        return inner
    if _is_of(exc, "django") and exc.__cause__ is not None:
        return exc.__cause__
    return exc


def _refuse_outside_run_sync(bind: Any) -> None:
    """Raise ``OptionInvalid`` for an asyncio driver's connection that is used outside of ``run_sync``."""
    module = sys.modules.get("sqlalchemy.util.concurrency")
    if bind.dialect.is_async and module is not None and not module.in_greenlet():
        raise OptionInvalid(f"connection= got a connection of {bind.dialect.driver} outside run_sync: {RUN_SYNC}")


def _of_sqlalchemy(connection: Any) -> ExternalConnection:
    _refuse_outside_run_sync(connection)
    if _is_of(connection.get_transaction(), "sqlalchemy.engine.base.TwoPhaseTransaction"):
        raise OptionInvalid(TWO_PHASE)
    pooled = connection.connection
    return ExternalConnection(
        pooled.driver_connection, pooled.dbapi_connection, lambda text: _sqlalchemy(connection, text)
    )


def _sqlalchemy(connection: Any, text: str) -> list[tuple[Any, ...]]:
    result = connection.exec_driver_sql(text.replace("%", "%%") if connection.dialect.paramstyle in _PERCENT else text)
    return [tuple(row) for row in result.fetchall()] if result.returns_rows else []


def _django(connection: Any) -> ExternalConnection:
    """Unwrap a connection of Django. *connection*: Django's wrapper of a connection, or the proxy
    ``django.db.connection``."""

    def execute(text: str) -> list[tuple[Any, ...]]:
        with connection.cursor() as cursor:
            cursor.execute(text)
            return list(cursor.fetchall()) if cursor.description else []

    connection.ensure_connection()
    return ExternalConnection(connection.connection, connection.connection, execute)


def _has(thing: Any, *names: str) -> bool:
    """Whether *thing* has these attributes. Checks its class, because reading them from a closed connection may raise
    any error.
    """
    return all(hasattr(thing.__class__, name) for name in names)


def _is_of(thing: Any, *paths: str) -> bool:
    """Whether one of *paths* is the name of the class of *thing*, or of a base class. A path may also be the name of
    the module or package of such a class."""
    names = [f"{base.__module__}.{base.__qualname__}." for base in type(thing).__mro__]
    return any(name.startswith(f"{path}.") for name in names for path in paths)


def _name(thing: Any) -> str:
    return thing.__name__ if isinstance(thing, type) else type(thing).__name__
