"""An app has one connection, and the tasks that are enqueued and run on this connection."""

from __future__ import annotations

import importlib
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import msgspec

from .backend.registry import open_backend
from .driverkit.fork import forks
from .errors import (
    ArgumentsInvalid,
    IncludeInvalid,
    MultiqError,
    OptionInvalid,
    SettingsInvalid,
    TaskNotFound,
)
from .events import Events
from .formatting import shown
from .ids import check_id
from .job import JobHandle
from .job_ref import read_ref
from .middleware import AppChain
from .queue import Queue
from .registry import Registrar, Tasks, check_free, check_schedule_free, make_task, not_loaded
from .settings.loader import load_settings
from .validation import check_count, check_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType
    from typing import Self

    from .backend import Backend
    from .events import E
    from .failed import FailedJobs
    from .flows import Flows
    from .flows.signature import Signature
    from .limits import Limits
    from .middleware import MiddlewareLike
    from .outbox import Outbox
    from .payloads import Payloads
    from .schedules import Definition, Schedules
    from .schedules.defining import Timing
    from .settings.model import Settings
    from .task import Task

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound="MiddlewareLike")

_MOST_QUEUES = 1000  # the most queues without connections that an app keeps for later calls


class App(Registrar):
    """Tasks and queues over one connection.

    *connection* is a URL, or the name of a connection in the configuration. Without *connection*, the app uses the
    variable ``MULTIQ_URL``. Without ``MULTIQ_URL``, the app uses the connection in ``multiq.toml`` or in
    ``[tool.multiq]`` of ``pyproject.toml``. Without a settings file, the app uses ``sqlite:///multiq.db``. The app
    connects when it is first used. Threads may share an app. A parent process and its forked children may share an app,
    too.

    *backend* is a backend object to use instead of a connection, such as ``RedisBackend(client=...)``. With *backend*,
    the attribute ``url`` is only the backend's name, such as ``redis://``. ``App.close`` closes the backend. The app's
    next call opens the closed backend again.

    *max_result*: the largest size, in bytes, of the JSON value that is kept with a job's outcome. The default is the
    setting ``max_result``, which is 256 KiB unless configured.

    *include*: modules with tasks, such as ``"shop.mail"``. The app imports the modules when its tasks are first needed,
    and includes the modules' registries (``Tasks``). The default is the setting ``include``.

    *payloads*: how payloads are signed, encrypted and compressed. By default, the settings ``payload`` apply.

    ``create=False`` is for programs that only read. With ``create=False``, the app does not create a missing SQLite
    file or missing tables. Calls raise ``BackendError`` if the file or the tables are missing.

    Raises ``SettingsInvalid``. Raises ``OptionInvalid`` if *backend* is not a ``Backend``, or if both *backend* and
    *connection* are given.
    """

    def __init__(
        self,
        connection: str | None = None,
        *,
        backend: Backend | None = None,
        settings: Settings | None = None,
        create: bool = True,
        max_result: int | None = None,
        include: Sequence[str] | None = None,
        payloads: Payloads | None = None,
    ) -> None:
        self._create = create
        self.settings = load_settings() if settings is None else settings
        if max_result is not None:
            self.settings = msgspec.structs.replace(self.settings, max_result=check_count(max_result, "max_result"))
        if include is not None:
            self.settings = _with_include(self.settings, include)
        self.url = self.settings.resolve(connection) if backend is None else _name_of(backend, connection)
        self._tasks: dict[str, Task[Any, Any]] = {}
        self.events = Events()
        self.chain = AppChain()
        """The app's middleware."""
        self.intercepts = False
        """Whether enqueues go through middleware."""
        self.outboxes: list[Outbox] = []
        """The outboxes that the workers of this app relay."""
        self._code_schedules: dict[str, Definition] = {}
        self._payloads = payloads
        self._backend = backend
        if backend is not None:
            _attach(backend, self)
            self._backend = self._sealed(backend)
        self._opening_calls: set[object] = set()  # coroutines that wait for the backend
        self._opening_generation = forks.generation
        self._queues: dict[str, Queue] = {}
        self._reserving: set[Queue] = set()  # queues that have connections of their own
        self._not_included = list(self.settings.include)
        self._including = threading.RLock()
        if self._not_included:
            not_loaded.add(self)

    @property
    def tasks(self) -> dict[str, Task[Any, Any]]:
        """The tasks by name. The first call imports the modules of ``include``. Raises ``IncludeInvalid``."""
        if self._not_included:
            self.load_included()
        return self._tasks

    @property
    def code_schedules(self) -> dict[str, Definition]:
        """The schedules that are defined in code, by name. The first call imports the modules of ``include``, as
        ``tasks`` does.

        Raises ``IncludeInvalid``.
        """
        if self._not_included:
            self.load_included()
        return self._code_schedules

    @property
    def backend(self) -> Backend:
        """The app's backend, constructed at the first use. Raises ``UrlInvalid``, ``BackendNotInstalled``."""
        backend = self._backend
        return self._open_backend() if backend is None else backend

    async def abackend(self) -> Backend:
        """Return ``backend``. The backend's driver is imported on a thread, because an import would block the event
        loop.

        Coroutines that wait for the backend continue in the order of their calls.
        """
        if self.is_open:
            return self.backend
        from .async_calls import run_in_order

        if self._opening_generation != forks.generation:  # a forked child inherits the parent's calls in this set
            self._opening_generation = forks.generation
            self._opening_calls.clear()
        call = object()
        self._opening_calls.add(call)
        try:
            return await run_in_order(self, self._open_backend)
        finally:
            self._opening_calls.discard(call)

    @property
    def has_backend(self) -> bool:
        """Whether the backend is constructed."""
        return self._backend is not None

    @property
    def is_open(self) -> bool:
        """Whether the backend is constructed and no coroutine waits for it. An enqueue must not overtake coroutines
        that wait."""
        return self._backend is not None and not self._opening_calls

    def queue(self, name: str = "default") -> Queue:
        """Return the queue that has the given name. Raises ``NameInvalid``."""
        queue = self._queues.get(name)
        if queue is None:
            if len(self._queues) >= _MOST_QUEUES + len(self._reserving):
                self._queues = {queue.name: queue for queue in list(self._reserving)}
            queue = self._queues.setdefault(name, Queue(self, name))
        return queue

    def keep_queue(self, queue: Queue) -> None:
        """Keep a queue until the app is closed, because the queue is about to open connections."""
        if queue not in self._reserving:
            self._reserving.add(queue)
            self._queues[queue.name] = queue

    @property
    def flows(self) -> Flows:
        """The chains, groups, batches and flows of this app's connection."""
        from .flows import Flows

        return Flows(self)

    @property
    def limits(self) -> Limits:
        """Lists and changes the limits of this app's queues."""
        from .limits import Limits

        return Limits(self)

    def job(self, queue: str, job_id: str | None = None) -> JobHandle:
        """Return the handle of a job, by ``app.job("default", job_id)``, or by ``app.job(ref)`` with a
        ``JobHandle.ref``.

        The job is not looked up. Raises ``NameInvalid``, ``OptionInvalid``.
        """
        if job_id is None:
            return JobHandle(self.backend, *read_ref(queue))
        return JobHandle(self.backend, check_name(queue), check_id(job_id))

    @property
    def failed(self) -> FailedJobs:
        """Lists, retries and deletes the failed jobs of all queues."""
        from .failed import FailedJobs  # imported late, because producers and workers need no failed jobs

        return FailedJobs(self.backend)

    def include(self, tasks: Tasks) -> None:
        """Include the tasks and schedules of a registry. A task or schedule that the registry gets later is included,
        too.

        If the registry is included already, nothing changes. Raises ``TaskExists`` or ``ScheduleExists`` if a name is
        taken. If ``include`` raises an error, it has included nothing. Raises ``ArgumentsInvalid`` if *tasks* is not a
        ``Tasks``.
        """
        if not isinstance(tasks, Tasks):
            raise ArgumentsInvalid(f"include must have a multiq.Tasks, got {shown(tasks)}")
        tasks.join(self, self._tasks, self._code_schedules)

    def exclude(self, tasks: Tasks) -> None:
        """Undo ``include``. If the registry is not included, nothing changes."""
        tasks.leave(self, self._tasks, self._code_schedules)

    def load_included(self) -> None:
        """Import the modules of ``include``, and include their registries. A module is imported only once.

        Raises ``IncludeInvalid``, ``TaskExists``. The next call after an error tries again.
        """
        with self._including:
            while self._not_included:
                name = self._not_included[0]
                module = _import(name)
                for value in list(vars(module).values()):
                    if isinstance(value, Tasks):
                        self.include(value)
                # if the import calls this method, the inner call has removed the name already
                if self._not_included and self._not_included[0] == name:
                    del self._not_included[0]
            not_loaded.discard(self)

    @property
    def schedules(self) -> Schedules:
        """Adds, lists, pauses and runs the schedules of this app's connection. Raises ``Unsupported``."""
        from .schedules import Schedules

        return Schedules(self)

    def find_task(self, name: str) -> Task[Any, Any]:
        """Return the task that has the given name. Raises ``TaskNotFound``. The error's message lists the names of all
        tasks."""
        try:
            return self.tasks[check_name(name, "task")]
        except KeyError:
            known = ", ".join(sorted(self.tasks)) or "none"
            raise TaskNotFound(f"there is no task {name!r} in this app; registered: {known}") from None

    def on(self, kind: type[E]) -> Callable[[Callable[[E], R]], Callable[[E], R]]:
        """Subscribe to events: ``@app.on(multiq.events.JobBuried)``."""

        def subscribe(subscriber: Callable[[E], R]) -> Callable[[E], R]:
            self.events.subscribe(kind, subscriber)
            return subscriber

        return subscribe

    def middleware(self, middleware: M) -> M:
        """Register middleware, which is an object of a subclass of ``Middleware``. The object that is registered first
        is the outermost middleware.

        As a decorator, ``app.middleware`` registers a function that wraps the runs of jobs. A generator function is
        called around each run, like ``Middleware.run``. An async generator function is called around coroutines only,
        like ``Middleware.arun``.

        Register middleware before the first enqueue and before a worker starts. Raises ``ArgumentsInvalid``.
        """
        self.chain.add(middleware)
        self.intercepts = self.chain.any_enqueue
        return middleware

    def note_middleware(self, task: Task[Any, Any]) -> None:
        """Record that a task of this app may have middleware of its own."""
        self.chain.note(task.chain)
        self.intercepts = self.chain.any_enqueue

    def connect(self, connection: str) -> None:
        """Use another connection from now on. *connection* is a URL, or a name in the settings.

        Existing job handles still use the old connection. Raises ``SettingsInvalid`` for a name that is not configured.
        """
        url = self.settings.resolve(connection)
        if url != self.url:
            self.close()
            self._queues.clear()
            self._reserving.clear()
            self._backend, self.url = None, url

    @contextmanager
    def using(self, backend: Backend) -> Iterator[Self]:
        """Use another backend within a ``with`` block, for example in tests. The app's own connection stays open.

        Existing job handles still use the app's own connection. Do not call ``using`` while other threads use the app.
        """
        before = self._backend, self.url, self._queues, self._reserving
        self._backend, self.url = self._sealed(backend), _name_of(backend, None)
        self._queues, self._reserving = {}, set()
        _attach(backend, self)
        try:
            yield self
        finally:
            self.close()
            self._backend, self.url, self._queues, self._reserving = before

    def close(self) -> None:
        """Close all connections. The app's next call opens new connections."""
        for queue in list(self._reserving):
            queue.close()
        if self._backend is not None:
            self._backend.close()

    async def aclose(self) -> None:
        """``close`` without blocking the event loop. Coroutines that wait for jobs get ``BackendUnavailable``.

        ``aclose`` waits for the enqueues that have begun. ``aclose`` then ends the threads that make calls for
        coroutines.
        """
        if self._backend is None:
            return
        from .async_calls import end_threads, run
        from .async_enqueue import finish_enqueues

        backend = self._backend
        await finish_enqueues(backend)
        for queue in list(self._reserving):
            await queue.aclose()
        await run(backend, self.close)
        end_threads(backend)

    def _open_backend(self) -> Backend:
        with forks.opening:
            backend = self._backend
            if backend is None:
                backend = open_backend(self.url, create=self._create)
                _attach(backend, self)
                self._backend = backend = self._sealed(backend)
        return backend

    def _sealed(self, backend: Backend) -> Backend:
        """Return *backend*, wrapped if payloads are signed, encrypted or compressed."""
        payloads, settings = self._payloads, self.settings.payload
        if payloads is None and not (settings.sign or settings.encrypt or settings.compress is not None):
            return backend
        from .payloads import Payloads
        from .payloads.sealed_backend import sealed

        if payloads is None:
            payloads = Payloads(**msgspec.structs.asdict(settings))
        elif not isinstance(payloads, Payloads):
            # the value itself may contain keys
            raise OptionInvalid(f"payloads must be a multiq.Payloads, got a {type(payloads).__name__}")
        return sealed(backend, payloads, max(self.settings.max_body, self.settings.max_result))

    def _register(self, function: Callable[..., Any], options: dict[str, Any]) -> Task[..., Any]:
        task = make_task(self, function, **options)
        check_free(self._tasks, task)
        task = self._tasks.setdefault(task.name, task)
        self.note_middleware(task)
        return task

    def _schedule(self, call: Signature, timing: Timing, name: str | None) -> None:
        from .schedules.defining import define

        if call.task.app is not self:
            raise ArgumentsInvalid(
                f"an app must schedule its own tasks, got task {call.task.name!r} of {call.task.app!r}: use that app"
            )
        definition = define(call.task.name if name is None else name, call, timing, origin="code")
        check_schedule_free(self._code_schedules, definition)
        self._code_schedules.setdefault(definition.name, definition)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        from .settings.url import redact

        return f"App({redact(self.url)!r}, {len(self._tasks)} tasks)"


