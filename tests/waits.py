"""Tests for the consumers of several drivers: a waiting reserve ends by time alone, and by an interrupt."""

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
    """At least one of ``TRIES`` measurements of an idle time is at most *most*.

    A busy machine disturbs some measurements, but a fault disturbs all of them.
    """
    seen: list[float] = []
    while not seen or seen[-1] > most:
        assert len(seen) < TRIES, f"at most {most} is idle, and there were {seen}"
        seen.append(measured())


ENDS = ["delay", "lease", "pause"]  # events that make a job ready by time alone


def woken_by_time(backend: Backend, end: str) -> None:
    """A job comes when its delay, its lease or its queue's pause has ended, and not before."""
    started = time.time()
    backend.enqueue("q", [NewJob(b"x", "job", delay=1.0 if end == "delay" else 0.0, ttr=1.0)])
    if end == "lease":
        assert len(backend.consumer(["q"]).reserve(1, 0)) == 1
    if end == "pause":
        backend.pause("q", 1.0)
    assert len(backend.consumer(["q"]).reserve(1, 60)) == 1
    assert 1.0 <= time.time() - started < 30  # well before the reserve's own timeout of 60 s


def woken_by_interrupt(consumer: Consumer, idle: float) -> None:
    """An interrupt ends the wait during which it comes; an interrupt between two waits ends the next wait."""
    threading.Timer(idle, consumer.interrupt).start()
    assert consumer.reserve(1, 100) == []
    consumer.interrupt()
    assert consumer.reserve(1, 100) == []
