"""``multiq.Flow``: any graph of jobs, which can be enqueued."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .enqueuing import asend, send
from .graph import Graph

if TYPE_CHECKING:
    import datetime as dt

    from .graph import Composite
    from .handle import FlowHandle
    from .signature import Signature


class Flow(Graph):
    """A directed acyclic graph of jobs.

    - *name*: a text for people, up to 200 characters. It need not be unique.
    - *keep*: seconds for which a finished flow is kept. The results that its jobs pass on are kept for the same time.
      Default: 7 days.
    - *catch*: a call that runs once if a job of the flow fails. If it lacks its first argument, it gets the flow's id.

    Raises ``OptionInvalid``, ``FlowInvalid``.
    """

    def enqueue(self) -> FlowHandle:
        """Enqueue all jobs of the flow. Returns its handle.

        If the call raises ``BackendUnavailable``, no job of the flow runs. ``EnqueueUncertain``: a part of the flow, or
        all of it, may have been enqueued. ``error.repeat()`` enqueues the rest, and returns the handle. If the call
        raises another ``BackendError``, a part of the flow may have been enqueued, and a job with missing predecessors
        does not run. ``multiq flows list`` shows this flow as ``enqueuing``.

        Raises ``FlowInvalid``, ``ArgumentsInvalid``, ``PayloadInvalid``, ``PayloadTooLarge``, ``Unsupported``.
        """
        return send(self)

    async def aenqueue(self) -> FlowHandle:
        """``enqueue`` without blocking the event loop. If the coroutine is cancelled after the first call of the
        backend, the enqueue goes on."""
        return await asend(self.app, self.enqueue)


def flow_of(part: Composite, name: str, keep: float | dt.timedelta, catch: Signature | None) -> Flow:
    """Return a flow that consists of a chain or a group."""
    flow = Flow(name, keep=keep, catch=catch)
    part.add_to(flow)
    return flow
