"""A store for workers, on each backend: private, empty, and gone when the test is."""

from __future__ import annotations

import contextlib
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
from servers.beanstalk import BeanstalkServer
from servers.mysql import any_server
from servers.redis import RedisServer
from worker_app import app

from multiq.settings.url import with_store

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
def _paired(folder: Path) -> Iterator[str]:
    with BeanstalkServer(binlog=True) as server:
        yield with_store(server.url, f"sqlite:///{folder}/store.db")


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


@contextlib.contextmanager
def _paired_with_redis(_folder: Path) -> Iterator[str]:
    with BeanstalkServer(binlog=True) as server, RedisServer() as store:
        yield with_store(server.url, store.url)


@contextlib.contextmanager
def _paired_with_mysql(_folder: Path) -> Iterator[str]:
    with BeanstalkServer(binlog=True) as server, any_server() as store, store.database() as place:
        yield with_store(server.url, place.url)


#: beanstalkd, and a store beside it, which is SQLite in the first one
PAIRED = "beanstalk+store"
PAIRS = {PAIRED: _paired, "beanstalk+redis": _paired_with_redis, "beanstalk+mysql": _paired_with_mysql}

NAMES = [name for name in STORES if find_spec(f"multiq_{name}.backend")]


STORES |= PAIRS


@pytest.fixture(params=NAMES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty store on each backend, and the test app's producer side on it."""
    with STORES[request.param](tmp_path) as url:
        app.connect(url)
        yield url
        app.close()
