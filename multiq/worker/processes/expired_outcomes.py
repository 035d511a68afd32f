"""Deletes expired outcomes. Otherwise they would stay in a queue in which no more jobs end."""

from __future__ import annotations

import contextlib
import random
import time
from typing import TYPE_CHECKING

from multiq.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.backend import Backend

_EVERY = 60.0  # the shortest time, in seconds, between two deletions; the longest time is twice this time


class ExpiredOutcomes:
    """Deletes the expired outcomes of a worker's queues."""

    def __init__(self, backend: Backend, queues: Sequence[str]) -> None:
        self._backend = backend
        self._queues = queues
        self.due_at = time.monotonic() + _EVERY

    def delete(self, now: float, *, has_kept: bool) -> None:
        """Delete them, and set ``due_at``. *has_kept*: only a process that has kept an outcome deletes any."""
        self.due_at = now + _EVERY * (1 + random.random())  # noqa: S311 - so that processes do not go in step
        if has_kept:
            with contextlib.suppress(BackendError):  # the fetcher reports the outage
                for queue in self._queues:
                    self._backend.forget(queue)
