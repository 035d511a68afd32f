"""Relays the outboxes of a worker's app. This runs on a thread, because an application's database may hang for longer
than a backend."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiq.app import App

EVERY = 5.0  # the longest time in seconds between two relays; the shortest time is half of it
_END_WAIT = 5.0  # the longest time in seconds that an ending worker waits for a running relay


def relay_outboxes_on_thread(app: App) -> Callable[[], None]:
    """Relay every few seconds. Returns a function that ends the thread. Without outboxes, no thread is started."""
    if not app.outboxes:
        return lambda: None
    ended = threading.Event()

    def run() -> None:
        wait = 0.0
        while not ended.wait(wait):
            for outbox in list(app.outboxes):
                if not outbox.is_of_one_thread:
                    outbox.relay_or_log()
            wait = EVERY * (1 - random.random() / 2)  # noqa: S311 - so that workers do not go in step

    thread = threading.Thread(target=run, name="multiq-outboxes", daemon=True)
    thread.start()

    def end() -> None:
        ended.set()
        thread.join(_END_WAIT)

    return end
