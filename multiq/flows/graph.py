"""The graph of a flow before the flow is enqueued: its nodes and their order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias

from multiq.backend import MAX_STEPS
from multiq.errors import FlowInvalid, OptionInvalid
from multiq.formatting import shown
from multiq.validation import check_keep

from .signature import Signature

if TYPE_CHECKING:
    import datetime as dt

    from multiq.app import App


OnFailure: TypeAlias = Literal["wait", "go", "stop"]
"""What a job does if one of its predecessors fails. ``wait``: it waits until the predecessor is kicked and succeeds.
``go``: it runs. ``stop``: it never runs."""

ON_FAILURE: tuple[OnFailure, ...] = ("wait", "go", "stop")

KEEP_DEFAULT = 7 * 86400.0  # seconds for which a finished flow and the results that its jobs pass on are kept
_NAME_MAX = 200  # characters

FIRST = -1
"""The place of an input that becomes the first argument, before the call's own arguments."""

#: a flow is enqueued in one step, together with its record, the job that ends it, and its catch
NODES_MAX = MAX_STEPS - 3


class Node:
    """A job of a flow. If a node is an argument of a later job, the later job gets the result of the node's job."""

    def __init__(self, index: int, signature: Signature) -> None:
        self.index = index
        self.signature = signature
        self.after: dict[Node, OnFailure] = {}
        self.inputs: list[tuple[int | str, Node | list[Node]]] = []
        """The arguments that are results: the position or name, and the node or nodes."""
        self.is_read = False
        """Whether another node gets the result of this node."""
        self.is_given_flow_id = False
        """Whether the call lacks its first argument, and gets the flow's id."""

    def __repr__(self) -> str:
        return f"<node {self.index}: {self.signature!r}>"


class Fragment(NamedTuple):
    """A part of a flow: its first nodes, its last nodes, and the nodes whose results are its result."""

    entries: list[Node]
    exits: list[Node]
    value: Node | list[Node]


class Composite(Protocol):
    """A part that can be added to a flow: a chain, a group or a batch."""

    @property
    def catch(self) -> Signature | None: ...

    def add_to(self, flow: Graph) -> Fragment: ...


Part: TypeAlias = "Signature | Composite"


