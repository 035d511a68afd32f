"""Flows: jobs that run after other jobs. A flow is a chain, a group, a batch, or any acyclic graph.

All jobs of a flow are enqueued together. A job that comes after other jobs is held until these other jobs have arrived
(``multiq.backend.Arrive``). A worker stores the arrival atomically with its verdict, so a flow does not depend on the
memory of a worker.
"""

from __future__ import annotations

from .batches import Batch, batch
from .chains import Chain, chain
from .flow import Flow
from .graph import Node
from .groups import Group, group
from .handle import FlowHandle, Flows
from .progress import FlowProgress
from .record import FlowInfo
from .signature import Signature
from .sweep import SweptFlow

__all__ = [
    "Batch", "Chain", "Flow", "FlowHandle", "FlowInfo", "FlowProgress", "Flows", "Group", "Node", "Signature",
    "SweptFlow", "batch", "chain", "group",
]  # fmt: skip
