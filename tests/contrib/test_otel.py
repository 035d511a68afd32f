"""Spans, links, events and metrics of jobs, as OpenTelemetry's in-memory exporters get them."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import baggage, context, propagate, trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext, SpanKind, StatusCode, TraceFlags, TraceState
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from otel_memory import Telemetry, is_link_to, links_of, telemetry
from processes import until
from shell import Shell
from stores import NAMES, STORES

import multiq
from multiq.backend.memory import MemoryBackend
from multiq.conformance.threads import HANGS
from multiq.contrib import otel
from multiq.errors import ArgumentsInvalid, BackendUnavailable, EnqueueRefused, JobExists, OptionInvalid, PayloadInvalid
from multiq.schedules.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from opentelemetry.sdk.trace import ReadableSpan

MODES: list[dict[str, Any]] = [{}, {"threads": 3}, {"concurrency": 3}]


@pytest.fixture
def told() -> Iterator[Telemetry]:
    with telemetry() as found:
        yield found


@pytest.fixture
def app(told: Telemetry) -> multiq.App:
    app = multiq.App("memory://")
    told.instrument(app)
    return app


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell.app.close()


def drain(app: multiq.App, **options: Any) -> int:
    return multiq.Worker(app, stop_when_empty=True, **options).run()


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


# --- the shapes of traces ---


@pytest.fixture(params=NAMES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with STORES[request.param](tmp_path) as url:
        yield url


def test_a_job_has_a_span_of_its_enqueue_and_one_of_its_run(store: str, told: Telemetry) -> None:
    # given an app on a real store
    with multiq.App(store) as app:
        told.instrument(app)

        @app.task(queue="mail")
        def noop() -> None: ...

        # when a job is enqueued within a span, and run
        with told.tracer.start_as_current_span("request") as request:
            handle = noop.enqueue()
        drain(app, queues=["mail"])

    # then the enqueue is a child span of the request's span, and the run is a trace of its own that links to the
    # enqueue
    (send,), (process,) = told.spans("send"), told.spans("process")
    assert (send.name, send.kind) == ("send mail", SpanKind.PRODUCER)
    assert (process.name, process.kind) == ("process mail", SpanKind.CONSUMER)
    assert send.parent is not None
    assert send.parent.span_id == request.get_span_context().span_id
    assert process.parent is None
    assert is_link_to(process, send)
    assert process.context.trace_id != send.context.trace_id
    # and both have what the conventions demand
    driver = store.partition(":")[0]
    common = {
        "messaging.system": "multiq",
        "messaging.destination.name": "mail",
        "messaging.message.id": handle.id,
        "messaging.multiq.task": "noop",
        "messaging.multiq.priority": 1024,
        "messaging.multiq.backend": driver,
    }
    for span, operation in ((send, "send"), (process, "process")):
        own = {"messaging.operation.name": operation, "messaging.operation.type": operation}
        assert (common | own).items() <= attributes(span).items()
        assert ("server.address" in attributes(span)) == (driver != "sqlite")
        assert span.status.status_code is StatusCode.UNSET
    assert {"messaging.multiq.attempt": 1, "messaging.multiq.verdict": "done"}.items() <= attributes(process).items()
    assert ":" in attributes(process)["messaging.client.id"]


def test_each_job_of_a_batch_has_a_span_to_which_its_run_links(app: multiq.App, told: Telemetry) -> None:
    @app.task
    def noop(number: int) -> None: ...

    # when three jobs are enqueued together
    handles = noop.enqueue_many([(1,), (2,), (3,)])
    drain(app)

    # then each job has a create span, the call has one span that links to these, and each run links to its create span
    creates, (send,), runs = told.spans("create"), told.spans("send"), told.spans("process")
    assert [attributes(span)["messaging.message.id"] for span in creates] == [handle.id for handle in handles]
    assert {span.kind for span in creates} == {SpanKind.PRODUCER}
    assert (send.name, send.kind) == ("send default", SpanKind.CLIENT)
    assert attributes(send)["messaging.batch.message_count"] == 3
    assert "messaging.message.id" not in attributes(send)
    assert links_of(send, creates) == ["create default"] * 3
    assert [is_link_to(run, create) for run, create in zip(runs, creates, strict=True)] == [True] * 3


def test_a_batch_without_create_spans_links_to_its_call(told: Telemetry) -> None:
    app = multiq.App("memory://")
    told.instrument(app, create_spans=False)

    @app.task
    def noop(number: int) -> None: ...

    noop.enqueue_many([(1,), (2,)])
    noop.enqueue_many([])
    drain(app)
    (send,) = told.spans("send")
    assert send.kind is SpanKind.PRODUCER  # because its context is the jobs' creation context
    assert told.spans("create") == []
    assert [is_link_to(run, send) for run in told.spans("process")] == [True, True]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("is_coroutine", [False, True], ids=["plain", "coroutine"])
def test_each_attempt_links_to_the_enqueue(
    app: multiq.App, told: Telemetry, mode: dict[str, Any], is_coroutine: bool
) -> None:
    # given a task that fails once
    def fail_once() -> None:
        assert trace.get_current_span().get_span_context().is_valid  # the run's span is the current one
        if multiq.current_job().attempt == 1:
            raise ValueError("not yet")

    async def afail_once() -> None:
        await asyncio.sleep(0)
        fail_once()

    work: multiq.Task[[], Any] = app.task(name="work", max_attempts=2, backoff=0)(
        afail_once if is_coroutine else fail_once
    )
    # when its job is run
    work.enqueue()
    drain(app, **mode)

    # then both attempts link to the one enqueue, and only the first has failed
    (send,), (first, second) = told.spans("send"), told.spans("process")
    assert is_link_to(first, send)
    assert is_link_to(second, send)
    assert [attributes(run)["messaging.multiq.attempt"] for run in (first, second)] == [1, 2]
    assert [attributes(run)["messaging.multiq.verdict"] for run in (first, second)] == ["retried", "done"]
    assert first.status.status_code is StatusCode.ERROR
    assert first.status.description == "ValueError: not yet"
    assert attributes(first)["error.type"] == "ValueError"
    assert second.status.status_code is StatusCode.UNSET
    assert "error.type" not in attributes(second)
    # and the error is an event in the log, of that span
    (event,) = told.events()
    assert (event.event_name, event.severity_number.value) == ("messaging.process.exception", 17)
    assert event.span_id == first.context.span_id
    assert event.attributes["exception.type"] == "ValueError"
    assert event.attributes["exception.message"] == "not yet"
    assert "fail_once" in event.attributes["exception.stacktrace"]


@pytest.mark.long
def test_a_chain_across_two_backends_is_linked_from_end_to_end(tmp_path: Path, told: Telemetry) -> None:
    # given an app on Redis whose job enqueues a chain on MySQL
    with (
        STORES["redis"](tmp_path) as redis,
        STORES["mysql"](tmp_path) as mysql,
        multiq.App(redis) as shop,
        multiq.App(mysql) as warehouse,
    ):
        told.instrument(shop)
        told.instrument(warehouse)

        @warehouse.task(keep=60)
        def pick(order: int) -> int:
            return order

        @warehouse.task
        def pack(order: int, box: str) -> None: ...

        @shop.task
        def pay(order: int) -> None:
            multiq.chain(pick.s(order), pack.s("big")).enqueue()

        # when the job is enqueued, and both workers run
        with told.tracer.start_as_current_span("request"):
            pay.enqueue(7)
        drain(shop)
        drain(warehouse)

    # then the spans of the chain's enqueue are within the run of the first job
    (paid, picked, packed) = told.spans("process")
    (sent, sent_chain) = told.spans("send")
    creates = told.spans("create")
    assert is_link_to(paid, sent)
    for span in (sent_chain, *creates):
        assert span.parent is not None
        assert span.parent.span_id == paid.context.span_id
    # and each run on the other backend links to the span of its job
    assert links_of(sent_chain, creates) == ["create default"] * 2
    assert is_link_to(picked, creates[0])
    assert is_link_to(packed, creates[1])
    flow = {attributes(span)["messaging.message.conversation_id"] for span in (sent_chain, *creates, picked, packed)}
    assert len(flow) == 1
    assert [attributes(span)["messaging.multiq.backend"] for span in (paid, picked, packed)] == [
        "redis", "mysql", "mysql",
    ]  # fmt: skip


def test_a_run_may_continue_the_trace_of_its_enqueue(told: Telemetry) -> None:
    app = multiq.App("memory://")
    told.instrument(app, parent="producer")

    @app.task
    def noop() -> None: ...

    noop.enqueue()
    with told.tracer.start_as_current_span("worker") as worker:  # a worker within a span of the program
        drain(app)
    (send,), (process,) = told.spans("send"), told.spans("process")
    assert process.parent is not None
    assert process.parent.span_id == send.context.span_id
    assert process.context.trace_id == send.context.trace_id
    assert [link.context.span_id for link in process.links] == [
        send.context.span_id, worker.get_span_context().span_id,
    ]  # fmt: skip


def test_a_context_that_the_caller_has_set_is_not_changed(app: multiq.App, told: Telemetry) -> None:
    @app.task
    def noop() -> None: ...

    # given jobs with a context of the caller's own
    own = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    call = noop.options(headers={"traceparent": own, "tenant": "ann"})
    one = call.enqueue()
    many = call.enqueue_many([(), ()])
    # then they keep it, and the spans link to it
    for handle in (one, *many):
        assert handle.peek().value["headers"] == {"traceparent": own, "tenant": "ann"}
    drain(app)
    assert told.spans("create") == []
    for span in (*told.spans("send"), *told.spans("process")):
        assert {link.context.span_id for link in span.links} == {0xB7AD6B7169203331}


def test_a_broken_context_is_replaced(app: multiq.App, told: Telemetry) -> None:
    @app.task
    def noop() -> None: ...

    noop.options(headers={"traceparent": "00-zz", "tracestate": "a=b"}).enqueue()
    drain(app)
    (send,), (process,) = told.spans("send"), told.spans("process")
    assert process.links == ()  # the header is the caller's, and nothing overwrites it
    assert send.links == ()


class Slow(CompositePropagator):
    """The default propagator, as one that multiq does not know."""


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"tenant": "ann"},
        {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
        {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"},
        {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-ff", "tenant": "ann"},
        {
            "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "tracestate": "a=b",
            "baggage": "c=d",
        },
        {"traceparent": "00-00000000000000000000000000000000-b7ad6b7169203331-01"},
        {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01"},
        {"traceparent": "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01"},
        {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more"},
        {"traceparent": "01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more"},
        {"traceparent": "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
        {"traceparent": " 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01 "},
        {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\n"},
        {"traceparent": "", "baggage": "c=d"},
    ],
    ids=str,
)
def test_headers_are_read_as_the_default_propagator_reads_them(told: Telemetry, headers: dict[str, str]) -> None:
    found = []
    for propagator in (None, Slow([TraceContextTextMapPropagator(), W3CBaggagePropagator()])):
        with multiq.App("memory://") as app:
            told.instrument(app, propagator=propagator)

            @app.task
            def noop() -> None:
                found.append(dict(baggage.get_all()))

            app.queue().enqueue({"multiq": 1, "task": "noop", "headers": headers})
            drain(app)
            found.append([link.context for link in told.spans("process")[-1].links])  # type: ignore[arg-type]
    assert found[:2] == found[2:]


@pytest.mark.parametrize("state", [TraceState(), TraceState([("a", "b")])], ids=["no state", "state"])
@pytest.mark.parametrize("flags", [0, 1, 3])
@pytest.mark.parametrize("items", [{}, {"c": "d"}], ids=str)
def test_headers_are_written_as_the_default_propagator_writes_them(
    told: Telemetry, state: TraceState, flags: int, items: dict[str, str]
) -> None:
    # given a job within a span
    parent = SpanContext(0xAF7651916CD43DD8448EB211C80319C, 0xB7AD, is_remote=True, trace_flags=TraceFlags(flags),
                         trace_state=state)  # fmt: skip
    current = trace.set_span_in_context(trace.NonRecordingSpan(parent))
    for name, value in items.items():
        current = baggage.set_baggage(name, value, current)
    app = multiq.App("memory://")
    told.instrument(app)

    @app.task
    def noop() -> None: ...

    token = context.attach(current)
    try:
        headers = noop.enqueue().peek().value["headers"]
    finally:
        context.detach(token)
    # then the headers are those of the default propagator, for the span of the enqueue
    expected: dict[str, str] = {}
    sent = re.fullmatch(r"00-0af7651916cd43dd8448eb211c80319c-([0-9a-f]{16})-(..)", headers["traceparent"])
    assert sent is not None
    own = SpanContext(parent.trace_id, int(sent[1], 16), is_remote=False, trace_flags=TraceFlags(int(sent[2], 16)),
                      trace_state=state)  # fmt: skip
    propagate.get_global_textmap().inject(expected, trace.set_span_in_context(trace.NonRecordingSpan(own), current))
    assert headers == expected


def test_a_traceparent_alone_needs_no_propagator(
    app: multiq.App, told: Telemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task
    def noop() -> None: ...

    # given propagators that would take as long as multiq's own code for a span
    for name in ("inject", "extract"):
        monkeypatch.delattr(TraceContextTextMapPropagator, name)
        monkeypatch.delattr(W3CBaggagePropagator, name)
    noop.enqueue()
    drain(app)
    # then they are not called
    (send,), (process,) = told.spans("send"), told.spans("process")
    assert is_link_to(process, send)


def test_the_global_propagator_may_be_set_after_the_call(app: multiq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    @app.task
    def noop() -> None: ...

    # given an app that is instrumented, when the program sets another global propagator, and enqueues
    monkeypatch.setattr(propagate, "_HTTP_TEXT_FORMAT", propagate.get_global_textmap())  # set back at the end
    propagate.set_global_textmap(W3CBaggagePropagator())
    token = context.attach(baggage.set_baggage("tenant", "ann"))
    try:
        handle = noop.enqueue()
    finally:
        context.detach(token)
    # then the job's headers are those of this propagator
    assert handle.peek().value["headers"] == {"baggage": "tenant=ann"}


def test_baggage_reaches_the_run_and_what_it_enqueues(app: multiq.App) -> None:
    seen: list[Any] = []

    @app.task
    def second() -> None:
        seen.append(baggage.get_baggage("tenant"))

    @app.task
    def first() -> None:
        seen.append(baggage.get_baggage("tenant"))
        second.enqueue()

    token = context.attach(baggage.set_baggage("tenant", "ann"))
    try:
        first.enqueue()
    finally:
        context.detach(token)
    drain(app)
    assert seen == ["ann", "ann"]
    assert baggage.get_baggage("tenant") is None  # the run's context is not left attached


def test_coroutines_that_run_together_have_their_own_spans(app: multiq.App, told: Telemetry) -> None:
    spans: dict[int, set[int]] = {}

    @app.task
    async def work(number: int) -> None:
        for _ in range(3):
            spans.setdefault(number, set()).add(trace.get_current_span().get_span_context().span_id)
            await asyncio.sleep(0)

    work.enqueue_many([(number,) for number in range(10)])
    drain(app, concurrency=10)
    assert {len(ids) for ids in spans.values()} == {1}
    assert set().union(*spans.values()) == {span.context.span_id for span in told.spans("process")}


def test_an_enqueue_in_a_coroutine_is_a_child_of_its_own_span(app: multiq.App, told: Telemetry) -> None:
    @app.task
    def noop(number: int) -> None: ...

    async def request(number: int) -> tuple[int, str]:
        with told.tracer.start_as_current_span(f"request {number}") as span:
            handle = await noop.aenqueue(number)
            return span.get_span_context().span_id, handle.id

    async def main() -> list[tuple[int, str]]:
        return await asyncio.gather(*(request(number) for number in range(10)))

    parents = {job_id: span_id for span_id, job_id in asyncio.run(main())}
    sent = told.spans("send")
    assert len(sent) == 10
    for span in sent:
        assert span.parent is not None
        assert parents[attributes(span)["messaging.message.id"]] == span.parent.span_id


def test_the_jobs_of_a_schedule_are_linked(app: multiq.App, told: Telemetry) -> None:
    @app.task
    def tick() -> None: ...

    app.schedule("0 0 29 2 *", tick.s(), name="rarely")  # not due within the minute that the scheduler looks ahead
    Scheduler(app).look()
    app.schedules.run("rarely")
    drain(app)
    (send,), (run,) = told.spans("send"), told.spans("process")
    assert is_link_to(run, send)


def test_a_job_within_its_enqueue_is_a_child_of_the_enqueue(told: Telemetry) -> None:
    with multiq.App("sync://") as app:
        told.instrument(app)

        @app.task
        def noop() -> None: ...

        noop.enqueue()
    (send,), (process,) = told.spans("send"), told.spans("process")
    assert process.parent is not None
    assert process.parent.span_id == send.context.span_id
    assert is_link_to(process, send)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://ann:pw@web-1:6380/2", {"server.address": "web-1", "server.port": 6380}),
        ("redis://a,b:7000", {"server.address": "a"}),
        ("redis+unix:///run/redis%20a.sock", {"server.address": "/run/redis a.sock"}),
        ("mysql://ann@/jobs?unix_socket=/run/mysqld.sock", {"server.address": "/run/mysqld.sock"}),
        ("sqlite:///jobs.db", {}),
    ],
)
def test_the_server_s_address_is_that_of_the_url(told: Telemetry, url: str, address: dict[str, Any]) -> None:
    with multiq.App(url) as app:
        own = told.instrument(app).attributes("send", "send", "mail")
    assert {name: value for name, value in own.items() if name.startswith("server.")} == address


# --- failures ---


def test_an_enqueue_that_fails_has_an_error(told: Telemetry) -> None:
    class Down(MemoryBackend):
        def enqueue(self, queue: str, jobs: Any, *, connection: Any = None) -> list[str]:
            raise BackendUnavailable("the server is away")

    with multiq.App(backend=Down()) as app:
        told.instrument(app)

        @app.task
        def noop() -> None: ...

        with pytest.raises(BackendUnavailable):
            noop.enqueue()
        with pytest.raises(BackendUnavailable):
            noop.enqueue_many([(), ()])
    sent = told.spans("send")
    assert [span.status.status_code for span in sent] == [StatusCode.ERROR] * 2
    assert {attributes(span)["error.type"] for span in sent} == {"multiq.errors.BackendUnavailable"}
    events = told.events()
    assert [(event.event_name, event.severity_number.value) for event in events] == [
        ("messaging.send.exception", 13)
    ] * 2
    (point,) = told.points("messaging.client.sent.messages")
    assert (point.value, point.attributes["error.type"]) == (3, "multiq.errors.BackendUnavailable")


def test_inner_middleware_may_refuse_and_change_the_queue(app: multiq.App, told: Telemetry) -> None:
    class Rules(multiq.Middleware):
        def enqueue(self, sending: multiq.Sending) -> Iterator[None]:
            for job in sending.jobs:
                if job.args:
                    raise EnqueueRefused("no room")
                job.set(queue="elsewhere")
            yield

    app.middleware(Rules())

    @app.task
    def noop(word: str = "") -> None: ...

    noop.enqueue()
    with pytest.raises(EnqueueRefused):
        noop.enqueue("x")
    moved, refused = told.spans("send")
    assert (moved.name, attributes(moved)["messaging.destination.name"]) == ("send elsewhere", "elsewhere")
    assert refused.status.status_code is StatusCode.ERROR
    # and the refused job was not sent, so it is not counted
    (point,) = told.points("messaging.client.sent.messages")
    assert (point.value, point.attributes["messaging.destination.name"]) == (1, "elsewhere")


def test_a_job_that_was_never_sent_is_not_counted_as_sent(app: multiq.App, told: Telemetry) -> None:
    @app.task(unique=multiq.Unique(on_conflict="error"))
    def noop(word: object) -> None: ...

    # when arguments are not valid, and when a job has the unique key of another one
    with pytest.raises(PayloadInvalid):
        noop.enqueue(object())
    noop.enqueue("x")
    with pytest.raises(JobExists):
        noop.enqueue("x")
    # then only the calls that reached the backend are counted
    points = told.points("messaging.client.sent.messages")
    counts = {point.attributes.get("error.type"): point.value for point in points}
    assert counts == {None: 1, "multiq.errors.JobExists": 1}


def test_what_is_no_failure_has_no_error(app: multiq.App, told: Telemetry) -> None:
    @app.task(max_attempts=3)
    def ask(word: str) -> None:
        raise {"snooze": multiq.Snooze(3600), "release": multiq.ReleaseJob(3600), "bury": multiq.BuryJob("bad")}[word]

    for word in ("snooze", "release", "bury"):
        ask.enqueue(word)
    drain(app)
    snoozed, released, buried = told.spans("process")
    assert [attributes(span)["messaging.multiq.verdict"] for span in (snoozed, released, buried)] == [
        "snoozed", "retried", "buried",
    ]  # fmt: skip
    assert [span.status.status_code for span in (snoozed, released, buried)] == [
        StatusCode.UNSET, StatusCode.UNSET, StatusCode.ERROR,
    ]  # fmt: skip


def test_an_error_whose_text_cannot_be_made_ends_its_span(app: multiq.App, told: Telemetry) -> None:
    class Rude(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    @app.task(max_attempts=1)
    def fail() -> None:
        raise Rude

    fail.enqueue()
    drain(app)
    (process,) = told.spans("process")
    assert process.status.status_code is StatusCode.ERROR


def test_errors_may_be_events_of_their_span_too(told: Telemetry) -> None:
    app = multiq.App("memory://")
    told.instrument(app, exception_events=True)

    @app.task(max_attempts=1)
    def fail() -> None:
        raise ValueError("no")

    fail.enqueue()
    drain(app)
    (process,) = told.spans("process")
    assert [event.name for event in process.events] == ["exception"]


class Broken:
    """Raises an error in one function that a program gives to the SDK."""

    def should_sample(self, *_arguments: Any, **_options: Any) -> Any:
        raise OSError("the sampler's configuration is away")

    def get_description(self) -> str:
        return "broken"

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        raise OSError("the span's start is not wanted")

    def on_end(self, span: Any) -> None:
        raise OSError("the span's end is not wanted")

    def _on_ending(self, span: Any) -> None: ...

    def shutdown(self) -> None: ...

    def force_flush(self, timeout_millis: int = 0) -> bool:
        return True

    def inject(self, *_arguments: Any, **_options: Any) -> None:
        raise OSError("no context can be written")

    def extract(self, *_arguments: Any, **_options: Any) -> Any:
        raise OSError("no context can be read")

    fields: frozenset[str] = frozenset()


def broken_options(where: str) -> dict[str, Any]:
    broken: Any = Broken()
    if where == "propagator":
        return {"propagator": broken}
    provider = TracerProvider(sampler=broken) if where == "sampler" else TracerProvider()
    if where != "sampler":
        processor: Any = SpanProcessor()
        setattr(processor, where, getattr(broken, where))
        provider.add_span_processor(processor)
    return {"tracer_provider": provider}


@pytest.mark.parametrize("where", ["sampler", "on_start", "on_end", "propagator"])
@pytest.mark.parametrize("is_coroutine", [False, True], ids=["plain", "coroutine"])
def test_telemetry_that_fails_changes_no_job(where: str, is_coroutine: bool, caplog: pytest.LogCaptureFixture) -> None:
    # given a program whose own part of the SDK raises errors
    app = multiq.App("memory://")
    otel.instrument(app, worker_calls=True, meter_provider=NoOpMeterProvider(), **broken_options(where))
    seen: list[int] = []

    def work(number: int) -> None:
        seen.append(number)
        if number == 3:
            raise ValueError(number)

    async def awork(number: int) -> None:
        work(number)

    task: multiq.Task[[int], Any] = app.task(name="work", max_attempts=1)(awork if is_coroutine else work)

    # when jobs are enqueued in each way, and run
    task.enqueue(1)
    task.enqueue_many([(2,), (3,)])
    asyncio.run(task.aenqueue(4))
    multiq.group(task.s(5), task.s(6)).enqueue()
    with pytest.raises(PayloadInvalid):
        task.enqueue(object())  # type: ignore[arg-type]
    drain(app)

    # then all have run once, each has its verdict, and the error of the telemetry was logged once
    assert sorted(seen) == [1, 2, 3, 4, 5, 6]
    stats = app.queue().stats()
    assert (stats.ready, stats.reserved, stats.buried) == (0, 0, 1)
    assert [record.name for record in caplog.records if "telemetry failed" in record.message] == ["multiq.otel"]
    assert not [record for record in caplog.records if "middleware failed" in record.message]


def test_metrics_that_fail_change_no_job(caplog: pytest.LogCaptureFixture) -> None:
    # given histograms that raise an error
    class Meters(MeterProvider):
        def get_meter(self, *arguments: Any, **options: Any) -> Any:
            meter = super().get_meter(*arguments, **options)
            make = meter.create_histogram

            def create(*arguments: Any, **options: Any) -> Any:
                histogram = make(*arguments, **options)
                histogram.record = Broken().inject  # type: ignore[method-assign]
                return histogram

            meter.create_histogram = create  # type: ignore[method-assign]
            return meter

    app = multiq.App("memory://")
    otel.instrument(app, worker_calls=True, meter_provider=Meters())
    seen: list[int] = []

    @app.task
    def work(number: int) -> None:
        seen.append(number)

    work.enqueue(1)
    work.enqueue_many([(2,), (3,)])
    drain(app)
    assert seen == [1, 2, 3]
    assert [record.name for record in caplog.records if "telemetry failed" in record.message] == ["multiq.otel"]


# --- the worker's calls ---


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_worker_s_calls_have_spans_if_asked(told: Telemetry, mode: dict[str, Any]) -> None:
    app = multiq.App("memory://")
    told.instrument(app, worker_calls=True)

    @app.task(max_attempts=2, backoff=0)
    def work(number: int) -> None:
        if number == 3:
            raise ValueError(number)

    work.enqueue_many([(1,), (2,), (3,)])
    drain(app, **mode)

    # then each job that was handed to its task has a receive span, and each verdict has a settle span
    creates, receives, processes = told.spans("create"), told.spans("receive"), told.spans("process")
    assert len(receives) == len(processes) == 4
    assert {(span.name, span.kind) for span in receives} == {("receive default", SpanKind.CLIENT)}
    assert all(links_of(span, creates) == ["create default"] for span in receives)
    settled = {word: told.spans(word) for word in ("ack", "release", "bury")}
    counts = {
        word: sum(attributes(span).get("messaging.batch.message_count", 1) for span in spans)
        for word, spans in settled.items()
    }
    assert counts == {"ack": 2, "release": 1, "bury": 1}
    for word, spans in settled.items():
        for span in spans:
            assert span.kind is SpanKind.CLIENT
            assert attributes(span)["messaging.operation.type"] == "settle"
            assert attributes(span)["messaging.operation.name"] == word
            assert span.status.status_code is StatusCode.UNSET  # settling the verdict of a failed job is no failure
    operations = {
        point.attributes["messaging.operation.name"] for point in told.points("messaging.client.operation.duration")
    }
    assert operations == {"send", "receive", "ack", "release", "bury"}


def test_a_job_that_is_prefetched_and_given_back_has_no_receive_span(told: Telemetry) -> None:
    app = multiq.App("memory://")
    told.instrument(app, worker_calls=True)

    @app.task
    def noop(number: int) -> None: ...

    noop.enqueue_many([(number,) for number in range(5)])
    worker = multiq.Worker(app, max_jobs=2, stop_when_empty=True)
    worker.run()
    assert len(told.spans("receive")) == len(told.spans("process")) == 2


def test_a_worker_s_calls_have_no_spans_unless_asked(app: multiq.App, told: Telemetry) -> None:
    @app.task
    def noop() -> None: ...

    noop.enqueue()
    drain(app)
    assert {span.name for span in told.spans()} == {"send default", "process default"}


# --- metrics ---


def test_metrics_count_and_measure_jobs(app: multiq.App, told: Telemetry) -> None:
    @app.task(queue="mail", max_attempts=1)
    def work(number: int) -> None:
        if number == 3:
            raise ValueError(number)

    work.enqueue(1)
    work.enqueue_many([(2,), (3,)])
    drain(app, queues=["mail"])

    def numbers(name: str) -> dict[tuple[Any, ...], Any]:
        keys = ("messaging.destination.name", "messaging.multiq.verdict", "error.type")
        return {
            tuple(value for key in keys if (value := point.attributes.get(key)) is not None): getattr(
                point, "value", getattr(point, "count", None)
            )
            for point in told.points(name)
        }

    assert numbers("messaging.client.sent.messages") == {("mail",): 3}
    assert numbers("messaging.client.consumed.messages") == {("mail",): 3}
    assert numbers("messaging.client.operation.duration") == {("mail",): 2}
    assert numbers("messaging.process.duration") == {("mail",): 2, ("mail", "ValueError"): 1}
    assert numbers("multiq.job.outcomes") == {("mail", "done"): 2, ("mail", "buried"): 1}
    assert numbers("multiq.job.wait") == {("mail",): 3}
    (point,) = [point for point in told.points("messaging.process.duration") if "error.type" in point.attributes]
    assert point.explicit_bounds == (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)


@pytest.mark.long
def test_queue_names_without_end_do_not_grow_the_counts(app: multiq.App, told: Telemetry) -> None:
    @app.task
    def noop() -> None: ...

    # when more queues are used than an instrument has sets of attributes
    for number in range(2100):
        noop.options(queue=f"customer-{number}").enqueue()
    points = told.points("messaging.client.sent.messages")

    # then the counts of the last ones are one number, and no job is missing
    assert len(points) == 2000
    assert sum(point.value for point in points) == 2100
    (others,) = [point for point in points if point.attributes.get("otel.metric.overflow")]
    assert (dict(others.attributes), others.value) == ({"otel.metric.overflow": True}, 101)


def test_queues_are_observed(told: Telemetry) -> None:
    app = multiq.App("memory://")

    @app.task(queue="mail")
    def noop() -> None: ...

    otel.observe_queues(app, meter_provider=told.meter_provider)
    noop.enqueue()
    noop.options(delay=3600).enqueue()
    found = {
        (point.attributes["messaging.destination.name"], point.attributes["messaging.multiq.state"]): point.value
        for point in told.points("multiq.queue.jobs")
    }
    assert found == {("mail", state): number for state, number in
                     {"ready": 1, "delayed": 1, "reserved": 0, "buried": 0, "held": 0}.items()}  # fmt: skip
    (age,) = told.points("multiq.queue.oldest_age")
    assert age.value >= 0


# --- how it is set up ---


def test_the_metrics_have_the_jobs_of_all_apps(told: Telemetry, tmp_path: Path) -> None:
    # given two apps with one meter provider
    apps = [multiq.App(f"sqlite:///{tmp_path}/{name}.db") for name in ("a", "b")]
    for number, app in enumerate(apps, start=1):
        told.instrument(app)

        @app.task(queue="mail")
        def noop() -> None: ...

        # when the first one enqueues and runs a job, and the second one two
        for _ in range(number):
            noop.enqueue()
        noop.options(queue="later").enqueue()
        drain(app, queues=["mail"])
        otel.observe_queues(app, meter_provider=told.meter_provider)
        otel.observe_queues(app, ["later"], meter_provider=told.meter_provider)  # counts no job twice
    # then no job is missing
    assert [point.value for point in told.points("messaging.client.sent.messages")] == [3, 2]
    for name in ("messaging.client.consumed.messages", "multiq.job.outcomes"):
        assert [point.value for point in told.points(name)] == [3]
    points = told.points("multiq.queue.jobs")
    assert [point.value for point in points if point.attributes["messaging.multiq.state"] == "ready"] == [2]
    for app in apps:
        app.close()


def test_an_app_is_instrumented_once(app: multiq.App, told: Telemetry) -> None:
    with pytest.raises(OptionInvalid, match="must be instrumented once"):
        told.instrument(app)
    with pytest.raises(OptionInvalid, match="parent must be one of link, producer, got 'child'"):
        told.instrument(multiq.App("memory://"), parent="child")
    with pytest.raises(ArgumentsInvalid, match=r"must have a multiq\.App"):
        otel.instrument("memory://")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["tracer_provider", "meter_provider", "logger_provider", "propagator"])
def test_what_an_app_is_instrumented_with_is_checked(app: multiq.App, name: str) -> None:
    other = multiq.App("memory://")
    kind = {"tracer": "TracerProvider", "meter": "MeterProvider", "logger": "LoggerProvider"}.get(
        name.partition("_")[0], "TextMapPropagator"
    )
    with pytest.raises(ArgumentsInvalid, match=f"{name} must be a {kind} of OpenTelemetry, got 5"):
        otel.instrument(other, **{name: 5})  # type: ignore[arg-type]
    assert other.chain.members == []
    with pytest.raises(ArgumentsInvalid, match=r"must have a multiq\.App, got 5"):
        otel.observe_queues(5)  # type: ignore[arg-type]
    with pytest.raises(OptionInvalid, match="queues must be a list of names, got 'mail'"):
        otel.observe_queues(app, "mail")
    with pytest.raises(ArgumentsInvalid, match="meter_provider must be a MeterProvider"):
        otel.observe_queues(app, meter_provider=5)  # type: ignore[arg-type]


def test_an_app_without_an_sdk_runs_as_before() -> None:
    # given only the API of OpenTelemetry, whose providers do nothing
    app = multiq.App("memory://")
    otel.instrument(app, worker_calls=True)

    @app.task
    def add(a: int, b: int) -> int:
        return a + b

    handle = add.enqueue(1, 2)
    assert handle.peek().value == {"multiq": 1, "task": "add", "args": [1, 2]}
    assert drain(app) == 0
    assert handle.state() is multiq.State.GONE


def test_the_missing_extra_is_named() -> None:
    program = (
        "import sys\n"
        "sys.modules['opentelemetry'] = None\n"
        "try:\n"
        "    import multiq.contrib.otel\n"
        "except ImportError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert told == "ExtraNotInstalled multiq.contrib.otel needs opentelemetry-api: pip install 'multiq[otel]'\n"


def test_an_exporter_that_hangs_does_not_keep_a_worker_from_its_end() -> None:
    # given spans in a batch, and a collector that does not answer
    answer, sent = threading.Event(), threading.Event()

    class Hung(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            answer.wait()
            sent.set()
            return SpanExportResult.SUCCESS

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Hung(), schedule_delay_millis=3_600_000))
    app = multiq.App("memory://")
    otel.instrument(app, tracer_provider=provider)

    @app.task
    def noop() -> None: ...

    noop.enqueue()

    # when a worker ends, then it does not wait for the collector for long
    give_up = threading.Timer(HANGS, answer.set)
    give_up.start()
    assert drain(app) == 0
    assert not sent.is_set()
    give_up.cancel()
    answer.set()
    provider.shutdown()


def test_the_processes_of_a_worker_send_their_last_spans(shell: Shell) -> None:
    # given an app whose spans wait in a batch for longer than the worker lives, and a worker with two processes
    (shell.folder / "shop" / "tasks.py").write_text(
        """
