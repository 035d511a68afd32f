"""Adds calls to a batch that is enqueued already. A member of the batch can add calls while it runs."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from multiq.backend import Arrive, Drop, Enqueue, State
from multiq.errors import FlowFinished, JobNotFound, JobReserved
from multiq.job import running as running_job

from . import record as records
from .job_plans import plan_growth, plan_guard
from .record import HOME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from multiq.app import App
    from multiq.backend import Backend, Step
    from multiq.job import JobHandle

    from .record import FlowRecord
    from .signature import Signature


def grow(app: App, flow_id: str, last: JobHandle, added: Sequence[Signature], record: FlowRecord) -> None:
    """Add calls to a batch whose last job is *last*. ``FlowHandle.add`` lists the errors."""
    growth = plan_growth(added, flow_id, record)  # first, so that an invalid call raises before the record changes
    backend = app.backend
    for part in growth:

        def steps(record: FlowRecord, part: Callable[[FlowRecord], list[Step]] = part) -> list[Step]:
            found = part(record)  # adds the members to the record
            records.check_size(backend, record)
            return found

        with _kept_waiting(app, flow_id, last):
            records.change(backend, flow_id, steps)
            _finish_steps(backend)


@contextlib.contextmanager
def _kept_waiting(app: App, flow_id: str, last: JobHandle) -> Iterator[None]:
    """Keep the last job of a batch held while the block lasts. Raises ``FlowFinished``.

    If a member of the batch runs this code, the last job already waits for this member. Otherwise the last job waits
    for one more job, the guard, which does nothing. If the program dies in the block, a worker runs the guard after the
    guard's delay. After the guard has run, the last job no longer waits for it.
    """
    backend = app.backend
    guard = None if _is_run_by_member(last) else plan_guard(app, flow_id, last)
    if guard is not None:
        begins = Arrive(last.queue, last.id, f"{guard.id}-begins", expect=2)
        backend.carry_out([begins, Enqueue(last.queue, guard)])
    try:
        if last.state() is not State.HELD:
            raise FlowFinished(f"all jobs of flow {flow_id} have ended: enqueue another batch")
        yield
    finally:
        if guard is not None:
            backend.carry_out([*_behind(backend), Arrive(last.queue, last.id, guard.id)])
            with contextlib.suppress(JobNotFound, JobReserved):
                backend.delete(last.queue, guard.id)


def _finish_steps(backend: Backend) -> None:
    """Carry out the steps in other queues before a running member is acked. Raises ``BackendError``.

    The last job must wait for the members that this member has added. Without this call, the ack could release the last
    job before the last job waits for these members.
    """
    while not backend.declared.one_step_everywhere and backend.relay([HOME]) > 0:
        pass


def _behind(backend: Backend) -> list[Step]:
    """Return a step in ``HOME`` that does nothing, so that the next steps follow all earlier steps in ``HOME``."""
    return [] if backend.declared.one_step_everywhere else [Drop(HOME, "none")]


def _is_run_by_member(last: JobHandle) -> bool:
    """Whether this code runs in a job for which the last job waits."""
    job = running_job.get(None)
    flow = None if job is None or job.envelope is None else job.envelope.flow
    return flow is not None and any((tell.queue, tell.id) == (last.queue, last.id) for tell in flow.tells)
