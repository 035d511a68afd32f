"""Tasks are functions whose calls can be enqueued. An enqueue checks the arguments against the signature."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

import msgspec

from .backend import PRIORITY_DEFAULT, TTR_DEFAULT
from .enqueue import put, put_one
from .envelope import ENVELOPE_VERSION, Envelope, are_plain, check_json, encode_envelope
from .errors import ArgumentsInvalid, OptionInvalid
from .formatting import shown
from .retry import RetryPolicy, tighter
from .validation import check_count, check_delay, check_name, check_new_id, check_priority, check_timeout, check_ttr

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from .app import App
    from .job import JobContext, JobHandle

P = ParamSpec("P")
R = TypeVar("R")

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class CallOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of one job of a task. All values are checked. Times are in seconds."""

    queue: str
    priority: int = PRIORITY_DEFAULT
    delay: float = 0.0
    ttr: float = TTR_DEFAULT
    connection: Any = None
    id: str | None = None
    max_attempts: int | None = None
    max_crashes: int | None = None
    retry_for: float | None = None
    timeout: float | None = None
    headers: dict[str, str] = {}


class Task(Generic[P, R]):
    """A registered function. Calling the task runs the function here. ``enqueue`` makes a job that a worker runs."""

    def __init__(
        self,
        app: App,
        function: Callable[P, R],
        *,
        name: str,
        options: CallOptions,
        policy: RetryPolicy,
        timeout: float | None,
        loosen: bool = False,
        on_success: Callable[[JobContext, Any], object] | None = None,
        on_retry: Callable[[JobContext, BaseException], object] | None = None,
        on_failure: Callable[[JobContext, BaseException], object] | None = None,
    ) -> None:
        """Construct a task from checked options. ``App.task`` lists the options.

        - *options*: the defaults of each job: queue, priority, ttr.
        - *policy*: made from *max_attempts*, *max_crashes*, *retry_for* and *backoff*.
        """
        self.app = app
        self.function = function
        self.name = check_name(name, "task")
        self.default = options
        self.policy = policy
        self.timeout = timeout
        self.loosen = loosen
        self.on_success = on_success
        self.on_retry = on_retry
        self.on_failure = on_failure
        self.is_coroutine = _is_coroutine(function)
        self.__doc__ = function.__doc__
        self.__wrapped__ = function
        self._signature = inspect.signature(function)
        self._fewest, self._most = _plain_range(self._signature)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def enqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> JobHandle:
        """Add a job that calls the function with these arguments.

        Errors:

        - ``ArgumentsInvalid``: the function does not take these arguments.
        - ``PayloadInvalid``: an argument is not JSON. The message has the path of the wrong value.
        - ``PayloadTooLarge``, ``BackendError``.
        - ``EnqueueUncertain``: it is unknown whether the job was added.
        """
        return self._send_one(args, kwargs, self.default)

    def enqueue_many(
        self, calls: Iterable[Sequence[Any] | Mapping[str, Any]], *, ids: Iterable[str] | None = None
    ) -> list[JobHandle]:
        """Enqueue many calls in one round trip.

        Each call is a tuple of positional arguments or a dict of named arguments. *ids* are ids of your own, one for
        each call.
        """
        return self._send([_call(call) for call in calls], self.default, ids)

    async def aenqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> JobHandle:
        """``enqueue`` without blocking the event loop."""
        import asyncio

        return await asyncio.to_thread(self.enqueue, *args, **kwargs)

    def options(
        self,
        *,
        queue: str | None = None,
        priority: int | None = None,
        delay: float | dt.timedelta | None = None,
        at: dt.datetime | None = None,
        ttr: float | None = None,
        connection: Any = None,
        id: str | None = None,  # noqa: A002 - as the job calls it
        max_attempts: int | None = None,
        max_crashes: int | None = None,
        retry_for: float | None = None,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> TaskCall[P]:
        """This task with other options: ``task.options(delay=30).enqueue(...)``.

        An option that is not given keeps the task's value.

        - *queue*: the queue.
        - *priority*: 0 goes first, 4294967295 last.
        - *delay*: seconds, or a timedelta, before the job may start.
        - *at*: the time, with a time zone, before which the job does not start. Give *at* or *delay*, not both.
        - *ttr*: seconds that a lease lasts without a touch.
        - *connection*: your own database connection. The job is written in its transaction, and exists if you commit.
        - *id*: an id of your own, one word of ASCII. While the queue holds a job with this id, nothing is added.
        - *max_attempts*, *max_crashes*, *retry_for*, *timeout*: as for ``App.task``. Values looser than the task's are
          allowed only if the task was registered with ``loosen=True``.
        - *headers*: strings by name that are stored with the job. ``JobContext.headers`` returns them.

        Raises ``OptionInvalid``, ``NameInvalid``.
        """
        default = self.default
        call = TaskCall(
            self,
            CallOptions(
                queue=default.queue if queue is None else check_name(queue),
                priority=default.priority if priority is None else check_priority(priority),
                delay=check_delay(delay, at),
                ttr=default.ttr if ttr is None else check_ttr(ttr),
                connection=connection,
                id=None if id is None else check_new_id(id),
                max_attempts=_optional_count(max_attempts, "max_attempts"),
                max_crashes=_optional_count(max_crashes, "max_crashes"),
                retry_for=None if retry_for is None else check_timeout(retry_for, "retry_for"),
                timeout=None if timeout is None else check_timeout(timeout),
                headers=_check_headers(headers),
            ),
        )
        if not self.loosen:
            self._refuse_looser(
                max_attempts=max_attempts, max_crashes=max_crashes, retry_for=retry_for, timeout=timeout
            )
        return call

    def check_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise ``ArgumentsInvalid`` unless the function takes these arguments."""
        if not kwargs and self._fewest <= len(args) <= self._most:
            return
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as exc:
            raise ArgumentsInvalid(
                f"task {self.name} cannot be called like this: {exc}; it is {self.name}{self._signature}"
            ) from exc

    def policy_of(self, envelope: Envelope) -> RetryPolicy:
        """Return the retry policy of one job.

        A value in the job's envelope replaces the task's value if it is stricter. If the task was registered with
        ``loosen=True``, each value in the envelope replaces the task's value.
        """
        if envelope.max_attempts is None and envelope.max_crashes is None and envelope.retry_for is None:
            return self.policy
        own = self.policy
        asked = RetryPolicy(
            max_attempts=own.max_attempts if envelope.max_attempts is None else envelope.max_attempts,
            max_crashes=own.max_crashes if envelope.max_crashes is None else envelope.max_crashes,
            retry_for=own.retry_for if envelope.retry_for is None else envelope.retry_for,
            backoff=own.backoff,
        )
        return asked if self.loosen else own.bounded(asked)

    def timeout_of(self, envelope: Envelope) -> float | None:
        """Return the seconds that one job may run. 0 or None: no limit."""
        if envelope.timeout is None:
            return self.timeout
        return envelope.timeout if self.loosen else tighter(self.timeout or 0.0, envelope.timeout)

    def is_like(self, other: Task[..., Any]) -> bool:
        """Whether *other* is the same function with the same options."""
        return self._traits() == other._traits()

    def __repr__(self) -> str:
        return f"Task({self.name!r}, queue={self.default.queue!r})"

    def _traits(self) -> tuple[object, ...]:
        hooks = self.on_success, self.on_retry, self.on_failure
        return self.function, self.default, self.policy, self.timeout, self.loosen, hooks

    def _refuse_looser(self, **asked: float | None) -> None:
        """Raise ``OptionInvalid`` for limits that are looser than the task's."""
        own = {
            "max_attempts": self.policy.attempts(),
            "max_crashes": self.policy.max_crashes,
            "timeout": self.timeout,
        }
        for name, value in asked.items():
            limit = self.policy.retry_for if name == "retry_for" else own[name] or None
            if value is None or limit is None or (value <= limit and (value or name == "retry_for")):
                continue
            raise OptionInvalid(
                f"{name} must be at most {limit:g}, as task {self.name} has it, got {value:g}: register it with a "
                "looser limit, or with loosen=True, which lets every job have its own"
            )

    def _send(
        self,
        calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
        options: CallOptions,
        ids: Iterable[str] | None,
    ) -> list[JobHandle]:
        if options.id is not None:
            raise OptionInvalid(f"enqueue_many must have ids=, one for each call, got id={shown(options.id)}")
        max_body = self.app.settings.max_body
        return put(
            self.app.backend,
            options.queue,
            [self._encode(args, kwargs, options, max_body) for args, kwargs in calls],
            priority=options.priority,
            delay=options.delay,
            ttr=options.ttr,
            connection=options.connection,
            ids=ids,
        )

    def _send_one(self, args: Sequence[Any], kwargs: Mapping[str, Any], options: CallOptions) -> JobHandle:
        app = self.app
        return put_one(
            app.backend,
            options.queue,
            self._encode(args, kwargs, options, app.settings.max_body),
            priority=options.priority,
            delay=options.delay,
            ttr=options.ttr,
            connection=options.connection,
            own_id=options.id,
        )

    def _encode(self, args: Sequence[Any], kwargs: Mapping[str, Any], options: CallOptions, max_body: int) -> bytes:
        self.check_arguments(args, kwargs)
        if not are_plain(args):
            for index, value in enumerate(args):
                check_json(value, f"args[{index}]")
        for name, value in kwargs.items():
            check_json(value, name)
        envelope = Envelope(
            ENVELOPE_VERSION,
            self.name,
            list(args),
            dict(kwargs),
            options.max_attempts,
            options.max_crashes,
            options.retry_for,
            options.timeout,
            options.headers,
        )
        return encode_envelope(envelope, max_body=max_body)


class TaskCall(Generic[P]):
    """A task with other options: ``task.options(delay=30).enqueue(...)``."""

    __slots__ = ("_options", "_task")

    def __init__(self, task: Task[P, Any], options: CallOptions) -> None:
        self._task = task
        self._options = options

    def enqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> JobHandle:
        """As ``Task.enqueue``."""
        return self._task._send_one(args, kwargs, self._options)  # noqa: SLF001 - a class of this module

    def enqueue_many(
        self, calls: Iterable[Sequence[Any] | Mapping[str, Any]], *, ids: Iterable[str] | None = None
    ) -> list[JobHandle]:
        """As ``Task.enqueue_many``."""
        return self._task._send([_call(call) for call in calls], self._options, ids)  # noqa: SLF001

    async def aenqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> JobHandle:
        """As ``Task.aenqueue``."""
        import asyncio

        return await asyncio.to_thread(self.enqueue, *args, **kwargs)


def _call(call: Sequence[Any] | Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if isinstance(call, tuple | list):
        return call, {}
    if isinstance(call, dict):
        return (), call
    raise ArgumentsInvalid(f"enqueue_many takes tuples of arguments, or dicts of named ones, got {shown(call)}")


def _is_coroutine(function: Callable[..., Any]) -> bool:
    """Return whether a call must be awaited. True also for an object whose ``__call__`` is a coroutine function."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _plain_range(signature: inspect.Signature) -> tuple[int, int]:
    """Return the fewest and the most arguments, if all may be positional. Else return an empty range."""
    parameters = signature.parameters.values()
    if not all(p.kind in _POSITIONAL for p in parameters):
        return 1, 0
    return sum(p.default is p.empty for p in parameters), len(parameters)


def _optional_count(value: int | None, name: str) -> int | None:
    return None if value is None else check_count(value, name, least=0)


def _check_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    if not headers:
        return {}
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ArgumentsInvalid(f"headers must be strings by name, got {shown(name)}: {shown(value)}")
    return dict(headers)
