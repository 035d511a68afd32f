"""The assertions of a fake connection: they compare the jobs that a test expects with the enqueued jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from multiq.annotations import Mismatch, to_builtins
from multiq.envelope import END_TASK
from multiq.errors import ArgumentsInvalid
from multiq.formatting import shown
from multiq.task import Task
from multiq.typed_tasks import TypedTask
from multiq.validation import check_name, check_timeout

from .enqueued import enqueued_jobs

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from multiq.annotations import Codec
    from multiq.app import App
    from multiq.flows.signature import Signature

    from .enqueued import Enqueued
    from .fakes import FakeBackend


class Assertions:
    """The assertions of ``Fake``."""

    def __init__(self, app: App, backend: FakeBackend) -> None:
        self.app = app
        self._backend = backend
        self._expected: set[int] = set()  # jobs by number, because the application's own ids may be enqueued again

    @property
    def enqueued(self) -> list[Enqueued]:
        """All jobs that were enqueued since the beginning, except the jobs that multiq adds to flows."""
        return [job for job in enqueued_jobs(self._backend) if job.task != END_TASK]

    def assert_enqueued(
        self,
        task: Task[..., Any] | str,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        within: float | None = None,
        queue: str | None = None,
    ) -> Enqueued:
        """Assert that a job of *task* was enqueued. Returns the job.

        - *args*, *kwargs*: the arguments. Arguments that the function takes by position or by name may be given in
          either way. Default: any arguments.
        - *within*: the job is due within this many seconds from now, by the clock of the fake. Default: at any time.
        - *queue*: the job's queue. Default: any queue.
        """
        name = _name(task)
        _check_given(args, kwargs)
        if within is not None:
            check_timeout(within, "within")
        if queue is not None:
            check_name(queue)
        for job in self._unexpected():
            if (
                job.task == name
                and (queue is None or job.queue == queue)
                and (within is None or job.due_in <= within)
                and ((args is None and kwargs is None) or _has_arguments(job, task, args or (), kwargs or {}))
            ):
                self._expect(job)
                return job
        wanted = _wanted(task, args, kwargs)
        wanted += f" in queue {queue}" if queue is not None else ""
        wanted += f", due within {within:g} s," if within is not None else ""
        raise self._failure(f"{wanted} was not enqueued")

    def assert_not_enqueued(self, task: Task[..., Any] | str) -> None:
        """Assert that no job of *task* was enqueued, except jobs that an earlier assertion has marked as expected.

        Raises ``TaskNotFound`` if the app has no such task, because the assertion could then never fail.
        """
        name = _name(task)
        if all(job.task != name for job in self.enqueued):  # a body may name a task of another program
            self.app.find_task(name)
        if any(job.task == name for job in self._unexpected()):
            raise self._failure(f"{name} was enqueued")

    def assert_nothing_else_enqueued(self) -> None:
        """Assert that all jobs are expected."""
        if self._unexpected():
            raise self._failure("more was enqueued than expected")

    def assert_chained(self, *steps: Signature) -> list[Enqueued]:
        """Assert that a chain of exactly these calls was enqueued. Returns its jobs."""
        _check_calls(*steps)
        for jobs in self._flows():
            chain = _in_order(jobs)
            if len(chain) == len(steps) and all(map(_is_call, chain, steps)):
                self._expect(*jobs)
                return chain
        raise self._failure(f"the chain {', '.join(map(repr, steps))} was not enqueued")

    def assert_batched(self, members: Sequence[Signature], *, then: Signature | None = None) -> list[Enqueued]:
        """Assert that a batch or a group of exactly these calls was enqueued. The order does not matter. Returns the
        members.

        *then*: the call after the last member. It may lack the flow's id, as in ``multiq.batch``.
        """
        if not isinstance(members, list | tuple):
            raise ArgumentsInvalid(f"members must be a list of calls like task.s(1, 2), got {shown(members)}")
        _check_calls(*members, *([] if then is None else [then]))
        for jobs in self._flows():
            found = self._members(jobs, list(members), then)
            if found is not None:
                self._expect(*jobs)
                return found
        after = f" and then {then!r}" if then is not None else ""
        raise self._failure(f"the batch {', '.join(map(repr, members))}{after} was not enqueued")

    def _members(self, jobs: list[Enqueued], members: list[Signature], then: Signature | None) -> list[Enqueued] | None:
        if len(jobs) == 1 and len(members) == 1 and then is None:  # a group of one call has no last job
            return jobs if _is_call(jobs[0], members[0]) else None
        told = {tell.id for job in jobs if job.flow for tell in job.flow.tells if tell.mode != "catch"}
        ends = [job for job in jobs if job.id in told]
        found = [job for job in jobs if job.flow is not None and job.flow.tells and job.id not in told]
        if len(ends) != 1 or len(found) != len(members) or (then is None) != (ends[0].task == END_TASK):
            return None
        if then is not None and not _is_call(ends[0], then):
            return None
        left = list(found)
        for member in members:
            match = next((job for job in left if _is_call(job, member)), None)
            if match is None:
                return None
            left.remove(match)
        return found

    def _flows(self) -> list[list[Enqueued]]:
        """Return the jobs of each flow that is not expected yet."""
        flows: dict[str, list[Enqueued]] = {}
        for job in enqueued_jobs(self._backend):
            if job.flow is not None and job.number not in self._expected:
                flows.setdefault(job.flow.id, []).append(job)
        return list(flows.values())

    def _unexpected(self) -> list[Enqueued]:
        return [job for job in self.enqueued if job.number not in self._expected]

    def _expect(self, *jobs: Enqueued) -> None:
        self._expected.update(job.number for job in jobs)

    def _failure(self, what: str) -> AssertionError:
        left = [f"  {job}" for job in self._unexpected()]
        count = len(self.enqueued) - len(left)
        besides = f" besides {count} expected jobs" if count else ""
        lines = [f"{what}; enqueued{besides}:" + ("" if left else " nothing"), *left]
        return AssertionError("\n".join(lines))


def _name(task: Task[..., Any] | str) -> str:
    if isinstance(task, Task):
        return task.name
    if isinstance(task, str):
        return task
    raise ArgumentsInvalid(f"an assertion must have a task of multiq, or the name of one, got {shown(task)}")


def _wanted(task: Task[..., Any] | str, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> str:
    if args is None and kwargs is None:
        return _name(task)
    parts = [*map(repr, args or ()), *(f"{name}={value!r}" for name, value in (kwargs or {}).items())]
    return f"{_name(task)}({', '.join(parts)})"


def _has_arguments(job: Enqueued, task: Task[..., Any] | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    wanted = _bound(task, args, kwargs)
    try:
        return bool(_bound(task, job.args, job.kwargs) == wanted)
    except ArgumentsInvalid:  # a body of another program, which the task does not accept
        return False


def _bound(task: Task[..., Any] | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return arguments as JSON's types. If the task is known, arguments with a default value are included."""
    if isinstance(task, Task):
        task.check_arguments(args, kwargs)
        bound = task.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return _compared(task, bound.args, bound.kwargs)
    return _as_json([list(args), dict(kwargs)])