import os, multiq
from multiq.contrib import otel
from opentelemetry import trace
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

class ToFile(SpanExporter):
    def export(self, spans):
        with open("spans", "a") as file:
            for span in spans:
                file.write(f"{os.getpid()} {span.name} {len(span.links)}\\n")
        return SpanExportResult.SUCCESS

provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(ToFile(), schedule_delay_millis=3_600_000))
trace.set_tracer_provider(provider)
app = multiq.App()
otel.instrument(app)

@app.task
def noop(number: int) -> None: ...

if __name__ == "__main__":
    noop.enqueue_many([(number,) for number in range(20)])
""".replace("\\\\n", "\\n")
    )
    subprocess.run([sys.executable, "-m", "shop.tasks"], cwd=shell.folder, env=shell.all_environment(), check=True)
    # when the worker has run all jobs
    done = shell.run("worker", "shop.tasks:app", "-p", "2", "--stop-when-empty")
    assert done.code == 0, done
    # then no span is missing
    lines = [line.split() for line in (shell.folder / "spans").read_text().splitlines()]
    names = [" ".join(line[1:]) for line in lines]
    assert names.count("process default 1") == 20
    assert names.count("create default 0") == 20
    assert names.count("send default 20") == 1


@pytest.mark.long
def test_a_run_that_does_not_end_at_its_timeout_has_a_span(shell: Shell) -> None:
    # given a task that goes on after its timeout, so its process has to end
    (shell.folder / "shop" / "tasks.py").write_text(
        """
