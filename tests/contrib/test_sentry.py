"""What Sentry gets of jobs: errors, transactions and spans, in a transport that keeps them in memory."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import sentry_sdk
from sentry_sdk.integrations.logging import LoggingIntegration
from sentry_sdk.transport import Transport
from shell import Shell
from stores import NAMES, STORES

import multiq
from multiq.contrib import sentry
from multiq.errors import ArgumentsInvalid, OptionInvalid
from multiq.logging import log_events

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sentry_sdk.envelope import Envelope

MODES: list[dict[str, Any]] = [{}, {"threads": 3}, {"concurrency": 3}]


class Kept(Transport):
    """Keeps the envelopes that are sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[dict[str, Any]] = []
        self.envelopes: list[Envelope] = []

    def capture_envelope(self, envelope: Envelope) -> None:
        self.envelopes.append(envelope)
        for item in envelope.items:
            found = item.get_event() or item.get_transaction_event()
            if found is not None:
                self.sent.append(dict(found))

    @property
    def transactions(self) -> list[dict[str, Any]]:
        return [event for event in self.sent if event.get("type") == "transaction"]

    @property
    def errors(self) -> list[dict[str, Any]]:
        return [event for event in self.sent if event.get("type") != "transaction"]

    def streamed(self) -> list[dict[str, Any]]:
        """The spans that were sent in envelopes of their own."""
        items = [item for envelope in self.envelopes for item in envelope.items if item.type == "span"]
        return [span for item in items for span in json.loads(item.get_bytes())["items"]]

    def task_transactions(self) -> list[dict[str, Any]]:
        return [event for event in self.transactions if event["contexts"]["trace"]["op"] == "queue.task.multiq"]


def init(kept: Kept, **options: Any) -> None:
    sentry_sdk.init(
        "http://key@localhost/1",
        transport=kept,
        traces_sample_rate=1.0,
        default_integrations=False,
        auto_enabling_integrations=False,
        integrations=[LoggingIntegration()],
        auto_session_tracking=False,
        **options,
    )


@pytest.fixture
def kept() -> Iterator[Kept]:
    with sentry_sdk.isolation_scope():
        kept = Kept()
        init(kept)
        try:
            yield kept
        finally:
            sentry_sdk.get_client().close()
            sentry_sdk.get_global_scope().set_client(None)


@pytest.fixture
def app(kept: Kept) -> multiq.App:
    app = multiq.App("memory://")
    sentry.instrument(app)
    return app


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell.app.close()


def drain(app: multiq.App, **options: Any) -> int:
    return multiq.Worker(app, stop_when_empty=True, **options).run()


