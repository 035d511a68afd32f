"""Limits. A limit says how many jobs with the same key may run at the same time, or may start in a period."""

from __future__ import annotations

import hashlib
import math
import string
import time
import weakref
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from .backend import MAX_GATE_TEXT, MAX_GATES, Gate, Quota, Terms
from .errors import (
    ArgumentsInvalid,
    BackendError,
    BackendTimeout,
    BackendUnavailable,
    LockedByCaller,
    MultiqError,
    OptionInvalid,
)
from .formatting import shown
from .outbox import of_backend
from .validation import APP_SCOPE, check_count, check_name

if TYPE_CHECKING:
    import inspect
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

    from .app import App
    from .backend import Backend, LimitState, NewJob
    from .call_options import CallOptions

States: TypeAlias = "list[LimitState]"

_RATE_MAX = 1e6  # jobs in a second: more is not possible, because drivers count in microseconds
_PER_MAX = 366 * 86400.0  # seconds
_DIGEST = 16  # bytes

#: The value of an option that ``Limits.set`` does not change.
_SAME: Any = object()


class Limit(msgspec.Struct, frozen=True):
    """A limit for the jobs of a task: ``@app.task(limits=[multiq.Limit("api", key="{customer}", slots=3)])``.

    - *name*: the limit's name. Two tasks of one queue that use the same name share one limit. Tasks that share a limit
      must give the same numbers.
    - *key*: a text with arguments of the call in braces, like ``"{customer}"`` or ``"{order[customer]}"``. Each value
      of the key has its own slots and its own rate. Without *key*, all jobs have the same key.
    - *slots*: the largest number of jobs that run at the same time.
    - *rate*, *per*: *rate* jobs start in *per* seconds. The default of *per* is 1 second.
    - *burst*: the number of jobs that may start at the same time after a period without jobs. Default: 1. In any period
      of ``t`` seconds, at most ``burst + rate * t / per`` jobs start.
    - *fair*: whether the keys share the slots: the key with the fewest running jobs is next. With False, which is the
      default, the oldest job starts first.
    - *scope*: ``"queue"``: the limit counts the jobs of each queue separately. ``"app"``: the limit counts the jobs of
      all queues together. Permits enforce a limit with the scope ``"app"`` (docs/limits.md), and *fair* is refused.
      Default: ``"queue"``.

    Give at least one of *slots*, *rate* and *fair*. Raises ``NameInvalid``, ``OptionInvalid``.
    """

    name: str
    key: str = ""
    slots: int | None = None
    rate: float | None = None
    per: float = 1.0
    burst: int = 1
    fair: bool = False
    scope: Literal["queue", "app"] = "queue"

    def __post_init__(self) -> None:
        check_name(self.name, "limit")
        if not isinstance(self.key, str):
            raise OptionInvalid(f"the key of limit {self.name} must be text like '{{customer}}', got {shown(self.key)}")
        _fields(self)
        check_quota(self.name, self.quota)
        if self.scope not in ("queue", "app"):
            raise OptionInvalid(f"scope of limit {self.name} must be 'queue' or 'app', got {shown(self.scope)}")
        if self.scope == "app" and self.fair:
            raise OptionInvalid(
                f"fair of limit {self.name} must be False with scope='app', got True: only a queue's keys share slots"
            )

    @property
    def quota(self) -> Quota:
        return Quota(self.slots, self.rate, self.per, self.burst, self.fair)

    def gate(self, arguments: Mapping[str, Any]) -> Gate:
        """Return the limit's name and key (the gate) for a job with the given arguments. Raises
        ``ArgumentsInvalid``."""
        if not self.key:
            return Gate(self.name)
        for name, value in arguments.items():
            if isinstance(value, (set, frozenset)) and name in _fields(self):
                raise ArgumentsInvalid(
                    f"the key {self.key!r} of limit {self.name} must not be made of a set, got one as {name}: "
                    "the text of a set differs from process to process; pass a sorted list"
                )
        try:
            key = self.key.format_map(arguments)
        except (LookupError, AttributeError, ValueError, TypeError, OverflowError) as exc:
            raise ArgumentsInvalid(
                f"the key {self.key!r} of limit {self.name} cannot be made of these arguments: "
                f"{type(exc).__name__}: {exc}"
            ) from exc
        return Gate(self.name, _short(key))