import json, time, multiq
from multiq.contrib import otel
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

class ToFile(SpanExporter):
    def export(self, spans):
        with open("spans", "a") as file:
            for span in spans:
                file.write(json.dumps([span.name, span.status.status_code.name, dict(span.attributes)]) + chr(10))
        return SpanExportResult.SUCCESS

provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(ToFile()))
app = multiq.App()
otel.instrument(app, tracer_provider=provider)

@app.task(max_attempts=1, timeout=0.2)
def dawdle() -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            time.sleep(30)
        except multiq.SoftTimeout:
            pass

if __name__ == "__main__":
    dawdle.enqueue()
"""
    )
    subprocess.run([sys.executable, "-m", "shop.tasks"], cwd=shell.folder, env=shell.all_environment(), check=True)
    # when a worker has ended the run
    done = shell.run("worker", "shop.tasks:app", "-p", "1", "--stop-when-empty")
    # then the run has a span, with its verdict
    spans = [json.loads(line) for line in (shell.folder / "spans").read_text().splitlines()]
    runs = [(status, own["messaging.multiq.verdict"]) for name, status, own in spans if name == "process default"]
    assert runs == [("ERROR", "buried")], (done, spans)


@pytest.mark.long
def test_the_sidecar_of_a_worker_sends_its_last_spans(shell: Shell) -> None:
    # given an app with a schedule, whose spans wait in a batch for longer than the worker lives
    (shell.folder / "shop" / "tasks.py").write_text(
        """
import multiq
from multiq.contrib import otel
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

class ToFile(SpanExporter):
    def export(self, spans):
        with open("spans", "a") as file:
            for span in spans:
                file.write(span.name + chr(10))
        return SpanExportResult.SUCCESS

provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(ToFile(), schedule_delay_millis=3_600_000))
app = multiq.App()
otel.instrument(app, tracer_provider=provider)

@app.task
def noop() -> None: ...

app.schedule("* * * * *", noop.s(), name="often")
"""
    )
    # when the sidecar has made the schedule's job, and the worker ends
    process = shell.start("worker", "shop.tasks:app", "-p", "1")
    try:
        until(lambda: shell.app.backend.stats("default").delayed or shell.app.backend.stats("default").ready)
    finally:
        process.terminate()
        output = process.communicate(timeout=HANGS)
    # then the span of the job's enqueue is not missing
    assert process.returncode == 0, output
    names = (shell.folder / "spans").read_text().splitlines()
    assert "send default" in names, names
