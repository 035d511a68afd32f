"""Batches: any number of calls that run in parallel, and a last call that runs when all of them are done."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from multiq.errors import FlowInvalid
from multiq.formatting import shown

from .enqueuing import asend, send_batch
from .flow import Flow
from .graph import KEEP_DEFAULT, Fragment, checked
from .signature import Signature

if TYPE_CHECKING:
    import datetime as dt

    from .graph import Graph
    from .handle import FlowHandle


class Batch:
    """Any number of calls that run in parallel, and a last call that runs when all of them are done. ``batch`` makes
    it."""

    def __init__(
        self,
        members: list[Signature],
        then: Signature | None,
        name: str,
        keep: float | dt.timedelta,
        catch: Signature | None,
    ) -> None:
        self.members = members
        self.then = None if then is None else checked(then)
        self.catch = catch
        self.flow = Flow(name, keep=keep, catch=catch)

    def enqueue(self) -> FlowHandle:
        """Enqueue all calls. Raises the errors of ``Flow.enqueue``."""
        return send_batch(self)

    async def aenqueue(self) -> FlowHandle:
        """``enqueue`` without blocking the event loop. If cancelled, it behaves like ``Flow.aenqueue``."""
        return await asend(self.members[0].task.app, self.enqueue)

    def add_to(self, flow: Graph) -> Fragment:
        nodes = [flow.add(member) for member in self.members]
        if self.then is None:
            return Fragment(nodes, nodes, nodes)
        last = flow.add(self.then, after=nodes)
        last.is_given_flow_id = self.then.lacks_argument()
        return Fragment(nodes, [last], last)


def batch(
    members: Iterable[Signature],
    *,
    then: Signature | None = None,
    catch: Signature | None = None,
    name: str = "",
    keep: float | dt.timedelta = KEEP_DEFAULT,
) -> Batch:
    """Make a batch: any number of calls that run in parallel, and a last call that runs when all of them are done.

    - *members*: calls (``task.s(...)``) of any tasks of one app. Their results are kept only if their tasks have
      ``keep``.
    - *then*: a call that runs once, after the last member. If it lacks its first argument, it gets the flow's id.
    - *catch*: a call that runs once, when the first member fails. If this call lacks its first argument, it gets the
      flow's id.
    - *name*, *keep*: as for ``Flow``.

    A failed member is buried, and *then* waits for this member. To continue, kick or delete the member. Raises
    ``FlowInvalid``.
    """
    if isinstance(members, Signature) or not isinstance(members, Iterable):
        raise FlowInvalid(f"a batch must have a list of calls (task.s(...)), got {shown(members)}")
    calls = list(members)
    for call in calls:
        if not isinstance(call, Signature):
            raise FlowInvalid(f"a batch must have calls (task.s(...)), got {shown(call)}")
    if not calls:
        raise FlowInvalid("a batch must have at least one call, got none")
    return Batch(calls, then, name, keep, catch)
