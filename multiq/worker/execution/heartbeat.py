"""What must go on beside the jobs: watching their limits; inline also touching leases and keeping nobody waiting."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("multiq.worker")

#: seconds between two looks while jobs are held
TICK = 0.025


class Heartbeat:
    """Calls *tick* every 25 ms from a thread of its own while ``holding`` is set; sleeps for good otherwise."""

    def __init__(self, tick: Callable[[], None], on_death: Callable[[], None]) -> None:
        self._tick = tick
        self._on_death = on_death
        self._closed = False
        self.holding = threading.Event()
        self._pause = threading.Event()
        self._thread = threading.Thread(target=self._run, name="multiq-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop; returns when the thread is through."""
        self._closed = True
        self._pause.set()
        self.holding.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closed:
                self.holding.wait()
                self._tick()
                self._pause.wait(TICK)
        except BaseException:  # noqa: BLE001 - reported, and fatal
            # a worker whose leases nobody keeps alive must not go on as if all were well
            _log.exception("the heartbeat died; the worker stops")
            self._on_death()
