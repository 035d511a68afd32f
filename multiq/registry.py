"""Registers functions as tasks. The module has the class of registries, and the base class of apps and registries."""

from __future__ import annotations

import difflib
import inspect
import re
import weakref
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, ParamSpec, TypeAlias, TypedDict, TypeVar, overload

from .backend import PRIORITY_DEFAULT, TTR_DEFAULT
from .call_options import CallOptions
from .errors import ArgumentsInvalid, NameInvalid, OptionInvalid, ScheduleExists, TaskExists, TaskNotIncluded
from .formatting import shown
from .middleware import Chain
from .retry import DEFAULT, MAX_CRASHES_DEFAULT, RetryPolicy, to_backoff, to_error_rules
from .task import Task
from .validation import (
    check_count,
    check_expires,
    check_keep,
    check_name,
    check_priority,
    check_queue,
    check_timeout,
    check_ttr,
)

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable, Sequence
    from typing import Unpack

    from .app import App
    from .flows.signature import Signature
    from .limits import Limit
    from .middleware import MiddlewareLike
    from .retry import Backoff
    from .schedules import Definition
    from .schedules.defining import ScheduleOptions, Timing
    from .unique import Unique

P = ParamSpec("P")
R = TypeVar("R")

not_loaded: weakref.WeakSet[App] = weakref.WeakSet()
"""The apps that have not yet imported the modules of their ``include``."""


ErrorClasses: TypeAlias = "type[BaseException] | Sequence[type[BaseException]]"


class TaskOptions(TypedDict, total=False):
    """The options of ``@app.task(...)``. ``App.task`` describes the options."""

    name: str
    queue: str
    priority: int
    ttr: float
    timeout: float
    max_attempts: int
    max_crashes: int
    retry_for: float
    retry_on: ErrorClasses
    bury_on: ErrorClasses
    expires: float | dt.timedelta
    loosen: bool
    backoff: Backoff | Sequence[float] | float
    keep: float | dt.timedelta | None
    unique: Unique | Literal[False] | None
    limits: Sequence[Limit] | Limit | None
    middleware: Sequence[MiddlewareLike]


