"""The results of a run as one document: ``--json`` writes it; the table, the page and the comparison read it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from .adapter import Durability  # noqa: TC001 - msgspec looks it up

if TYPE_CHECKING:
    from pathlib import Path

VERSION = 1

Better = Literal["higher", "lower"]


class Metric(msgspec.Struct, frozen=True):
    """One figure of a workload, with its unit and which way is better.

    ``workloads`` defines the metrics; ``docs/bench.md`` explains them.
    """

    name: str
    """A word or two: ``drained``, ``pickup p50``, ``client CPU``."""
    unit: str
    """``jobs/s``, ``ms``, ``us/job``, ``commands/job``, ``MB``..."""
    better: Better
    counts: bool = True
    """Whether a comparison of two runs judges this metric; False: the metric only informs (memory)."""


class Violation(msgspec.Struct, frozen=True):
    """A broken promise. One violation makes the whole run fail."""

    kind: Literal["lost", "doubled", "early", "out of order", "overlap", "invented", "left over", "failed"]
    """What happened to the job:

    - ``lost``: it was enqueued, but never run to its end, and not handed out when the queue was emptied;
    - ``doubled``: it was handed out again, and no crash, lease end, release or kick explains that;
    - ``early``: it was begun before its due time;
    - ``out of order``: it was begun before a job that was to go first, although there was only one consumer;
    - ``overlap``: two runs of it were under way at the same time;
    - ``invented``: it was run, but never enqueued;
    - ``left over``: it was in the store when all work was done;
    - ``failed``: the workload itself could not be carried out.
    """
    count: int
    example: str
    """One case in a sentence: job, times, process."""


class Verification(msgspec.Struct, frozen=True):
    """What happened to the jobs of one repeat."""

    enqueued: int
    finished: int
    """How many of the enqueued jobs ran to their end at least once, or were handed out when the queue was emptied."""
    runs: int
    explained: int
    """Repeated runs of a job that a crash, a failure or a lease's end explains. "At least once" allows them, so they
    are no violation."""
    violations: list[Violation]
    checked: list[str]
    """What was checked. The order is only checked if the backend promises one."""


class Sample(msgspec.Struct, frozen=True, rename={"verification": "accounting"}):
    """One repeat of one workload on one target."""

    started: float
    """Seconds since the run began: repeats are interleaved, and this shows how."""
    seconds: float
    metrics: dict[str, float | None]
    """By the metric's name; None: this server does not report it."""
    verification: Verification
    histograms: dict[str, str]
    """By name (``latency``, ``lateness``): HdrHistogram, V2 encoding, base64; values in microseconds."""
    timeline: list[tuple[float, float]]
    """Seconds since the repeat began, and jobs finished per second from then on. Shows stalls and recovery."""
    calm: float
    """How long a fixed piece of work took before and after this repeat, relative to its shortest time in the whole run:
    1.0 is a machine at rest."""


class Result(msgspec.Struct, frozen=True, rename={"target": "contestant", "baseline": "limit"}):
    """All repeats of a workload on a target."""

    target: str
    workload: str
    """``drain``, ``backlog``...: docs/bench.md defines them."""
    variant: str
    """What varies within a workload: ``10k``, ``body 64 KB``; empty if nothing does."""
    parameters: dict[str, str | int | float]
    samples: list[Sample]
    baseline: float | None = None
    """What the baseline reached, in the unit of the workload's first metric; None: no baseline was measured."""
    skipped: str | None = None
    """Why there are no samples: a power that this backend lacks, with the reason."""

    def figures(self, metric: str) -> list[float]:
        """The metric's values in the order of the repeats. Repeats without a value are left out."""
        found = (sample.metrics.get(metric) for sample in self.samples)
        return [value for value in found if value is not None]


class TargetInfo(msgspec.Struct, frozen=True):
    """A backend in a run."""

    name: str
    """As the user gave it, but with the password of a URL masked, and with a number if the run has the same name twice.
    """
    backend: str
    server: str
    """``redis 7.0.15``."""
    is_ours: bool
    """Whether the bench started the server."""
    durability: Durability
    promises: dict[str, str]
    """What docs/durability.md and the capabilities promise, in a few words each: shown beside the speeds."""
    idle_commands: float | None
    """Requests per second of one idle worker."""


class Workload(msgspec.Struct, frozen=True):
    """A copy of a workload's definition, so that a report can be read without this version of multiq."""

    name: str
    title: str
    about: str
    """A sentence or two: what the workload does, and what its figures mean."""
    metrics: list[Metric]
    """The first one is the headline."""


class Report(msgspec.Struct, frozen=True, rename={"targets": "contestants"}):
    """A whole run."""

    version: int
    multiq: str
    started_at: str
    """ISO 8601, with a zone."""
    seconds: float
    profile: str
    """``fast``, ``durable``, or ``as set`` if all servers are the user's."""
    is_quick: bool
    repeats: int
    environment: dict[str, str]
    """CPU, cores, memory, kernel, Python, client libraries and their versions, load at the start."""
    noise: str | None
    """Why the figures may be unreliable; None: the machine was calm."""
    workloads: list[Workload]
    targets: list[TargetInfo]
    results: list[Result]
    warm_ups: list[Result] = []
    """Results without figures, which are verified only: the warm-up before the workloads, and idle workers."""
    reference: float | None = None
    """Seconds that the fixed piece of work of ``Sample.calm`` took at its fastest: the machine's own speed."""

    @property
    def violations(self) -> list[tuple[Result, Violation]]:
        """All violations, each with the result that it belongs to."""
        return [
            (result, violation)
            for result in [*self.warm_ups, *self.results]
            for sample in result.samples
            for violation in sample.verification.violations
        ]


def write(report: Report, path: Path) -> None:
    """Write the report as indented JSON. Raises ``OSError``."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def read(path: Path) -> Report:
    """Read what ``write`` wrote. Raises ``OSError``, and ``msgspec.MsgspecError`` if the file is not such a
    report."""
    return msgspec.json.decode(path.read_bytes(), type=Report)
