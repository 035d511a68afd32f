"""Middleware is user code that wraps each enqueue and each run of a job. ``App.middleware`` registers middleware."""

from __future__ import annotations

import contextlib
import inspect
import logging
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from .errors import ArgumentsInvalid, OptionInvalid
from .formatting import shown

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

    from .app import App
    from .backend import Consumer
    from .call_options import CallOptions
    from .job import JobContext
    from .task import Task

_log = logging.getLogger("multiq.middleware")

EnqueueKind: TypeAlias = Literal["one", "many", "flow", "schedule"]
Verdict: TypeAlias = Literal["done", "retried", "buried", "snoozed", "given back", "expired", "cancelled"]


class Outgoing:
    """A job of a task that is about to be enqueued."""

    __slots__ = ("_task", "args", "headers", "id", "kwargs", "options", "task")

    def __init__(
        self,
        task: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: CallOptions,
        known: Task[..., Any] | None,
    ) -> None:
        self.task = task
        """The task's name."""
        self.args = args
        self.kwargs = kwargs
        self.headers = dict(options.headers)
        """The job's headers. The keys are the headers' names, and the values are texts. Middleware may change the
        headers."""
        self.options = options
        """The job's options, such as its queue and priority. ``set`` changes them."""
        self.id: str | None = options.id
        """The job's id. If the caller has not chosen the id, ``id`` is None until the job is stored."""
        self._task = known

    def set(self, **options: Any) -> None:
        """Change options of the job. The options have the names and values of ``Task.options``.

        The jobs of one ``enqueue_many`` must stay in one queue. *headers*, *id* and *connection* cannot be set. No
        option of a schedule's job can be set. Raises ``OptionInvalid``, ``NameInvalid``.
        """
        if self._task is None:
            raise OptionInvalid(f"a schedule's job must keep its options, got {', '.join(options)}: change its headers")
        for name in ("headers", "id", "connection"):
            if name in options:
                raise OptionInvalid(f"middleware must not set {name}: change the dict headers; all others are fixed")
        checked = self._task.options(**options).chosen
        names = {"delay" if name == "at" else name for name in options}
        self.options = msgspec.structs.replace(self.options, **{name: getattr(checked, name) for name in names})


