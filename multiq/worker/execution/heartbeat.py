"""The heartbeat: a thread that checks timeouts, renews leases and settles finished jobs, however long a job takes."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("multiq.worker")

#: seconds between two heartbeats while jobs are held
TICK = 0.025


class Heartbeat:
    """Calls *tick* every 25 ms from a thread of its own while ``holding`` is set; waits otherwise."""

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
        """Stop, and wait for the thread's end."""
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
            # without the heartbeat, leases end while their jobs run: the worker must not go on
            _log.exception("the heartbeat died; the worker stops")
            self._on_death()
