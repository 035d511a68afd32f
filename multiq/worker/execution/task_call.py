"""A call of a task: what a runner needs to run one job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from multiq.envelope import Envelope
    from multiq.flows.record import FlowRecord
    from multiq.job import JobContext
    from multiq.retry import RetryPolicy
    from multiq.task import Task


class TaskCall(msgspec.Struct, frozen=True):
    job: JobContext
    task: Task[Any, Any]
    envelope: Envelope
    policy: RetryPolicy
    timeout: float | None
    """The job's time limit in seconds. None: no limit."""
    thread: int | None
    """The thread that runs the call. None: it runs on the shared event loop."""
    record: FlowRecord | None = None
    """The record of the flow that this job ends. None: the job ends no flow."""

    @property
    def deadline(self) -> float:
        """The value of ``time.monotonic()`` at which the timeout ends. Infinite without a timeout."""
        return float("inf") if self.job.deadline is None else self.job.deadline
