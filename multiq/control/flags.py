"""What is said to all workers of a connection, on whichever host: that it is down, or that they should restart.

A store has no place for such words, but every store has queues. So each word is a job that is due in a century, in a
queue of its own that nobody reserves from: it is there or it is not, and it has an id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from multiq.backend import DELAY_MAX, NewJob, State
from multiq.ids import new_id

if TYPE_CHECKING:
    from multiq.backend import Backend

DOWN = "multiq.down"
RESTART = "multiq.restart"
PRESENCE_QUEUES = tuple(f"multiq.roll-call.{number}" for number in range(1, 5))
"""One for each who looks at the workers."""
CONTROL_QUEUES = frozenset({DOWN, RESTART, *PRESENCE_QUEUES})
"""Listings leave them out."""


class ControlState(NamedTuple):
    """What all workers of a connection are told."""

    last_restart: str | None
    """Another text after each restart; None: there was none."""
    is_presence_asked: bool
    """Whether somebody wants to know who works."""


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
        self._set(DOWN)
        return True

    def bring_up(self) -> bool:
        """Have them go on. False: nobody had told them not to."""
        return bool(self._backend.purge(DOWN, [State.DELAYED]))

    def restart(self) -> None:
        """Have all workers that run now end after what they run."""
        self._backend.purge(RESTART, [State.DELAYED])
        self._set(RESTART)

    def ask_presence(self, seconds: float) -> None:
        """For so long, have all workers look for who wants to know of them.

        A pause is what ends by itself, and what comes with the counts that workers ask for anyway.
        """
        self._backend.pause(RESTART, seconds)

    def read(self) -> ControlState:
        """What there is to hear, but for ``is_down``: one question, if nothing was said."""
        stats = self._backend.stats(RESTART)
        page = self._backend.jobs(RESTART, State.DELAYED, limit=1) if stats.delayed else None
        return ControlState(page.jobs[0].id if page and page.jobs else None, stats.paused_for is not None)

    def _set(self, flag: str) -> None:
        self._backend.enqueue(flag, [NewJob(b"", new_id(), delay=DELAY_MAX)])
