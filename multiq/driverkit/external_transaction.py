"""What an application passes as ``connection=``: a database driver's connection, or SQLAlchemy's or Django's.

multiq's driver needs the database driver's connection inside of SQLAlchemy's or Django's, and must let the library run
the first statement. With that statement SQLAlchemy begins its transaction: it commits no transaction that it has not
begun. Django checks that its transaction can still be committed. multiq imports neither library, and recognizes their
objects by documented attributes.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from multiq.errors import MultiqError, OptionInvalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_RUN_SYNC = (
    "an asynchronous connection cannot be used here: await connection.run_sync(lambda c: queue.enqueue(body, "
    "connection=c)), on an AsyncConnection or AsyncSession of SQLAlchemy's"
)

_PERCENT = ("format", "pyformat")  # styles in which a statement's percent sign is written twice


class ExternalConnection:
    """The application's connection, unwrapped."""

    def __init__(self, driver: Any, adapter: Any, execute: Callable[[str], list[tuple[Any, ...]]] | None) -> None:
        self.driver = driver
        """The database driver's own connection."""
        self.adapter = adapter
        """The same connection, or SQLAlchemy's adapter, which gives an asyncio driver the interface of the DB API."""
        self.execute = execute
        """Runs a statement without parameters through the library and returns its rows. None: there is no library."""

    @property
    def library(self) -> str:
        """The package of the database driver that the connection belongs to."""
        return type(self.driver).__module__.partition(".")[0]

    def begin(self) -> None:
        """Let the library begin its transaction, if it has not. Raises if that transaction cannot be committed."""
        if self.execute is not None:
            self.execute("SELECT 1")


def unwrap(connection: Any, drivers: tuple[type, ...], expected: str) -> ExternalConnection:
    """Find the database driver's connection in *connection*; instances of *drivers* are used as they are.

    Raises the library's own errors, and ``OptionInvalid`` if there is no such connection inside. *expected*: what is
    accepted, for the message.
    """
    if isinstance(connection, drivers):
        return ExternalConnection(connection, connection, None)
    if _is_of(connection, "sqlalchemy.ext.asyncio", "aiosqlite", "aiomysql", "asyncmy", "asyncio"):
        raise OptionInvalid(f"connection= got a {_name(connection)}: {_RUN_SYNC}")
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
        _refuse_outside_run_sync(connection)
        pooled = connection.connection
        return ExternalConnection(
            pooled.driver_connection, pooled.dbapi_connection, lambda text: _sqlalchemy(connection, text)
        )
    if _has(connection, "driver_connection", "dbapi_connection"):  # Engine.raw_connection()
        return ExternalConnection(connection.driver_connection, connection.dbapi_connection, None)
    raise OptionInvalid(f"connection= must be {expected}, got a {type(connection).__name__}")


@contextlib.contextmanager
def explained(translate: Callable[[BaseException], MultiqError | None]) -> Iterator[None]:
    """Replace the errors that the use of the application's connection raises in this block by multiq's errors.

    *translate*: gets the database driver's error, and returns multiq's. It returns None for an error that does not come
    from the database, but says that the connection cannot be used: then ``OptionInvalid`` is raised.
    """
    try:
        yield
    except MultiqError:
        raise
    except Exception as exc:
        raise translate(driver_error(exc)) or OptionInvalid(f"connection= cannot be used: {exc}") from exc


def driver_error(exc: BaseException) -> BaseException:
    """The database driver's error inside an error of SQLAlchemy's or Django's; else *exc* itself."""
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
        raise OptionInvalid(f"connection= got a connection of {bind.dialect.driver} outside run_sync: {_RUN_SYNC}")


def _sqlalchemy(connection: Any, text: str) -> list[tuple[Any, ...]]:
    result = connection.exec_driver_sql(text.replace("%", "%%") if connection.dialect.paramstyle in _PERCENT else text)
    return [tuple(row) for row in result.fetchall()] if result.returns_rows else []


def _django(connection: Any) -> ExternalConnection:
    """Django's wrapper of a connection, or the proxy that applications import."""

    def execute(text: str) -> list[tuple[Any, ...]]:
        with connection.cursor() as cursor:
            cursor.execute(text)
            return list(cursor.fetchall()) if cursor.description else []

    connection.ensure_connection()
    return ExternalConnection(connection.connection, connection.connection, execute)


def _has(thing: Any, *names: str) -> bool:
    """Whether the class of *thing* has these attributes: reading them from a closed connection may raise any error."""
    return all(hasattr(thing.__class__, name) for name in names)


def _is_of(thing: Any, *paths: str) -> bool:
    """Whether a path names the class of *thing*, a base class of it, or a module or package that has one of them."""
    names = [f"{base.__module__}.{base.__qualname__}." for base in type(thing).__mro__]
    return any(name.startswith(f"{path}.") for name in names for path in paths)


def _name(thing: Any) -> str:
    return thing.__name__ if isinstance(thing, type) else type(thing).__name__
