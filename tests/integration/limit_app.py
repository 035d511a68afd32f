"""Tasks over their time limit while they use locks: queues, conditions, logging, context managers, executors."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Self

from worker_app import note

import multiq

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

app = multiq.App()

_inbox: queue.Queue[int] = queue.Queue(maxsize=2)
_condition = threading.Condition()
_event = threading.Event()
_lock = threading.Lock()
_pool = ThreadPoolExecutor(1)
_log = logging.getLogger("limit_app")
_log.propagate = False
_handler = logging.StreamHandler(Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - for the process's life
_log.addHandler(_handler)
_log.setLevel("INFO")


@contextlib.contextmanager
def _held() -> Iterator[None]:
    _lock.acquire()
    try:
        yield
    finally:
        _lock.release()


class Gate(threading.local):
    """A context manager that counts, and spends time before and after it counts, so that a timeout may hit it there."""

    inside = 0

    def __enter__(self) -> Self:
        self._dawdle()
        self.inside += 1
        self._dawdle()
        return self

    def __exit__(self, *_: object) -> None:
        self._dawdle()
        self.inside -= 1
        self._dawdle()

    @staticmethod
    def _dawdle() -> None:
        for _ in range(30):
            pass


class Tidy:
    """``ending`` counts the calls of ``__del__`` that have begun and not ended."""

    ending = 0

    def __del__(self) -> None:
        Tidy.ending += 1
        for _ in range(30):
            pass
        Tidy.ending -= 1


_gate = Gate()


def _use_queue() -> None:
    with contextlib.suppress(queue.Full):
        _inbox.put_nowait(1)
    with contextlib.suppress(queue.Empty):
        _inbox.get(timeout=0.001)


def _use_condition() -> None:
    with _condition:
        _condition.notify_all()
        _condition.wait(0.0005)
    _event.set()
    _event.clear()


def _use_log() -> None:
    _log.info("a line of a job")


def _use_context_manager() -> None:
    with _held():
        pass


def _use_gate() -> None:
    with _gate:
        pass
    Tidy()


def _use_pool() -> None:
    _pool.submit(int).result()


USES: dict[str, Callable[[], None]] = {
    "queue": _use_queue,
    "condition": _use_condition,
    "log": _use_log,
    "context manager": _use_context_manager,
    "gate": _use_gate,
    "pool": _use_pool,
}


@app.task(timeout=0.05, max_attempts=1)
def hammer(number: int, use: str, listens: bool) -> None:
    """Uses an object with a lock in an endless loop. With *listens*, it also checks its time limit itself."""
    note("start", number)
    job, again = multiq.current_job(), USES[use]
    while True:
        again()
        if listens:
            job.check()


@app.task(max_attempts=1)
def probe(number: int) -> None:
    """Note which locks are never released."""
    locks = {"queue": _inbox.mutex, "lock": _lock, "handler": _handler.lock, "condition": _condition}
    for name, lock in locks.items():
        assert lock is not None
        if lock.acquire(timeout=3):
            lock.release()
        else:
            note(f"locked:{name}", number)
    if _gate.inside:
        note(f"inside:{_gate.inside}", number)
    give_up_at = time.monotonic() + 3
    while Tidy.ending and time.monotonic() < give_up_at:  # other jobs may run beside this one
        time.sleep(0.01)
    if Tidy.ending:
        note(f"untidy:{Tidy.ending}", number)
    _log.info("a line of the last job")
    _pool.submit(int).result(timeout=3)
    note("end", number)


@app.task(timeout=0.02, max_attempts=1)
def brief(number: int) -> None:
    """Ends at about the moment at which its time limit is over."""
    until = time.monotonic() + 0.02
    while time.monotonic() < until:
        pass
    note("end", number)


@app.task(timeout=0.3, max_attempts=1)
def listen(number: int) -> None:
    """Checks whether its time is over."""
    note("start", number)
    job = multiq.current_job()
    assert job.deadline is not None
    left = job.deadline - time.monotonic()
    assert 0 < left <= 0.3
    job.check()
    note("went-on", number)
    for _ in range(1000):
        time.sleep(0.01)
        try:
            job.check()
        except multiq.SoftTimeout:
            note("in-time" if time.monotonic() >= job.deadline else "early", number)
            raise
    note("end", number)


@app.task(timeout=0.3, max_attempts=1)
async def alisten(number: int) -> None:
    """The same as a coroutine that blocks the loop."""
    listen.function(number)


@app.task(max_attempts=1)
def unlimited(number: int) -> None:
    job = multiq.current_job()
    assert job.deadline is None
    job.check()
    note("end", number)


@app.task(timeout=0.3, max_attempts=1)
def deaf(number: int, seconds: float) -> None:
    """Never checks its time limit, and sleeps in short turns."""
    note("start", number)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.01)
    note("end", number)


@app.task(max_attempts=1)
def neighbour(number: int, seconds: float) -> None:
    """Has one attempt, so that it must not be blamed."""
    note("start", number)
    time.sleep(seconds)
    note("end", number)


@app.task(timeout=0.3, max_attempts=1)
def asleep(number: int) -> None:
    note("start", number)
    time.sleep(300)
