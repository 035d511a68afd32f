"""What a worker writes on SIGQUIT: the running jobs with their durations, and the stack of every thread."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import signal
import time
from typing import TYPE_CHECKING

from multiq.formatting import many

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .child_record import ProcessSlot

_log = logging.getLogger("multiq.supervisor")


def log_running(slots: Iterable[ProcessSlot]) -> None:
    """Log a line for each running job. The supervisor calls this, and the children write the stacks of their own
    threads."""
    now = time.monotonic()
    for slot in slots:
        running = [entry for entry in slot.entries() if entry.is_running]
        _log.warning("worker process %s runs %s", slot.pid, many(len(running), "job") if running else "no job")
        for entry in running:
            _log.warning("  [%s] %s for %.1f s", entry.held.queue, entry.held.id, now - entry.mark)


@contextlib.contextmanager
def dumping_stacks(*, on: bool) -> Iterator[None]:
    """While the block lasts, SIGQUIT writes the stack of each thread, even if C code holds the GIL."""
    # stderr is missing, or has no file descriptor
    with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):
        if on:
            faulthandler.register(signal.SIGQUIT, all_threads=True)
    try:
        yield
    finally:
        if on:
            faulthandler.unregister(signal.SIGQUIT)
