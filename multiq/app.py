"""An app: one connection, and the tasks that are enqueued and run on it."""

from __future__ import annotations

import difflib
import inspect
import threading
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypedDict, TypeVar, overload

from .backend import PRIORITY_DEFAULT, TTR_DEFAULT
from .backend.registry import open_backend
from .driverkit.fork import forks
from .errors import ArgumentsInvalid, NameInvalid, OptionInvalid, TaskExists, TaskNotFound
from .events import Events
from .formatting import shown
from .queue import Queue
from .retry import DEFAULT, MAX_CRASHES_DEFAULT, RetryPolicy, to_backoff
from .settings.loader import load_settings
from .task import CallOptions, Task
from .validation import check_count, check_name, check_priority, check_timeout, check_ttr

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self, Unpack

    from .backend import Backend
    from .events import E
    from .job import JobContext
    from .retry import Backoff
    from .settings.model import Settings

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound="Callable[[JobContext], Any]")

Middleware: TypeAlias = "tuple[bool, Callable[[JobContext], Any]]"
"""Whether the middleware is async, and the function that makes the context manager in which a job runs."""


class TaskOptions(TypedDict, total=False):
    """The options of ``@app.task(...)``, as ``App.task`` lists them."""

    name: str
    queue: str
    priority: int
    ttr: float
    timeout: float
    max_attempts: int
    max_crashes: int
    retry_for: float
    loosen: bool
    backoff: Backoff | Sequence[float] | float
    on_success: Callable[[JobContext, Any], object]
    on_retry: Callable[[JobContext, BaseException], object]
    on_failure: Callable[[JobContext, BaseException], object]