class Graph:
    """The jobs of a flow and their order. ``Flow`` describes the parameters."""

    def __init__(
        self, name: str = "", *, keep: float | dt.timedelta = KEEP_DEFAULT, catch: Signature | None = None
    ) -> None:
        if not isinstance(name, str) or len(name) > _NAME_MAX or not _is_unicode(name):
            raise FlowInvalid(f"a flow's name must be a text of up to {_NAME_MAX} characters, got {shown(name)}")
        self.name = name
        self.keep = check_keep(keep)
        if not self.keep:
            raise OptionInvalid(
                f"keep of a flow must be more than 0 seconds, got {shown(keep)}: the results that the flow's jobs pass "
                "on must be kept"
            )
        self.catch = None if catch is None else checked(catch)
        self.nodes: list[Node] = []

    def add(
        self,
        part: Part,
        *,
        after: Sequence[Node] | Mapping[Node, OnFailure] = (),
        on_failure: OnFailure = "wait",
    ) -> Node:
        """Add a call, or a chain, group or batch. Returns its node, or the node of its last job.

        - *after*: the nodes that must be done before the new node runs. A mapping gives each of them its own
          *on_failure*. Nodes that are arguments of the call are added to *after*.
        - *on_failure*: what happens if one of these nodes fails. ``"wait"``: the new node waits until the failed job is
          kicked and succeeds. ``"go"``: the new node runs. ``"stop"``: neither the new node nor its successors run.

        A group has several last jobs, so it can only be added within a chain. Raises ``FlowInvalid``,
        ``ArgumentsInvalid``.
        """
        edges = self._edges(after, on_failure)
        if isinstance(part, Signature):
            node = self._add_call(part, on_failure)
            node.after |= edges
            return node
        count = len(self.nodes)
        try:
            fragment = self.add_part(part)
        except BaseException:
            del self.nodes[count:]  # a part that is refused adds no job
            raise
        if isinstance(fragment.value, list):
            del self.nodes[count:]
            raise FlowInvalid("a group must be a step of a chain here, because it has several last jobs")
        for entry in fragment.entries:
            entry.after |= edges
        return fragment.value

    def add_part(self, part: Part) -> Fragment:
        """Add a part whose nodes have no edges to other nodes."""
        if isinstance(part, Signature):
            node = self._add_call(part, "wait")
            return Fragment([node], [node], node)
        if not hasattr(part, "add_to"):
            raise FlowInvalid(f"a flow must have calls (task.s(...)), chains, groups and batches, got {shown(part)}")
        if part.catch is not None:
            raise FlowInvalid("catch must be an option of the whole flow here, not of a part of it")
        return part.add_to(self)

    @property
    def app(self) -> App:
        """The app of the flow's tasks. Raises ``FlowInvalid`` if there is no task, or if the tasks belong to several
        apps."""
        if not self.nodes:
            raise FlowInvalid("a flow must have at least one call, got none")
        calls = [*(node.signature for node in self.nodes), *([] if self.catch is None else [self.catch])]
        apps = {call.task.app for call in calls}
        if len(apps) != 1:
            raise FlowInvalid(f"a flow must have calls of tasks of one app, got {len(apps)} apps")
        return apps.pop()

    def _add_call(self, signature: Signature, on_failure: OnFailure) -> Node:
        if len(self.nodes) >= NODES_MAX:
            raise FlowInvalid(f"a flow must have at most {NODES_MAX} jobs: multiq.batch takes any number")
        node = Node(len(self.nodes), checked(signature))
        named: list[tuple[int | str, object]] = [*enumerate(signature.args), *signature.kwargs.items()]
        for where, value in named:
            sources = _nodes_in(value)
            if not sources:
                continue
            self._check_own(sources)
            node.inputs.append((where, sources if isinstance(value, list) else sources[0]))
            node.after |= dict.fromkeys(sources, on_failure)
            mark_read(sources)
        self.nodes.append(node)
        return node

    def _edges(self, after: Sequence[Node] | Mapping[Node, OnFailure], on_failure: OnFailure) -> dict[Node, OnFailure]:
        if isinstance(after, Node) or not isinstance(after, Iterable):
            raise FlowInvalid(f"after must be a list of nodes, got {shown(after)}")
        nodes = list(after)
        self._check_own(nodes)
        edges = dict(after.items()) if isinstance(after, Mapping) else dict.fromkeys(nodes, on_failure)
        for mode in (on_failure, *edges.values()):
            if mode not in ON_FAILURE:
                raise FlowInvalid(f"on_failure must be one of {', '.join(ON_FAILURE)}, got {shown(mode)}")
        return edges

    def _check_own(self, nodes: Sequence[object]) -> None:
        for node in nodes:
            if not isinstance(node, Node) or node.index >= len(self.nodes) or self.nodes[node.index] is not node:
                raise FlowInvalid(f"after must have nodes that add() of this flow has returned, got {shown(node)}")

    def __repr__(self) -> str:
        return f"Flow({self.name!r}, {len(self.nodes)} jobs)"


def checked(signature: object) -> Signature:
    if not isinstance(signature, Signature):
        raise FlowInvalid(f"a call must be made with task.s(...), got {shown(signature)}")
    return signature


def check_parts(parts: tuple[Part, ...], what: str) -> list[Part]:
    """Return the parts of a chain or a group as a list. Raises ``FlowInvalid``."""
    if not parts:
        raise FlowInvalid(f"{what} must have at least one part, got none")
    if len(parts) == 1 and isinstance(parts[0], Iterable) and not isinstance(parts[0], str):
        raise FlowInvalid(f"{what} must have its parts as arguments, got a {type(parts[0]).__name__}: write *parts")
    return list(parts)


def mark_read(value: Node | list[Node]) -> None:
    for node in value if isinstance(value, list) else [value]:
        node.is_read = True


def _nodes_in(value: object) -> list[Node]:
    """Return the nodes in an argument, which may be a node or a list of nodes. Empty for any other value."""
    if isinstance(value, Node):
        return [value]
    if isinstance(value, list) and value and all(isinstance(item, Node) for item in value):
        return list(value)
    return []


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
