"""Typed events about jobs and workers. Logging and metrics subscribe to these events.

A subscriber is called in the thread in which the event happened, and should be quick. A subscriber that is a coroutine
function runs on an event loop (``async_subscribers``). A subscriber's error is logged, and never changes the outcome of
a job.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec

from .driverkit.fork import forks

if TYPE_CHECKING:
    import asyncio

    from .async_subscribers import AsyncSubscribers
    from .job import JobContext

_log = logging.getLogger("multiq.events")


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """The base class of all events. A subscriber of ``Event`` gets every event."""


class JobEvent(Event, frozen=True, kw_only=True):
    """An event about one run of a job."""

    job: JobContext


class JobStarted(JobEvent, frozen=True, kw_only=True):
    """A job is about to run."""


class JobDone(JobEvent, frozen=True, kw_only=True):
    """A job has succeeded and will be acked."""

    seconds: float


class JobFailed(JobEvent, frozen=True, kw_only=True):
    """A job raised an error. The event ``JobRetried`` or ``JobBuried`` follows."""

    seconds: float
    error: BaseException


class JobRetried(JobEvent, frozen=True, kw_only=True):
    """A job will be released and run again after ``delay`` seconds."""

    delay: float
    reason: str


class JobBuried(JobEvent, frozen=True, kw_only=True):
    """A job will be buried, because it has no attempts left, has crashed too often, or cannot be decoded."""

    reason: str


class JobSnoozed(JobEvent, frozen=True, kw_only=True):
    """A job raised ``Snooze``, and will run again after ``delay`` seconds. A snooze is neither a failure nor a
    retry."""

    delay: float
    reason: str | None


class JobExpired(JobEvent, frozen=True, kw_only=True):
    """A job did not start within its ``expires`` seconds, and will be dropped without a run."""

    age: float
    """Seconds since the job was enqueued or rescheduled."""
    expires: float
    """The number of seconds after the enqueue within which the job had to start."""


class JobCancelled(JobEvent, frozen=True, kw_only=True):
    """A running or reserved job was cancelled by a request, and will not run again.

    The error ``multiq.JobCancelled`` is another class.
    """

    reason: str


class JobTimedOut(JobEvent, frozen=True, kw_only=True):
    """A job was stopped because it ran longer than its ``timeout``. The event ``JobRetried`` or ``JobBuried``
    follows."""

    timeout: float
    stack: str | None = None
    """The stack of the job's thread, if the process was ended to stop the job. None means that the process was not
    ended, or that the stack is unknown.
    """


class JobOverdue(JobEvent, frozen=True, kw_only=True):
    """A job still runs after its timeout. A supervisor ends the job's process. Without a supervisor, the job continues
    to run."""

    timeout: float


class JobCrashed(Event, frozen=True, kw_only=True):
    """The process that ran a job died. After the crash, the job is ready again. ``max_crashes`` limits the number of
    crashes."""

    queue: str
    job_id: str
    task: str | None = None
    """The name of the job's task. None means that the job has no task, or is gone."""
    reason: str


class JobLost(Event, frozen=True, kw_only=True):
    """The lease of a job ended before its result was stored. The job runs again, and the result is discarded."""

    queue: str
    job_id: str
    task: str | None = None
    """The name of the job's task. None means that the job has no task, or is gone."""


class WorkerEvent(Event, frozen=True, kw_only=True):
    """An event about a worker process."""

    worker: str
    """``host:pid``."""


class WorkerStarted(WorkerEvent, frozen=True, kw_only=True):
    """A worker begins to reserve jobs."""

    queues: tuple[str, ...]


class WorkerLooping(WorkerEvent, frozen=True, kw_only=True):
    """A worker is about to reserve jobs."""


class WorkerPaused(WorkerEvent, frozen=True, kw_only=True):
    """A worker stops reserving jobs until it is resumed. The worker's running jobs continue."""


class WorkerResumed(WorkerEvent, frozen=True, kw_only=True):
    """A worker reserves jobs again."""


class WorkerStopping(WorkerEvent, frozen=True, kw_only=True):
    """A worker reserves no more jobs."""

    reason: str


class WorkerStopped(WorkerEvent, frozen=True, kw_only=True):
    """A worker has ended."""

    exit_code: int


class BackendDown(WorkerEvent, frozen=True, kw_only=True):
    """An attempt to reach the backend failed. The next attempt follows in ``retry_in`` seconds."""

    error: Exception
    retry_in: float


class BackendUp(WorkerEvent, frozen=True, kw_only=True):
    """The backend answers again."""


E = TypeVar("E", bound=Event)
Subscriber: TypeAlias = Callable[[Any], object]


