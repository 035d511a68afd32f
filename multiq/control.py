"""What is said to all workers of a connection, on whichever host: that it is down, or that they should restart.

A store has no place for such words, but every store has queues. So each word is a job that is due in a century, in a
queue of its own that nobody reserves from: it is there or it is not, and it has an id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .backend import DELAY_MAX, NewJob, State
from .ids import new_id

if TYPE_CHECKING:
    from .backend import Backend

DOWN = "multiq.down"
RESTART = "multiq.restart"
CONTROL_QUEUES = frozenset({DOWN, RESTART})
"""Listings leave them out."""


class Control:
    """The words on one connection. Each method may raise ``BackendError``."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def is_down(self) -> bool:
        """Whether workers are to take no jobs."""
        return bool(self._backend.stats(DOWN).delayed)

    def take_down(self) -> bool:
        """Have all workers take no more jobs. False: they were told so already."""
        if self.is_down():
            return False
        self._say(DOWN)
        return True

    def bring_up(self) -> bool:
        """Have them go on. False: nobody had told them not to."""
        return bool(self._backend.purge(DOWN, [State.DELAYED]))

    def restart(self) -> None:
        """Have all workers that run now end after what they run."""
        self._backend.purge(RESTART, [State.DELAYED])
        self._say(RESTART)

    def last_restart(self) -> str | None:
        """Another text after each restart; None: there was none."""
        if not self._backend.stats(RESTART).delayed:
            return None
        page = self._backend.jobs(RESTART, State.DELAYED, limit=1)
        return page.jobs[0].id if page.jobs else None

    def _say(self, word: str) -> None:
        self._backend.enqueue(word, [NewJob(b"", new_id(), delay=DELAY_MAX)])
