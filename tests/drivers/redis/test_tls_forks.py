"""Forks beside threads that connect with TLS: a child inherits OpenSSL's locks."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from multiq.backend.registry import open_backend
from multiq.conformance.forks import ended_well, fork

if TYPE_CHECKING:
    from servers.redis import RedisServer

FORKS = 600  # about 1 in 200 hung when forks did not wait for handshakes


@pytest.mark.long
@pytest.mark.timeout(600)
def test_forked_child_connects_whatever_handshakes_its_parent_was_in(redis_tls: RedisServer) -> None:
    is_over = threading.Event()
    connected: list[int] = []

    def connect() -> None:
        while not is_over.is_set():
            with open_backend(redis_tls.url) as other:
                other.queues()
            connected.append(1)

    threads = [threading.Thread(target=connect) for _ in range(3)]
    with open_backend(redis_tls.url) as backend:
        for thread in threads:
            thread.start()
        try:
            for _ in range(FORKS):
                time.sleep(0.001)
                assert ended_well(fork(backend.queues))
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
    assert len(connected) > FORKS
