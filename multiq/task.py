"""Tasks are functions whose calls can be enqueued. An enqueue checks the arguments against the signature."""

from __future__ import annotations

import copy
import inspect
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar

from .backend import MAX_GATES, Gate, Terms
from .call_options import CallOptions
from .enqueue import put, put_one
from .envelope import ENVELOPE_VERSION, FLOW_VERSION, Envelope, encode_envelope
from .errors import ArgumentsInvalid, OptionInvalid, TaskNotIncluded
from .formatting import shown
from .ids import check_new_id
from .json_check import are_plain, check_json
from .loosening import bounded_policy, bounded_timeout, refuse_looser
from .signature_check import ArgumentCheck
from .validation import (
    check_count,
    check_delay,
    check_expires,
    check_headers,
    check_keep,
    check_name,
    check_priority,
    check_queue,
    check_timeout,
    check_ttr,
)

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    from .annotations import Codec
    from .app import App
    from .backend import UniqueKey
    from .envelope import FlowPart
    from .flows.signature import Signature
    from .job import JobHandle
    from .limits import Limit
    from .middleware import Chain
    from .registry import Tasks
    from .retry import ErrorRules, RetryPolicy
    from .unique import Unique

P = ParamSpec("P")
R = TypeVar("R")


class _AppOfRegistry:
    """The attribute ``app`` of a registry's task, if the attribute is not set on the task itself.

    Python looks here only if the task has no ``app`` of its own. A method ``__getattr__`` would do the same, but would
    make each look-up of each attribute of a task slower: multiq's own part of an enqueue takes 4.4 us then, not 4.0 us.
    """

    def __get__(self, task: Task[..., Any] | None, owner: type) -> Any:
        if task is None:
            return self
        if task.registry is not None:
            return task.registry.app_of(task)
        raise AttributeError(f"{owner.__name__!r} object has no attribute 'app'")


