"""OpenTelemetry: spans, links and metrics of jobs, by the semantic conventions for messaging.

``instrument(app)`` is the only call that an application needs. ``docs/opentelemetry.md`` describes the spans and
metrics.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from multiq.app import App
from multiq.errors import ArgumentsInvalid, ExtraNotInstalled, OptionInvalid
from multiq.events import WorkerStopped
from multiq.formatting import shown
from multiq.validation import check_name

try:
    from .tracing import OpenTelemetry
except ImportError as exc:
    if not (exc.name or "").startswith("opentelemetry"):
        raise
    raise ExtraNotInstalled("multiq.contrib.otel needs opentelemetry-api: pip install 'multiq[otel]'") from exc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry._logs import LoggerProvider
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.propagators.textmap import TextMapPropagator
    from opentelemetry.trace import TracerProvider

__all__ = ["OpenTelemetry", "instrument", "observe_queues"]

_PARENTS = ("link", "producer")
_LAST_SPANS = 1.5  # seconds that a worker process has at its end to send its last spans and metrics


def instrument(
    app: App,
    *,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
    logger_provider: LoggerProvider | None = None,
    propagator: TextMapPropagator | None = None,
    parent: Literal["link", "producer"] = "link",
    create_spans: bool = True,
    worker_calls: bool = False,
    body_size: bool = False,
    exception_events: bool = False,
) -> OpenTelemetry:
    """Trace and measure the jobs of *app*. Call this function before other middleware is registered. The middleware of
    OpenTelemetry is then the outermost.

    - *tracer_provider*, *meter_provider*, *logger_provider*, *propagator*: default: the global objects.
    - *parent*: ``"link"``: each run has its own trace, which links to the span of the enqueue. ``"producer"``: a
      run also continues the trace of the enqueue.
    - *create_spans*: whether each job of an ``enqueue_many`` or a flow has its own span. False: all these
      jobs link to the span of the call.
    - *worker_calls*: whether the worker's calls that reserve and settle jobs have spans and durations, too. A worker
      then makes one more call whenever its queues become empty.
    - *body_size*: whether spans have the size of a job's body.
    - *exception_events*: True: errors are log events, and also events of their span. False: errors are only log events.

    Raises ``OptionInvalid`` if *app* is instrumented already. Raises ``ArgumentsInvalid``.
    """
    if not isinstance(app, App):
        raise ArgumentsInvalid(f"instrument must have a multiq.App, got {shown(app)}")
    if parent not in _PARENTS:
        raise OptionInvalid(f"parent must be one of {', '.join(_PARENTS)}, got {shown(parent)}")
    if any(isinstance(member, OpenTelemetry) for member in app.chain.members):
        raise OptionInvalid(
            "an app must be instrumented once, got a second call: it would send all spans and metrics twice"
        )
    _check_providers(tracer_provider=tracer_provider, meter_provider=meter_provider, logger_provider=logger_provider)
    if propagator is not None and not all(hasattr(propagator, name) for name in ("inject", "extract", "fields")):
        raise ArgumentsInvalid(f"propagator must be a TextMapPropagator of OpenTelemetry, got {shown(propagator)}")
    middleware = OpenTelemetry(
        app,
        tracer_provider=tracer_provider,
        meter_provider=meter_provider,
        logger_provider=logger_provider,
        propagator=propagator,
        continues_trace=parent == "producer",
        create_spans=create_spans,
        body_size=body_size,
        exception_events=exception_events,
    )
    if worker_calls:
        from .worker_calls import WorkerCalls

        middleware.calls = WorkerCalls(middleware)
    app.middleware(middleware)

    def flush(_event: WorkerStopped | None = None) -> None:
        middleware.flush(_LAST_SPANS)

    app.events.subscribe(WorkerStopped, flush)
    app.events.last_calls.append(flush)
    return middleware


def observe_queues(app: App, queues: Sequence[str] = (), *, meter_provider: MeterProvider | None = None) -> None:
    """Report the numbers of queues as metrics: ``multiq.queue.jobs`` and ``multiq.queue.oldest_age``.

    *queues*: the names of these queues. Default: all queues that have jobs or are paused. Call this function in only
    one process. The numbers come from the store, so a second process would report the same jobs again.
    """
    from .metrics import observe_queues as observe
    from .tracing import labels_of, meter_of

    if not isinstance(app, App):
        raise ArgumentsInvalid(f"observe_queues must have a multiq.App, got {shown(app)}")
    if isinstance(queues, str) or not isinstance(queues, Iterable):
        raise OptionInvalid(f"queues must be a list of names, got {shown(queues)}")
    names = [check_name(name) for name in queues]
    _check_providers(meter_provider=meter_provider)
    observe(app, meter_provider, meter_of(meter_provider), names, labels_of(app))


def _check_providers(**providers: object) -> None:
    """Raise ``ArgumentsInvalid`` for an object that is not what its name says."""
    for name, provider in providers.items():
        kind = name.partition("_")[0]
        if provider is not None and not hasattr(provider, f"get_{kind}"):
            raise ArgumentsInvalid(
                f"{name} must be a {kind.capitalize()}Provider of OpenTelemetry, got {shown(provider)}"
            )
