"""Opens database connections as an application would, without multiq, to test ``enqueue(connection=)``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast
from urllib.parse import unquote

from multiq.settings.url import split

from .requirements import NotTriedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from urllib.parse import SplitResult


class ExternalConnection(Protocol):
    """The part of a DB-API connection that the suite uses."""

    def commit(self) -> None: ...
    def rollback(self) -> None: ...
    def close(self) -> None: ...


def connect(url: str) -> ExternalConnection:
    """Open a connection to *url*'s database with a plain client library."""
    parts = split(url)
    scheme = parts.scheme.partition("+")[0]
    if scheme not in _CONNECT:
        raise NotTriedError(
            f"transactional_enqueue: the suite cannot connect to {scheme}:// without multiq: name a harness that "
            "overrides transaction() with --harness, or run the suite under pytest"
        )
    return _CONNECT[scheme](parts)


def _sqlite(parts: SplitResult) -> ExternalConnection:
    import sqlite3

    return sqlite3.connect(unquote(parts.path).removeprefix("/"), timeout=30)


def _mysql(parts: SplitResult) -> ExternalConnection:
    import pymysql  # type: ignore[import-untyped, unused-ignore]

    options: dict[str, Any] = {"host": parts.hostname or "localhost", "port": parts.port or 3306}
    if parts.username is not None:
        options["user"] = unquote(parts.username)
    if parts.password is not None:
        options["password"] = unquote(parts.password)
    database = unquote(parts.path).removeprefix("/")
    return cast("ExternalConnection", pymysql.connect(database=database or None, **options))


_CONNECT: dict[str, Callable[[SplitResult], ExternalConnection]] = {"sqlite": _sqlite, "mysql": _mysql}