class Task(Generic[P, R]):
    """A registered function. Calling the task runs the function directly, in this process. ``enqueue`` makes a job that
    a worker runs."""

    app: App
    """The app of the task. A task of a registry has the attribute ``app`` only if the registry is included in exactly
    one app."""
    if not TYPE_CHECKING:  # hidden, because a type checker would refuse assignments
        app = _AppOfRegistry()

    def __init__(
        self,
        app: App | None,
        function: Callable[P, R],
        *,
        name: str,
        options: CallOptions,
        policy: RetryPolicy,
        timeout: float | None,
        expires: float | None = None,
        error_rules: ErrorRules | None = None,
        loosen: bool = False,
        chain: Chain | None = None,
    ) -> None:
        """Construct a task from checked options. ``App.task`` lists the options.

        - *app*: the app of the task, or None for a task of a registry.
        - *options*: the default options of each job, such as the queue and the priority.
        - *policy*: the values of *max_attempts*, *max_crashes*, *retry_for* and *backoff*.
        - *error_rules*: the values of *retry_on* and *bury_on*.
        - *chain*: the task's own middleware.
        """
        if app is not None:
            self.app = app
        self.registry: Tasks | None = None
        self.function = function
        self.name = check_name(name, "task")
        self.default = options
        self.policy = policy
        self.timeout = timeout
        self.expires = expires
        self.error_rules = error_rules
        self.loosen = loosen
        self.chain = chain
        self.is_coroutine = _is_coroutine(function)
        self.__doc__ = function.__doc__
        self.__wrapped__ = function
        self.signature = inspect.signature(function)
        self._arguments = ArgumentCheck(self.signature)
        self._fewest, self._most = self._arguments.fewest, self._arguments.most  # read for each job

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def enqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> JobHandle:
        """Add a job that calls the task's function with the given arguments.

        Errors:

        - ``ArgumentsInvalid``: the function does not take the given arguments.
        - ``PayloadInvalid``: an argument is not JSON. The message has the path of the wrong value.
        - ``PayloadTooLarge``, ``BackendError``.
        - ``EnqueueUncertain``: it is unknown whether the job was added.
        - ``Unsupported``: the task has ``keep``, ``unique`` or ``limits``, and the backend does not support this
          option. Nothing was sent.
        - ``JobExists``: another job has the unique key, and the task has ``on_conflict="error"``.
        """
        return self._send_one(args, kwargs, self.default)

    def enqueue_many(
        self, calls: Iterable[Sequence[Any] | Mapping[str, Any]], *, ids: Iterable[str] | None = None
    ) -> list[JobHandle]:
        """Enqueue many calls in one round trip.

        Each call is a tuple of positional arguments or a dict of named arguments. *ids* has your own id for each call.
        """
        return self._send([_call(call) for call in calls], self.default, ids)

    async def aenqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> JobHandle:
        """``enqueue`` without blocking the event loop. Enqueues that wait at the same time are sent in one round trip.

        If the coroutine is cancelled before the job is sent, nothing is enqueued. If the job was sent before the
        cancellation, the enqueue continues. A note of the ``CancelledError`` says whether the job was sent.
        """
        return await self._asend_one(args, kwargs, self.default)

    async def aenqueue_many(
        self, calls: Iterable[Sequence[Any] | Mapping[str, Any]], *, ids: Iterable[str] | None = None
    ) -> list[JobHandle]:
        """``enqueue_many`` without blocking the event loop. A cancelled ``aenqueue_many`` behaves like a cancelled
        ``aenqueue``."""
        return await self._asend([_call(call) for call in calls], self.default, ids)

    def options(
        self,
        *,
        queue: str | None = None,
        priority: int | None = None,
        delay: float | dt.timedelta | None = None,
        at: dt.datetime | None = None,
        ttr: float | None = None,
        connection: Any = None,
        id: str | None = None,  # noqa: A002 - a job's attribute has the same name
        max_attempts: int | None = None,
        max_crashes: int | None = None,
        retry_for: float | None = None,
        timeout: float | None = None,
        expires: float | dt.timedelta | None = None,
        headers: Mapping[str, str] | None = None,
        keep: float | dt.timedelta | None = None,
        unique: Unique | Literal[False] | None = None,
        limits: Sequence[Limit] | Limit | None = None,
    ) -> TaskCall[P]:
        """Return this task with other options, for calls like ``task.options(delay=30).enqueue(...)``.

        The default of each option is the task's value.

        - *queue*: the queue of the job.
        - *priority*: a number from 0 (first) to 4294967295 (last).
        - *delay*: seconds, or a timedelta, before the job may start.
        - *at*: the time, with a time zone, before which the job does not start. Give *at* or *delay*, not both.
        - *ttr*: seconds that a lease lasts without a touch.
        - *connection*: your own database connection. The job is part of the connection's transaction, and exists only
          after a commit.
        - *id*: an id of your own, which is one word of ASCII. If the queue already has a job with the same id, nothing
          is added.
        - *max_attempts*, *max_crashes*, *retry_for*, *timeout*: as in ``App.task``. Looser values than the task's
          values are allowed only if the task was registered with ``loosen=True``.
        - *expires*: seconds, or a timedelta, after the enqueue. A job that has not started after *expires* seconds is
          dropped. 0: no limit.
        - *headers*: a dict of strings that is stored with the job. ``JobContext.headers`` returns the headers.
        - *keep*: seconds, or a timedelta, for which the outcome is kept after the job is done. 0: no outcome is kept.
        - *unique*: a ``multiq.Unique``. While another job has the same key, nothing is added. With False, the job is
          not unique.
        - *limits*: the job's limits, instead of the task's limits. With an empty list, the job has no limits.

        Raises ``OptionInvalid``, ``NameInvalid``.
        """
        default = self.default
        seconds = check_delay(delay, at)
        call = TaskCall(
            self,
            CallOptions(
                queue=default.queue if queue is None else check_queue(queue),
                priority=default.priority if priority is None else check_priority(priority),
                delay=seconds,
                ttr=default.ttr if ttr is None else check_ttr(ttr),
                connection=connection,
                id=None if id is None else check_new_id(id),
                max_attempts=_optional_count(max_attempts, "max_attempts"),
                max_crashes=_optional_count(max_crashes, "max_crashes"),
                retry_for=None if retry_for is None else check_timeout(retry_for, "retry_for"),
                timeout=None if timeout is None else check_timeout(timeout),
                headers=check_headers(headers),
                keep=default.keep if keep is None else check_keep(keep),
                expires=None if expires is None else check_expires(expires),
                unique=default.unique if unique is None else self._checked_unique(unique),
                limits=default.limits if limits is None else self._check_limits(limits),
            ),
        )
        if seconds:
            self._refuse_late(seconds, expires)
        if not self.loosen:
            refuse_looser(
                self, max_attempts=max_attempts, max_crashes=max_crashes, retry_for=retry_for, timeout=timeout
            )
        return call

    def _checked_unique(self, unique: Unique | Literal[False]) -> Unique | None:
        from .unique import check_unique  # imported late, because few programs have unique jobs

        checked = check_unique(unique)
        return None if checked is None else checked.check(self.name, self.signature)

    def check_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise ``ArgumentsInvalid`` if the function does not take the given arguments."""
        if kwargs or not self._fewest <= len(args) <= self._most:
            self._arguments.check(self.name, args, kwargs)

    def accept(self, envelope: Envelope) -> None:
        """Check the arguments of a job that is about to run, and decode them by the function's annotations.

        The arguments of a flow's job are decoded later, by ``decode_arguments``. Raises ``ArgumentsInvalid``.
        """
        if envelope.kwargs or not self._fewest <= len(envelope.args) <= self._most:
            self.check_arguments(envelope.args, envelope.kwargs)

    def decode_arguments(self, envelope: Envelope) -> None:
        """Decode the arguments of a flow's job, after the results of earlier jobs were inserted. Raises
        ``ArgumentsInvalid``.

        JSON's own types need no decoding. ``TypedTask`` decodes all other types.
        """

    @property
    def returns(self) -> Codec | None:
        """The codec that encodes the results. None means that the annotation of the return value is one of JSON's own
        types."""
        return None

    def policy_of(self, envelope: Envelope) -> RetryPolicy:
        """Return the retry policy of one job.

        A stricter value in the job's envelope replaces the task's value. If the task was registered with
        ``loosen=True``, each value in the envelope replaces the task's value.
        """
        if envelope.max_attempts is None and envelope.max_crashes is None and envelope.retry_for is None:
            return self.policy
        return bounded_policy(self.policy, envelope, loosen=self.loosen)

    def timeout_of(self, envelope: Envelope) -> float | None:
        """Return the seconds that one job may run. 0 and None mean that there is no limit."""
        if envelope.timeout is None:
            return self.timeout
        return bounded_timeout(self.timeout, envelope.timeout, loosen=self.loosen)

    def for_app(self, app: App) -> Task[P, R]:
        """Return the copy of this task that belongs to *app*, for calls like ``task.for_app(app).enqueue(...)``.

        Raises ``TaskNotIncluded`` if the app does not have this task.
        """
        found = app.tasks.get(self.name)
        if found is None or not found.is_like(self):
            raise TaskNotIncluded(f"task {self.name!r} is not in {app!r}: app.include(tasks) adds its registry")
        return found

    def copy_for(self, app: App) -> Task[P, R]:
        """Return a copy of a registry's task for an app that includes the registry."""
        task = copy.copy(self)
        task.app, task.registry = app, None
        return task

    def __dir__(self) -> list[str]:
        """Leave out ``app`` if the attribute is not set on the task itself.

        ``unittest.mock`` with a *spec*, and ``inspect.getmembers``, read each attribute of this list. Reading ``app``
        may raise ``TaskNotIncluded``.
        """
        return [name for name in super().__dir__() if name != "app" or "app" in vars(self)]

    def is_like(self, other: Task[..., Any]) -> bool:
        """Whether *other* is the same function with the same options."""
        return self._traits() == other._traits()

    def __repr__(self) -> str:
        return f"Task({self.name!r}, queue={self.default.queue!r})"

    def _check_outcomes(self) -> None:
        """Raise ``Unsupported`` if the backend keeps no outcomes."""
        backend = self.app.backend
        if not backend.declared.outcomes:
            raise backend.unsupported("outcomes")

    def _traits(self) -> tuple[object, ...]:
        own = None if self.chain is None else tuple(self.chain.members)
        limits = self.policy, self.timeout, self.expires, self.error_rules, self.loosen
        return self.function, self.default, limits, own

    def _check_limits(self, limits: Sequence[Limit] | Limit) -> tuple[Limit, ...]:
        from .limits import check_limits

        return check_limits(limits, self.signature)

    def gates(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: CallOptions,
        results: Container[int | str] = (),
    ) -> tuple[Gate, ...]:
        """Return the limit's name and key (a gate) for each limit of the call that has ``scope="queue"``.

        *results*: the positions and names of arguments that are None until the job runs. Raises ``ArgumentsInvalid``.
        """
        from .limits import of_queue

        return self._gates(of_queue(options.limits), args, kwargs, results)

    def _gates(
        self,
        limits: Sequence[Limit],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        results: Container[int | str],
    ) -> tuple[Gate, ...]:
        from .limits import gates_of, refuse_results

        refuse_results(limits, self.signature, args, kwargs, results)
        return gates_of(limits, self.signature, args, kwargs)

    def terms(self, args: Sequence[Any], kwargs: Mapping[str, Any], options: CallOptions) -> Terms:
        """Return the unique key and the limits (terms) of a call with checked arguments. Raises ``ArgumentsInvalid``,
        ``PayloadInvalid``."""
        unique = None if options.unique is None else self._unique_key(options.unique, args, kwargs)
        gates = self.gates(args, kwargs, options) if options.limits else ()
        if unique is not None and options.unique is not None and options.unique.follows:
            from .limits import FOLLOW

            gates = (*gates, Gate(FOLLOW.name, unique.key.hex()))
            if len(gates) > MAX_GATES:
                raise OptionInvalid(f"a task with on_conflict='follow' must have at most {MAX_GATES - 1} limits")
        return Terms(unique=unique, gates=gates)

    def _unique_key(self, unique: Unique, args: Sequence[Any], kwargs: Mapping[str, Any]) -> UniqueKey:
        return unique.key_of(self.name, self.signature, args, kwargs)

    def _refuse_late(self, delay: float, expires: float | dt.timedelta | None) -> None:
        """Raise ``OptionInvalid`` if the job would expire before its delay is over."""
        limit = self.expires if expires is None else check_expires(expires)
        if limit and delay >= limit:
            raise OptionInvalid(
                f"the delay must be shorter than expires={limit:g} seconds, got {delay:g}: both begin at the enqueue, "
                "so the job would never start"
            )

    def _send(
        self,
        calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
        options: CallOptions,
        ids: Iterable[str] | None,
    ) -> list[JobHandle]:
        _refuse_id(options)
        app = self.app
        if app.intercepts or options.has_terms:
            from .enqueue_with_middleware import send

            return send(self, calls, options, ids, is_one=False)
        max_body = app.settings.max_body
        return put(
            app.backend,
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
        if app.intercepts or options.has_terms:
            from .enqueue_with_middleware import send

            return send(self, [(args, kwargs)], options, is_one=True)[0]
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

    async def _asend(
        self,
        calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
        options: CallOptions,
        ids: Iterable[str] | None,
    ) -> list[JobHandle]:
        from .async_enqueue import aopen, aput

        _refuse_id(options)
        if self.app.intercepts or options.has_terms:
            from .enqueue_with_middleware import asend

            return await asend(self, calls, options, ids, is_one=False)
        max_body = self.app.settings.max_body
        # encode first, because the caller may change the arguments while the backend is opened
        bodies = [self._encode(args, kwargs, options, max_body) for args, kwargs in calls]
        backend = await aopen(self.app, options.queue)
        if options.keep:
            self._check_outcomes()
        return await aput(
            backend,
            options.queue,
            bodies,
            priority=options.priority,
            delay=options.delay,
            ttr=options.ttr,
            connection=options.connection,
            ids=ids,
        )

    async def _asend_one(self, args: Sequence[Any], kwargs: Mapping[str, Any], options: CallOptions) -> JobHandle:
        from .async_enqueue import aopen, aput_one

        if self.app.intercepts or options.has_terms:
            from .enqueue_with_middleware import asend

            return (await asend(self, [(args, kwargs)], options, is_one=True))[0]
        body = self._encode(args, kwargs, options, self.app.settings.max_body)  # encoded first, as in _asend
        backend = await aopen(self.app, options.queue)
        if options.keep:
            self._check_outcomes()
        return await aput_one(
            backend,
            options.queue,
            body,
            priority=options.priority,
            delay=options.delay,
            ttr=options.ttr,
            connection=options.connection,
            own_id=options.id,
        )

    def s(self, /, *args: Any, **kwargs: Any) -> Signature:
        """Return a call of this task as a part of a chain, group, batch or flow. The call is not enqueued.

        In a chain, the first argument may be missing. A missing first argument is the result of the chain's previous
        job.
        """
        return _signature(self, args, kwargs, self.default)

    def encode(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], options: CallOptions, flow: FlowPart | None = None
    ) -> bytes:
        """Return the body of a job, which may belong to a flow. Raises the errors of ``enqueue`` about arguments."""
        max_body = self.app.settings.max_body
        body = self._encode(args, kwargs, options, max_body, flow)
        if not options.limits or not any(limit.scope == "app" for limit in options.limits):
            return body
        from .limits import of_app
        from .permit_notes import add_permits, app_gates

        gates = self._gates(of_app(options.limits), args, kwargs, places_of_results(flow))
        return add_permits(body, app_gates(gates), max_body)

    def _encode(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: CallOptions,
        max_body: int,
        flow: FlowPart | None = None,
    ) -> bytes:
        self.check_arguments(args, kwargs)
        if not are_plain(args):
            for index, value in enumerate(args):
                check_json(value, f"args[{index}]")
        if kwargs and not are_plain(kwargs.values()):
            for name, value in kwargs.items():
                check_json(value, name)
        envelope = Envelope(
            ENVELOPE_VERSION,
            self.name,
            [*args],  # a list, because the JSON leaves out an empty list, and does not leave out an empty tuple
            kwargs,  # type: ignore[arg-type]  # encoded at once
            options.max_attempts,
            options.max_crashes,
            options.retry_for,
            options.timeout,
            options.headers,
            options.expires,
        )
        if flow is not None:
            envelope.multiq, envelope.flow = FLOW_VERSION, flow
        if options.keep:
            # without a backend, aenqueue opens the backend later, and then checks the capability
            if self.app.has_backend:
                self._check_outcomes()
            envelope.keep = options.keep
        return encode_envelope(envelope, max_body)