@pytest.mark.parametrize("store", NAMES)
def test_a_run_continues_the_trace_of_its_enqueue(store: str, kept: Kept, tmp_path: Path) -> None:
    # given an app on a real store
    with STORES[store](tmp_path) as url, multiq.App(url) as app:
        sentry.instrument(app)

        @app.task(queue="mail")
        def noop() -> None: ...

        # when a job is enqueued in a transaction, and run
        with sentry_sdk.start_transaction(name="GET /register", op="http.server"):
            handle = noop.enqueue()
        drain(app, queues=["mail"])
    request, run = kept.transactions
    # then the request has a span of the enqueue
    (publish,) = request["spans"]
    assert (publish["op"], publish["description"], publish["origin"]) == ("queue.publish", "noop", "auto.queue.multiq")
    expected = {"messaging.system": "multiq", "messaging.destination.name": "mail", "messaging.message.id": handle.id}
    assert expected.items() <= publish["data"].items()
    # and the run is a transaction of the same trace, whose parent is this span
    trace = run["contexts"]["trace"]
    assert (run["transaction"], trace["op"], trace["status"]) == ("noop", "queue.task.multiq", "ok")
    assert run["transaction_info"] == {"source": "task"}
    assert trace["trace_id"] == request["contexts"]["trace"]["trace_id"]
    assert trace["parent_span_id"] == publish["span_id"]
    (process,) = run["spans"]
    assert process["op"] == "queue.process"
    assert (expected | {"messaging.message.retry.count": 0}).items() <= process["data"].items()
    assert process["data"]["messaging.message.receive.latency"] >= 0
    assert kept.errors == []


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("is_coroutine", [False, True], ids=["plain", "coroutine"])
def test_an_error_is_reported_when_the_job_is_buried(
    app: multiq.App, kept: Kept, mode: dict[str, Any], is_coroutine: bool
) -> None:
    log_events(app)  # a worker of the command line logs such records; they are not reported a second time

    # given a job that fails twice
    def fail(number: int) -> None:
        sentry_sdk.set_tag("number", number)
        raise ValueError(f"no {number}")

    async def afail(number: int) -> None:
        await asyncio.sleep(0)
        fail(number)

    task: multiq.Task[[int], Any] = app.task(name="bill", max_attempts=2, backoff=0)(afail if is_coroutine else fail)
    handles = task.enqueue_many([(1,), (2,)])
    drain(app, **mode)

    # then each job is reported once, with its last run's tags and trace, and without its arguments
    assert len(kept.errors) == 2
    runs = kept.task_transactions()
    assert len(runs) == 4
    for number, handle in enumerate(handles, start=1):
        (event,) = [event for event in kept.errors if event["tags"]["multiq.job_id"] == handle.id]
        (value,) = event["exception"]["values"]
        assert (value["type"], value["value"]) == ("ValueError", f"no {number}")
        assert value["mechanism"] == {"type": "multiq", "handled": False}
        assert event["tags"]["multiq.task"] == "bill"
        assert event["tags"]["number"] in {number, str(number)}
        assert event["contexts"]["multiq"] == {
            "task": "bill", "queue": "default", "job_id": handle.id, "attempt": 2,
        }  # fmt: skip
        last = [run for run in runs if run["tags"]["multiq.job_id"] == handle.id][-1]
        assert event["contexts"]["trace"]["trace_id"] == last["contexts"]["trace"]["trace_id"]
        assert last["contexts"]["trace"]["status"] == "internal_error"


@pytest.mark.parametrize(("errors", "count"), [("buried", 1), ("all", 2), ("none", 0)])
def test_errors_are_reported_as_asked(kept: Kept, errors: Any, count: int) -> None:
    app = multiq.App("memory://")
    sentry.instrument(app, errors=errors)

    @app.task(max_attempts=2, backoff=0)
    def fail() -> None:
        raise ValueError("no")

    fail.enqueue()
    drain(app)
    assert len(kept.errors) == count


def test_what_is_no_failure_is_not_reported(kept: Kept) -> None:
    app = multiq.App("memory://")
    sentry.instrument(app, errors="all")

    @app.task(max_attempts=3)
    def ask(word: str) -> None:
        raise multiq.Snooze(3600) if word == "snooze" else multiq.ReleaseJob(3600)

    ask.enqueue("snooze")
    ask.enqueue("release")
    drain(app)
    assert kept.errors == []
    assert [run["contexts"]["trace"]["status"] for run in kept.task_transactions()] == ["aborted"] * 2


def test_a_job_that_releases_itself_in_its_last_attempt_is_reported(app: multiq.App, kept: Kept) -> None:
    @app.task(max_attempts=2, backoff=0)
    def ask() -> None:
        raise multiq.ReleaseJob(reason="the van is full")

    ask.enqueue()
    drain(app)
    (event,) = kept.errors
    (value,) = event["exception"]["values"]
    assert (value["type"], value["value"]) == ("ReleaseJob", "the van is full")
    assert event["contexts"]["multiq"]["attempt"] == 2


