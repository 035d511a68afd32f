"""Chains: steps that run one after the other. Each step gets the result of the previous step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .flow import flow_of
from .graph import FIRST, KEEP_DEFAULT, Fragment, check_parts, mark_read

if TYPE_CHECKING:
    import datetime as dt

    from .flow import Flow
    from .graph import Graph, Part
    from .handle import FlowHandle
    from .signature import Signature


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
        return flow_of(self, *self._options)

    def add_to(self, flow: Graph) -> Fragment:
        first = last = flow.add_part(self.steps[0])
        for step in self.steps[1:]:
            added = flow.add_part(step)
            _follow(added, last)
            last = added
        return Fragment(first.entries, last.exits, last.value)


def chain(
    *steps: Part, name: str = "", keep: float | dt.timedelta = KEEP_DEFAULT, catch: Signature | None = None
) -> Chain:
    """Make a chain: each step runs when the previous step is done.

    - *steps*: calls (``task.s(...)``), groups, batches and chains. A call that lacks its first argument gets the result
      of the previous step. If the previous step is a group, its result is the list of the parts' results.
    - *name*, *keep*, *catch*: as for ``Flow``.

    Raises ``FlowInvalid``.
    """
    return Chain(check_parts(steps, "a chain"), name, keep, catch)


def _follow(fragment: Fragment, earlier: Fragment) -> None:
    """Let *fragment* run after *earlier*. Calls of *fragment* that lack their first argument get the result of
    *earlier*."""
    for entry in fragment.entries:
        if entry.signature.lacks_argument():
            entry.inputs.append((FIRST, earlier.value))
            mark_read(earlier.value)
        entry.after |= dict.fromkeys(earlier.exits, "wait")
