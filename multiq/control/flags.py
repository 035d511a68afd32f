"""Control flags for all workers of a connection, on every host: "down" and "restart".

A control flag is a job in a reserved queue, delayed by 100 years. The flag is set while the job exists. Each time that
a flag is set, a new job with a new id is added. No worker reserves from a reserved queue.

Flags are stored as jobs, because every driver can store jobs.

Control flags need several capabilities. If a backend lacks a capability that control flags need, setting a flag raises
``Unsupported``, and every flag reads as not set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from multiq.backend import DELAY_MAX, Enqueue, NewJob, State, Terms
from multiq.errors import Unsupported
from multiq.ids import new_id

if TYPE_CHECKING:
    from multiq.backend import Backend

DOWN = "multiq.down"
RESTART = "multiq.restart"
PRESENCE_QUEUES = tuple(f"multiq.roll-call.{number}" for number in range(1, 5))
"""The queues for viewers. A viewer is a process that lists the workers (see ``presence``), and uses one of the queues
for viewers."""
CONTROL_QUEUES = frozenset({DOWN, RESTART, *PRESENCE_QUEUES})
"""The reserved queues, which are left out of lists of queues."""


_NEEDS = ("inspection", "management", "pausing", "purging", "exact_counts")


def missing_for_control(backend: Backend) -> Unsupported | None:
    """Return the error if *backend* cannot have control flags and presence. Return None if the backend can have control
    flags and presence."""
    declared = backend.declared
    for power in _NEEDS:
        if not declared.claim(power):
            return backend.unsupported(power)
    if declared.longest_delay is not None:
        reason = f"control flags are jobs delayed by 100 years, and its longest delay is {declared.longest_delay:g} s"
        return Unsupported("control flags", declared.backend, reason)
    return None


def visible_queues(backend: Backend) -> list[str]:
    """Return the names of all queues except the reserved queues (``CONTROL_QUEUES``)."""
    return [name for name in backend.queues() if name not in CONTROL_QUEUES]


def schedules_mark() -> Enqueue:
    """Return the step that marks the connection as a connection with schedules.

    The mark is a held job in the restart queue, because workers already read the counts of the restart queue. Because
    of the mark, a worker without schedules needs no additional call to find out that there are no schedules. The mark
    is never removed, because another process could store a schedule during the removal.
    """
    return Enqueue(RESTART, NewJob(b"", "schedules", terms=Terms(awaits=1)))


class ControlState(NamedTuple):
    """The control flags of a connection, except ``is_down``."""

    last_restart: str | None
    """The id of the latest request to restart, or None if there was no request."""
    restart_age: float
    """Seconds since the latest request to restart, by the backend's clock. The value is 0 if there was no request or
    the age is not known."""
    is_presence_asked: bool
    """Whether a viewer (``multiq top``) asks for the list of workers."""
    has_schedules: bool
    """Whether a schedule was ever stored on this connection (``schedules_mark``)."""


class DownState(NamedTuple):
    """The flags that are stored in the queue of ``multiq down``."""

    is_down: bool
    are_cancels_asked: bool
    """Whether there may be requests to cancel running jobs."""


class Control:
    """Reads and sets the control flags of one connection.

    Each method may raise ``BackendError``. On a backend without control flags, setting a flag raises ``Unsupported``,
    and every flag reads as not set.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._missing = missing_for_control(backend)

    @property
    def is_supported(self) -> bool:
        """Whether the connection can have control flags."""
        return self._missing is None

    def check(self) -> None:
        """Raise ``Unsupported`` if the connection cannot have control flags."""
        if self._missing is not None:
            raise self._missing

    def is_down(self) -> bool:
        """Return whether the connection is down. Workers take no jobs from a connection that is down."""
        return self._missing is None and bool(self._backend.stats(DOWN).delayed)

    def take_down(self) -> bool:
        """Stop all workers from taking jobs. Returns False if the connection was already down."""
        self.check()
        if self.is_down():
            return False
        self._set(DOWN)
        return True

    def bring_up(self) -> bool:
        """Let workers take jobs again. Returns False if workers were allowed to take jobs already."""
        self.check()
        return bool(self._backend.purge(DOWN, [State.DELAYED]))

    def restart(self) -> None:
        """Ask all workers that run now to finish their jobs and exit."""
        self.check()
        self._backend.purge(RESTART, [State.DELAYED])
        self._set(RESTART)

    def ask_presence(self, seconds: float) -> None:
        """Ask all workers to check for viewers (``presence``) during the next *seconds* seconds.

        The flag is a pause of the restart queue. A pause ends without a call, and workers already read the counts of
        the restart queue.
        """
        self.check()
        self._backend.pause(RESTART, seconds)

    def ask_cancels(self, seconds: float) -> None:
        """Ask all workers to look for requests to cancel jobs (``multiq.cancellation``) during the next *seconds*.

        The flag is a pause of the queue of ``multiq down``, because workers already read this queue's counts.
        """
        self.check()
        self._backend.pause(DOWN, seconds)

    def are_cancels_asked(self) -> bool:
        """Return whether there may be requests to cancel jobs."""
        return self.read_down().are_cancels_asked

    def read_down(self) -> DownState:
        """Read ``is_down`` and ``are_cancels_asked``. Makes one call to the backend."""
        if self._missing is not None:
            return DownState(is_down=False, are_cancels_asked=False)
        stats = self._backend.stats(DOWN)
        return DownState(is_down=bool(stats.delayed), are_cancels_asked=stats.paused_for is not None)

    def read(self) -> ControlState:
        """Read the flags, except ``is_down``. Makes one call to the backend, or two calls if a restart was
        requested."""
        # called on every backend, because this call also shows that the backend answers
        stats = self._backend.stats(RESTART)
        if self._missing is not None:
            return ControlState(None, 0.0, is_presence_asked=False, has_schedules=False)
        requests = self._backend.jobs(RESTART, State.DELAYED, limit=1).jobs if stats.delayed else []
        last_restart, age = (requests[0].id, requests[0].age or 0.0) if requests else (None, 0.0)
        return ControlState(
            last_restart,
            age,
            is_presence_asked=stats.paused_for is not None,
            has_schedules=bool(stats.held),
        )

    def _set(self, flag: str) -> None:
        self._backend.enqueue(flag, [NewJob(b"", new_id(), delay=DELAY_MAX)])