class Registrar:
    """The base class of ``App`` and ``Tasks``, which registers functions as tasks, and schedules tasks."""

    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R]: ...

    @overload
    def task(
        self, function: None = None, /, **options: Unpack[TaskOptions]
    ) -> Callable[[Callable[P, R]], Task[P, R]]: ...

    def task(self, function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        """Register a function as a task, by the decorator ``@app.task`` or ``@app.task(queue="mail", ...)``. A registry
        ``tasks`` has the decorator ``@tasks.task``.

        Options:

        - *name*: the task's name. Default: the function's name. A registry puts its prefix in front of the task's name.
        - *queue*: the queue of the task's jobs. Default: ``"default"``.
        - *priority*: a number from 0 (first) to 4294967295 (last). Default: 1024.
        - *ttr*: how long a lease lasts, in seconds. The worker renews the lease while the task runs. Default: 60.
        - *timeout*: how long the task may run, in seconds. When the timeout is over, ``SoftTimeout`` is raised in the
          task. Default: no limit.
        - *max_attempts*: the number of attempts after which a job is buried. 0: no limit. Default: 5, or no limit with
          *retry_for*.
        - *max_crashes*: a job is buried when this number of its attempts have ended by a crash, a kill or a lost lease.
          0: no limit. Default: 3.
        - *retry_for*: how long after its enqueue, in seconds, a failed job may still be retried. Default: no limit.
        - *retry_on*: the exception classes that are retried. A job that raises an error of another class is buried.
          Default: every error is retried.
        - *bury_on*: exception classes that bury a job without a retry. The most specific class of *retry_on* and
          *bury_on* decides.
        - *expires*: seconds, or a timedelta, after the enqueue. A job that has not started after *expires* seconds is
          dropped. A retry that has not started after *expires* seconds is dropped, too. 0: no limit. Default: no limit.
        - *loosen*: whether a single job may have looser limits than its task. Stricter limits are always allowed.
          Default: False.
        - *backoff*: the wait after a failed attempt. A backoff is a number of seconds, or a list with the seconds for
          each attempt. A backoff may also be a function that takes the attempt's number and returns seconds. Default:
          exponential.
        - *keep*: seconds, or a timedelta, for which a job's outcome is kept after the job is done. ``JobHandle.result``
          needs *keep*. 0: no outcome is kept. Default: 0.
        - *unique*: a ``multiq.Unique``, which says when two jobs of the task have the same key. While a job has its
          key, no other job with the same key is added to the queue. Default: jobs are not unique.
        - *limits*: at most four objects ``multiq.Limit``. A limit says how many jobs with the same key may run at the
          same time, or may start in a period. Default: none.
        - *middleware*: middleware for this task only, which runs within the middleware of the app. ``App.middleware``
          describes middleware.

        Raises ``TaskExists``, ``NameInvalid``, ``OptionInvalid``. Raises ``ArgumentsInvalid`` if *function* is not a
        function.
        """
        _check_options(options)

        def register(function: Callable[..., Any]) -> Task[..., Any]:
            return self._register(function, options)

        return register if function is None else register(function)

    @overload
    def schedule(
        self, cron: str | None, call: Signature, /, *, name: str | None = None, **options: Unpack[ScheduleOptions]
    ) -> None: ...

    @overload
    def schedule(
        self, cron: str | None = None, /, *, name: str | None = None, **options: Unpack[ScheduleOptions]
    ) -> Callable[[Task[P, R] | Callable[P, R]], Task[P, R]]: ...

    def schedule(
        self,
        cron: str | None = None,
        call: Signature | None = None,
        /,
        *,
        name: str | None = None,
        **options: Unpack[ScheduleOptions],
    ) -> Any:
        """Run a task by a schedule. Put ``@app.schedule("0 7 * * mon-fri", zone="Europe/Berlin")`` above ``@app.task``.

        ``app.schedule("0 7 * * *", task.s(1), name="report")`` schedules a call with arguments. A function that is not
        yet a task becomes a task. The schedule is stored when a worker of this app starts, or with ``multiq tick``. A
        registry ``tasks`` has the decorator ``@tasks.schedule``. A registry's schedule belongs to each app that
        includes the registry.

        - *cron*: an expression of five fields, or of six fields, of which the first has the seconds.
        - *every*: seconds, or a timedelta, from 1 second to 366 days. Occurrences are due at the multiples of the
          interval since 1970 in UTC.
        - *at*: a time of day, like ``"07:00"``, or a list of times of day. Give one of *cron*, *every* and *at*.
        - *zone*: the time zone of *cron* and *at*, like ``"Europe/Berlin"``. Default: ``"UTC"``.
        - *name*: the schedule's name. Default: the task's name. A registry puts its prefix in front of *name*.
        - *misfire*: what happens to missed occurrences. An occurrence is missed if no scheduler has enqueued its job by
          its time. ``"once"``, the default: the latest missed occurrence runs. ``"skip"``: the missed occurrences
          of the last *grace* seconds run. ``"all"``: the latest 500 missed occurrences run. ``"all(n)"``: the latest
          *n* missed occurrences run.
        - *grace*: seconds after which a missed occurrence does not run. Default: 20 with ``skip``, and no limit with
          any other *misfire*.
        - *overlap*: what happens to an occurrence if the previous occurrence's job still waits or runs. ``"allow"``,
          the default: the occurrence runs. ``"skip"``: the occurrence is left out. ``"follow"``: when the previous
          occurrence's job is done, the latest occurrence runs.
        - *jitter*: the longest delay of an occurrence, in seconds. Each occurrence gets a different delay. Default: 0.

        Raises ``ScheduleInvalid``, ``ScheduleExists``, ``NameInvalid``, ``OptionInvalid``, ``ArgumentsInvalid``. A
        registry without an app raises some of the errors only when an app includes the registry.
        """
        from .schedules.defining import check_call, check_timing

        timing = check_timing(cron, **options)
        if call is not None:
            check_call(call)

        def register(task: Task[..., Any] | Callable[..., Any]) -> Task[..., Any]:
            known = task if isinstance(task, Task) else self.task(task)
            self._schedule(known.s(), timing, name)
            return known

        return register if call is None else self._schedule(call, timing, name)

    def _register(self, function: Callable[..., Any], options: dict[str, Any]) -> Task[..., Any]:
        raise NotImplementedError

    def _schedule(self, call: Signature, timing: Timing, name: str | None) -> None:
        """Register a schedule. If *name* is None, the schedule gets the name of the call's task."""
        raise NotImplementedError


class _Scheduled(NamedTuple):
    """A schedule of a registry. The schedule's definition needs the settings of an app."""

    call: Signature
    timing: Timing

    def is_like(self, other: _Scheduled) -> bool:
        mine, theirs = self.call, other.call
        return (
            mine.task.is_like(theirs.task)
            and (mine.args, mine.kwargs, mine.options) == (theirs.args, theirs.kwargs, theirs.options)
            and self.timing == other.timing
        )

    def define(self, name: str, task: Task[..., Any]) -> Definition:
        """Return the definition for an app. *task*: the app's copy of the task."""
        from .flows.signature import Signature
        from .schedules.defining import define

        return define(
            name, Signature(task, self.call.args, self.call.kwargs, self.call.options), self.timing, origin="code"
        )


class Tasks(Registrar):
    """A registry of tasks without an app. ``App.include`` includes a registry in an app. With a registry, a module with
    tasks need not import an app.

    *prefix*: a text in front of the tasks' names. A dot separates the prefix and the name. ``prefix=__name__`` gives
    names that no other module has.

    A task can be enqueued as soon as its registry is included in an app. If a registry is included in several apps,
    ``task.for_app(app)`` chooses an app. A task that is registered after its registry was included is included
    immediately. Raises ``NameInvalid``.
    """

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix if prefix == "" else check_name(prefix, "task")
        if self.prefix.endswith("."):
            raise NameInvalid(f"a prefix must not end with a dot, because a dot follows it, got {shown(prefix)}")
        self.tasks: dict[str, Task[Any, Any]] = {}
        """The tasks by name. Each task's name begins with the registry's prefix."""
        self._schedules: dict[str, _Scheduled] = {}
        self.apps: list[App] = []
        """The apps in which this registry is included."""

    def app_of(self, task: Task[..., Any]) -> App:
        """Return the only app in which this registry is included. Raises ``TaskNotIncluded``."""
        for app in list(not_loaded):
            app.load_included()
        if len(self.apps) == 1:
            return self.apps[0]
        if self.apps:
            raise TaskNotIncluded(
                f"task {task.name!r} is included in {len(self.apps)} apps ({', '.join(map(repr, self.apps))}): "
                "choose one app with task.for_app(app).enqueue(...), or take the registry out of the other apps with "
                "app.exclude(tasks)"
            )
        raise TaskNotIncluded(
            f"task {task.name!r} is in a registry that no app includes: call app.include(tasks), or add the module "
            f"{task.function.__module__!r} to the setting include"
        )

    def join(self, app: App, tasks: dict[str, Task[Any, Any]], schedules: dict[str, Definition]) -> None:
        """Add copies of all tasks to an app's *tasks*, and the definitions of all schedules to its *schedules*. If
        ``join`` raises an error, it has added nothing."""
        copies = {name: task.copy_for(app) for name, task in self.tasks.items()}
        for copy in copies.values():
            check_free(tasks, copy)
        definitions = [one.define(name, copies[one.call.task.name]) for name, one in self._schedules.items()]
        for definition in definitions:
            check_schedule_free(schedules, definition)
        for copy in copies.values():
            app.note_middleware(tasks.setdefault(copy.name, copy))
        for definition in definitions:
            schedules.setdefault(definition.name, definition)
        if app not in self.apps:
            self.apps.append(app)
            self._note_apps()

    def leave(self, app: App, tasks: dict[str, Task[Any, Any]], schedules: dict[str, Definition]) -> None:
        if app in self.apps:
            for name in self.tasks:
                tasks.pop(name, None)
            for name in self._schedules:
                schedules.pop(name, None)
            self.apps.remove(app)
            self._note_apps()

    def _register(self, function: Callable[..., Any], options: dict[str, Any]) -> Task[..., Any]:
        task = make_task(None, function, prefix=self.prefix, **options)
        for known in (self.tasks, *(app.tasks for app in self.apps)):
            check_free(known, task)
        task = self.tasks.setdefault(task.name, task)
        task.registry = self
        for app in self.apps:
            app.include(self)
        self._note_apps()
        return task

    def _schedule(self, call: Signature, timing: Timing, name: str | None) -> None:
        task = call.task
        if self.tasks.get(task.name) is not task:
            raise ArgumentsInvalid(
                f"a registry must schedule its own tasks, got task {task.name!r}: use its own registry"
            )
        if name is None:
            name = task.name
        elif self.prefix:
            name = f"{self.prefix}.{check_name(name, 'schedule')}"
        new = _Scheduled(call, timing)
        known = self._schedules.get(check_name(name, "schedule"))
        if known is not None and not known.is_like(new):
            raise ScheduleExists(_schedule_exists(name, known.call.task.name))
        for app in self.apps:
            check_schedule_free(app.code_schedules, new.define(name, task.copy_for(app)))
        self._schedules.setdefault(name, new)
        for app in self.apps:
            app.include(self)

    def _note_apps(self) -> None:
        """Set the app of the tasks if this registry is in exactly one app."""
        for task in self.tasks.values():
            if len(self.apps) == 1:
                task.app = self.apps[0]
            else:
                vars(task).pop("app", None)

    def __repr__(self) -> str:
        return f"Tasks({self.prefix!r}, {len(self.tasks)} tasks)"


def check_free(tasks: dict[str, Task[Any, Any]], task: Task[..., Any]) -> None:
    """Raise ``TaskExists`` if *tasks* has another task with the same name."""
    known = tasks.get(task.name)
    if known is None or known.is_like(task):
        return
    raise TaskExists(
        f"task {task.name!r} is already registered for {place(known.function)}, and the new task, for "
        f"{place(task.function)}, has another function or other options: give one of the two tasks another name=, or "
        "register it in a registry with a prefix of its own, Tasks(prefix=__name__)"
    )


def check_schedule_free(schedules: dict[str, Definition], definition: Definition) -> None:
    """Raise ``ScheduleExists`` if *schedules* has another schedule with the same name."""
    known = schedules.get(definition.name)
    if known is not None and not known.is_like(definition):
        raise ScheduleExists(_schedule_exists(known.name, known.task))


def _schedule_exists(name: str, task: str) -> str:
    return f"there is a schedule {name!r} already, of task {task}: give one of the two another name="


def make_task(
    app: App | None,
    function: Callable[..., Any],
    *,
    prefix: str = "",
    name: str | None = None,
    queue: str = "default",
    priority: int = PRIORITY_DEFAULT,
    ttr: float = TTR_DEFAULT,
    timeout: float | None = None,
    max_attempts: int | None = None,
    max_crashes: int = MAX_CRASHES_DEFAULT,
    retry_for: float | None = None,
    retry_on: ErrorClasses | None = None,
    bury_on: ErrorClasses | None = None,
    expires: float | dt.timedelta | None = None,
    loosen: bool = False,
    backoff: Backoff | Sequence[float] | float = DEFAULT,
    keep: float | dt.timedelta | None = None,
    unique: Unique | Literal[False] | None = None,
    limits: Sequence[Limit] | Limit | None = None,
    middleware: Sequence[MiddlewareLike] = (),
) -> Task[..., Any]:
    """Return a task with checked options. *app* is None for the task of a registry. Raises the errors of
    ``App.task``."""
    _check_function(function)
    policy = RetryPolicy(
        max_attempts=None if max_attempts is None else check_count(max_attempts, "max_attempts", least=0),
        max_crashes=check_count(max_crashes, "max_crashes", least=0),
        retry_for=None if retry_for is None else check_timeout(retry_for, "retry_for"),
        backoff=to_backoff(backoff),
    )
    name = _own_name(function) if name is None else name
    if unique:
        from .unique import check_unique  # imported late, because few programs have unique jobs

        checked = check_unique(unique)
        unique = None if checked is None else checked.check(name, inspect.signature(function))
    return _class_of(function)(
        app,
        function,
        name=f"{prefix}.{check_name(name, 'task')}" if prefix else name,
        options=CallOptions(
            queue=check_queue(queue),
            priority=check_priority(priority),
            ttr=check_ttr(ttr),
            keep=check_keep(keep),
            unique=unique or None,
            limits=_check_limits(limits, function),
        ),
        policy=policy,
        timeout=None if timeout is None else check_timeout(timeout),
        expires=None if expires is None else check_expires(expires),
        error_rules=to_error_rules(retry_on, bury_on),
        loosen=_check_flag(loosen, "loosen"),
        chain=_chain_of(middleware),
    )


_PLAIN: frozenset[object] = frozenset([inspect.Parameter.empty, None, str, int, float, bool, list, dict])
_PLAIN_WORDS = frozenset(
    [
        *("str", "int", "float", "bool", "None", "list", "dict"),
        *("Any", "object", "List", "Dict", "Optional", "Union", "Sequence", "Mapping", "Iterable"),
    ]
)
_WORD = re.compile(r"[A-Za-z_][\w.]*")


def _class_of(function: Callable[..., Any]) -> type[Task[..., Any]]:
    """Return ``TypedTask`` if an annotation may need an encoding. Most programs never import ``TypedTask``."""
    signature = inspect.signature(function)
    annotations = [signature.return_annotation, *(p.annotation for p in signature.parameters.values())]
    others = [annotation for annotation in annotations if not _is_plain(annotation)]
    if not others:
        return Task
    from .annotations import are_plain

    if are_plain(others):
        return Task
    from .typed_tasks import TypedTask

    return TypedTask


def _is_plain(annotation: Any) -> bool:
    """Whether an annotation certainly has only JSON's own types. An annotation that is text is not evaluated."""
    if isinstance(annotation, str):
        words = {word.rpartition(".")[2] for word in _WORD.findall(annotation)}
        return words <= _PLAIN_WORDS and not {"'", '"'} & {*annotation}
    return isinstance(annotation, Hashable) and annotation in _PLAIN


_MEANT = {
    **dict.fromkeys(("retries", "retry", "max_retries", "tries", "max_tries", "attempts"), "max_attempts"),
    **dict.fromkeys(("retry_backoff", "retry_delay", "default_retry_delay", "interval", "min_backoff"), "backoff"),
    **dict.fromkeys(("time_limit", "soft_time_limit", "job_timeout", "max_time"), "timeout"),
    **dict.fromkeys(("lease", "ttl", "visibility_timeout"), "ttr"),
    **dict.fromkeys(("max_age", "retry_until"), "retry_for"),
    **dict.fromkeys(("result_ttl", "result_expires", "keep_result", "store_results", "retention"), "keep"),
    **dict.fromkeys(("unique_for", "unique_until", "unique_key", "dedupe", "deduplication", "singleton"), "unique"),
    **dict.fromkeys(
        ("rate_limit", "limit", "max_concurrency", "concurrency", "concurrency_limit", "limits_concurrency"), "limits"
    ),
    **dict.fromkeys(("autoretry_for", "retry_exceptions", "retry_for_exceptions"), "retry_on"),
    **dict.fromkeys(("dont_autoretry_for", "throws", "fatal", "discard_on"), "bury_on"),
    **dict.fromkeys(("expires_in", "expiry", "expire", "start_by", "discard_after"), "expires"),
    "queue_name": "queue",
    "prio": "priority",
    **dict.fromkeys(
        ("on_success", "on_retry", "on_failure", "on_error", "on_exception"),
        "middleware=[...], whose ended() is called",
    ),
    **dict.fromkeys(
        ("delay", "countdown", "eta", "at", "schedule"), "options(delay=...) or options(at=...) of the task"
    ),
    **dict.fromkeys(("headers", "connection"), "options(...) of the task"),
    **dict.fromkeys(("id", "job_id", "task_id", "idempotency_key"), "options(id=...) of the task"),
}
"""Maps the name of an option in another library to the name of multiq's option."""


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
            f"a task must return a list, not yield its items, got the generator function {place(function)}: "
            "a call of a generator function runs none of its code"
        )
    try:
        inspect.signature(function)
    except (ValueError, TypeError) as exc:
        raise ArgumentsInvalid(
            f"the signature of {place(function)} cannot be read ({exc}): call it from a function of your own"
        ) from exc


