"""beanstalkd servers for tests: one for the whole run, and new ones for tests that break them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from servers.beanstalk import BeanstalkServer

from multiq.backend.registry import open_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from servers.beanstalk import BareClient

    from multiq.backend import Backend


@pytest.fixture(scope="session")
def beanstalk_server() -> Iterator[BeanstalkServer]:
    """One server for all tests that do not change it. Each test has its own tubes."""
    with BeanstalkServer() as server:
        yield server


@pytest.fixture
def new_beanstalk() -> Iterator[Callable[..., BeanstalkServer]]:
    """Starts a server for this test alone: ``new_beanstalk(binlog=True)``."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(BeanstalkServer(**options))


@pytest.fixture
def server(new_beanstalk: Callable[..., BeanstalkServer]) -> BeanstalkServer:
    """A server with default settings, for this test alone."""
    return new_beanstalk()


@pytest.fixture
def backend(server: BeanstalkServer) -> Iterator[Backend]:
    with open_backend(server.url) as backend:
        yield backend


@pytest.fixture
def client(server: BeanstalkServer) -> Iterator[BareClient]:
    """A plain connection to the server, without multiq."""
    with server.client() as client:
        yield client
