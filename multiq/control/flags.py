"""Control flags for all workers of a connection, on every host: "down" and "restart".

A control flag is a job in a reserved queue, delayed by 100 years. The flag is set while the job exists. Each time that
a flag is set, it gets a new job with a new id. No worker reserves from a reserved queue.

The driver interface stores only jobs, so flags are jobs. If the driver interface gets a key-value store, the flags can
move into that store.

Control flags need several capabilities. On a backend that lacks one of them, setting a flag raises ``Unsupported``, and
no flag is ever read as set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from multiq.backend import DELAY_MAX, NewJob, State
from multiq.errors import Unsupported
from multiq.ids import new_id

if TYPE_CHECKING:
    from multiq.backend import Backend

DOWN = "multiq.down"
RESTART = "multiq.restart"
PRESENCE_QUEUES = tuple(f"multiq.roll-call.{number}" for number in range(1, 5))
"""One queue for each viewer of the workers (``presence``)."""
CONTROL_QUEUES = frozenset({DOWN, RESTART, *PRESENCE_QUEUES})
"""The queues that listings leave out."""


_NEEDS = ("inspection", "management", "pausing", "purging", "exact_counts")


def missing_for_control(backend: Backend) -> Unsupported | None:
    """Return the error for a backend without control flags and presence, or None if the backend has both."""
    declared = backend.declared
    for power in _NEEDS:
        if not declared.claim(power):
            return backend.unsupported(power)
    if declared.longest_delay is not None:
        reason = f"control flags are jobs delayed by 100 years, and its longest delay is {declared.longest_delay:g} s"
        return Unsupported("control flags", declared.backend, reason)
    return None


def visible_queues(backend: Backend) -> list[str]:
    """Return the names of all queues except the reserved ones (``CONTROL_QUEUES``)."""
    return [name for name in backend.queues() if name not in CONTROL_QUEUES]


class ControlState(NamedTuple):
    """The control flags of a connection, except ``is_down``."""

    last_restart: str | None
    """The id of the latest request to restart. None if there was no request."""
    is_presence_asked: bool
    """Whether some viewer wants to see the workers."""


class Control:
    """Reads and sets the control flags of one connection.

    Each method may raise ``BackendError``. On a backend without control flags, setting one raises ``Unsupported``, and
    no flag is ever read as set.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._missing = missing_for_control(backend)

    def is_down(self) -> bool:
        """Return whether the connection is down. Workers take no jobs from a connection that is down."""
        return self._missing is None and bool(self._backend.stats(DOWN).delayed)

    def take_down(self) -> bool:
        """Stop all workers from taking jobs. Returns False if the connection was already down."""
        self._refuse()
        if self.is_down():
            return False
        self._set(DOWN)
        return True

    def bring_up(self) -> bool:
        """Let workers take jobs again. Returns False if the connection was not down."""
        self._refuse()
        return bool(self._backend.purge(DOWN, [State.DELAYED]))

    def restart(self) -> None:
        """Ask all workers that run now to finish their jobs and exit."""
        self._refuse()
        self._backend.purge(RESTART, [State.DELAYED])
        self._set(RESTART)

    def ask_presence(self, seconds: float) -> None:
        """Ask all workers to check for viewers during the next *seconds* seconds.

        The flag is set by a pause of the restart queue. A pause ends by itself, and workers read the queue's counts
        anyway.
        """
        self._refuse()
        self._backend.pause(RESTART, seconds)

    def read(self) -> ControlState:
        """Read the flags, except ``is_down``. Makes one call to the backend, or two if a restart was requested."""
        stats = self._backend.stats(RESTART)  # called on every backend, because it also shows that the backend answers
        if self._missing is not None:
            return ControlState(None, is_presence_asked=False)
        page = self._backend.jobs(RESTART, State.DELAYED, limit=1) if stats.delayed else None
        return ControlState(page.jobs[0].id if page and page.jobs else None, stats.paused_for is not None)

    def _refuse(self) -> None:
        if self._missing is not None:
            raise self._missing

    def _set(self, flag: str) -> None:
        self._backend.enqueue(flag, [NewJob(b"", new_id(), delay=DELAY_MAX)])
