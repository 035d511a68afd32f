"""The middleware: a span for each enqueue and each run, and their metrics."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import socket
import time
import traceback
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

from opentelemetry import baggage, metrics, propagate, trace
from opentelemetry._logs import LogRecord, SeverityNumber, get_logger
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context, attach, detach, get_current
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import multiq
from multiq.driverkit.fork import forks
from multiq.errors import BackendError, JobError, MultiqError
from multiq.job import HEADER_DELAY, describe, first_wait
from multiq.middleware import Middleware
from multiq.retry import ReleaseJob
from multiq.worker.execution.hanging_calls import run_in_thread

from . import conventions as conv
from .metrics import instruments_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextvars import Token

    from opentelemetry._logs import LoggerProvider
    from opentelemetry.metrics import Meter, MeterProvider
    from opentelemetry.propagators.textmap import TextMapPropagator
    from opentelemetry.trace import Span, TracerProvider
    from opentelemetry.util.types import AttributeValue

    from multiq.app import App
    from multiq.backend import Consumer
    from multiq.job import JobContext
    from multiq.middleware import Ending, Outgoing, Sending

    from .metrics import Labels
    from .worker_calls import WorkerCalls

_log = logging.getLogger("multiq.otel")

_NAME = "multiq"
_PRODUCER, _CONSUMER = SpanKind.PRODUCER, SpanKind.CONSUMER  # an enum's member takes longer to look up
_TRACEPARENT = re.compile("00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_STATE = "multiq.otel"  # the key of a run's span in the job's state
_MOST_CACHED = 1000  # entries of each cache
_FLAWS = frozenset({"retried", "buried"})  # verdicts on runs that have failed


class OpenTelemetry(Middleware):
    """Middleware that traces and measures the jobs of an app. ``instrument`` makes and registers this middleware."""

    def __init__(
        self,
        app: App,
        *,
        tracer_provider: TracerProvider | None,
        meter_provider: MeterProvider | None,
        logger_provider: LoggerProvider | None,
        propagator: TextMapPropagator | None,
        continues_trace: bool,
        create_spans: bool,
        body_size: bool,
        exception_events: bool,
    ) -> None:
        self.calls: WorkerCalls | None = None
        """Traces the worker's calls. None: the worker's calls are not traced."""
        self._app = app
        self._providers = (tracer_provider, meter_provider, logger_provider)
        self.tracer = trace.get_tracer(_NAME, multiq.__version__, tracer_provider, conv.SCHEMA_URL)
        self._logger = get_logger(_NAME, multiq.__version__, logger_provider, conv.SCHEMA_URL)
        meter = meter_of(meter_provider)
        self.instruments = instruments_of(meter_provider, meter)
        self._measures = not isinstance(meter, metrics.NoOpMeter)
        self._own_propagator = propagator
        self._propagator: TextMapPropagator | None = None
        self._fields: set[str] = set()
        self._is_w3c = False
        self._continues_trace = continues_trace
        self._create_spans = create_spans
        self._body_size = body_size
        self._exception_events = exception_events
        self._url = ""
        self._common: dict[str, AttributeValue] = {}
        self._has_failed = False
        self._templates: dict[tuple[str, str], dict[str, AttributeValue]] = {}
        self._sends: dict[tuple[str, str, str, int], dict[str, AttributeValue]] = {}
        self._processes: dict[tuple[str, str], tuple[str, dict[str, AttributeValue]]] = {}
        self._labels: dict[tuple[str | None, ...], tuple[Labels, dict[str, AttributeValue]]] = {}
        self._generation = -1
        self._client = ""

    # --- enqueue ---

    def enqueue(self, sending: Sending) -> Iterator[None]:
        jobs = sending.jobs
        if len(jobs) != 1:
            yield from self._send_many(sending) if jobs else (None,)
            return
        (job,) = jobs
        queue = job.options.queue
        span: Span | None = None
        token: Token[Context] | None = None
        try:
            span, token = self._begin_send(sending, job, queue)
        except Exception:  # noqa: BLE001 - an SDK that fails must not refuse an enqueue
            self.note_failure()
        error: BaseException | None = None
        began = time.perf_counter()
        try:
            yield
        except BaseException as exc:
            error = exc
            raise
        finally:
            seconds = time.perf_counter() - began
            if token is not None:
                detach(token)
            self._sent(sending, span, queue, error, seconds, job)

    def _begin_send(self, sending: Sending, job: Outgoing, queue: str) -> tuple[Span, Token[Context]]:
        known = self._context_in(job.headers) if job.headers else None
        span = self.tracer.start_span(
            f"send {queue}",
            None,
            _PRODUCER,
            self._attributes_of(sending, job, "send"),
            () if known is None else (Link(known),),
        )
        context = set_span_in_context(span)
        if known is None:
            self._inject(job.headers, context)
        return span, attach(context)

    def _send_many(self, sending: Sending) -> Iterator[None]:
        queues = {job.options.queue for job in sending.jobs}
        queue = queues.pop() if len(queues) == 1 else ""  # a flow may have several queues
        created: list[tuple[Outgoing, Span, int]] = []
        span: Span | None = None
        token: Token[Context] | None = None
        try:
            span, token = self._begin_send_many(sending, queue, created)
        except Exception:  # noqa: BLE001 - as in enqueue
            self.note_failure()
        error: BaseException | None = None
        began = time.perf_counter()
        try:
            yield
        except BaseException as exc:
            error = exc
            raise
        finally:
            seconds = time.perf_counter() - began
            if token is not None:
                detach(token)
            self._sent(sending, span, queue, error, seconds)
            self._created(created)

    def _begin_send_many(
        self, sending: Sending, queue: str, created: list[tuple[Outgoing, Span, int]]
    ) -> tuple[Span, Token[Context]]:
        """Begin the span of the call. Also begin the spans of its jobs, and add them to *created*."""
        links: list[Link] = []
        own: list[Outgoing] = []  # jobs whose creation context is the context of the call's span
        for job in sending.jobs:
            known = self._context_in(job.headers)
            if known is not None:
                links.append(Link(known))
            elif self._create_spans:
                create = self.tracer.start_span(
                    f"create {job.options.queue}", None, _PRODUCER, self._attributes_of(sending, job, "create")
                )
                created.append((job, create, time.time_ns()))
                self._inject(job.headers, set_span_in_context(create))
                links.append(Link(create.get_span_context()))
            else:
                own.append(job)
        attributes = self.attributes("send", "send", queue)
        attributes[conv.BATCH_COUNT] = len(sending.jobs)
        if sending.flow is not None:
            attributes[conv.CONVERSATION_ID] = sending.flow
        kind = SpanKind.PRODUCER if own else SpanKind.CLIENT
        span = self.tracer.start_span(f"send {queue}".rstrip(), None, kind, attributes, links)
        context = set_span_in_context(span)
        for job in own:
            self._inject(job.headers, context)
        return span, attach(context)

    def _created(self, created: list[tuple[Outgoing, Span, int]]) -> None:
        for job, span, ended_at in created:
            try:
                if job.id is not None:
                    span.set_attribute(conv.MESSAGE_ID, job.id)
                span.end(ended_at)
            except Exception:  # noqa: BLE001 - as in enqueue
                self.note_failure()

    def _sent(  # noqa: PLR0917 - what is measured
        self,
        sending: Sending,
        span: Span | None,
        queue: str,
        error: BaseException | None,
        seconds: float,
        job: Outgoing | None = None,
    ) -> None:
        """End the span of a call. *job*: the call's only job. None: the call has several jobs."""
        error_type: str | None = None
        if error is not None and not _is_made_elsewhere(sending, error):
            error_type = type_name(error)
        try:
            if span is not None:
                if job is not None:
                    _complete(span, job, queue)
                if error_type is not None and error is not None:
                    self.fail(span, error, "messaging.send.exception", SeverityNumber.WARN)
                span.end()
        except Exception:  # noqa: BLE001 - as in enqueue
            self.note_failure()
        if self._measures:
            try:
                labels, attributes = self.labels(
                    "send", "send", queue if job is None else job.options.queue, error_type
                )
                self.instruments.operation_duration.record(seconds, attributes)
                if error is None or _was_sent(sending, error):
                    self.instruments.sent.add(labels, len(sending.jobs))
            except Exception:  # noqa: BLE001 - as in enqueue
                self.note_failure()

    # --- run ---

    def run(self, job: JobContext) -> Iterator[None]:
        token: Token[Context] | None = None
        try:
            token = self._begin_run(job)
        except Exception:  # noqa: BLE001 - an SDK that fails must not fail a job
            self.note_failure()
        if self._measures:
            try:
                self._measure_start(job)
            except Exception:  # noqa: BLE001 - as above
                self.note_failure()
        try:
            yield
        finally:
            if token is not None:
                detach(token)

    def _begin_run(self, job: JobContext) -> Token[Context]:
        lease, envelope = job.lease, job.envelope
        context: Context = get_current()
        creation: SpanContext | None = None
        links: tuple[Link, ...] = ()
        if envelope is not None and envelope.headers:
            creation, sent = self._extract(envelope.headers)
            if creation is not None:
                links = (Link(creation),)
                ambient = _valid_context(context) if self._continues_trace else None
                if ambient is not None:
                    links = (*links, Link(ambient))
            context = self._continued(context, sent, creation)
        if self.calls is not None:
            self.calls.handed_on(lease, creation)
        name, attributes = self._process(lease.queue, job.task or "")
        attributes[conv.MESSAGE_ID] = lease.id
        attributes[conv.ATTEMPT] = lease.attempt
        attributes[conv.PRIORITY] = lease.priority
        if envelope is not None and envelope.flow is not None:
            attributes[conv.CONVERSATION_ID] = envelope.flow.id
        if self._body_size:
            attributes[conv.BODY_SIZE] = len(lease.body)
        span = self.tracer.start_span(name, context, _CONSUMER, attributes, links)
        job.state[_STATE] = span  # ended() ends the span, because the verdict is known then
        return attach(set_span_in_context(span, context))

    def ended(self, job: JobContext, ending: Ending) -> None:
        verdict, error = ending.verdict, ending.error
        error_type: str | None = None
        if verdict in _FLAWS and not (verdict == "retried" and isinstance(error, ReleaseJob)):
            error_type = "_OTHER" if error is None else type_name(error)
        span: Span | None = None if job.kept is None else job.kept.pop(_STATE, None)
        try:
            if span is not None:
                if span.is_recording():
                    span.set_attribute(conv.VERDICT, verdict)
                if error_type is not None and error is not None:
                    self.fail(span, error, "messaging.process.exception", SeverityNumber.ERROR)
                span.end()
        except Exception:  # noqa: BLE001 - as in run
            self.note_failure()
        if self._measures:
            try:
                self._measure_end(job, ending, error_type)
            except Exception:  # noqa: BLE001 - as in run
                self.note_failure()

    def consumer(self, consumer: Consumer, worker: str) -> Consumer:  # noqa: ARG002 - client() has the same name
        return consumer if self.calls is None else self.calls.around(consumer)

    # --- for the worker's calls, and instrument() ---

    def flush(self, seconds: float) -> None:
        """Send the waiting spans, log events and metrics, because a worker process ends without Python's exit.

        *seconds*: the longest time for the spans, for the log events and for the metrics. The batch processors of the
        SDK ignore their timeout, and an exporter waits much longer for a silent collector.
        """
        global_ones = (trace.get_tracer_provider, metrics.get_meter_provider, _logger_provider)
        for own, find in zip(self._providers, global_ones, strict=True):
            force_flush = getattr(find() if own is None else own, "force_flush", None)
            if force_flush is not None:
                run_in_thread(functools.partial(_flush, force_flush, seconds)).wait(seconds)

    def note_failure(self) -> None:
        """Log the error that is being handled. The SDK, or code that the program has given to the SDK, has raised it.

        Only the first error is logged, because each further job would raise the same error."""
        if not self._has_failed:
            self._has_failed = True
            _log.exception("telemetry failed: jobs go on without it, and further errors of it are not logged")

    def attributes(self, operation: str, kind: str, queue: str) -> dict[str, AttributeValue]:
        """Return the attributes that all spans of an operation have. The caller may add attributes."""
        self._follow()
        found = self._templates.get((operation, queue))
        if found is None:
            found = self._make_template(operation, kind, queue)
            _keep(self._templates, (operation, queue), found)
        return found.copy()

    def labels(  # noqa: PLR0917 - what is measured
        self, operation: str, kind: str, queue: str, error_type: str | None = None, task: str = "", verdict: str = ""
    ) -> tuple[Labels, dict[str, AttributeValue]]:
        """Return the attributes of a measurement. Callers must not change the returned dict."""
        self._follow()
        key = (operation, queue, error_type, task, verdict)
        found = self._labels.get(key)
        if found is None:
            attributes = {**self._common, conv.OPERATION_NAME: operation, conv.OPERATION_TYPE: kind}
            optional = (
                (conv.DESTINATION, queue), (conv.TASK, task), (conv.VERDICT, verdict), (conv.ERROR_TYPE, error_type)
            )  # fmt: skip
            attributes.update((name, value) for name, value in optional if value)
            found = tuple(attributes.items()), attributes
            _keep(self._labels, key, found)
        return found

    def client(self) -> str:
        """Return the name of this process in the form of a worker's name, ``host:pid``."""
        self._follow()
        return self._client

    def fail(self, span: Span, error: BaseException, event: str, severity: SeverityNumber) -> None:
        """Mark a span as failed, and emit the log event of its error."""
        kind, message = type_name(error), describe(error)
        span.set_attribute(conv.ERROR_TYPE, kind)
        span.set_status(Status(StatusCode.ERROR, message))
        if self._exception_events:
            span.record_exception(error)
        attributes: dict[str, Any] = {
            conv.EXCEPTION_TYPE: kind,
            conv.EXCEPTION_MESSAGE: message.partition(": ")[2],
            conv.EXCEPTION_STACKTRACE: _stack(error),
        }
        record = LogRecord(
            timestamp=time.time_ns(),
            context=set_span_in_context(span),
            severity_number=severity,
            severity_text=severity.name,
            attributes=attributes,
            event_name=event,
        )
        self._logger.emit(record)

    # --- details ---

    def _follow(self) -> None:
        """Forget all attributes if this is another process, or another connection (``App.connect``)."""
        if self._app.url is not self._url or self._generation != forks.generation:
            self._client, self._generation = f"{socket.gethostname()}:{os.getpid()}", forks.generation
            self._url = self._app.url
            self._common = dict(labels_of(self._app))
            self._templates, self._sends, self._processes, self._labels = {}, {}, {}, {}

    def _make_template(self, operation: str, kind: str, queue: str) -> dict[str, AttributeValue]:
        template = {
            **self._common,
            conv.OPERATION_NAME: operation,
            conv.OPERATION_TYPE: kind,
            conv.BACKEND: self._url.partition(":")[0].partition("+")[0],
        }
        if queue:
            template[conv.DESTINATION] = queue
        return template

    def _attributes_of(self, sending: Sending, job: Outgoing, operation: str) -> dict[str, AttributeValue]:
        self._follow()
        options = job.options
        key = operation, options.queue, job.task, options.priority
        found = self._sends.get(key)
        if found is None:
            found = self._make_template(operation, operation, options.queue)
            found[conv.TASK] = job.task
            found[conv.PRIORITY] = options.priority
            _keep(self._sends, key, found)
        attributes = found.copy()  # a sampler may change it
        if job.id is not None:
            attributes[conv.MESSAGE_ID] = job.id
        if sending.flow is not None:
            attributes[conv.CONVERSATION_ID] = sending.flow
        return attributes

    def _process(self, queue: str, task: str) -> tuple[str, dict[str, AttributeValue]]:
        """Return the name and the attributes that all runs of a task from a queue have. The caller may add
        attributes."""
        self._follow()
        found = self._processes.get((queue, task))
        if found is None:
            template = self._make_template("process", "process", queue)
            template[conv.CLIENT_ID] = self._client
            template[conv.TASK] = task
            found = f"process {queue}", template
            _keep(self._processes, (queue, task), found)
        return found[0], found[1].copy()

    def _current_propagator(self) -> TextMapPropagator:
        """Return the propagator. A program may set the global propagator after it has instrumented its apps."""
        found = propagate.get_global_textmap() if self._own_propagator is None else self._own_propagator
        if found is not self._propagator:
            # first, because another thread may read all three
            self._fields, self._is_w3c = found.fields, _is_w3c(found)
            self._propagator = found
        return found

    def _context_in(self, headers: dict[str, str]) -> SpanContext | None:
        """Return the context that the caller has put into a job's headers, or None if there is none."""
        if not headers:
            return None
        propagator = self._current_propagator()
        if self._fields.isdisjoint(headers):
            return None
        return _valid_context(propagator.extract(headers, Context()))

    # The default propagators take 6 us to write or to read a traceparent, which is half of the time that multiq takes
    # for a span beside the SDK. So these two methods write and read a traceparent that comes alone.

    def _inject(self, headers: dict[str, str], context: Context) -> None:
        propagator = self._current_propagator()
        if self._is_w3c and not baggage.get_all(context):
            span = get_current_span(context).get_span_context()
            if span.is_valid and not span.trace_state:
                parent = f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"
                headers.setdefault("traceparent", parent)
                return
        if not headers:
            propagator.inject(headers, context)
            return
        carrier: dict[str, str] = {}
        propagator.inject(carrier, context)
        for name, value in carrier.items():
            headers.setdefault(name, value)

    def _extract(self, headers: dict[str, str]) -> tuple[SpanContext | None, Context | None]:
        """Return the context of a job's creation, and the whole context in the job's headers. The latter is None if it
        has nothing else."""
        propagator = self._current_propagator()
        if self._is_w3c and "tracestate" not in headers and "baggage" not in headers:
            found = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
            if found is not None:
                trace_id, span_id, flags = (int(part, 16) for part in found.groups())
                creation = SpanContext(trace_id, span_id, True, TraceFlags(flags))
                return (creation if creation.is_valid else None), None
        sent = propagator.extract(headers, Context())
        return _valid_context(sent), sent

    def _continued(self, ambient: Context, sent: Context | None, creation: SpanContext | None) -> Context:
        """Return the context of a run: the ambient context with the baggage of the enqueue. With ``parent="producer"``,
        this context also has the trace of the enqueue."""
        context = ambient
        for name, value in () if sent is None else baggage.get_all(sent).items():
            context = baggage.set_baggage(name, value, context)
        if self._continues_trace and creation is not None:
            context = set_span_in_context(NonRecordingSpan(creation), context)
        return context

    def _measure_end(self, job: JobContext, ending: Ending, error_type: str | None) -> None:
        queue, task = job.lease.queue, job.task or ""
        if ending.seconds is not None:
            _, attributes = self.labels("process", "process", queue, error_type, task)
            self.instruments.process_duration.record(ending.seconds, attributes)
        outcome, _ = self.labels("process", "process", queue, None, task, ending.verdict)
        self.instruments.outcomes.add(outcome)

    def _measure_start(self, job: JobContext) -> None:
        labels, attributes = self.labels("process", "process", job.lease.queue, None, job.task or "")
        self.instruments.consumed.add(labels)
        wait = first_wait(job)
        if wait is not None:
            self.instruments.wait.record(wait, attributes)
            if HEADER_DELAY in job.headers:
                self.instruments.lateness.record(wait, attributes)