def check_quota(name: str, quota: Quota) -> Quota:
    """Return *quota*. Raises ``OptionInvalid``."""
    if quota.slots is None and quota.rate is None and not quota.fair:
        raise OptionInvalid(f"limit {name} must have slots, a rate or fair=True, got none of them")
    if quota.slots is not None:
        check_count(quota.slots, f"slots of limit {name}", least=0)
    if quota.rate is not None and not (_is_number(quota.rate) and 0 < quota.rate < math.inf):
        raise OptionInvalid(f"the rate of limit {name} must be more than 0 jobs, got {shown(quota.rate)}")
    if not _is_number(quota.per) or not 0 < quota.per <= _PER_MAX:
        raise OptionInvalid(
            f"per of limit {name} must be more than 0 and at most {_PER_MAX:.0f} seconds, got {shown(quota.per)}"
        )
    if quota.rate is not None and not 1 / _PER_MAX <= quota.rate / quota.per <= _RATE_MAX:
        raise OptionInvalid(
            f"the rate of limit {name} must be from one job in {_PER_MAX:.0f} seconds to {_RATE_MAX:.0f} jobs in a "
            f"second, got {quota.rate:.12g} in {quota.per:.12g} s"
        )
    check_count(quota.burst, f"burst of limit {name}")
    if not isinstance(quota.fair, bool):
        raise OptionInvalid(f"fair of limit {name} must be True or False, got {shown(quota.fair)}")
    return quota


def check_limits(limits: Iterable[Limit] | Limit | None, signature: inspect.Signature) -> tuple[Limit, ...]:
    """Return the limits of a task, sorted by name. Raises ``OptionInvalid``."""
    if limits is None:
        return ()
    if isinstance(limits, Limit):
        limits = [limits]
    try:
        found = list(limits)
    except TypeError:
        raise OptionInvalid(f"limits must be a list of multiq.Limit, got {shown(limits)}") from None
    for limit in found:
        if not isinstance(limit, Limit):
            raise OptionInvalid(f"limits must be a list of multiq.Limit, got {shown(limit)}")
        if limit.name == FOLLOW.name:
            raise OptionInvalid(
                f"a limit must have another name than {FOLLOW.name!r}: unique jobs with on_conflict='follow' have the "
                "limit with this name"
            )
        _check_fields(limit, signature)
    names = [limit.name for limit in found]
    if len(set(names)) < len(names):
        raise OptionInvalid(f"the limits of a task must have different names, got {', '.join(names)}")
    if len(found) > MAX_GATES:
        raise OptionInvalid(f"a task must have at most {MAX_GATES} limits, got {len(found)}")
    return tuple(sorted(found, key=lambda limit: limit.name))


def gates_of(
    limits: Sequence[Limit], signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Gate, ...]:
    """Return the limits and keys (gates) that apply to a call. The arguments must have been checked. Raises
    ``ArgumentsInvalid``."""
    arguments: Mapping[str, Any] = {}
    if any(limit.key for limit in limits):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                arguments = {**arguments[parameter.name], **arguments}
    return tuple(limit.gate(arguments) for limit in limits)


def refuse_results(
    limits: Sequence[Limit],
    signature: inspect.Signature,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    results: Container[int | str],
) -> None:
    """Raise ``ArgumentsInvalid`` if the key of a limit is made of an argument that is the result of an earlier job.

    The key is computed at the enqueue, when there is no result yet. So all jobs would have the same key.

    - *results*: the positions and names of the arguments that are results.
    """
    if not results:
        return
    parameters = signature.parameters
    late = {name for name in kwargs if name in results}
    for position, parameter in enumerate(parameters.values()):
        if parameter.kind is parameter.VAR_POSITIONAL:
            positions = range(position, len(args))
        elif parameter.kind is parameter.VAR_KEYWORD:
            positions = range(0)
            if late.difference(parameters):
                late.add(parameter.name)
        else:
            positions = range(position, position + 1)
        if any(at in results for at in positions):
            late.add(parameter.name)
    for limit in limits:
        name = next((name for name in _fields(limit) if name in late), None)
        if name is not None:
            raise ArgumentsInvalid(
                f"the key {limit.key!r} of limit {limit.name} must be made of arguments that are known at the enqueue, "
                f"got {name}, which is the result of an earlier job of the flow"
            )


