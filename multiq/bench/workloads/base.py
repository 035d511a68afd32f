"""The base class of workloads, and the figures that several workloads have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import msgspec

from multiq.bench import report
from multiq.bench.report import Metric

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.backend.capabilities import Capabilities
    from multiq.bench.run_log import Run
    from multiq.bench.scenario import Scenario
    from multiq.bench.verification import Sent

Parameters = dict[str, int | float]

COSTS = [
    Metric("commands", "commands/job", "lower"),
    Metric("bytes", "bytes/job", "lower"),
    Metric("client CPU", "us/job", "lower"),
    # CPU time is read from /proc in steps of 10 ms, and includes the server's other work
    Metric("server CPU", "us/job", "lower", counts=False),
    Metric("server memory", "MB", "lower", counts=False),
]
"""The metrics of the cost of a repeat's measured part."""


class Variant(msgspec.Struct, frozen=True):
    """A workload with its parameters."""

    parameters: Parameters
    name: str = ""
    seconds: float = 1.0
    """The estimated duration of one repeat, for the progress bar."""
    repeats: int | None = None
    """The largest number of repeats, or None for the number that the user asked for."""
    times: int = 1
    """The number of runs in each turn. Many repeats of short and steady work can show small changes."""


class Outcome(msgspec.Struct):
    """The figures of a repeat, without its verification."""

    metrics: dict[str, float | None]
    histograms: dict[str, str] = {}
    timeline: list[tuple[float, float]] = []


class Infeasible(Exception):
    """A variant needs more time on this target than is available. The message of the error has the reason."""


class Workload(ABC):
    """Work to do, and the measurements of that work."""

    name: ClassVar[str]
    title: ClassVar[str]
    about: ClassVar[str]
    metrics: ClassVar[list[Metric]]
    baseline: ClassVar[str | None] = None
    """The name of a method of ``Baseline``. The figure of that method is compared with the first metric."""
    wants_idle: ClassVar[bool] = False
    """Whether the cost of an idle worker is one of the workload's figures."""

    @classmethod
    def definition(cls) -> report.Workload:
        """The definition for a report."""
        return report.Workload(cls.name, cls.title, cls.about, cls.metrics)

    @abstractmethod
    def variants(self, *, is_quick: bool) -> list[Variant]:
        """The variants, in the order in which they are run."""

    def lacks(self, capabilities: Capabilities, parameters: Parameters) -> str | None:  # noqa: ARG002 - a hook
        """The reason why a backend cannot run this workload. The result is None if the backend can run the workload."""
        return None

    @abstractmethod
    def run(self, scenario: Scenario, parameters: Parameters) -> Outcome:
        """Run one repeat. If a repeat cannot be completed, the caller handles the error."""


def finished_per_second(runs: Sequence[Run]) -> float | None:
    """Runs per second, from the first run's start to the last run's end."""
    ends = [run.end for run in runs if run.is_finished]
    if len(ends) < 2:
        return None
    return len(ends) * 1e9 / (max(ends) - min(run.start for run in runs))


def first_starts(runs: Sequence[Run]) -> dict[int, int]:
    """The start of each job's first run. The keys are the jobs' numbers."""
    starts: dict[int, int] = {}
    for run in runs:
        starts.setdefault(run.number, run.start)
    return starts


def waits(sent: Sequence[Sent], runs: Sequence[Run]) -> list[float]:
    """The wait of each job that ran, in ns, until its first start.

    The wait begins at the planned time of the enqueue plus the job's delay.
    """
    starts = first_starts(runs)
    return [
        starts[call.first] - (call.intended or call.called) - call.delay * 1e9 for call in sent if call.first in starts
    ]