def _complete(span: Span, job: Outgoing, queue: str) -> None:
    """Set the attributes that are known only after the enqueue. *queue*: the job's queue at the start of the span."""
    if not span.is_recording():
        return
    if job.id is not None:
        span.set_attribute(conv.MESSAGE_ID, job.id)
    if job.options.queue != queue:  # other middleware has changed it
        span.update_name(f"send {job.options.queue}")
        span.set_attribute(conv.DESTINATION, job.options.queue)


def _flush(force_flush: Callable[[int], object], seconds: float) -> None:
    with contextlib.suppress(Exception):  # an exporter that fails logs the failure itself
        force_flush(int(seconds * 1000))


def meter_of(provider: MeterProvider | None) -> Meter:
    return metrics.get_meter(_NAME, multiq.__version__, provider, conv.SCHEMA_URL)


def labels_of(app: App) -> Labels:
    """Return the attributes that all measurements of an app have: the system, and the server if there is one."""
    from multiq.settings.url import first_host

    host, port = first_host(app.url)
    host = host or _socket_of(app.url)
    labels: Labels = ((conv.MESSAGING_SYSTEM, conv.SYSTEM),)
    if host:
        labels = (*labels, (conv.SERVER_ADDRESS, host))
        labels = labels if port is None else (*labels, (conv.SERVER_PORT, port))
    return labels