def _compared(
    task: Task[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], results: Container[int | str] = ()
) -> Any:
    """Return arguments as JSON's types. Arguments with equal values become equal: sets in any order, for example."""
    if isinstance(task, TypedTask):
        args, kwargs = task.types.convert(_key, args, kwargs, results)
    return _as_json([list(args), dict(kwargs)])


def _key(codec: Codec, value: Any) -> Any:
    try:
        return codec.encode_key(value)
    except Mismatch:  # no enqueue accepts the value, but other programs can send it
        return value


def _as_json(value: Any) -> Any:
    try:
        return msgspec.json.decode(msgspec.json.encode(to_builtins(value)))
    except Exception as exc:
        raise ArgumentsInvalid(
            f"an assertion must have arguments that can be enqueued, got {shown(value)}: {exc}"
        ) from exc


def _is_call(job: Enqueued, signature: Signature) -> bool:
    """Whether a job of a flow runs this call. Arguments that are results of other jobs are left out."""
    if job.task != signature.task.name:
        return False
    results = {given.where for given in job.flow.inputs} if job.flow is not None else set()
    args, kwargs = list(signature.args), dict(signature.kwargs)
    for where in sorted(results, key=str):
        if isinstance(where, int):
            args.insert(where, None)
        else:
            kwargs[where] = None
    if len(job.args) == len(args) + 1 and job.flow is not None and job.args[0] == job.flow.id:
        args.insert(0, job.flow.id)
    given_args = [None if at in results else value for at, value in enumerate(job.args)]
    given_kwargs = {name: None if name in results else value for name, value in job.kwargs.items()}
    given: Any = _compared(signature.task, given_args, given_kwargs, results)
    return bool(given == _compared(signature.task, args, kwargs, results))


def _check_calls(*calls: Signature) -> None:
    from multiq.flows.signature import Signature

    for call in calls:
        if not isinstance(call, Signature):
            raise ArgumentsInvalid(f"the assertion must have calls like task.s(1, 2), got {shown(call)}")


def _check_given(args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> None:
    if args is not None and not isinstance(args, list | tuple):
        raise ArgumentsInvalid(f"args must be a tuple of all arguments by position, got {shown(args)}")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise ArgumentsInvalid(f"kwargs must be a dict of all arguments by name, got {shown(kwargs)}")


def _in_order(jobs: Sequence[Enqueued]) -> list[Enqueued]:
    """Return the jobs of a chain in their order, or no jobs if they are not a chain."""
    by_id = {job.id: job for job in jobs}
    later = {job.id: [t.id for t in job.flow.tells if t.mode != "catch"] for job in jobs if job.flow is not None}
    catches = {t.id for job in jobs if job.flow is not None for t in job.flow.tells if t.mode == "catch"}
    firsts = set(by_id) - {told for tells in later.values() for told in tells} - catches
    if len(firsts) != 1 or any(len(tells) > 1 for tells in later.values()):
        return []
    chain = [by_id[firsts.pop()]]
    while later.get(chain[-1].id) and len(chain) <= len(jobs):
        chain.append(by_id[later[chain[-1].id][0]])
    return chain