def test_a_job_whose_task_was_not_called_is_reported(app: multiq.App, kept: Kept) -> None:
    @app.task
    def noop() -> None: ...

    app.queue().enqueue({"multiq": 1, "task": "noop", "args": [1, 2]})
    drain(app)
    (event,) = kept.errors
    assert event["message"].startswith("noop is buried: task noop cannot be called like this")
    assert event["tags"]["multiq.task"] == "noop"


def test_a_report_without_a_run_has_no_breadcrumbs_of_other_jobs(app: multiq.App, kept: Kept) -> None:
    # given a subscriber that logs the failures of jobs, and a job that fails
    @app.on(multiq.events.JobFailed)
    def tell(event: multiq.events.JobFailed) -> None:
        logging.getLogger("shop").warning("%s failed: %s", event.job.task, event.error)

    @app.task(max_attempts=1)
    def fail() -> None:
        raise ValueError("it is about ann")

    fail.enqueue()
    # when another job is buried before its task is called
    app.queue().enqueue({"multiq": 1, "task": "fail", "args": [1, 2]})
    drain(app)
    # then its report does not have the log of the first one
    (_, event) = kept.errors
    assert event["message"].startswith("fail is buried: ")
    assert event["breadcrumbs"]["values"] == []


@pytest.mark.filterwarnings("ignore:The send_default_pii option is deprecated")
@pytest.mark.parametrize("option", [{"send_default_pii": True}, {"data_collection": {"queues": True}}], ids=str)
def test_arguments_are_sent_if_sentry_may_have_them(kept: Kept, option: dict[str, Any]) -> None:
    init(kept, **option)
    app = multiq.App("memory://")
    sentry.instrument(app)

    @app.task(max_attempts=1)
    def fail(address: str, name: str) -> None:
        raise ValueError("no")

    fail.enqueue("ann@example.com", name="Ann")
    drain(app)
    (event,) = kept.errors
    assert event["contexts"]["multiq"]["args"] == ["ann@example.com"]
    assert event["contexts"]["multiq"]["kwargs"] == {"name": "Ann"}


def test_jobs_that_run_together_do_not_share_tags(app: multiq.App, kept: Kept) -> None:
    @app.task
    async def work(number: int) -> None:
        sentry_sdk.set_tag("number", number)
        await asyncio.sleep(0)
        sentry_sdk.add_breadcrumb(message=str(number))

    work.enqueue_many([(number,) for number in range(10)])
    drain(app, concurrency=10)
    runs = kept.task_transactions()
    assert sorted(int(run["tags"]["number"]) for run in runs) == [*range(10)]
    assert len({run["tags"]["multiq.job_id"] for run in runs}) == 10
    assert "multiq.job_id" not in sentry_sdk.get_isolation_scope()._tags


def test_a_trace_that_the_caller_has_set_is_not_changed(app: multiq.App, kept: Kept) -> None:
    @app.task
    def noop() -> None: ...

    own = {"sentry-trace": "771a43a4192642f0b136d5159a501700-1234567890abcdef-1", "baggage": "tenant=ann"}
    handle = noop.options(headers=own).enqueue()
    assert handle.peek().value["headers"] == own
    drain(app)
    (run,) = kept.task_transactions()
    assert run["contexts"]["trace"]["trace_id"] == "771a43a4192642f0b136d5159a501700"


def test_baggage_of_others_stays(app: multiq.App) -> None:
    @app.task
    def noop() -> None: ...

    with sentry_sdk.start_transaction(name="request"):
        headers = noop.options(headers={"baggage": "tenant=ann"}).enqueue().peek().value["headers"]
    assert headers["baggage"].startswith("tenant=ann,sentry-")
    assert "sentry-trace" in headers


