"""The results of a run as one document. The option ``--json`` writes this document. The table, the page and the
comparison read it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from .adapter import Durability  # noqa: TC001 - msgspec looks it up

if TYPE_CHECKING:
    from pathlib import Path

VERSION = 1

Better = Literal["higher", "lower"]


class Metric(msgspec.Struct, frozen=True):
    """One figure of a workload, with its unit and its better direction.

    ``workloads`` defines the metrics. ``docs/bench.md`` explains them.
    """

    name: str
    """The name in a word or two: ``drained``, ``pickup p50``, ``client CPU``."""
    unit: str
    """``jobs/s``, ``ms``, ``us/job``, ``commands/job``, ``MB``..."""
    better: Better
    counts: bool = True
    """Whether a comparison of two runs judges this metric."""


class Violation(msgspec.Struct, frozen=True):
    """A broken promise. One violation makes the whole run fail."""

    kind: Literal["lost", "doubled", "early", "out of order", "overlap", "invented", "left over", "failed"]
    """The kind of the violation:

    - ``lost``: the job was enqueued, but neither run to its end nor handed out when the queue was emptied.
    - ``doubled``: the job was handed out again without an explanation. A crash, the end of a lease, a release or a kick
      would explain the repetition.
    - ``early``: the job was begun before its due time.
    - ``out of order``: with only one consumer, the job was begun before a job that was to go first.
    - ``overlap``: two runs of the job were under way at the same time.
    - ``invented``: the job was run, but never enqueued.
    - ``left over``: the job was in the store when all work was done.
    - ``failed``: the workload itself could not be carried out.
    """
    count: int
    example: str
    """One case in a sentence, with the job, the times and the process."""


class Verification(msgspec.Struct, frozen=True):
    """The verification of the jobs of one repeat."""

    enqueued: int
    finished: int
    """How many jobs ran to their end at least once, or were handed out when the queue was emptied."""
    runs: int
    explained: int
    """Repeated runs of a job that a crash, a failure or the end of a lease explains.

    "At least once" allows a second run after a crash, so a run of that kind is not a violation.
    """
    violations: list[Violation]
    checked: list[str]
    """The checks that were made. The order is checked only if the backend promises an order."""


class Sample(msgspec.Struct, frozen=True, rename={"verification": "accounting"}):
    """One repeat of one workload on one target."""

    started: float
    """Seconds from the beginning of the run. The start times show how the repeats are interleaved."""
    seconds: float
    metrics: dict[str, float | None]
    """The figures by the metric's name. A figure is None if this server does not report it."""
    verification: Verification
    histograms: dict[str, str]
    """Histograms by name (``latency``, ``lateness``): HdrHistogram, V2 encoding, base64. Values are microseconds."""
    timeline: list[tuple[float, float]]
    """Pairs of numbers: the seconds since the repeat began, and the jobs finished per second from that time on. The
    pairs show stalls and recovery."""
    calm: float
    """The duration of a fixed piece of work around this repeat, divided by its shortest duration in the whole run.

    1.0 is the shortest duration, and 2.0 means that the machine ran at half its speed.
    """


class Result(msgspec.Struct, frozen=True, rename={"target": "contestant", "baseline": "limit"}):
    """All repeats of a workload on a target."""

    target: str
    workload: str
    """The workload's name: ``drain``, ``backlog``... docs/bench.md defines the workloads."""
    variant: str
    """The variant of the workload: ``10k``, ``body 64 KB``. The name is empty if the workload has only one variant."""
    parameters: dict[str, str | int | float]
    samples: list[Sample]
    baseline: float | None = None
    """The baseline's figure, in the unit of the workload's first metric. The baseline is None if no baseline was
    measured."""
    skipped: str | None = None
    """The reason why there are no samples, such as a capability that this backend lacks."""

    def figures(self, metric: str) -> list[float]:
        """The metric's values in the order of the repeats. Repeats without a value are left out."""
        found = (sample.metrics.get(metric) for sample in self.samples)
        return [value for value in found if value is not None]


class TargetInfo(msgspec.Struct, frozen=True):
    """A backend in a run."""

    name: str
    """The name that the user gave. The password of a URL is masked. If a name is repeated, a number is added to it."""
    backend: str
    server: str
    """``redis 7.0.15``."""
    is_ours: bool
    """Whether the bench started the server."""
    durability: Durability
    promises: dict[str, str]
    """The promises of docs/durability.md and of the capabilities, in a few words each. The page shows the promises
    beside the speeds."""
    idle_commands: float | None
    """Requests per second of one idle worker."""


class Workload(msgspec.Struct, frozen=True):
    """A copy of a workload's definition, so that a report can be read without this version of multiq."""

    name: str
    title: str
    about: str
    """A description of the workload and of the meaning of its figures."""
    metrics: list[Metric]
    """The first metric is the headline."""


class Report(msgspec.Struct, frozen=True, rename={"targets": "contestants"}):
    """A whole run."""

    version: int
    multiq: str
    started_at: str
    """The time in ISO 8601, with a zone."""
    seconds: float
    profile: str
    """``fast`` or ``durable``. The value is ``as set`` if all servers are the user's."""
    is_quick: bool
    repeats: int
    environment: dict[str, str]
    """CPU, cores, memory, kernel, Python, client libraries and their versions, load at the start."""
    noise: str | None
    """The reason why the figures may be unreliable. The value is None if the machine was not disturbed."""
    workloads: list[Workload]
    targets: list[TargetInfo]
    results: list[Result]
    warm_ups: list[Result] = []
    """Results of the warm-up and of idle workers. The jobs of the warm-up and of idle workers are verified, but have no
    figures."""
    reference: float | None = None
    """The shortest duration in seconds of the fixed piece of work of ``Sample.calm``."""

    @property
    def violations(self) -> list[tuple[Result, Violation]]:
        """All violations, each with its result."""
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
    """Read a report from a file of ``write``.

    Raises ``OSError``. Raises ``msgspec.MsgspecError`` if the file is not a report.
    """
    return msgspec.json.decode(path.read_bytes(), type=Report)
