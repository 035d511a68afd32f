"""Groups: parts that run in parallel. The result of a group is the list of the parts' results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiq.errors import FlowInvalid

from .flow import flow_of
from .graph import KEEP_DEFAULT, Fragment, check_parts

if TYPE_CHECKING:
    import datetime as dt

    from .flow import Flow
    from .graph import Graph, Part
    from .handle import FlowHandle
    from .signature import Signature


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
        flow = flow_of(self, *self._options)
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


def group(
    *parts: Part, name: str = "", keep: float | dt.timedelta = KEEP_DEFAULT, catch: Signature | None = None
) -> Group:
    """Make a group: all parts run in parallel.

    - *parts*: calls (``task.s(...)``), chains and batches with ``then``.
    - *name*, *keep*, *catch*: as for ``Flow``.

    Raises ``FlowInvalid``.
    """
    return Group(check_parts(parts, "a group"), name, keep, catch)
