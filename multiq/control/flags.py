"""Control flags for all workers of a connection, on every host: the connection is down, or the workers are to restart.

Control flags are stored as jobs delayed by 100 years in reserved queues: the interface for drivers stores jobs and
nothing else, and every store has queues and delays. No worker reserves from these queues. A flag is set while its job
exists. Each time that a flag is set, it gets a new job, with a new id.

When the interface for drivers can keep small values under keys, the flags can become such values, without reserved
queues.

Control flags need several capabilities. A backend that lacks one of them has no control flags: setting one raises
``Unsupported``, and readers find none.
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
"""Queues that listings leave out."""


_NEEDS = ("inspection", "management", "pausing", "purging", "exact_counts")


def missing_for_control(backend: Backend) -> Unsupported | None:
    """Why a backend has no control flags and no presence; None: the backend has both."""
    declared = backend.declared
    for power in _NEEDS:
        if not declared.claim(power):
            return backend.unsupported(power)
    if declared.longest_delay is not None:
        reason = f"control flags are jobs delayed by 100 years, and its longest delay is {declared.longest_delay:g} s"
        return Unsupported("control flags", declared.backend, reason)
    return None


def visible_queues(backend: Backend) -> list[str]:
    """The queues of users: all queues but the reserved ones (``CONTROL_QUEUES``)."""
    return [name for name in backend.queues() if name not in CONTROL_QUEUES]


class ControlState(NamedTuple):
    """The control flags of a connection, except ``is_down``."""

    last_restart: str | None
    """An id that changes with each request to restart; None: there was none."""
    is_presence_asked: bool
    """Whether there is a viewer of the workers."""


class Control:
    """Reads and sets the control flags of one connection. Each method may raise ``BackendError``.

    On a backend without control flags, methods that set one raise ``Unsupported``, and readers find none.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._missing = missing_for_control(backend)

    def is_down(self) -> bool:
        """Whether the connection is down, so that workers take no jobs."""
        return self._missing is None and bool(self._backend.stats(DOWN).delayed)

    def take_down(self) -> bool:
        """Have all workers take no more jobs. False: the connection was down already."""
        self._refuse()
        if self.is_down():
            return False
        self._set(DOWN)
        return True

    def bring_up(self) -> bool:
        """Have workers take jobs again. False: the connection was not down."""
        self._refuse()
        return bool(self._backend.purge(DOWN, [State.DELAYED]))

    def restart(self) -> None:
        """Have all workers that run now finish their jobs and end."""
        self._refuse()
        self._backend.purge(RESTART, [State.DELAYED])
        self._set(RESTART)

    def ask_presence(self, seconds: float) -> None:
        """Have all workers look for viewers during the next *seconds* seconds.

        This flag is a pause of the restart queue: a pause ends by itself, and the counts that workers read anyway say
        whether the queue is paused.
        """
        self._refuse()
        self._backend.pause(RESTART, seconds)

    def read(self) -> ControlState:
        """Read the flags, except ``is_down``. Makes one call to the backend, or two if a restart was requested."""
        stats = self._backend.stats(RESTART)  # also where there are no flags: it shows that the backend answers
        if self._missing is not None:
            return ControlState(None, is_presence_asked=False)
        page = self._backend.jobs(RESTART, State.DELAYED, limit=1) if stats.delayed else None
        return ControlState(page.jobs[0].id if page and page.jobs else None, stats.paused_for is not None)

    def _refuse(self) -> None:
        if self._missing is not None:
            raise self._missing

    def _set(self, flag: str) -> None:
        self._backend.enqueue(flag, [NewJob(b"", new_id(), delay=DELAY_MAX)])
