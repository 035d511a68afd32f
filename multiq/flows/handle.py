"""Handles of enqueued flows: show their progress, cancel them, and add calls to a batch."""

from __future__ import annotations

import builtins
import contextlib
import datetime as dt
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

import msgspec

from multiq.backend import MAX_STEPS
from multiq.envelope import END_TASK
from multiq.errors import FlowInvalid, FlowNotFound, JobReserved, PayloadInvalid
from multiq.formatting import shown
from multiq.job import JobHandle
from multiq.validation import check_delay, check_timeout

from . import record as records
from .batch_growth import grow
from .progress import FlowProgress, progress_of
from .record import HOME, FlowInfo, job_id
from .signature import Signature
from .sweep import SweptFlow, sweep

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from multiq.app import App
    from multiq.backend import Step

    from .record import FlowRecord

P = ParamSpec("P")
R = TypeVar("R")

_PREFIX = records.key_of("")


class FlowHandle:
    """A chain, group, batch or flow that is enqueued."""

    __slots__ = ("_app", "id")

    def __init__(self, app: App, flow_id: str) -> None:
        self._app = app
        self.id = flow_id

    def info(self) -> FlowInfo:
        """Return the flow's name, state and number of jobs. Raises ``FlowNotFound``."""
        return records.info(self.id, self._record())

    def progress(self) -> FlowProgress:
        """Return how many jobs have ended. The jobs of *then* and *catch* of a batch are not counted.

        For a flow that is not a batch, this method reads each job. A job that the store has lost does not count
        as ended if another job waits for it. For a cancelled flow, this method counts the jobs that had ended before
        the cancellation. Raises ``FlowNotFound``.
        """
        return progress_of(self._app.backend, self.id, self._record())

    def tasks(self) -> Iterator[tuple[JobHandle, str]]:
        """Yield the handle and the task's name of each job, in the order of the jobs' numbers. Raises
        ``FlowNotFound``."""
        backend = self._app.backend
        return ((JobHandle(backend, queue, own_id), task) for queue, own_id, task in self._record().jobs(self.id))

    def jobs(self) -> Iterator[JobHandle]:
        """Yield the handles of all jobs, in the order of the jobs' numbers. Raises ``FlowNotFound``."""
        backend = self._app.backend
        return (JobHandle(backend, queue, own_id) for queue, own_id, _ in self._record().jobs(self.id))

    def last(self) -> JobHandle:
        """Return the handle of the job that ends the flow. Its result is the flow's result. Raises ``FlowNotFound``."""
        return self._last(self._record())

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the flow's result, and return it: the result of the job ``last()``. For a group: the list of its
        parts' results.

        If a job of the flow is buried, the jobs after it wait, and this method waits, too. *timeout*: seconds. 0: do
        not wait. None: wait for ever. Raises ``FlowNotFound``, ``FlowInvalid`` if the flow has no result, and the
        errors of ``JobHandle.result``.
        """
        jobs, is_list = self._results()
        if not is_list:
            return jobs[0].result(timeout)
        left = _time_left(timeout)
        return [job.result(left()) for job in jobs]

    def cancel(
        self, *, running: bool = False, grace: float | dt.timedelta | None = None, reason: str | None = None
    ) -> int:
        """Cancel the flow: none of its jobs starts after this. Returns the number of deleted jobs.

        *running*: also cancel the running jobs, as ``JobHandle.cancel`` does with *grace* and *reason*. False: the
        running jobs go on.

        If the program dies during this call, cancel the flow again. Cancelling a flow that is finished does nothing.
        Raises ``FlowNotFound``, and ``Unsupported`` if the backend cannot cancel running jobs.
        """
        from multiq.cancellation import GRACE_DEFAULT, check_reason_of, check_supported, request_many

        backend, why = self._app.backend, check_reason_of(reason)
        seconds = GRACE_DEFAULT if grace is None else check_delay(grace, name="grace")
        if running:
            check_supported(backend)
        record = self._cancel_record()
        if record.state != "cancelled":
            return 0
        jobs = [(queue, own_id) for queue, own_id, _ in record.jobs(self.id)]
        last = jobs[record.last]
        first = [last, *([jobs[record.catch]] if record.catch >= 0 else [])]
        deleted, reserved = 0, list[tuple[str, str]]()
        # the other jobs are deleted in reverse order, because workers begin at the other end
        for some in (first, [job for job in reversed(jobs) if job not in first]):
            for queue, ids in _by_queue(some).items():
                for at in range(0, len(ids), MAX_STEPS):
                    answers = backend.delete_many(queue, ids[at : at + MAX_STEPS])
                    deleted += sum(answer is None for answer in answers)
                    reserved += [(queue, answer.job_id) for answer in answers if isinstance(answer, JobReserved)]
                    if any(answer is not None and (queue, answer.job_id) == last for answer in answers):
                        backend.carry_out([records.put_cancel(self.id, record)])
        if running and reserved:
            request_many(backend, reserved, grace=seconds, reason=why)
        return deleted

    def _cancel_record(self) -> FlowRecord:
        """Record that the flow is cancelled, and how many of its jobs had ended. Returns the flow's record."""
        done = -1
        record = self._record()
        if record.state not in {"finished", "cancelled"}:
            done = progress_of(self._app.backend, self.id, record).done
        stored = record

        def steps(record: FlowRecord) -> list[Step]:
            nonlocal stored
            stored = record
            if record.state in {"finished", "cancelled"}:
                return []
            stored = msgspec.structs.replace(records.ended(record, "cancelled"), done=done)
            return [*records.ending(self.id, stored)]

        records.change(self._app.backend, self.id, steps)
        return stored

    def add(self, calls: Iterable[Signature]) -> None:
        """Add calls to a batch that is not done. A member of the batch can add calls while it runs.

        Up to a thousand calls are added atomically. A member that runs again adds its calls again.

        Raises ``FlowFinished`` if the batch is done or cancelled. In this case, no call was enqueued. Raises
        ``FlowInvalid``, ``FlowNotFound``, and the errors of ``Flow.enqueue``.
        """
        added = _checked_calls(calls, self._app)
        if not added:
            return
        record = self._record()
        if not record.is_batch:
            raise FlowInvalid("calls can be added only to a batch, and this flow is not a batch: enqueue another flow")
        if not self._app.intercepts:
            grow(self._app, self.id, self._last(record), added, record)
            return
        from multiq.enqueue_with_middleware import around_calls

        with around_calls(self._app, added, self.id) as (changed, _):
            grow(self._app, self.id, self._last(record), changed, record)

    def forget(self) -> None:
        """Delete the record of a flow that has ended, or whose record cannot be read. Its jobs do not change.

        Raises ``FlowNotFound``, and ``FlowInvalid`` if the flow has not ended.
        """
        from multiq.backend import Version

        backend, key = self._app.backend, records.key_of(self.id)
        while True:
            note = backend.note(HOME, key)
            if note is None:
                raise records.not_found(self.id)
            with contextlib.suppress(PayloadInvalid):
                state = records.decode(note).state
                if state not in {"finished", "cancelled"}:
                    raise FlowInvalid(
                        f"flow {self.id} is {state}, and only a flow that has ended is forgotten: cancel it"
                    )
            if backend.carry_out(records.drops(self.id), when=[Version(HOME, key, note.version)]):
                return

    async def ainfo(self) -> FlowInfo:
        """``info`` without blocking the event loop."""
        return await self._run(self.info)

    async def aprogress(self) -> FlowProgress:
        """``progress`` without blocking the event loop."""
        return await self._run(self.progress)

    async def atasks(self) -> Iterator[tuple[JobHandle, str]]:
        """``tasks`` without blocking the event loop: ``for job, task in await flow.atasks()``."""
        return await self._run(self.tasks)

    async def ajobs(self) -> Iterator[JobHandle]:
        """``jobs`` without blocking the event loop: ``for job in await flow.ajobs()``."""
        return await self._run(self.jobs)

    async def alast(self) -> JobHandle:
        """``last`` without blocking the event loop."""
        return await self._run(self.last)

    async def aresult(self, timeout: float | None = None) -> Any:  # noqa: ASYNC109 - as in result
        """Like ``result``."""
        jobs, is_list = await self._run(self._results)
        if not is_list:
            return await jobs[0].aresult(timeout)
        left = _time_left(timeout)
        return [await job.aresult(left()) for job in jobs]

    async def acancel(
        self, *, running: bool = False, grace: float | dt.timedelta | None = None, reason: str | None = None
    ) -> int:
        """``cancel`` without blocking the event loop."""
        return await self._run(self.cancel, running=running, grace=grace, reason=reason)

    async def aforget(self) -> None:
        """``forget`` without blocking the event loop."""
        await self._run(self.forget)

    async def aadd(self, calls: Iterable[Signature]) -> None:
        """``add`` without blocking the event loop."""
        await self._run(self.add, calls)

    def open(self) -> bool:
        """Record that all jobs of the flow are enqueued. Returns False if the flow was cancelled meanwhile."""
        try:
            return self._change(_opened).state != "cancelled"
        except FlowNotFound:  # the flow has already ended, and its record has expired
            return True

    def sweep(self, *, dry_run: bool) -> Literal["finished", "dropped", "left"]:
        """Finish or drop this flow, whose producer has died: see ``Flows.sweep``."""
        return sweep(self, self._app.backend, dry_run=dry_run)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FlowHandle) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"FlowHandle({self.id!r})"

    async def _run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        from multiq.async_calls import run

        return await run(await self._app.abackend(), function, *args, **kwargs)

    def _results(self) -> tuple[list[JobHandle], bool]:
        """Return the jobs whose results are the flow's result, and whether the flow's result is a list."""
        record = self._record()
        if record.ends:
            backend = self._app.backend
            return [JobHandle(backend, record.queue_of(end), job_id(self.id, end)) for end in record.ends], True
        if record.task_of(record.last) == END_TASK:
            raise FlowInvalid(
                f"flow {self.id} has no result, because it does not end with one call: give a batch a then=, or let a "
                "chain end with a call; jobs() has the handles of all jobs"
            )
        return [self._last(record)], False

    def _record(self) -> FlowRecord:
        return records.read(self._app.backend, self.id)[0]

    def _last(self, record: FlowRecord) -> JobHandle:
        return JobHandle(self._app.backend, record.queue_of(record.last), job_id(self.id, record.last))

    def _change(self, change: Callable[[FlowRecord], FlowRecord | None]) -> FlowRecord:
        """Change the record by compare-and-set. *change* returns the new record, or None to leave the record unchanged.

        Returns the stored record.
        """
        stored: FlowRecord | None = None

        def steps(record: FlowRecord) -> list[Step]:
            nonlocal stored
            changed = change(record)
            stored = record if changed is None else changed
            return [] if changed is None else [records.put(self.id, changed)]

        records.change(self._app.backend, self.id, steps)
        assert stored is not None  # noqa: S101 - steps was called
        return stored


