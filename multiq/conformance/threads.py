"""Threads whose results and errors reach the test."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

T = TypeVar("T")

HANGS = 60.0  # seconds after which a race counts as hung, even on a slow machine


class Background(Generic[T]):
    """Runs a function in a new thread."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def result(self, patience: float) -> T:
        """Wait for the work, and return its result or raise its error. Fails if the work is not done after *patience*
        seconds."""
        self.join(patience)
        assert not self.is_alive(), f"still waiting after {patience:g} s"
        if self._error is not None:
            raise self._error
        return self._result[0]

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, patience: float) -> None:
        self._thread.join(patience)

    def _run(self) -> None:
        try:
            self._result.append(self._work())
        except BaseException as exc:  # noqa: BLE001 - raised again where the test waits for the result
            self._error = exc


def together(works: Sequence[Callable[[], T]]) -> list[T]:
    """Start all *works* at the same moment, each in a thread. Returns the results in the order of *works*."""
    start = threading.Barrier(len(works))

    def at_once(work: Callable[[], T]) -> Callable[[], T]:
        def run() -> T:
            start.wait(HANGS)
            return work()

        return run

    threads = [Background(at_once(work)) for work in works]
    return [thread.result(HANGS) for thread in threads]


class Lag:
    """Measures for how many seconds this machine has delayed a thread during the ``with`` block.

    A test adds ``seconds`` to its time limit.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._measure, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(HANGS)

    def _measure(self) -> None:
        woken_at = time.monotonic()
        while not self._is_over.wait(_TICK):
            now = time.monotonic()
            self.seconds += max(0.0, now - woken_at - 2 * _TICK)
            woken_at = now


_TICK = 0.01  # seconds