class App:
    """Tasks and queues over one connection.

    *connection* is a URL, or the name of a connection in the configuration. Default: ``MULTIQ_URL``, then
    ``multiq.toml`` or ``[tool.multiq]`` in ``pyproject.toml``, then ``sqlite:///multiq.db``. The app connects at the
    first use. Threads may share an app. A parent and its forked children may share an app, too.

    *backend* is a backend object to use instead of a connection, such as ``RedisBackend(client=...)``. The attribute
    ``url`` is then only the backend's name, ``redis://``. ``close`` closes this backend. The next call opens it again.

    ``create=False`` is for programs that only read. It creates neither the SQLite file nor tables. If the file or the
    tables are missing, calls raise ``BackendError``.

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
    ) -> None:
        self._create = create
        self.settings = load_settings() if settings is None else settings
        self.url = self.settings.resolve(connection) if backend is None else _name_of(backend, connection)
        self.tasks: dict[str, Task[Any, Any]] = {}
        self.events = Events()
        self.around: list[Middleware] = []
        self.fetch_hooks: list[Callable[[str], object]] = []
        self._backend = backend
        self._queues: dict[str, Queue] = {}

    @property
    def backend(self) -> Backend:
        """The app's backend, constructed at the first use. Raises ``UrlInvalid``, ``BackendNotInstalled``."""
        backend = self._backend
        if backend is None:
            with _opening.lock:
                backend = self._backend = self._backend or open_backend(self.url, create=self._create)
        return backend

    def queue(self, name: str = "default") -> Queue:
        """The queue of this name. Raises ``NameInvalid``."""
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues.setdefault(name, Queue(self, name))
        return queue

    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R]: ...

    @overload
    def task(
        self, function: None = None, /, **options: Unpack[TaskOptions]
    ) -> Callable[[Callable[P, R]], Task[P, R]]: ...

    def task(self, function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        """Register a function as a task: ``@app.task`` or ``@app.task(queue="mail", ...)``.

        Options:

        - *name*: the task's name. Default: the function's own.
        - *queue*: the queue of its jobs. Default: ``"default"``.
        - *priority*: 0 goes first, 4294967295 last. Default: 1024.
        - *ttr*: how long a lease lasts, in seconds. The worker renews the lease while the task runs. Default: 60.
        - *timeout*: how long the task may run, in seconds. Then it gets a ``SoftTimeout``. Default: no limit.
        - *max_attempts*: attempts before a job is buried. 0: no limit. Default: 5, or no limit with *retry_for*.
        - *max_crashes*: attempts that may end by a crash, a kill or a lost lease. 0: no limit. Default: 3.
        - *retry_for*: seconds after the enqueue in which a failed job is tried again. Default: no limit.
        - *loosen*: whether a single job may have looser limits than its task. Stricter limits are always allowed.
          Default: False.
        - *backoff*: the wait after a failed attempt: a number of seconds, a list with the seconds for each attempt, or
          a function that takes the attempt's number and returns seconds. Default: exponential.
        - *on_success*: a function that is called with the job and its result.
        - *on_retry*: a function that is called with the job and the error, before a failed job is retried.
        - *on_failure*: a function that is called with the job and the error, when a failed job is buried.

        Raises ``TaskExists``, ``NameInvalid``, ``OptionInvalid``. Raises ``ArgumentsInvalid`` if *function* is not a
        function.
        """

        _check_options(options)

        def register(function: Callable[..., Any]) -> Task[..., Any]:
            return self._register(_make_task(self, function, **options))

        return register if function is None else register(function)

    def find_task(self, name: str) -> Task[Any, Any]:
        """The task of this name. Raises ``TaskNotFound``, whose message lists the names of all tasks."""
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

    def middleware(self, function: F) -> F:
        """Register a generator function to run around each job.

        The code before its ``yield`` runs before the job. The code after its ``yield`` runs after the job.

        The function is called with the job's context. An error of the job is raised at the ``yield``. Middleware that
        catches this error makes the job a success. An error that middleware raises before its ``yield`` fails the job.
        An async generator function runs around coroutines only. The middleware registered first is the outermost.

        Raises ``ArgumentsInvalid`` if *function* is not a generator function.
        """
        is_async = inspect.isasyncgenfunction(function)
        if not is_async and not inspect.isgeneratorfunction(function):
            raise ArgumentsInvalid(
                "middleware must be a generator function, with its work before and after one yield, got "
                f"{_place(function)}"
            )
        self.around.append((is_async, asynccontextmanager(function) if is_async else contextmanager(function)))
        return function

    def before_fetch(self, hook: Callable[[str], R]) -> Callable[[str], R]:
        """Register a function that each worker calls before it reserves jobs. The argument is the worker's name.

        If the function returns False, the worker reserves nothing, and calls the function again within a second.
        Running jobs go on. If the function raises an error, the worker logs the error and reserves jobs.
        """
        self.fetch_hooks.append(hook)
        return hook

    def connect(self, connection: str) -> None:
        """Use another connection from now on: a URL, or a name in the settings.

        Existing job handles still use the old connection. Raises ``SettingsInvalid`` for a name that is not configured.
        """
        url = self.settings.resolve(connection)
        if url != self.url:
            self.close()
            self._queues.clear()
            self._backend, self.url = None, url

    def close(self) -> None:
        """Close all connections. The next call opens new ones."""
        for queue in list(self._queues.values()):
            queue.close()
        if self._backend is not None:
            self._backend.close()

    def _register(self, task: Task[..., Any]) -> Task[..., Any]:
        known = self.tasks.setdefault(task.name, task)
        if known is task or known.is_like(task):
            return known
        raise TaskExists(
            f"task {task.name!r} is registered already by {_place(known.function)}, and {_place(task.function)} is "
            "another function or has other options: give one of them another name="
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        from .settings.url import redact

        return f"App({redact(self.url)!r}, {len(self.tasks)} tasks)"


def _name_of(backend: object, connection: str | None) -> str:
    """Return the ``url`` of an app that was made with *backend*, such as ``redis://``. Raises ``OptionInvalid``."""
    from .backend import Backend

    if not isinstance(backend, Backend):  # the message shows only the type, because a URL may contain a password
        raise OptionInvalid(f"backend must be a Backend, like RedisBackend(client=...), got a {type(backend).__name__}")
    if connection is not None:
        raise OptionInvalid("an app must have a connection or a backend, got both")
    return f"{backend.declared.backend}://"


def _make_task(
    app: App,
    function: Callable[..., Any],
    *,
    name: str | None = None,
    queue: str = "default",
    priority: int = PRIORITY_DEFAULT,
    ttr: float = TTR_DEFAULT,
    timeout: float | None = None,
    max_attempts: int | None = None,
    max_crashes: int = MAX_CRASHES_DEFAULT,
    retry_for: float | None = None,
    loosen: bool = False,
    backoff: Backoff | Sequence[float] | float = DEFAULT,
    on_success: Callable[[JobContext, Any], object] | None = None,
    on_retry: Callable[[JobContext, BaseException], object] | None = None,
    on_failure: Callable[[JobContext, BaseException], object] | None = None,
) -> Task[..., Any]:
    _check_function(function)
    _check_hook(on_success, "on_success")
    _check_hook(on_retry, "on_retry")
    _check_hook(on_failure, "on_failure")
    policy = RetryPolicy(
        max_attempts=None if max_attempts is None else check_count(max_attempts, "max_attempts", least=0),
        max_crashes=check_count(max_crashes, "max_crashes", least=0),
        retry_for=None if retry_for is None else check_timeout(retry_for, "retry_for"),
        backoff=to_backoff(backoff),
    )
    return Task(
        app,
        function,
        name=_own_name(function) if name is None else name,
        options=CallOptions(queue=check_name(queue), priority=check_priority(priority), ttr=check_ttr(ttr)),
        policy=policy,
        timeout=None if timeout is None else check_timeout(timeout),
        loosen=_check_flag(loosen, "loosen"),
        on_success=on_success,
        on_retry=on_retry,
        on_failure=on_failure,
    )


_MEANT = {
    **dict.fromkeys(("retries", "retry", "max_retries", "tries", "max_tries", "attempts"), "max_attempts"),
    **dict.fromkeys(("retry_backoff", "retry_delay", "default_retry_delay", "interval", "min_backoff"), "backoff"),
    **dict.fromkeys(("time_limit", "soft_time_limit", "job_timeout", "max_time"), "timeout"),
    **dict.fromkeys(("lease", "ttl", "visibility_timeout"), "ttr"),
    **dict.fromkeys(("max_age", "retry_until"), "retry_for"),
    "queue_name": "queue",
    "prio": "priority",
    **dict.fromkeys(("on_error", "on_exception"), "on_failure"),
    **dict.fromkeys(
        ("delay", "countdown", "eta", "at", "schedule"), "options(delay=...) or options(at=...) of the task"
    ),
    **dict.fromkeys(("headers", "connection"), "options(...) of the task"),
    **dict.fromkeys(("id", "job_id", "task_id", "idempotency_key"), "options(id=...) of the task"),
}
"""Names from other libraries -> the name of the same option in multiq."""


def _check_options(options: dict[str, Any]) -> None:
    known = TaskOptions.__annotations__
    for name, value in options.items():
        if name not in known:
            close = _MEANT.get(name) or next(iter(difflib.get_close_matches(name, known, n=1)), None)
            which = f"did you mean {close}?" if close else f"there are: {', '.join(known)}"
            raise OptionInvalid(f"unknown task option {name}={shown(value)}: {which}")


def _check_function(function: Callable[..., Any]) -> None:
    if not callable(function):
        raise ArgumentsInvalid(f"a task must be a function, got {shown(function)}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ArgumentsInvalid(
            f"a task must return a list, not yield its items, got the generator function {_place(function)}: "
            "to call a generator function runs none of its code"
        )
    try:
        inspect.signature(function)
    except (ValueError, TypeError) as exc:
        raise ArgumentsInvalid(
            f"the signature of {_place(function)} cannot be read ({exc}): call it from a function of your own"
        ) from exc


def _own_name(function: Callable[..., Any]) -> str:
    name: str | None = getattr(function, "__name__", None)
    if name is None or name == "<lambda>":
        raise NameInvalid(f"a task must have a name, and {_place(function)} has none: @app.task(name=...)")
    return name


def _check_flag(value: bool, name: str) -> bool:
    if not isinstance(value, bool):
        raise OptionInvalid(f"{name} must be True or False, got {shown(value)}")
    return value


def _check_hook(hook: Callable[..., object] | None, name: str) -> None:
    if hook is not None and (not callable(hook) or inspect.iscoroutinefunction(hook)):
        raise OptionInvalid(f"{name} must be a plain function, as it is called and not awaited, got {shown(hook)}")


class _Opening:
    """The lock around the construction of a backend.

    A forked child makes a new lock, because a thread of the parent may have held the lock at the fork.
    """

    def __init__(self) -> None:
        self.start_over_in_child()
        forks.watch(self)

    def start_over_in_child(self) -> None:
        self.lock = threading.Lock()


_opening = _Opening()


def _place(function: Callable[..., Any]) -> str:
    name = getattr(function, "__qualname__", None)
    return f"{function.__module__}.{name}" if name else shown(function)