def of_queue(limits: Sequence[Limit]) -> list[Limit]:
    return [limit for limit in limits if limit.scope == "queue"]


def of_app(limits: Sequence[Limit]) -> list[Limit]:
    return [limit for limit in limits if limit.scope == "app"]


def with_gates(job: NewJob, gates: tuple[Gate, ...]) -> NewJob:
    terms = Terms(gates=gates) if job.terms is None else msgspec.structs.replace(job.terms, gates=gates)
    return msgspec.structs.replace(job, terms=terms)


#: The quotas that this process has stored in each backend, by queue and name.
_stored: weakref.WeakKeyDictionary[Backend, dict[tuple[str, str], Quota]] = weakref.WeakKeyDictionary()
#: The monotonic time from which enqueues whose jobs go to an outbox try again to store limits.
_try_at: weakref.WeakKeyDictionary[Backend, float] = weakref.WeakKeyDictionary()
_TRY_AFTER = 5.0  # seconds


def store_limits(backend: Backend, queue: str, limits: Sequence[Limit], connection: Any = None) -> None:
    """Store the limits of a queue. A limit that this process has already stored is not stored again. A pinned limit
    does not change.

    *connection*: the connection of the enqueue, if it has one. The backend may store the limits in the transaction of
    this connection. A limit that a rollback would remove does not count as stored.

    If the backend does not answer, and the jobs of *connection* may go to an outbox, limits of the app's code are
    stored later, by a worker or by another enqueue. Enqueues that follow within a few seconds do not try again, so that
    they do not wait. For limits of a single call, the error is raised, because no worker knows them.

    Raises ``OptionInvalid`` if this process has stored the limit with other numbers. Raises ``Unsupported``,
    ``BackendError``.
    """
    missing = missing_limits(backend, queue, limits)
    if not missing or connection is None:
        _store(backend, missing, None)
        return
    may_be_later = any(_are_in_code(outbox.app, missing) for outbox in of_backend(backend))
    if may_be_later and time.monotonic() < _try_at.get(backend, 0.0):
        return
    try:
        _store(backend, missing, connection)
    except BackendUnavailable as exc:
        # a store that can take part in the transaction may also be locked by this transaction, as the error's note says
        may_be_locked = isinstance(exc, BackendTimeout) and backend.declared.transactional_enqueue
        if not may_be_later or may_be_locked:
            raise
        _try_at[backend] = time.monotonic() + _TRY_AFTER


def _store(backend: Backend, all_missing: Mapping[str, Mapping[str, Quota]], connection: Any) -> None:
    for place, missing in all_missing.items():
        if place == APP_SCOPE or not backend.declared.limits:
            from .permit_notes import change_quotas  # imported late, because few programs need permits

            try:
                change_quotas(backend, place, missing, pinned=False)
            except (BackendTimeout, LockedByCaller) as exc:
                if connection is not None:
                    exc.add_note(
                        f"limit {', '.join(missing)} is kept by permits, and must be stored before the transaction of "
                        "connection= locks the file: start a worker of the app first, or enqueue a job of the task "
                        "once outside a transaction"
                    )
                raise
        elif connection is None:
            backend.limits(place, missing, pinned=False)
        elif not backend.limits_beside(place, missing, connection):
            continue
        _stored[backend].update({(place, name): quota for name, quota in missing.items()})


def missing_limits(backend: Backend, queue: str, limits: Sequence[Limit]) -> dict[str, dict[str, Quota]]:
    """Return the limits that ``store_limits`` would store, by place and by name.

    The place of a limit is *queue*, or ``APP_SCOPE``. Calls no server. Raises ``OptionInvalid`` and ``Unsupported`` in
    the same cases as ``store_limits``.
    """
    check_supported(backend, limits)
    known = _stored.setdefault(backend, {})
    missing: dict[str, dict[str, Quota]] = {}
    for limit in limits:
        place = APP_SCOPE if limit.scope == "app" else queue
        before = known.get((place, limit.name), limit.quota)
        if before != limit.quota:
            where = "the app" if limit.scope == "app" else f"queue {queue}"
            raise OptionInvalid(
                f"limit {limit.name} must have the same numbers everywhere in {where}, got {_text(before)} and "
                f"{_text(limit.quota)}: give one of the two limits another name"
            )
        if (place, limit.name) not in known:
            missing.setdefault(place, {})[limit.name] = limit.quota
    return missing


