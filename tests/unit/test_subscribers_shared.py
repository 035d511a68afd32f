"""Subscribers while others are added, and while other workers of the same app end."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest

import multiq
from multiq import events

if TYPE_CHECKING:
    from collections.abc import Callable

LOST = events.JobLost(queue="q", job_id="1")


def until(condition: Callable[[], object]) -> None:
    give_up_at = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < give_up_at, "waited in vain"
        time.sleep(0.001)


def test_a_subscriber_added_during_an_event_gets_the_next_one() -> None:
    # Given events that a subscriber gets for the first time
    told, heard = events.Events(), list[events.Event]()

    class Late(defaultdict[Any, Any]):
        """Another subscriber is added while the subscribers are looked up."""

        is_late = False

        def __getitem__(self, kind: object) -> Any:
            found = super().__getitem__(kind)
            if self.is_late:
                return found
            self.is_late = True
            found = list(found)
            told.subscribe(events.JobLost, heard.append)
            return found

    told._subscribers = Late(list, {events.JobLost: [lambda _: None]})
    told.listeners = events._Listeners(told._subscribers)
    told.emit(LOST)
    # When the next event is emitted
    heard.clear()
    told.emit(LOST)
    # Then the new subscriber gets it
    assert heard == [LOST]


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit, SystemExit, asyncio.CancelledError, BaseException])
def test_any_error_of_a_subscriber_is_logged_and_the_others_are_called(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    told, heard = events.Events(), list[events.Event]()

    def fail(_: events.Event) -> None:
        raise error

    told.subscribe(events.JobLost, fail)
    told.subscribe(events.JobLost, heard.append)
    told.emit(LOST)
    assert heard == [LOST]
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [error]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, BaseException])
def test_whatever_a_coroutine_raises_is_logged_and_its_loop_lives(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    told, heard = events.Events(), list[events.Event]()

    async def fail(_: events.Event) -> None:
        raise error

    async def hear(event: events.Event) -> None:
        heard.append(event)

    told.subscribe(events.JobLost, fail)
    told.subscribe(events.JobLost, hear)
    told.emit(LOST)
    until(lambda: len(heard) == 1)
    told.emit(LOST)
    until(lambda: len(heard) == 2)
    told.finish(5)
    assert sum("subscriber of JobLost failed" in message for message in caplog.messages) == 2


MODES: list[dict[str, Any]] = [{}, {"threads": 2}, {"concurrency": 2}]


@pytest.mark.parametrize("first", MODES)
@pytest.mark.parametrize("second", MODES)
def test_a_worker_that_ends_does_not_cancel_the_subscribers_of_another(
    first: dict[str, Any], second: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given two workers of one app, and a subscriber that is slow with an event of the second worker
    monkeypatch.setattr("multiq.worker.processes.process._LAST_EVENTS", 0.1)
    app = multiq.App("memory://")
    goes_on, began, heard = threading.Event(), threading.Event(), list[str]()

    @app.on(events.JobDone)
    async def hear(event: events.JobDone) -> None:
        if event.job.task == "slow":
            began.set()
            await asyncio.to_thread(goes_on.wait)
        heard.append(str(event.job.task))

    @app.task(queue="a")
    async def quick() -> None:
        await asyncio.sleep(0)

    @app.task(queue="b")
    async def slow() -> None:
        await asyncio.sleep(0)

    one = multiq.Worker(app, queues=["a"], **first)
    other = multiq.Worker(app, queues=["b"], **second)
    threads = [threading.Thread(target=each.run) for each in (one, other)]
    with caplog.at_level(logging.WARNING):
        for thread in threads:
            thread.start()
        try:
            quick.enqueue()
            until(lambda: heard == ["quick"])
            slow.enqueue()
            assert began.wait(20)
            # When the first worker ends
            one.stop()
            threads[0].join(20)
            # Then the subscriber runs on, and gets later events
            goes_on.set()
            until(lambda: heard == ["quick", "slow"])
            slow.enqueue()
            until(lambda: heard == ["quick", "slow", "slow"])
        finally:
            goes_on.set()
            one.stop()
            other.stop()
            for thread in threads:
                thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert "multiq-events" not in [thread.name for thread in threading.enumerate()]
    assert not [message for message in caplog.messages if "failed" in message]