class TaskCall(Generic[P]):
    """A task with other options, which ``task.options(delay=30)`` returns."""

    __slots__ = ("_options", "_task")

    def __init__(self, task: Task[P, Any], options: CallOptions) -> None:
        self._task = task
        self._options = options

    @property
    def chosen(self) -> CallOptions:
        """All options. An option that was not given has its default."""
        return self._options

    def enqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> JobHandle:
        """Like ``Task.enqueue``."""
        return self._task._send_one(args, kwargs, self._options)  # noqa: SLF001 - a class of this module

    def enqueue_many(
        self, calls: Iterable[Sequence[Any] | Mapping[str, Any]], *, ids: Iterable[str] | None = None
    ) -> list[JobHandle]:
        """Like ``Task.enqueue_many``."""
        return self._task._send([_call(call) for call in calls], self._options, ids)  # noqa: SLF001

    def s(self, /, *args: Any, **kwargs: Any) -> Signature:
        """Like ``Task.s``."""
        return _signature(self._task, args, kwargs, self._options)

    async def aenqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> JobHandle:
        """Like ``Task.aenqueue``."""
        return await self._task._asend_one(args, kwargs, self._options)  # noqa: SLF001

    async def aenqueue_many(
        self, calls: Iterable[Sequence[Any] | Mapping[str, Any]], *, ids: Iterable[str] | None = None
    ) -> list[JobHandle]:
        """Like ``Task.aenqueue_many``."""
        return await self._task._asend([_call(call) for call in calls], self._options, ids)  # noqa: SLF001


