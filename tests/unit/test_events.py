"""Events: which subscribers get them, and that a subscriber's error stays with the subscriber."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from multiq.events import Event, Events, JobLost, WorkerEvent, WorkerPaused, WorkerStopped

PAUSED = WorkerPaused(worker="host:1")
STOPPED = WorkerStopped(worker="host:1", exit_code=0)
LOST = JobLost(queue="q", job_id="1")


def test_a_subscriber_gets_its_event_type_and_its_subtypes() -> None:
    events, heard = Events(), dict[type[Event], list[Event]]()
    for kind in (Event, WorkerEvent, WorkerPaused):
        events.subscribe(kind, heard.setdefault(kind, []).append)
    for event in (PAUSED, STOPPED, LOST):
        events.emit(event)
    assert heard == {Event: [PAUSED, STOPPED, LOST], WorkerEvent: [PAUSED, STOPPED], WorkerPaused: [PAUSED]}


def test_subscribers_are_called_in_their_order_the_most_specific_type_first() -> None:
    events, order = Events(), list[str]()
    events.subscribe(Event, lambda _event: order.append("any"))
    events.subscribe(WorkerPaused, lambda _event: order.append("first"))
    events.subscribe(WorkerPaused, lambda _event: order.append("second"))
    events.subscribe(WorkerEvent, lambda _event: order.append("worker"))
    events.emit(PAUSED)
    assert order == ["first", "second", "worker", "any"]


def test_listeners_are_empty_for_types_without_subscribers() -> None:
    events = Events()
    assert not events.listeners[WorkerPaused]
    events.emit(PAUSED)
    events.subscribe(WorkerEvent, lambda _event: None)
    assert events.listeners[WorkerPaused]
    assert not events.listeners[JobLost]


def test_a_late_subscriber_gets_what_follows() -> None:
    events, heard = Events(), list[Event]()
    events.emit(PAUSED)
    events.subscribe(WorkerPaused, heard.append)
    events.emit(PAUSED)
    assert heard == [PAUSED]


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), RecursionError()])
def test_a_subscriber_s_error_is_logged_and_the_others_are_called(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    events, heard = Events(), list[Event]()

    def fail(_event: Event) -> None:
        raise error

    events.subscribe(WorkerPaused, fail)
    events.subscribe(WorkerPaused, heard.append)
    with caplog.at_level(logging.ERROR, "multiq.events"):
        events.emit(PAUSED)
    assert heard == [PAUSED]
    assert caplog.messages == ["a subscriber of WorkerPaused failed; the outcome of the job is not affected"]


def test_a_subscriber_may_subscribe_another_one_while_it_is_called() -> None:
    events, heard = Events(), list[Any]()
    events.subscribe(WorkerPaused, lambda _event: events.subscribe(WorkerPaused, heard.append))
    events.emit(PAUSED)
    assert heard == []
    events.emit(PAUSED)
    assert heard == [PAUSED]


def test_threads_may_subscribe_while_others_emit() -> None:
    events, heard = Events(), list[Event]()
    done = threading.Event()

    def emit() -> None:
        while not done.is_set():
            events.emit(PAUSED)

    emitting = threading.Thread(target=emit)
    emitting.start()
    for _ in range(200):
        events.subscribe(WorkerPaused, heard.append)
    done.set()
    emitting.join(30)
    heard.clear()
    events.emit(PAUSED)
    assert len(heard) == 200


def test_an_event_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        STOPPED.exit_code = 1  # type: ignore[misc]  # wrong on purpose
