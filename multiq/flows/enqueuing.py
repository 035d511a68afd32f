"""Enqueues a flow: its record, and all of its jobs.

A job is enqueued before its predecessors, because an arrival at a missing job is lost. If the producer dies in the
middle, the record says ``enqueuing``, and a job with missing predecessors does not run.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any, TypeAlias

from multiq.backend import MAX_STEPS, Arrive, Enqueue, Version
from multiq.enqueue import add_jobs
from multiq.envelope import END_TASK, Tell
from multiq.errors import (
    BackendError,
    BackendUnavailable,
    EnqueuePartial,
    EnqueueUncertain,
    FlowInvalid,
    PayloadTooLarge,
)
from multiq.ids import new_id
from multiq.uncertain_enqueue import later

from . import record as records
from .handle import FlowHandle
from .job_plans import calls_of, numbered_members, plan_catch, plan_graph, plan_last_of_batch, plan_members
from .record import FlowRecord, job_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from multiq.app import App
    from multiq.backend import Backend, NewJob, Step

    from .batches import Batch
    from .graph import Graph
    from .job_plans import Planned
    from .signature import Signature

    _Call: TypeAlias = Callable[[float], object]
    """A call of the backend. The argument is the seconds since the flow was enqueued: 0, or more in a repetition."""


def send(flow: Graph) -> FlowHandle:
    """Enqueue a graph. The errors are those of ``Flow.enqueue``."""
    app = flow.app
    _check_powers(app.backend)
    flow_id = new_id()
    if not app.intercepts:
        return _send_graph(flow, app, flow_id, calls_of(flow))[0]
    from multiq.enqueue_with_middleware import around_calls

    with around_calls(app, calls_of(flow), flow_id) as (calls, jobs):
        handle, record = _send_graph(flow, app, flow_id, calls)
        numbers = [*range(len(flow.nodes)), *([record.catch] if record.catch >= 0 else [])]
        for job, number in zip(jobs, numbers, strict=True):
            job.id = job_id(flow_id, number)
        return handle


def _send_graph(flow: Graph, app: App, flow_id: str, calls: Sequence[Signature]) -> tuple[FlowHandle, FlowRecord]:
    backend = app.backend
    planned, record = plan_graph(flow, app, flow_id, calls)
    handle, put = FlowHandle(app, flow_id), records.put(flow_id, record)
    starts = [plan for plan in planned if not plan.is_held]
    _check_sizes(backend, planned, record)
    # enqueue atomically if the backend can do this; if not, enqueue the jobs that wait for other jobs first
    if backend.declared.one_step_everywhere:
        record.state = "open"
        put = records.put(flow_id, record)
        steps: list[Step] = [put, *(Enqueue(plan.queue, plan.job) for plan in planned)]
        _Sending(handle, app, starts, [], [_Once(backend, flow_id, steps)]).run()
        return handle, record
    before = [lambda _: backend.carry_out([put]), *_calls(backend, [plan for plan in planned if plan.is_held])]
    _Sending(handle, app, starts, before, [*_calls(backend, starts), lambda _: _open(handle)]).run()
    return handle, record


def send_batch(batch: Batch) -> FlowHandle:
    """Enqueue a batch. The errors are those of ``Flow.enqueue``."""
    flow = batch.flow
    signatures = [*batch.members, *([batch.then] if batch.then else []), *([flow.catch] if flow.catch else [])]
    app = _one_app(signatures)
    _check_powers(app.backend)
    flow_id = new_id()
    if not app.intercepts:
        return _send_batch(batch, app, flow_id, signatures)[0]
    from multiq.enqueue_with_middleware import around_calls

    with around_calls(app, signatures, flow_id) as (calls, jobs):
        handle, ids = _send_batch(batch, app, flow_id, calls)
        for job, own_id in zip(jobs, ids, strict=True):
            job.id = own_id
        return handle


def _send_batch(batch: Batch, app: App, flow_id: str, calls: Sequence[Signature]) -> tuple[FlowHandle, list[str]]:
    """Return the flow and the ids of its jobs. *calls*: the members, *then* and *catch*."""
    backend, flow = app.backend, batch.flow
    count = len(batch.members)
    then = None if batch.then is None else calls[count]
    record = FlowRecord(flow.name, "enqueuing", time.time(), flow.keep, [], is_batch=True)
    last_queue = (calls[0] if then is None else then).options.queue
    tells = [Tell(last_queue, job_id(flow_id, 0))]
    record.last = 0
    last = plan_last_of_batch(batch, app, flow_id, last_queue, then)
    record.add(last_queue, END_TASK if then is None else then.task.name)
    held = [last]
    if flow.catch is not None:
        catch = plan_catch(calls[-1], flow_id, 1)
        held.append(catch)
        record.catch = 1
        record.add(catch.queue, catch.task)
        tells.append(Tell(catch.queue, catch.job.id, "catch"))
    members = numbered_members(plan_members(calls[:count], flow_id, tells), flow_id, record)
    _check_sizes(backend, [*members, *held], record)
    handle, put = FlowHandle(app, flow_id), records.put(flow_id, record)
    seal = Arrive(last_queue, last.job.id, records.SEAL)
    after = [*_calls(backend, members), lambda _: backend.carry_out([seal]), lambda _: _open(handle)]
    _Sending(handle, app, members, [lambda _: backend.carry_out([put]), *_calls(backend, held)], after).run()
    others = held if then is not None else held[1:]
    return handle, [plan.job.id for plan in (*members, *others)]


async def asend(app: App, enqueue: Callable[[], FlowHandle]) -> FlowHandle:
    """Call *enqueue* of a flow on a thread."""
    from multiq.async_calls import run

    return await run(await app.abackend(), enqueue)


class _Sending:
    """The calls that enqueue a flow. If a reply is lost, ``EnqueueUncertain.repeat`` repeats the call that had no
    reply, and then makes the remaining calls."""

    def __init__(
        self,
        handle: FlowHandle,
        app: App,
        starts: Sequence[Planned],
        before: Sequence[_Call],
        after: Sequence[_Call],
    ) -> None:
        """*starts*: the jobs that can run at once. *before*: the first calls, which enqueue none of these jobs."""
        self._began = time.monotonic()
        self._handle = handle
        self._app = app
        self._starts = starts
        self._calls = [*before, *after]
        self._first = len(before)
        self._at = 0

    def run(self, passed: float = 0.0) -> FlowHandle:
        """Make the calls that are not made yet. *passed*: seconds since the flow was enqueued.

        The errors are those of ``Flow.enqueue``.

        Several threads may call this. Then some calls are made twice, which has no further effect, and none is left
        out.
        """
        while (at := self._at) < len(self._calls):
            try:
                self._calls[at](passed)
            except BackendError as exc:
                if self._is_uncertain(exc, at):
                    raise self._uncertain(exc) from exc
                raise
            self._at = at + 1
        return self._handle

    def _is_uncertain(self, error: BackendError, at: int) -> bool:
        """Whether the caller must get an ``EnqueueUncertain`` for the whole flow, because jobs that can run may be
        stored. To a program, ``BackendUnavailable`` would mean that nothing is stored.

        *at*: the number of the failed call.

        An ``EnqueueUncertain`` from one call is replaced, too, because its ``repeat`` would repeat only that call. A
        call raises ``EnqueuePartial`` if a part of its jobs is stored, and the server of the other jobs does not
        answer.
        """
        if isinstance(error, EnqueueUncertain):
            return True
        if isinstance(error, EnqueuePartial):
            return isinstance(error.__cause__, BackendUnavailable)
        if at < self._first:
            return False
        return error.may_be_done or (at > self._first and isinstance(error, BackendUnavailable))

    def _uncertain(self, error: BackendError) -> EnqueueUncertain:
        jobs = [plan.job for plan in self._starts]
        why = error.why if isinstance(error, EnqueueUncertain | EnqueuePartial) else str(error)
        uncertain = EnqueueUncertain(self._starts[0].queue, jobs, why, client_ids=True)
        uncertain.repeat_by(self._repeat, self._run)
        return uncertain

    def _repeat(self) -> FlowHandle:
        return self.run(time.monotonic() - self._began)

    async def _run(self, function: Callable[[], Any]) -> Any:
        from multiq.async_calls import run

        return await run(await self._app.abackend(), function)


class _Once:
    """Stores a flow in one step. If the first attempt has stored it, a repetition does nothing."""

    def __init__(self, backend: Backend, flow_id: str, steps: Sequence[Step]) -> None:
        self._backend = backend
        self._new = Version(records.HOME, records.key_of(flow_id), "")
        self._steps = steps
        self._is_repeated = False

    def __call__(self, passed: float) -> None:
        if self._is_repeated:
            steps = [
                Enqueue(step.queue, _later(step.job, passed)) if isinstance(step, Enqueue) else step
                for step in self._steps
            ]
            self._backend.carry_out(steps, when=[self._new])
            return
        self._is_repeated = True
        self._backend.carry_out(self._steps)


def _open(flow: FlowHandle) -> None:
    """Record that all jobs of a flow are enqueued, unless it was cancelled meanwhile."""
    if not flow.open():
        flow.cancel()  # deletes the jobs that were enqueued after the first cancel


def _check_powers(backend: Backend) -> None:
    for power in ("holds", "notes", "outcomes"):
        if not backend.declared.claim(power):
            raise backend.unsupported(power)


def _check_sizes(backend: Backend, planned: Iterable[Planned], record: FlowRecord) -> None:
    """Raise ``PayloadTooLarge`` before the first call, because a later call would leave a part of the flow behind."""
    records.check_size(backend, record)
    limit = backend.capabilities.max_body
    if limit is None:
        return
    for plan in planned:
        if len(plan.job.body) > limit:
            raise PayloadTooLarge(
                len(plan.job.body),
                limit,
                f"it is the call of task {plan.task}; keep the data elsewhere and store its address",
            )


def _one_app(signatures: Sequence[Signature]) -> App:
    apps = {signature.task.app for signature in signatures}
    if len(apps) != 1:
        raise FlowInvalid(f"a batch must have calls of tasks of one app, got {len(apps)} apps")
    return apps.pop()


def _calls(backend: Backend, planned: Iterable[Planned]) -> list[_Call]:
    """Return the calls that enqueue these jobs, as few calls as possible. The jobs of one queue keep their order."""
    by_queue: dict[str, list[NewJob]] = {}
    for plan in planned:
        by_queue.setdefault(plan.queue, []).append(plan.job)
    return [
        functools.partial(_enqueue, backend, queue, jobs[start : start + MAX_STEPS])
        for queue, jobs in by_queue.items()
        for start in range(0, len(jobs), MAX_STEPS)
    ]


def _enqueue(backend: Backend, queue: str, jobs: Sequence[NewJob], passed: float) -> None:
    if passed:
        jobs = [_later(job, passed) for job in jobs]
    if backend.declared.client_ids:
        add_jobs(backend, queue, jobs)
    else:  # this backend keeps the ids of the jobs only if steps enqueue them
        backend.carry_out([Enqueue(queue, job) for job in jobs])


def _later(job: NewJob, passed: float) -> NewJob:
    """Return the job as it is sent *passed* seconds later.

    The delay of a held job begins only at its release, so it is not shortened.
    """
    return job if job.terms is not None and job.terms.awaits else later(job, passed)
