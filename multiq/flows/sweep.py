"""Finishes or drops a flow whose producer died before it had enqueued all jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from multiq.backend import Arrive, State
from multiq.job import JobHandle

from . import record as records
from .progress import peek
from .record import HOME, job_id

if TYPE_CHECKING:
    from multiq.backend import Backend, JobRecord

    from .handle import FlowHandle


class SweptFlow(NamedTuple):
    """A flow whose producer has died, and the action of ``Flows.sweep``."""

    id: str
    name: str
    action: Literal["finished", "dropped", "left"]
    """The action of ``sweep``.

    - ``finished``: all jobs of the flow were enqueued, so the flow can continue.
    - ``dropped``: the flow was cancelled, because some of its jobs are missing.
    - ``left``: some jobs of the flow run, or can still run.
    """


def sweep(flow: FlowHandle, backend: Backend, *, dry_run: bool) -> Literal["finished", "dropped", "left"]:
    """Finish or drop a flow: see ``Flows.sweep``."""
    record, _ = records.read(backend, flow.id)
    ending = JobHandle(backend, record.queue_of(record.last), job_id(flow.id, record.last))
    last = _peek(backend, ending)
    if last is None or last.state is State.HELD:
        if _can_go_on(flow, backend):
            return "left"
        # The jobs were not all read at the same moment, and the last steps of a dead worker may still wait.
        queues = dict.fromkeys(queue for queue, _, _ in record.jobs(flow.id))
        if (
            backend.relay([*queues, HOME])
            or _can_go_on(flow, backend)
            or records.read(backend, flow.id)[0].state != "enqueuing"
        ):
            return "left"
        before, last = last, _peek(backend, ending)
        if (before is None) != (last is None):
            return "left"
        if last is None or not record.is_batch or last.awaits != 1:  # 1: it waits only for the seal
            if not dry_run:
                flow.cancel(reason="its producer died before it had enqueued all jobs")
            return "dropped"
    if not dry_run:
        if record.is_batch:
            backend.carry_out([Arrive(ending.queue, ending.id, records.SEAL)])
        flow.open()
    return "finished"


def _can_go_on(flow: FlowHandle, backend: Backend) -> bool:
    """Whether a job of the flow runs, or will run."""
    states = (_peek(backend, job) for job in flow.jobs())
    return any(job is not None and job.state is not State.HELD for job in states)


def _peek(backend: Backend, job: JobHandle) -> JobRecord | None:
    return peek(backend, job.queue, job.id)
