"""MariaDB for tests: one server for the tests that leave it intact, and new ones for the others."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, cast

import pytest
from servers.mysql import MysqlDatabases, MysqlServer, Place, any_server

from multiq.backend.registry import open_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from multiq_mysql.backend import MysqlBackend


@pytest.fixture(scope="session")
def mysql_server() -> Iterator[MysqlDatabases]:
    """One server for all tests that do not change it. Each test has its own database."""
    with any_server() as server:
        yield server


@pytest.fixture
def place(mysql_server: MysqlDatabases) -> Iterator[Place]:
    """An empty database for this test alone."""
    with mysql_server.database() as made:
        yield made


@pytest.fixture
def new_mysql() -> Iterator[Callable[..., MysqlServer]]:
    """Starts a server for this test alone: ``new_mysql(sql_mode="ANSI")``."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(MysqlServer(**settings))


@pytest.fixture
def backend(place: Place) -> Iterator[MysqlBackend]:
    """On a database of this test's own, whose tables are made."""
    with open_backend(place.url) as backend:
        backend.stats("q")
        yield cast("MysqlBackend", backend)