class Flows:
    """The flows of an app's connection: ``app.flows``."""

    def __init__(self, app: App) -> None:
        self._app = app

    def get(self, flow_id: str) -> FlowHandle:
        """Return the handle of a flow. If the flow is unknown, the handle's methods raise ``FlowNotFound``."""
        return FlowHandle(self._app, flow_id)

    def list(self) -> Iterator[FlowInfo]:
        """Yield all flows that are open or kept, sorted by their ids. The ids ascend with the time of the enqueue."""
        backend = self._app.backend
        cancels: dict[str, FlowRecord] | None = None
        after: str | None = None
        while True:
            page = backend.notes(HOME, _PREFIX, after=after)
            for note in page.notes:
                flow_id, record = note.key.removeprefix(_PREFIX), records.decode(note)
                if record.state == "finished":
                    cancels = records.cancels(backend) if cancels is None else cancels
                    record = cancels.get(flow_id, record)
                yield records.info(flow_id, record)
            if page.after is None:
                return
            after = page.after

    def sweep(self, older_than: float | dt.timedelta = 3600, *, dry_run: bool = False) -> builtins.list[SweptFlow]:
        """Finish or drop the flows whose producer died before it had enqueued all jobs.

        If a job of the flow can still run, the flow is not changed. If all jobs of a batch were enqueued, this method
        finishes the enqueue of the batch. Any other flow is cancelled.

        - *older_than*: seconds, or a timedelta. Only flows that were enqueued longer ago than this time are changed. If
          a producer needs more time to enqueue a flow, the flow may be cancelled.
        - *dry_run*: change nothing, and return what would be done.

        Raises ``BackendError``.
        """
        age = older_than.total_seconds() if isinstance(older_than, dt.timedelta) else older_than
        seconds = check_timeout(age, "older_than")
        swept = []
        for info in builtins.list(self.list()):
            if info.state == "enqueuing" and time.time() - info.created >= seconds:
                with contextlib.suppress(FlowNotFound):
                    swept.append(SweptFlow(info.id, info.name, self.get(info.id).sweep(dry_run=dry_run)))
        return swept

    async def alist(self) -> AsyncIterator[FlowInfo]:
        """``list`` without blocking the event loop: ``async for info in app.flows.alist()``."""
        from multiq.async_calls import iterate

        async for info in iterate(await self._app.abackend(), self.list()):
            yield info

    async def asweep(
        self, older_than: float | dt.timedelta = 3600, *, dry_run: bool = False
    ) -> builtins.list[SweptFlow]:
        """``sweep`` without blocking the event loop."""
        from multiq.async_calls import run

        return await run(await self._app.abackend(), self.sweep, older_than, dry_run=dry_run)


def _checked_calls(calls: Iterable[Signature], app: App) -> list[Signature]:
    if isinstance(calls, Signature) or not isinstance(calls, Iterable):
        raise FlowInvalid(f"calls must be a list of calls (task.s(...)), got {shown(calls)}")
    found = list(calls)
    for call in found:
        if not isinstance(call, Signature):
            raise FlowInvalid(f"a batch must have calls (task.s(...)), got {shown(call)}")
        if call.task.app is not app:
            raise FlowInvalid("a batch must have calls of tasks of one app, and this call is of another app's task")
    return found


def _opened(record: FlowRecord) -> FlowRecord | None:
    return msgspec.structs.replace(record, state="open") if record.state == "enqueuing" else None


def _by_queue(jobs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for queue, own_id in jobs:
        found.setdefault(queue, []).append(own_id)
    return found


def _time_left(timeout: float | None) -> Callable[[], float | None]:
    """Return a function that returns the rest of *timeout*, in seconds."""
    if timeout is None:
        return lambda: None
    give_up_at = time.monotonic() + check_timeout(timeout)
    return lambda: max(0.0, give_up_at - time.monotonic())