def check_supported(backend: Backend, limits: Sequence[Limit]) -> None:
    """Raise ``Unsupported`` if a backend cannot enforce the limits, either within the reserve or by permits."""
    kept_by = backend.declared.limits_kept_by
    for limit in limits:
        if kept_by == "reserve" and limit.scope == "queue":
            continue
        from .permit_notes import check_possible, check_quota_of_permits

        check_possible(backend)
        check_quota_of_permits(backend, limit.name, limit.quota)


def store_app_limits(app: App) -> list[MultiqError]:
    """Store the limits of all tasks and schedules of an app. Each limit is stored in the queue of its task.

    Returns the errors of limits that cannot be stored, for example because two tasks give a limit different numbers.
    All other limits are stored. Raises ``BackendError``.
    """
    errors: dict[str, MultiqError] = {}
    for queue, limits in _limits_in_code(app):
        try:
            store_limits(app.backend, queue, limits)
        except BackendError:
            raise
        except MultiqError:
            for limit in limits:
                try:
                    store_limits(app.backend, queue, [limit])
                except BackendError:
                    raise
                except MultiqError as exc:
                    errors.setdefault(str(exc), exc)
    return list(errors.values())


def places_in_code(app: App) -> set[str]:
    """Return the queues that have limits in an app's code. The set has ``APP_SCOPE`` if there are limits of the whole
    app."""
    limits_of_queues = list(_limits_in_code(app))
    queues = {queue for queue, limits in limits_of_queues if of_queue(limits)}
    return queues | {APP_SCOPE for _, limits in limits_of_queues if of_app(limits)}


def forget_stored(backend: Backend, places: Container[str]) -> None:
    """Let this process store the limits of these places again."""
    known = _stored.get(backend, {})
    for place, name in tuple(known):
        if place in places:
            known.pop((place, name), None)


def _limits_in_code(app: App) -> Iterator[tuple[str, tuple[Limit, ...]]]:
    for task in app.tasks.values():
        if limits := limits_of(task.default):
            yield task.default.queue, limits
    for definition in app.code_schedules.values():
        if definition.gates and definition.task in app.tasks:
            yield definition.queue, limits_of(app.tasks[definition.task].default)


def _are_in_code(app: App, all_missing: Mapping[str, Mapping[str, Quota]]) -> bool:
    known = {
        (APP_SCOPE if limit.scope == "app" else queue, limit.name)
        for queue, limits in _limits_in_code(app)
        for limit in limits
    }
    return all((place, name) in known for place, missing in all_missing.items() for name in missing)


def limits_of(options: CallOptions) -> tuple[Limit, ...]:
    """Return all limits of a call's jobs, including the limit of a unique task with ``on_conflict="follow"``."""
    follows = options.unique is not None and options.unique.follows
    return (*options.limits, FOLLOW) if follows else options.limits


