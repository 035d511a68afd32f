"""The numbers of queues for metrics, and the age of their next jobs. A read takes a limited time, even if the backend
hangs.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from multiq.backend import State
from multiq.errors import MultiqError, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from multiq.backend import Backend, QueueStats

_REUSED_FOR = 5.0  # seconds for which the numbers of one read are used again


class QueueNumbers(NamedTuple):
    stats: QueueStats
    oldest_age: float | None
    """See ``oldest_age``."""


class QueueReader:
    """Reads the numbers of queues. Thread-safe.

    - *find_queues*: returns the names of the queues. It may call the backend.
    - *patience*: seconds that ``read`` waits for the backend.
    """

    def __init__(self, backend: Backend, find_queues: Callable[[], Sequence[str]], patience: float) -> None:
        self._backend = backend
        self._find_queues = find_queues
        self._patience = patience
        self._numbers: list[QueueNumbers] | None = None
        self.error = ""
        """The reason why the last ``read`` returned None."""
        self._started_at = -_REUSED_FOR
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def read(self) -> list[QueueNumbers] | None:
        """Return numbers that are at most a few seconds old. None: the backend did not answer in time.

        A separate thread calls the backend, because a call to a silent backend takes too long for a page.
        """
        with self._lock:
            thread, now = self._thread, time.monotonic()
            if thread is None or (not thread.is_alive() and now >= self._started_at + _REUSED_FOR):
                thread = threading.Thread(target=self._call, name="multiq-queue-numbers", daemon=True)
                thread.start()
                self._thread, self._started_at = thread, now
            left = self._started_at + self._patience - now
        thread.join(max(0.0, left))
        if thread.is_alive():
            self.error = f"the backend has not answered within {self._patience:g} s"
            return None
        return self._numbers

    def _call(self) -> None:
        self._numbers = None
        try:
            self._numbers = [self._of(queue) for queue in self._find_queues()]
        except MultiqError as exc:
            self.error = str(exc)

    def _of(self, queue: str) -> QueueNumbers:
        stats = self._backend.stats(queue)
        return QueueNumbers(stats, oldest_age(self._backend, stats))


def oldest_age(backend: Backend, stats: QueueStats) -> float | None:
    """Return the age, in seconds, of the next ready job. This is the oldest ready job of the most urgent priority.

    The age counts from the enqueue or reschedule, by the server's clock. 0: no job is ready. None: the backend does not
    know the age. Raises ``BackendError``.
    """
    if stats.ready == 0:
        return 0.0
    if not backend.declared.inspection:
        return None
    try:
        page = backend.jobs(stats.queue, State.READY, limit=1)
    except Unsupported:
        return None
    return page.jobs[0].age if page.jobs else 0.0