def _socket_of(url: str) -> str | None:
    """Return the path of the server's UNIX socket, which the conventions use as its address. None: there is none."""
    parts = urlsplit(url)
    if parts.scheme.endswith("+unix"):
        return unquote(parts.path)
    return next(iter(parse_qs(parts.query).get("unix_socket", ())), None)


def type_name(error: BaseException) -> str:
    """Return the qualified name of an error's class."""
    kind = type(error)
    module = kind.__module__
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"


def _keep(cache: dict[Any, Any], key: object, value: object) -> None:
    if len(cache) >= _MOST_CACHED:  # the number of queue names in a program has no limit
        cache.clear()
    cache[key] = value


def _valid_context(context: Context) -> SpanContext | None:
    found = get_current_span(context).get_span_context()
    return found if found.is_valid else None


def _is_w3c(propagator: TextMapPropagator) -> bool:
    """Whether this is OpenTelemetry's default propagator, which writes ``traceparent``, ``tracestate`` and
    ``baggage``."""
    parts = [type(part) for part in getattr(propagator, "_propagators", ())]
    return type(propagator) is CompositePropagator and parts == [TraceContextTextMapPropagator, W3CBaggagePropagator]


def _is_made_elsewhere(sending: Sending, error: BaseException) -> bool:
    """Whether another scheduler has made the same occurrence. If so, the repeated occurrence is not a failure."""
    return sending.kind == "schedule" and not isinstance(error, MultiqError)


def _was_sent(sending: Sending, error: BaseException) -> bool:
    """Whether the jobs of a failed enqueue may have reached the backend. The conventions forbid to count other jobs."""
    if isinstance(error, MultiqError):
        return isinstance(error, BackendError | JobError)
    return not _is_made_elsewhere(sending, error)


def _stack(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001 - the error's own methods may fail
        return ""


def _logger_provider() -> object:
    from opentelemetry._logs import get_logger_provider

    return get_logger_provider()
