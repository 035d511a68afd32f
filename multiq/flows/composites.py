"""Chains, groups and batches: flows for which the caller builds no graph."""

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

    from .graph import Graph, Part
    from .handle import FlowHandle


class Chain:
    """Steps that run one after the other. ``chain`` makes it."""

    def __init__(self, steps: list[Part], name: str, keep: float | dt.timedelta, catch: Signature | None) -> None:
        self.steps = steps
        self.catch = catch
        self._options = name, keep, catch

    def enqueue(self) -> FlowHandle:
        """Enqueue all steps. Raises the errors of ``Flow.enqueue``."""
        return self._flow().enqueue()

    async def aenqueue(self) -> FlowHandle:
        """``enqueue`` without blocking the event loop. If cancelled, it behaves like ``Flow.aenqueue``."""
        return await self._flow().aenqueue()

    def _flow(self) -> Flow:
        return _flow_of(self, self._options)

    def add_to(self, flow: Graph) -> Fragment:
        first = last = flow.add_part(self.steps[0])
        for step in self.steps[1:]:
            added = flow.add_part(step)
            flow.follow(added, last)
            last = added
        return Fragment(first.entries, last.exits, last.value)


class Group:
    """Parts that run in parallel. The result is the list of the parts' results. ``group`` makes it."""

    def __init__(self, parts: list[Part], name: str, keep: float | dt.timedelta, catch: Signature | None) -> None:
        self.parts = parts
        self.catch = catch
        self._options = name, keep, catch

    def enqueue(self) -> FlowHandle:
        """Enqueue all parts. Raises the errors of ``Flow.enqueue``."""
        return self._flow().enqueue()

    async def aenqueue(self) -> FlowHandle:
        """``enqueue`` without blocking the event loop. If cancelled, it behaves like ``Flow.aenqueue``."""
        return await self._flow().aenqueue()

    def _flow(self) -> Flow:
        flow = _flow_of(self, self._options)
        for node in flow.nodes:
            node.is_read = node.is_read or not any(node in other.after for other in flow.nodes)
        return flow

    def add_to(self, flow: Graph) -> Fragment:
        fragments = [flow.add_part(part) for part in self.parts]
        values = [fragment.value for fragment in fragments]
        if any(isinstance(value, list) for value in values):
            raise FlowInvalid("a group must not be a part of a group: give all calls to one group")
        return Fragment(
            [node for fragment in fragments for node in fragment.entries],
            [node for fragment in fragments for node in fragment.exits],
            [value for value in values if not isinstance(value, list)],
        )


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


def chain(
    *steps: Part, name: str = "", keep: float | dt.timedelta = KEEP_DEFAULT, catch: Signature | None = None
) -> Chain:
    """Make a chain: each step runs when the previous step is done.

    - *steps*: calls (``task.s(...)``), groups, batches and chains. A call that lacks its first argument gets the result
      of the previous step. If the previous step is a group, its result is the list of the parts' results.
    - *name*, *keep*, *catch*: as for ``Flow``.

    Raises ``FlowInvalid``.
    """
    return Chain(_parts(steps, "a chain"), name, keep, catch)


def group(
    *parts: Part, name: str = "", keep: float | dt.timedelta = KEEP_DEFAULT, catch: Signature | None = None
) -> Group:
    """Make a group: all parts run in parallel.

    - *parts*: calls (``task.s(...)``), chains and batches with ``then``.
    - *name*, *keep*, *catch*: as for ``Flow``.

    Raises ``FlowInvalid``.
    """
    return Group(_parts(parts, "a group"), name, keep, catch)


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


def _parts(parts: tuple[Part, ...], what: str) -> list[Part]:
    if not parts:
        raise FlowInvalid(f"{what} must have at least one part, got none")
    if len(parts) == 1 and isinstance(parts[0], Iterable) and not isinstance(parts[0], str):
        raise FlowInvalid(f"{what} must have its parts as arguments, got a {type(parts[0]).__name__}: write *parts")
    return list(parts)


def _flow_of(part: Chain | Group, options: tuple[str, float | dt.timedelta, Signature | None]) -> Flow:
    name, keep, catch = options
    flow = Flow(name, keep=keep, catch=catch)
    part.add_to(flow)
    return flow