class Sending:
    """An enqueue that is about to be sent, of one job or of several jobs that are sent together."""

    __slots__ = ("app", "flow", "jobs", "kind")

    def __init__(self, app: App, kind: EnqueueKind, jobs: list[Outgoing]) -> None:
        self.app = app
        self.kind = kind
        """What was called.

        - ``"one"``: ``enqueue``.
        - ``"many"``: ``enqueue_many``.
        - ``"flow"``: ``enqueue`` of a chain, group, batch or flow.
        - ``"schedule"``: no method was called, because a scheduler enqueues the job.
        """
        self.jobs = jobs
        self.flow: str | None = None
        """The id of the flow. None means that the jobs do not belong to a flow."""


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How a run of a job has ended, and what happens to the job."""

    verdict: Verdict
    """The verdict says what happens to the job after the run.

    - ``"done"``: the job is acked.
    - ``"retried"``: the job has failed, and runs again after ``delay`` seconds.
    - ``"buried"``: the job has failed and is not retried, or cannot run.
    - ``"snoozed"``: the job has raised ``Snooze``, and runs again after ``delay`` seconds.
    - ``"given back"``: the job runs again, because its worker ends.
    - ``"expired"``, ``"cancelled"``: the job is dropped.
    """
    seconds: float | None = None
    """The duration of the run in seconds. None means that the task was not called."""
    result: Any = None
    """The value that the task has returned."""
    error: BaseException | None = None
    """The exception that the task or middleware has raised. None means that no exception was raised, or that the
    exception was raised in another process."""
    delay: float | None = None
    """Seconds until the job runs again. None means that the job runs again immediately, or does not run again."""
    reason: str | None = None
    """The reason why the job did not succeed."""


class Middleware:
    """The base class of middleware. Override the methods that you need. A method that is not overridden takes no
    time."""

    def enqueue(self, sending: Sending) -> Iterator[None]:  # noqa: ARG002 - to be overridden
        """A generator that wraps each enqueue of tasks' jobs. The jobs are sent at the ``yield`` of the generator.

        Before the ``yield``, the generator may change the jobs' headers and options. If the generator raises an error
        before the ``yield``, for example ``EnqueueRefused``, nothing is sent. An error of the enqueue is raised at the
        ``yield``. The caller gets the enqueue's error even if the generator catches the error. An error that the
        generator raises after the ``yield`` is only logged, because the jobs are stored.
        """
        yield

    def run(self, job: JobContext) -> Iterator[None]:  # noqa: ARG002
        """A generator that wraps each run of a job. The task is called at the ``yield`` of the generator.

        An error of the task is raised at the ``yield``. If the generator catches the task's error, the job has
        succeeded. If the generator raises an error, the job fails.
        """
        yield

    async def arun(self, job: JobContext) -> AsyncIterator[None]:  # noqa: ARG002
        """``run`` for coroutines, as an async generator. If a class does not override ``arun``, its ``run`` is also
        called around coroutines."""
        yield

    def ended(self, job: JobContext, ending: Ending) -> None:
        """Called when the verdict on a job is known. If ``ended`` raises an error, the error is logged, and the verdict
        does not change. ``ended`` is also called for a job whose task was not called, for example because the job's
        body is not valid.
        """

    def before_fetch(self, worker: str) -> bool | None:
        """Called before a worker reserves jobs. If ``before_fetch`` returns False, the worker reserves no jobs, and
        calls ``before_fetch`` again within a second.

        *worker*: the worker's name, ``host:pid``. Running jobs continue. If ``before_fetch`` raises an error, the error
        is logged, and the worker reserves jobs.
        """

    def consumer(self, consumer: Consumer, worker: str) -> Consumer:  # noqa: ARG002
        """Called once by each process of a worker. Returns the consumer to use, which is *consumer* itself, or a
        consumer that wraps *consumer*.

        Override ``consumer`` to run your own code, such as tracing, around the calls that reserve and settle jobs.
        Inner middleware has already wrapped *consumer*. If ``consumer`` raises an error, the error is logged, and the
        process uses *consumer*.
        """
        return consumer


RunFunction: TypeAlias = "Callable[[JobContext], Iterator[None] | AsyncIterator[None]]"
MiddlewareLike: TypeAlias = "Middleware | RunFunction"

_Enqueue: TypeAlias = "Callable[[Sending], AbstractContextManager[None]]"
_Run: TypeAlias = "Callable[[JobContext], AbstractContextManager[None]]"
_ARun: TypeAlias = "Callable[[JobContext], AbstractAsyncContextManager[None]]"


class Chain:
    """Middleware in order. The outermost middleware is first."""

    __slots__ = ("_around_coroutines", "before_fetch", "consumers", "ended", "enqueue", "members", "runs")

    def __init__(self, members: Sequence[MiddlewareLike] = ()) -> None:
        self.members: list[MiddlewareLike] = []
        self.enqueue: list[_Enqueue] = []
        self.runs: list[_Run] = []
        """The middleware that surrounds the runs of plain functions."""
        self._around_coroutines: list[tuple[bool, Any]] = []
        self.ended: list[Callable[[JobContext, Ending], object]] = []
        self.before_fetch: list[Callable[[str], object]] = []
        self.consumers: list[Callable[[Consumer, str], Consumer]] = []
        for member in members:
            self.add(member)

    def add(self, member: MiddlewareLike) -> None:
        """Raises ``ArgumentsInvalid``."""
        run, arun = _runs_of(member)
        if run is not None:
            self.runs.append(run)
        if arun is not None or run is not None:
            self._around_coroutines.append((arun is not None, run if arun is None else arun))
        if isinstance(member, Middleware):
            if _has_own(member, "enqueue"):
                self.enqueue.append(contextmanager(_generator(member.enqueue, inspect.isgeneratorfunction)))
            if _has_own(member, "ended"):
                self.ended.append(member.ended)
            if _has_own(member, "before_fetch"):
                self.before_fetch.append(member.before_fetch)
            if _has_own(member, "consumer"):
                self.consumers.append(member.consumer)
        self.members.append(member)

    @property
    def wraps_runs(self) -> bool:
        return bool(self._around_coroutines)

    def enter_runs(self, stack: contextlib.ExitStack, job: JobContext) -> None:
        for run in self.runs:
            stack.enter_context(run(job))

    async def enter_coroutine(self, stack: contextlib.AsyncExitStack, job: JobContext) -> None:
        for is_async, run in self._around_coroutines:
            entered = run(job)
            await stack.enter_async_context(entered) if is_async else stack.enter_context(entered)

    def around_consumer(self, consumer: Consumer, worker: str) -> Consumer:
        """Return the consumer of a worker's process, which is *consumer* or a consumer of middleware that wraps
        *consumer*."""
        for wrap in reversed(self.consumers):
            try:
                consumer = wrap(consumer, worker)
            except Exception:  # noqa: BLE001 - logged
                _log.exception("middleware failed in consumer(); the worker goes on without it")
        return consumer

    def tell(self, job: JobContext, ending: Ending) -> None:
        """Call the method ``ended`` of all middleware, beginning with the innermost middleware."""
        for ended in reversed(self.ended):
            try:
                ended(job, ending)
            except BaseException:  # noqa: BLE001 - no error may change the job's verdict
                _log.exception(
                    "middleware failed in ended() of task %s; the outcome of the job is not affected", job.task
                )


class AppChain(Chain):
    """The middleware of an app, and the data about the middleware of its tasks."""

    __slots__ = ("any_ended", "any_enqueue", "any_run")

    def __init__(self) -> None:
        super().__init__()
        self.any_enqueue = False
        """Whether the app or one of its tasks has middleware around enqueues."""
        self.any_run = False
        self.any_ended = False

    def add(self, member: MiddlewareLike) -> None:
        super().add(member)
        self.note(self)

    def note(self, chain: Chain | None) -> None:
        """Record the middleware of a task."""
        if chain is not None:
            self.any_enqueue = self.any_enqueue or bool(chain.enqueue)
            self.any_run = self.any_run or chain.wraps_runs
            self.any_ended = self.any_ended or bool(chain.ended)


class AroundEnqueue:
    """Runs middleware around an enqueue, in a ``with`` block.

    Once jobs may be stored, only the error of the enqueue is raised. Any other error could cause the caller to enqueue
    the jobs again.
    """

    # a class, because contextlib.contextmanager and ExitStack take 2 us more for each enqueue
    __slots__ = ("_chains", "_entered", "_sending")

    def __init__(self, sending: Sending, *chains: Chain | None) -> None:
        self._sending = sending
        self._chains = chains
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        try:
            for chain in self._chains:
                for enter in () if chain is None else chain.enqueue:
                    around = enter(self._sending)
                    around.__enter__()
                    self._entered.append(around)
        except BaseException as exc:
            self._leave(exc)
            raise

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        interruption: BaseException | None = None
        for around in reversed(self._entered):
            try:
                if error is None:
                    around.__exit__(None, None, None)
                else:
                    around.__exit__(type(error), error, error.__traceback__)
            except Exception as exc:  # noqa: BLE001 - logged
                if exc is not error:
                    _log.exception("middleware failed after an enqueue; the enqueue is not affected")
            except BaseException as exc:  # noqa: BLE001 - raised below, after all middleware has ended
                if exc is not error:
                    error = interruption = exc
        if interruption is not None:
            raise interruption


def _runs_of(member: MiddlewareLike) -> tuple[_Run | None, _ARun | None]:
    if isinstance(member, Middleware):
        run = contextmanager(_generator(member.run, inspect.isgeneratorfunction)) if _has_own(member, "run") else None
        arun = (
            asynccontextmanager(_generator(member.arun, inspect.isasyncgenfunction))
            if _has_own(member, "arun")
            else None
        )
        return run, arun
    if inspect.isasyncgenfunction(member):
        return None, asynccontextmanager(member)
    if inspect.isgeneratorfunction(member):
        return contextmanager(member), None
    raise ArgumentsInvalid(
        "middleware must be an object of a subclass of multiq.Middleware, or a generator function, with its work "
        f"before and after one yield, got {shown(member)}"
    )


def _has_own(member: Middleware, name: str) -> bool:
    return getattr(type(member), name) is not getattr(Middleware, name) or name in getattr(member, "__dict__", ())


def _generator(method: Any, is_generator: Callable[[Any], bool]) -> Any:
    if not is_generator(method):
        raise ArgumentsInvalid(
            f"{method.__qualname__} must be a generator method, with its work before and after one yield: "
            "a plain method would do all of it before"
        )
    return method