def _check_limits(limits: Sequence[Limit] | Limit | None, function: Callable[..., Any]) -> tuple[Limit, ...]:
    if not limits:
        return ()
    from .limits import check_limits  # imported late, because most programs have no limits

    return check_limits(limits, inspect.signature(function))


def _own_name(function: Callable[..., Any]) -> str:
    if isinstance(function, Task):
        raise ArgumentsInvalid(f"{function!r} is a task already: app.include(tasks) adds the tasks of a registry")
    name: str | None = getattr(function, "__name__", None)
    if name is None or name == "<lambda>":
        raise NameInvalid(f"a task must have a name, and {place(function)} has none: @app.task(name=...)")
    return name


def _check_flag(value: bool, name: str) -> bool:
    if not isinstance(value, bool):
        raise OptionInvalid(f"{name} must be True or False, got {shown(value)}")
    return value


def _chain_of(middleware: Sequence[MiddlewareLike]) -> Chain | None:
    if not isinstance(middleware, list | tuple):
        raise OptionInvalid(f"middleware must be a list, got {shown(middleware)}")
    return Chain(middleware) if middleware else None


def place(function: Callable[..., Any]) -> str:
    name = getattr(function, "__qualname__", None)
    return f"{function.__module__}.{name}" if name else shown(function)
