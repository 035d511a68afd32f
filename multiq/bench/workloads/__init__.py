"""The workloads, in the order in which a run executes them and a report shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Infeasible, Outcome, Variant, Workload
from .producing import Backlog, Bodies, EnqueueBulk, EnqueueOne
from .waiting import Delayed, Latency
from .working import Contention, Drain, Failures, Priorities, Recovery, Settle

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["WORKLOADS", "Infeasible", "Outcome", "Variant", "Workload"]

WORKLOADS: Sequence[Workload] = (
    EnqueueOne(),
    EnqueueBulk(),
    Drain(),
    Settle(),
    Latency(),
    Delayed(),
    Contention(),
    Backlog(),
    Bodies(),
    Priorities(),
    Failures(),
    Recovery(),
)
