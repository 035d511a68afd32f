"""Subscribers that are coroutine functions: where they run, that jobs do not wait for them, and how they end."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from functools import partial
from typing import Any

import pytest

import multiq
from multiq import State, async_subscribers, events

MODES: list[dict[str, Any]] = [{}, {"threads": 3}, {"concurrency": 5}]


@pytest.fixture
def app() -> multiq.App:
    return multiq.App("memory://")


def drain(app: multiq.App, **options: Any) -> int:
    return multiq.Worker(app, stop_when_empty=True, **options).run()


@pytest.mark.parametrize("mode", MODES)
class TestInEachMode:
    """In each mode in which jobs run."""

    def test_each_event_reaches_async_subscribers_before_the_worker_ends(
        self, app: multiq.App, mode: dict[str, Any]
    ) -> None:
        # Given a slow async subscriber
        heard: list[str] = []

        @app.on(events.JobDone)
        async def tell(event: events.JobDone) -> None:
            await asyncio.sleep(0.05)
            heard.append(event.job.id)

        handles = app.task(name="work")(lambda: None).enqueue_many([()] * 20)
        # When a worker runs to its end
        assert drain(app, **mode) == 0
        # Then the subscriber got all events, and its last call ran to its end
        assert sorted(heard) == sorted(handle.id for handle in handles)

    def test_the_last_event_reaches_async_subscribers(self, app: multiq.App, mode: dict[str, Any]) -> None:
        heard: list[events.WorkerEvent] = []

        async def tell(event: events.WorkerEvent) -> None:
            await asyncio.sleep(0)
            heard.append(event)

        app.on(events.WorkerStarted)(tell)
        app.on(events.WorkerStopped)(tell)
        drain(app, **mode)
        assert [type(event) for event in heard] == [events.WorkerStarted, events.WorkerStopped]

    def test_an_async_subscriber_s_error_is_logged_and_changes_nothing(
        self, app: multiq.App, mode: dict[str, Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        # Given subscribers that fail
        @app.on(events.JobStarted)
        async def fail(event: events.JobStarted) -> None:
            raise ValueError("no")

        @app.on(events.JobDone)
        async def leave(event: events.JobDone) -> None:
            await asyncio.sleep(0)
            raise SystemExit(3)

        handle = app.task(name="work")(lambda: None).enqueue()
        # When the job runs, then it is done, and both subscribers were called
        assert drain(app, **mode) == 0
        assert handle.state() == State.GONE
        told = [message for message in caplog.messages if "subscriber" in message]
        assert sorted(told) == [
            "a subscriber of JobDone failed; the outcome of the job is not affected",
            "a subscriber of JobStarted failed; the outcome of the job is not affected",
        ]

    def test_a_subscriber_that_does_not_end_is_cancelled_at_the_worker_s_end(
        self, app: multiq.App, mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        # Given a subscriber that waits for ever
        monkeypatch.setattr("multiq.worker.processes.process._LAST_EVENTS", 0.1)
        cancelled: list[bool] = []

        @app.on(events.JobDone)
        async def hang(event: events.JobDone) -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(True)
                raise

        app.task(name="work")(lambda: None).enqueue()
        # When the worker is stopped, then it ends, and logs that it cancelled the subscriber
        assert drain(app, **mode) == 0
        assert cancelled == [True]
        assert any("1 subscribers took longer than 0.1 s" in message for message in caplog.messages)

    def test_all_async_subscribers_run_on_one_loop(self, app: multiq.App, mode: dict[str, Any]) -> None:
        # Given subscribers of several kinds of events
        loops: set[asyncio.AbstractEventLoop] = set()
        told: list[events.JobEvent] = []

        async def tell(event: events.JobEvent) -> None:
            await asyncio.sleep(0)
            loops.add(asyncio.get_running_loop())
            told.append(event)

        app.on(events.JobStarted)(tell)
        app.on(events.JobDone)(tell)
        app.task(name="work")(lambda: None).enqueue_many([()] * 10)
        # When jobs run
        drain(app, **mode)
        # Then all subscribers were called on one loop
        assert len(told) == 20
        assert len(loops) == 1


def test_with_concurrency_a_subscriber_runs_on_the_loop_of_the_jobs(app: multiq.App) -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    @app.task
    async def work() -> None:
        loops.append(asyncio.get_running_loop())

    @app.on(events.JobDone)
    async def tell(event: events.JobDone) -> None:
        loops.append(asyncio.get_running_loop())

    work.enqueue()
    drain(app, concurrency=2)
    assert len(loops) == 2
    assert loops[0] is loops[1]


@pytest.mark.parametrize("mode", MODES[:2])
def test_without_concurrency_subscribers_run_in_a_thread_that_ends_with_the_worker(
    app: multiq.App, mode: dict[str, Any]
) -> None:
    names: list[str] = []

    @app.on(events.JobDone)
    async def tell(event: events.JobDone) -> None:
        names.append(threading.current_thread().name)

    app.task(name="work")(lambda: None).enqueue()
    drain(app, **mode)
    assert names == ["multiq-events"]
    assert "multiq-events" not in [thread.name for thread in threading.enumerate()]


def test_a_job_does_not_wait_for_an_async_subscriber(app: multiq.App) -> None:
    # Given a subscriber that waits until the next job has run
    ran, heard = threading.Event(), list[bool]()

    @app.on(events.JobDone)
    async def tell(event: events.JobDone) -> None:
        heard.append(await asyncio.to_thread(ran.wait, 20))

    app.task(name="first")(lambda: None).enqueue()
    app.task(name="second")(ran.set).enqueue()
    # Then no call of the subscriber waits for another call
    drain(app)
    assert heard == [True, True]


def test_every_kind_of_coroutine_function_is_an_async_subscriber(app: multiq.App) -> None:
    heard: list[str] = []

    class Teller:
        async def __call__(self, event: events.Event) -> None:
            heard.append("object")

        async def tell(self, event: events.Event) -> None:
            heard.append("method")

    async def tell(word: str, event: events.Event) -> None:
        heard.append(word)

    for subscriber in (Teller(), Teller().tell, partial(tell, "partial")):
        app.on(events.WorkerStopped)(subscriber)
    drain(app)
    assert sorted(heard) == ["method", "object", "partial"]


def test_a_subscriber_that_is_slower_than_the_jobs_does_not_fill_the_memory(
    app: multiq.App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Given room for three events, and a subscriber that does not return until the end
    monkeypatch.setattr(async_subscribers, "MAX_PENDING", 3)
    monkeypatch.setattr("multiq.worker.processes.process._LAST_EVENTS", 0.1)
    heard: list[str] = []

    @app.on(events.JobDone)
    async def tell(event: events.JobDone) -> None:
        heard.append(event.job.id)
        await asyncio.Event().wait()

    app.task(name="work")(lambda: None).enqueue_many([()] * 50)
    # When many jobs run, then the subscriber gets three events, and the log reports once that others were dropped
    drain(app)
    assert len(heard) == 3
    assert sum("a subscriber is too slow" in message for message in caplog.messages) == 1


def test_after_a_fork_the_child_has_a_loop_of_its_own() -> None:
    # Given an event whose subscriber ran on a loop of this process
    told, heard = events.Events(), list[int]()

    async def tell(event: events.Event) -> None:
        heard.append(os.getpid())

    told.subscribe(events.JobLost, tell)
    told.emit(events.JobLost(queue="q", job_id="1"))
    # When a forked child emits an event, then the subscriber runs in the child
    pid = os.fork()
    if pid == 0:
        heard.clear()
        told.emit(events.JobLost(queue="q", job_id="2"))
        told.finish(5)
        os._exit(0 if heard == [os.getpid()] else 1)
    assert os.waitpid(pid, 0)[1] == 0
    # And the loop of this process still works
    told.emit(events.JobLost(queue="q", job_id="3"))
    told.finish(5)
    assert heard == [os.getpid()] * 2


def test_without_async_subscribers_the_end_waits_for_nothing(caplog: pytest.LogCaptureFixture) -> None:
    told = events.Events()
    with caplog.at_level(logging.WARNING):
        told.finish(1)
    assert caplog.messages == []
