"""A call is over at its deadline, also in a program in which signals come all the time."""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest

from multiq.backend import NewJob
from multiq.backend.registry import open_backend
from multiq.errors import BackendUnavailable
from multiq.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from servers.redis import RedisServer

    from multiq.backend import Backend

QUEUE = "mail"

CALLS: dict[str, Callable[[Backend], object]] = {
    "a small call": lambda backend: backend.stats(QUEUE),
    "a large one": lambda backend: backend.enqueue(QUEUE, [NewJob(bytes(8_000_000), new_id())]),
    "several partitions": lambda backend: backend.pause(QUEUE, 1),
}


@pytest.fixture
def ticking() -> Iterator[None]:
    """Four signals a second that do nothing."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.25, 0.25)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("ticking")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_signals_do_not_postpone_the_deadline(server: RedisServer, call: Callable[[Backend], object]) -> None:
    with open_backend(f"{server.url}?timeout=0.6&partitions=2") as backend:
        backend.stats(QUEUE)
        server.pause()
        goes_on_by_itself = threading.Timer(40, server.go_on)  # else a call that waits for ever would end the run
        goes_on_by_itself.start()
        started = time.monotonic()
        try:
            with pytest.raises(BackendUnavailable):
                call(backend)
            assert time.monotonic() - started < 30  # a guard against hanging, many times what it may take
        finally:
            goes_on_by_itself.cancel()
            server.go_on()