class Events:
    """The subscribers of an app, by event type."""

    def __init__(self) -> None:
        self._subscribers: defaultdict[type[Event], list[Subscriber]] = defaultdict(list)
        self.listeners = _Listeners(self._subscribers)
        """The subscribers of each concrete event type. Code that emits an event constructs the event only if its type
        has subscribers."""
        self.logged = False
        """Whether ``multiq.logging`` has subscribed already."""
        self.last_calls: list[Callable[[], object]] = []
        """What a worker's sidecar calls at its end. A sidecar runs no jobs, so it emits no ``WorkerStopped``."""
        self._async_subscribers: AsyncSubscribers | None = None  # None if no subscriber is a coroutine function
        self._sessions: list[EventSession] = []
        self._session_lock = threading.Lock()

    def subscribe(self, kind: type[E], subscriber: Callable[[E], object]) -> None:
        """Call *subscriber* with each event of the class *kind* and of its subclasses."""
        self._subscribers[kind].append(self._soon(subscriber) if _is_async(subscriber) else subscriber)
        self.listeners = _Listeners(self._subscribers)  # another thread may still read the old dict

    def open_session(self, loop: asyncio.AbstractEventLoop | None = None) -> EventSession:
        """Begin the session of a worker that emits events from now on.

        *loop*: the worker's event loop, on which subscribers that are coroutine functions may run.
        """
        with self._session_lock:
            # remove the sessions of a parent process
            self._sessions[:] = [session for session in self._sessions if session.generation == forks.generation]
            session = EventSession(self, loop)
            self._sessions.append(session)
            return session

    def finish(self, patience: float) -> None:
        """Wait up to *patience* seconds for coroutine subscribers. Cancel the subscribers that still run after
        *patience* seconds."""
        self.open_session().close(patience)

    def emit(self, event: Event) -> None:
        """Call all subscribers of the event. The subscribers' errors are logged."""
        kind = type(event)
        for subscriber in self.listeners[kind]:
            try:
                subscriber(event)
            except BaseException:  # noqa: BLE001 - the error is logged, and the job continues
                _log.exception("a subscriber of %s failed; the outcome of the job is not affected", kind.__name__)

    def _soon(self, subscriber: Callable[[Any], Any]) -> Subscriber:
        """Return a subscriber that starts the coroutine and does not wait for its end."""
        # programs without coroutine subscribers need not import asyncio
        from .async_subscribers import AsyncSubscribers

        background = self._async_subscribers = self._async_subscribers or AsyncSubscribers(self._sessions)
        return lambda event: background.start(subscriber, event)


class _Listeners(dict[type[Event], tuple[Subscriber, ...]]):
    """For each concrete event type, the subscribers to this type and to its parent types.

    A cache for speed, because each job looks up two event types.
    """

    def __init__(self, subscribers: Mapping[type[Event], list[Subscriber]]) -> None:
        self._subscribers = subscribers

    def __missing__(self, kind: type[Event]) -> tuple[Subscriber, ...]:
        found = self[kind] = tuple(
            subscriber
            for parent in kind.__mro__
            if parent in self._subscribers
            for subscriber in self._subscribers[parent]
        )
        return found


class EventSession:
    """The period from a worker's first event to its last event. If several workers of a process share an app, each
    worker has its own session."""

    def __init__(self, events: Events, loop: asyncio.AbstractEventLoop | None) -> None:
        self._events = events
        self.loop = loop
        """The event loop on which subscribers that are coroutine functions run, until ``finish``."""
        self.generation = forks.generation

    def finish(self, patience: float) -> None:
        """Wait up to *patience* seconds for subscribers that are coroutine functions.

        Afterwards, cancel the subscribers that still run on the worker's loop.
        """
        loop, self.loop = self.loop, None
        background = self._events._async_subscribers  # noqa: SLF001 - a class of this module
        if background is not None:
            background.finish(loop, patience)

    def close(self, patience: float) -> None:
        """End the session, because the worker has ended.

        The end of an app's last session cancels the subscribers that still run on any loop.
        """
        self.finish(patience)
        events = self._events
        with events._session_lock:  # noqa: SLF001
            if self in events._sessions:  # noqa: SLF001
                events._sessions.remove(self)  # noqa: SLF001
            is_last = not events._sessions  # noqa: SLF001
        if is_last and events._async_subscribers is not None:  # noqa: SLF001
            events._async_subscribers.close()  # noqa: SLF001


def _is_async(subscriber: Subscriber) -> bool:
    return inspect.iscoroutinefunction(subscriber) or inspect.iscoroutinefunction(
        getattr(type(subscriber), "__call__", None)  # noqa: B004 - the method is inspected
    )
