"""Who waits is woken by time alone, and by an interrupt: what consumers that look for themselves have in common."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from multiq.backend import NewJob

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiq.backend import Backend, Consumer

TRIES = 4


def is_quiet(measured: Callable[[], float], most: float) -> None:
    """One of some measurements of an idle time is small enough: a busy machine disturbs some, a fault each of them."""
    seen: list[float] = []
    while not seen or seen[-1] > most:
        assert len(seen) < TRIES, f"at most {most} is idle, and there were {seen}"
        seen.append(measured())


ENDS = ["delay", "lease", "pause"]  # what makes a job ready without anybody's doing


def woken_by_time(backend: Backend, end: str) -> None:
    """A job comes when its delay, its lease or its queue's pause has ended, and not before."""
    started = time.time()
    backend.enqueue("q", [NewJob(b"x", "job", delay=1.0 if end == "delay" else 0.0, ttr=1.0)])
    if end == "lease":
        assert len(backend.consumer(["q"]).reserve(1, 0)) == 1
    if end == "pause":
        backend.pause("q", 1.0)
    assert len(backend.consumer(["q"]).reserve(1, 60)) == 1
    assert 1.0 <= time.time() - started < 30  # and it is not the end of the wait which finds it


def woken_by_interrupt(consumer: Consumer, idle: float) -> None:
    """It ends the wait in which it comes, or else the next one."""
    threading.Timer(idle, consumer.interrupt).start()
    assert consumer.reserve(1, 100) == []
    consumer.interrupt()
    assert consumer.reserve(1, 100) == []
