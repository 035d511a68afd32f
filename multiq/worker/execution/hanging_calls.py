"""Runs a call that may hang in a daemon thread of its own, so that the caller waits only as long as it wants.

Such calls write a log, emit an event to the user's subscribers, or ask the backend. The thread does not block the exit
of the process.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def run_in_thread(call: Callable[[], object]) -> threading.Event:
    """Run *call*, which may hang, in a new thread. Returns an event that is set when *call* has returned."""
    is_done = threading.Event()

    def run() -> None:
        try:
            call()
        finally:
            is_done.set()

    try:
        threading.Thread(target=run, name="multiq-aside", daemon=True).start()
    except RuntimeError:  # the system refuses to start a thread
        with contextlib.suppress(Exception):
            run()
    return is_done
