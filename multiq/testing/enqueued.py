"""The jobs that a test has enqueued, as its assertions get them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from multiq.driverkit.clock import SECOND
from multiq.envelope import Envelope, FlowPart, decode_envelope, decode_json
from multiq.errors import PayloadInvalid
from multiq.formatting import shown

if TYPE_CHECKING:
    from multiq.backend import NewJob

    from .fakes import FakeBackend


class Enqueued(msgspec.Struct, frozen=True, kw_only=True):
    """A job as it was enqueued. It may have run since then."""

    queue: str
    id: str
    number: int
    """The number of jobs that were enqueued before this job."""
    task: str | None
    """None: the body is not an envelope."""
    args: list[Any]
    """The arguments as in the envelope, in JSON's types."""
    kwargs: dict[str, Any]
    value: Any
    """The decoded body."""
    due_in: float
    """Seconds until the job is due, by the clock of the fake. 0 or less: the job is due."""
    priority: int
    flow: FlowPart | None
    """For a flow's job: the part of the envelope that concerns the flow."""

    def __str__(self) -> str:
        if self.task is None:
            return f"{shown(self.value)} in queue {self.queue}"
        parts = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs.items())]
        due = f", due in {self.due_in:g} s" if self.due_in > 0 else ""
        return f"{self.task}({', '.join(parts)}) in queue {self.queue}{due}"


def enqueued_jobs(backend: FakeBackend) -> list[Enqueued]:
    """Return all jobs that were enqueued since the beginning, including the jobs that multiq adds to flows."""
    now = backend.clock()
    return [
        _enqueued(number, queue, job, job.delay - (now - at) / SECOND)
        for number, (queue, job, at) in enumerate(backend.sent)
    ]


def _enqueued(number: int, queue: str, job: NewJob, due_in: float) -> Enqueued:
    try:
        envelope = decode_envelope(job.body, max_body=len(job.body))
    except PayloadInvalid:
        envelope = Envelope(1, "")
    return Enqueued(
        queue=queue,
        id=job.id,
        number=number,
        task=envelope.task or None,
        args=envelope.args,
        kwargs=envelope.kwargs,
        value=decode_json(job.body),
        due_in=due_in,
        priority=job.priority,
        flow=envelope.flow,
    )