def places_of_results(flow: FlowPart | None) -> Container[int | str]:
    """Return the positions and names of the arguments that are None until the job runs."""
    return () if flow is None else {given.where for given in flow.inputs}


def encode_builtin(name: str, flow: FlowPart, *, max_body: int) -> bytes:
    """Return the body of a job that runs a built-in task of multiq."""
    return encode_envelope(Envelope(FLOW_VERSION, name, flow=flow), max_body=max_body)


def _signature(task: Task[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions) -> Signature:
    from .flows.signature import Signature

    for name in ("connection", "id"):
        if getattr(options, name) is not None:
            raise OptionInvalid(
                f"the call of a flow or schedule must have no {name}: multiq makes the ids, and enqueues the jobs"
            )
    return Signature(task, args, kwargs, options)


def _refuse_id(options: CallOptions) -> None:
    if options.id is not None:
        raise OptionInvalid(f"enqueue_many must have ids=, one for each call, got id={shown(options.id)}")


def _call(call: Sequence[Any] | Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if isinstance(call, tuple | list):
        return call, {}
    if isinstance(call, dict):
        return (), call
    raise ArgumentsInvalid(f"enqueue_many takes tuples of arguments, or dicts of named ones, got {shown(call)}")


def _is_coroutine(function: Callable[..., Any]) -> bool:
    """Return whether a call of *function* must be awaited. *function* may be an object whose ``__call__`` is a
    coroutine function."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _optional_count(value: int | None, name: str) -> int | None:
    return None if value is None else check_count(value, name, least=0)
