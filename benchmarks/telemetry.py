"""What OpenTelemetry costs an enqueue and a run: ``benchmarks/telemetry.py --help``.

Nothing is stored: the backend does nothing in an enqueue, and the worker's code runs the same reserved job again and
again. The figures are microseconds of the calling thread's CPU time that a call takes more than without telemetry. The
SDK has a ``BatchSpanProcessor``, and the spans are sent between two turns, so the sending is not measured. *SDK
alone* is middleware that only makes spans as large as multiq's. Its cost includes that of *empty middleware*.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

from beside import arguments, report
from opentelemetry import trace
from opentelemetry.context import attach, detach
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler
from opentelemetry.trace import Link, SpanKind

import multiq
from multiq.backend.memory import MemoryBackend
from multiq.contrib import otel
from multiq.worker.execution.runner import Runner
from multiq.worker.execution.timeouts import Timeouts
from multiq.worker.processes.inflight import Held

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from beside import Figures
    from opentelemetry.sdk.trace import ReadableSpan

    from multiq.backend import NewJob

_CALLS = 2_000  # in a turn


class Sink(MemoryBackend):
    """A backend whose enqueue does nothing."""

    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:  # noqa: ARG002
        return [job.id for job in jobs]


class Drop(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:  # noqa: ARG002
        return SpanExportResult.SUCCESS


class Empty(multiq.Middleware):
    """Does nothing around each enqueue and each run."""

    def enqueue(self, sending: multiq.middleware.Sending) -> Iterator[None]:  # noqa: ARG002
        yield

    def run(self, job: multiq.JobContext) -> Iterator[None]:  # noqa: ARG002
        yield


class SpansOnly(multiq.Middleware):
    """Makes a span with as many attributes and links as multiq's spans have, and nothing else."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer
        self._link = Link(tracer.start_span("send default").get_span_context())
        self._sent: dict[str, Any] = {f"messaging.attribute_{at}": "default" for at in range(7)}
        self._run: dict[str, Any] = {f"messaging.attribute_{at}": "default" for at in range(10)}

    def enqueue(self, sending: multiq.middleware.Sending) -> Iterator[None]:
        span = self._tracer.start_span("send default", None, SpanKind.PRODUCER, self._sent.copy())
        token = attach(trace.set_span_in_context(span))
        yield
        detach(token)
        span.set_attribute("messaging.message.id", sending.jobs[0].id or "")
        span.end()

    def run(self, job: multiq.JobContext) -> Iterator[None]:  # noqa: ARG002
        span = self._tracer.start_span("process default", None, SpanKind.CONSUMER, self._run.copy(), (self._link,))
        token = attach(trace.set_span_in_context(span))
        yield
        detach(token)
        span.set_attribute("messaging.multiq.verdict", "acked")
        span.end()


class Way:
    """An app with some kind of telemetry. ``enqueue`` and ``run`` return the CPU seconds of a call."""

    def __init__(self, prepare: Callable[[multiq.App], object], provider: TracerProvider | None = None) -> None:
        self._provider = provider
        self._app = app = multiq.App(backend=Sink())
        prepare(app)
        add: Any = app.task(name="add")(lambda a, b: a + b)
        self._enqueue = lambda: add.enqueue(1, 2)
        with multiq.App("memory://") as other:
            prepare(other)
            more: Any = other.task(name="add")(lambda a, b: a + b)
            more.enqueue(1, 2)
            (lease,) = other.backend.consumer(["default"]).reserve(1, 0)
        runner, held = Runner(other, Timeouts(2.0)), Held(lease, None, 0.0, 0.0)
        self._run = lambda: runner.run(held)

    def enqueue(self) -> float:
        return self._cost(self._enqueue)

    def run(self) -> float:
        return self._cost(self._run)

    def _cost(self, call: Callable[[], object]) -> float:
        call()
        began = time.thread_time()
        for _ in range(_CALLS):
            call()
        took = time.thread_time() - began
        if self._provider is not None:
            self._provider.force_flush()
        return took / _CALLS


def _ways() -> dict[str, Way]:
    def provider(sampler: Sampler) -> TracerProvider:
        made = TracerProvider(sampler=sampler)
        made.add_span_processor(BatchSpanProcessor(Drop(), 4 * _CALLS, 3_600_000, 4 * _CALLS))
        return made

    on, off = provider(ALWAYS_ON), provider(ALWAYS_OFF)
    none, meters = NoOpMeterProvider(), MeterProvider([InMemoryMetricReader()])
    return {
        "none": Way(lambda _app: None),
        "empty middleware": Way(lambda app: app.middleware(Empty())),
        "SDK alone": Way(lambda app: app.middleware(SpansOnly(on.get_tracer("benchmark"))), on),
        "spans": Way(lambda app: otel.instrument(app, tracer_provider=on, meter_provider=none), on),
        "spans, not sampled": Way(lambda app: otel.instrument(app, tracer_provider=off, meter_provider=none)),
        "spans and metrics": Way(lambda app: otel.instrument(app, tracer_provider=on, meter_provider=meters), on),
    }


def main() -> None:
    options = arguments(__doc__, turns=21)
    ways = _ways()
    taken: dict[str, dict[str, list[float]]] = {name: {"enqueue": [], "run": []} for name in ways}

    def measure() -> Figures:
        for _ in range(options.turns):
            for name, way in ways.items():
                taken[name]["enqueue"].append(way.enqueue())
                taken[name]["run"].append(way.run())
        return figures("none", "none")

    def figures(name: str, base: str) -> Figures:
        return {
            f"{what}, us": 1e6
            * statistics.median(
                own - (other if name != base else 0.0)
                for own, other in zip(taken[name][what], taken[base][what], strict=True)
            )
            for what in ("enqueue", "run")
        }

    rest = {name: lambda name=name: figures(name, "none") for name in ways if name != "none"}
    report("CPU time that a call takes more than with none", {"none": measure, **rest}, as_json=options.json)


if __name__ == "__main__":
    main()
