"""Redis servers for tests: one for the whole run, and new ones for tests that change or break them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from servers.certificate import Certificate
from servers.redis import RedisCluster, RedisServer, SentinelTrio

from multiq.backend.registry import open_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from multiq.backend import Backend


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """One server for all tests that do not change it. Each test has its own queues."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def new_redis() -> Iterator[Callable[..., RedisServer]]:
    """Starts a server for this test alone: ``new_redis(appendonly="yes")``."""
    with ExitStack() as stack:
        yield lambda **config: stack.enter_context(RedisServer(**config))


@pytest.fixture
def server(new_redis: Callable[..., RedisServer]) -> RedisServer:
    """A server with default settings, for this test alone."""
    return new_redis()


@pytest.fixture
def backend(server: RedisServer) -> Iterator[Backend]:
    with open_backend(server.url) as backend:
        yield backend


@pytest.fixture(scope="session")
def redis_tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server that speaks TLS only, with a certificate for 127.0.0.1 of an authority that ``url`` names."""
    with RedisServer(certificate=Certificate.make(tmp_path_factory.mktemp("certificates"), "good")) as server:
        yield server


@pytest.fixture
def redis_sentinel() -> Iterator[SentinelTrio]:
    """A primary, a replica and three sentinels, for this test alone."""
    with SentinelTrio() as trio:
        yield trio


@pytest.fixture(scope="session")
def redis_masters() -> Iterator[RedisCluster]:
    with RedisCluster() as cluster:
        yield cluster


@pytest.fixture
def redis_cluster(redis_masters: RedisCluster) -> Iterator[RedisCluster]:
    """Three masters without any keys. A test that changes the cluster itself starts its own cluster."""
    yield redis_masters
    for node in redis_masters.nodes:
        node.ask("FLUSHALL")