def _name_of(backend: object, connection: str | None) -> str:
    """Return the attribute ``url``, such as ``redis://``, of an app that was made with *backend*. Raises
    ``OptionInvalid``."""
    from .backend import Backend

    if not isinstance(backend, Backend):  # the message shows only the type, because a URL may contain a password
        raise OptionInvalid(f"backend must be a Backend, like RedisBackend(client=...), got a {type(backend).__name__}")
    if connection is not None:
        raise OptionInvalid("an app must have a connection or a backend, got both")
    return f"{backend.declared.backend}://"


def _attach(backend: Backend, app: App) -> None:
    """Give *app* to a backend that runs jobs itself during the enqueue, such as ``sync://``."""
    attach = getattr(backend, "attach_app", None)
    if attach is not None:
        attach(app)


def _with_include(settings: Settings, include: Sequence[str]) -> Settings:
    try:
        return msgspec.structs.replace(settings, include=include)
    except SettingsInvalid as exc:
        raise OptionInvalid(exc.problems[0].replace("include: ", "include ", 1)) from exc


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except MultiqError:
        raise
    except (Exception, SystemExit) as exc:  # a user's module may raise any error
        raise IncludeInvalid(f"include: module {name!r} cannot be imported: {type(exc).__name__}: {exc}") from exc
