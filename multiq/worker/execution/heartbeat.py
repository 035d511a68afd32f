"""The heartbeat: a thread that checks timeouts, renews leases and settles finished jobs while jobs run."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("multiq.worker")

#: Seconds between two heartbeats while jobs are held.
TICK = 0.025


class Heartbeat:
    """Calls *tick* every 25 ms in a separate thread while ``holding`` is set."""

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
        except BaseException:  # noqa: BLE001 - logged; the worker stops
            # Without the heartbeat, leases would end while their jobs run, so the worker must stop.
            _log.exception("the heartbeat died; the worker stops")
            self._on_death()
