"""A store for workers, on each backend: private, empty, and gone when the test is.

What a worker does depends little on the backend: ``make test`` has each row of a test on one backend or two, in turn,
and ``make test-long`` the rest.
"""

from __future__ import annotations

import contextlib
import zlib
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
from servers.beanstalk import BeanstalkServer
from servers.mysql import any_server
from servers.redis import RedisServer
from worker_app import app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path


@contextlib.contextmanager
def _sqlite(folder: Path) -> Iterator[str]:
    yield f"sqlite:///{folder}/jobs.db"


@contextlib.contextmanager
def _redis(_folder: Path) -> Iterator[str]:
    with RedisServer() as server:
        yield server.url


@contextlib.contextmanager
def _beanstalk(_folder: Path) -> Iterator[str]:
    with BeanstalkServer() as server:
        yield server.url


@contextlib.contextmanager
def _mysql(_folder: Path) -> Iterator[str]:
    with any_server() as server, server.database() as place:
        yield place.url


#: a backend's name -> its store, as the URL
STORES: dict[str, Callable[[Path], AbstractContextManager[str]]] = {
    "sqlite": _sqlite,
    "redis": _redis,
    "beanstalk": _beanstalk,
    "mysql": _mysql,
}

NAMES = [name for name in STORES if find_spec(f"multiq_{name}.backend")]


class _Row(str):
    """A backend's name, as a row of each test that uses ``url``."""

    __slots__ = ()


@pytest.fixture(params=map(_Row, NAMES))
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty store on each backend, and the test app's producer side on it."""
    with STORES[request.param](tmp_path) as url:
        app.connect(url)
        yield url
        app.close()


@pytest.hookimpl(tryfirst=True)  # before those marked are deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            name = item.callspec.params.get("url")
            if isinstance(name, _Row) and name not in _in_turn(item.nodeid.replace(name, "")):
                item.add_marker(pytest.mark.long)


def _in_turn(row: str) -> list[str]:
    """Where ``make test`` runs a row: one where anybody may settle a lease; for half of the rows beanstalkd, too."""
    number = zlib.crc32(row.encode())
    portable = [name for name in NAMES if name != "beanstalk"]
    return [portable[number % len(portable)], *(["beanstalk"] if number & 0x100 else [])]