def test_spans_are_streamed_if_sentry_streams_them(kept: Kept) -> None:
    init(kept, trace_lifecycle="stream")
    app = multiq.App("memory://")
    sentry.instrument(app)

    @app.task(max_attempts=1)
    def bill(number: int) -> None:
        if number:
            raise ValueError(number)

    with sentry_sdk.traces.start_span("GET /register"):
        headers = bill.enqueue(0).peek().value["headers"]
    bill.enqueue(1)
    drain(app)
    sentry_sdk.flush()
    spans = {
        ("bill", span["attributes"]["sentry.op"]["value"], span["status"]): span
        for span in kept.streamed()
        if span["name"] == "bill"
    }
    assert sorted(spans) == [
        ("bill", "queue.process", "error"),
        ("bill", "queue.process", "ok"),
        ("bill", "queue.publish", "ok"),
        ("bill", "queue.task.multiq", "error"),
        ("bill", "queue.task.multiq", "ok"),
    ]
    publish, run = spans["bill", "queue.publish", "ok"], spans["bill", "queue.task.multiq", "ok"]
    assert headers["sentry-trace"].split("-")[1] == publish["span_id"]
    assert (run["trace_id"], run["parent_span_id"]) == (publish["trace_id"], publish["span_id"])
    assert [event["exception"]["values"][0]["value"] for event in kept.errors] == ["1"]


def test_sentry_that_is_off_changes_nothing() -> None:
    app = multiq.App("memory://")
    sentry.instrument(app)

    @app.task(max_attempts=1)
    def fail() -> None:
        raise ValueError("no")

    assert fail.enqueue().peek().value == {"multiq": 1, "task": "fail"}
    assert drain(app) == 0


def test_an_app_is_instrumented_once(app: multiq.App) -> None:
    with pytest.raises(OptionInvalid, match="must be instrumented once"):
        sentry.instrument(app)
    with pytest.raises(OptionInvalid, match="errors must be one of buried, all, none, got 'some'"):
        sentry.instrument(multiq.App("memory://"), errors="some")  # type: ignore[arg-type]
    with pytest.raises(ArgumentsInvalid, match=r"must have a multiq\.App"):
        sentry.instrument("memory://")  # type: ignore[arg-type]


def test_the_missing_extra_is_named() -> None:
    program = (
        "import sys\n"
        "sys.modules['sentry_sdk'] = None\n"
        "try:\n"
        "    import multiq.contrib.sentry\n"
        "except ImportError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert told == "ExtraNotInstalled multiq.contrib.sentry needs sentry-sdk: pip install 'multiq[sentry]'\n"


@pytest.mark.long
def test_the_processes_of_a_worker_report_errors_and_crashes(shell: Shell) -> None:
    # given an app that sends to a file, and jobs that fail, and that kill their process
    (shell.folder / "shop" / "tasks.py").write_text(
        """
import json, os, signal, multiq, sentry_sdk
from multiq.contrib import sentry
from sentry_sdk.transport import Transport

class ToFile(Transport):
    def capture_envelope(self, envelope):
        for item in envelope.items:
            event = item.get_event()
            if event is not None:
                values = event.get("exception", {}).get("values", [{}])
                with open("events", "a") as file:
                    file.write((event.get("message") or values[-1].get("value", "?")) + chr(10))

sentry_sdk.init("http://key@localhost/1", transport=ToFile())
app = multiq.App()
sentry.instrument(app)

@app.task(max_attempts=1)
def fail() -> None:
    raise ValueError("it fails")

@app.task(max_crashes=1)
def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    fail.enqueue()
    die.enqueue()
"""
    )
    subprocess.run([sys.executable, "-m", "shop.tasks"], cwd=shell.folder, env=shell.all_environment(), check=True)
    # when a worker has run them
    done = shell.run("worker", "shop.tasks:app", "-p", "1", "--stop-when-empty")
    # then each error is reported once
    lines = (shell.folder / "events").read_text().splitlines()
    assert lines.count("it fails") == 1, (done, lines)
    assert len([line for line in lines if line.startswith("die: its process has died")]) == 1, (done, lines)
    assert len([line for line in lines if line.startswith("die is buried: ")]) == 1, (done, lines)