class Limits:
    """``app.limits``: lists and changes the limits of an app's queues. Changes take effect immediately, for all
    workers."""

    def __init__(self, app: App) -> None:
        self._app = app

    def list(self, queue: str | None = None) -> dict[str, list[LimitState]]:
        """Return the stored limits of each queue. *queue*: return only the limits of *queue*. Queues without limits are
        left out.

        Without *queue*, the result has the queues that have jobs, and the queues of this app's tasks. The limits with
        ``scope="app"`` are listed under ``"@app"``. A limit that is enforced by permits has no parked jobs, because
        refused jobs are delayed. Raises ``Unsupported``.
        """
        backend = self._app.backend
        if queue is not None:
            names = {queue if queue == APP_SCOPE else check_name(queue)}
        elif backend.declared.limits_kept_by == "reserve":
            names = {APP_SCOPE, *backend.queues(), *(task.default.queue for task in self._app.tasks.values())}
        else:
            names = self._places_of_permits()
        found = {name: self._states(name) for name in sorted(names)}
        return {name: states for name, states in found.items() if states}

    def _places_of_permits(self) -> set[str]:
        from .permit_notes import check_possible, limited_places

        check_possible(self._app.backend)
        return limited_places(self._app.backend)

    def _states(self, place: str) -> States:
        backend = self._app.backend
        if place != APP_SCOPE and backend.declared.limits:
            return backend.limits(place)
        from .permit_notes import are_possible, check_possible, states

        if place == APP_SCOPE and backend.declared.limits and not are_possible(backend):
            return []
        check_possible(backend)
        return states(backend, place)

    def _change(self, place: str, name: str, quota: Quota | None) -> Sequence[LimitState]:
        backend = self._app.backend
        if place != APP_SCOPE and backend.declared.limits:
            return backend.limits(place, {name: quota})
        from .permit_notes import change_quotas, check_possible, states

        check_possible(backend)
        change_quotas(backend, place, {name: quota}, pinned=True)
        return states(backend, place)

    def set(
        self,
        queue: str,
        name: str,
        *,
        slots: int | None = _SAME,
        rate: float | None = _SAME,
        per: float = _SAME,
        burst: int = _SAME,
        fair: bool = _SAME,
    ) -> LimitState:
        """Change a limit, or make a new limit. Options that are not given keep their values. Returns the limit.

        - *queue*: the limit's queue, or ``"@app"`` for a limit with ``scope="app"``.

        ``set`` pins the limit: after the call, the numbers in the code do not replace the limit's numbers. ``remove``
        also removes the pin. The limit ``follow`` of unique jobs cannot be changed. Raises ``OptionInvalid``,
        ``NameInvalid``, ``Unsupported``.
        """
        _refuse_follow(name)
        place = queue if queue == APP_SCOPE else check_name(queue)
        before = {state.name: state.quota for state in self._states(place)}
        given = {"slots": slots, "rate": rate, "per": per, "burst": burst, "fair": fair}
        changed = {field: value for field, value in given.items() if value is not _SAME}
        quota = msgspec.structs.replace(before.get(check_name(name, "limit"), Quota()), **changed)
        states = self._change(place, name, check_quota(name, quota))
        return next(state for state in states if state.name == name)

    def remove(self, queue: str, name: str) -> bool:
        """Remove a limit, which no longer applies to jobs. *queue*: as in ``set``.

        Returns whether the limit was stored. A process whose code has the limit stores the limit again when the process
        starts. Raises ``OptionInvalid`` for the limit ``follow`` of unique jobs.
        """
        _refuse_follow(name)
        place = queue if queue == APP_SCOPE else check_name(queue)
        check_name(name, "limit")
        was_stored = any(state.name == name for state in self._states(place))
        self._change(place, name, None)
        return was_stored


def _refuse_follow(name: str) -> None:
    if name == FOLLOW.name:
        raise OptionInvalid(
            f"the limit must have another name than {FOLLOW.name!r}: without this limit, or with other slots, several "
            "unique jobs with on_conflict='follow' and the same key would run at the same time"
        )


def _fields(limit: Limit) -> list[str]:
    """Return the names of the arguments that the key contains."""
    try:
        parts = list(string.Formatter().parse(limit.key))
    except ValueError as exc:
        raise OptionInvalid(
            f"the key of limit {limit.name} must be text like '{{customer}}', got {limit.key!r}: {exc}"
        ) from exc
    names = [name.split(".")[0].split("[")[0] for _, name, _, _ in parts if name is not None]
    if any(not name or name.isdigit() for name in names):
        raise OptionInvalid(
            f"the key of limit {limit.name} must name its arguments, like '{{customer}}', got {limit.key!r}"
        )
    return names


def _check_fields(limit: Limit, signature: inspect.Signature) -> None:
    parameters = signature.parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    unknown = [name for name in _fields(limit) if name not in parameters]
    if unknown:
        raise OptionInvalid(
            f"the key of limit {limit.name} must be made of the task's arguments ({', '.join(parameters) or 'none'}), "
            f"got {unknown[0]}"
        )


def _short(key: str) -> str:
    """Return the key. A key that is too long is cut, and gets its hash as the end, so that different keys stay
    different."""
    if len(key) <= MAX_GATE_TEXT:
        return key
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=_DIGEST).hexdigest()
    return f"{key[: MAX_GATE_TEXT - len(digest) - 1]}~{digest}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(quota: Quota) -> str:
    return " ".join(f"{name}={value}" for name, value in msgspec.structs.asdict(quota).items() if value is not None)


# at the end of the module, because ``Limit`` calls the functions above
FOLLOW = Limit("follow", slots=1)
"""The limit of unique jobs with ``on_conflict="follow"``. The key of the limit is the job's unique key, in hex."""
