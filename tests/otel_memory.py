"""OpenTelemetry's SDK in memory: what an app sends can be read."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from multiq.contrib import otel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from opentelemetry.sdk.trace import ReadableSpan

    import multiq


class Telemetry:
    def __init__(self) -> None:
        self._spans = InMemorySpanExporter()
        self.tracer_provider = TracerProvider()
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self._spans))
        self._reader = InMemoryMetricReader()
        self.meter_provider = MeterProvider([self._reader])
        self._logs = InMemoryLogRecordExporter()  # type: ignore[no-untyped-call]
        self.logger_provider = LoggerProvider()
        self.logger_provider.add_log_record_processor(SimpleLogRecordProcessor(self._logs))
        self.tracer = self.tracer_provider.get_tracer("test")

    def instrument(self, app: multiq.App, **options: Any) -> otel.OpenTelemetry:
        return otel.instrument(
            app,
            tracer_provider=self.tracer_provider,
            meter_provider=self.meter_provider,
            logger_provider=self.logger_provider,
            **options,
        )

    def spans(self, operation: str | None = None) -> list[ReadableSpan]:
        """The ended spans, by their begin. *operation*: those whose name begins with this word."""
        spans = sorted(self._spans.get_finished_spans(), key=lambda span: span.start_time or 0)
        return [span for span in spans if operation is None or span.name.partition(" ")[0] == operation]

    def events(self) -> list[Any]:
        return [log.log_record for log in self._logs.get_finished_logs()]

    def points(self, name: str) -> list[Any]:
        """The data points of a metric."""
        data = self._reader.get_metrics_data()
        return [
            point
            for resource in (data.resource_metrics if data is not None else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]

    def close(self) -> None:
        self.tracer_provider.shutdown()
        self.meter_provider.shutdown()
        self.logger_provider.shutdown()


@contextlib.contextmanager
def telemetry() -> Iterator[Telemetry]:
    found = Telemetry()
    try:
        yield found
    finally:
        found.close()


def is_link_to(span: ReadableSpan, target: ReadableSpan) -> bool:
    return any(link.context.span_id == target.context.span_id for link in span.links)


def links_of(span: ReadableSpan, others: Sequence[ReadableSpan]) -> list[str]:
    """The names of the spans to which a span links. A span that is not among *others* is ``?``."""
    names = {other.context.span_id: other.name for other in others}
    return [names.get(link.context.span_id, "?") for link in span.links]
