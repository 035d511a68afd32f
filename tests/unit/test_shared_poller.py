"""Waits by polling: the pauses, notifications within the process, and one poll for all waiting consumers."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from multiq.driverkit.shared_poller import Found, Notifier, PollPause, SharedPoller

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_GUARD = 30.0  # seconds: a wait that takes longer hangs


def _held_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


def _until(condition: Callable[[], object]) -> None:
    give_up_at = time.monotonic() + _GUARD
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.001)


# --- PollPause ---


def test_pause_grows_with_the_time_since_the_last_activity(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("multiq.driverkit.shared_poller.time.monotonic", lambda: now)
    pause = PollPause(first=0.5, longest=3.0, growth=0.1)
    pause.speed_up()
    assert pause.next() == 0.5
    now += 10
    assert (pause.idle, pause.next()) == (10, 1.5)
    now += 1000
    assert pause.next() == 3.0
    pause.speed_up()
    assert pause.next() == 0.5


def test_pauses_vary_by_the_jitter() -> None:
    pause = PollPause(first=1.0, longest=1.0, growth=0.0, jitter=0.1)
    pauses = {pause.next() for _ in range(100)}
    assert len(pauses) > 50
    assert 0.9 <= min(pauses) < max(pauses) <= 1.1


# --- Notifier ---


def test_notification_releases_each_listener_once() -> None:
    notifier = Notifier()
    one, two = _held_lock(), _held_lock()
    with notifier.listening(one), notifier.listening(two):
        notifier.notify()
        notifier.notify()  # a second release of the listener's lock would raise an error
        assert one.acquire(timeout=_GUARD)
        assert two.acquire(timeout=_GUARD)
    assert notifier.notifications == 2


def test_listener_that_has_left_is_not_released() -> None:
    notifier = Notifier()
    lock = _held_lock()
    with notifier.listening(lock):
        pass
    notifier.notify()
    assert not lock.acquire(blocking=False)


# --- SharedPoller ---


def _poller(pause: float = 0.001) -> SharedPoller:
    return SharedPoller(PollPause(first=pause, longest=pause, growth=0.0))


def _asleep(poller: SharedPoller, queues: Sequence[str], poll: Callable[[Sequence[str]], Found]) -> threading.Thread:
    """A consumer that waits for *queues* in a thread of its own, until it is woken."""
    until = time.monotonic() + 2 * _GUARD  # later than the guard, so that the timeout does not look like a wake-up
    thread = threading.Thread(target=poller.sleep, args=(queues, poller.notifications, until, poll), daemon=True)
    before = poller.waiting
    thread.start()
    _until(lambda: poller.waiting > before)
    return thread


def _nothing(_queues: Sequence[str]) -> Found:
    return Found((), _GUARD)


def test_one_poll_is_for_the_queues_of_all_waiting_consumers() -> None:
    poller = _poller()
    polled: list[list[str]] = []
    has_work = threading.Event()

    def poll(queues: Sequence[str]) -> Found:
        polled.append(sorted(queues))
        return Found({"b"} if has_work.is_set() else (), _GUARD)

    def never(_queues: Sequence[str]) -> Found:
        raise AssertionError("another consumer polls already")

    one = _asleep(poller, ["a"], poll)
    two = _asleep(poller, ["b", "c"], never)
    _until(lambda: ["a", "b", "c"] in polled)
    # A job in the other consumer's queue wakes that consumer. The first consumer continues to wait.
    has_work.set()
    two.join(_GUARD)
    assert not two.is_alive()
    assert one.is_alive()
    poller.notify()
    one.join(_GUARD)
    assert not one.is_alive()


def test_another_consumer_takes_over_when_the_polling_one_leaves() -> None:
    poller = _poller()
    leave = threading.Event()

    def failing(_queues: Sequence[str]) -> Found:
        leave.wait(_GUARD)
        raise RuntimeError

    def first() -> None:
        with pytest.raises(RuntimeError):
            poller.sleep(["a"], 0, time.monotonic() + _GUARD, failing)

    thread = threading.Thread(target=first)
    thread.start()
    _until(lambda: poller.waiting)
    other = _asleep(poller, ["b"], _nothing)
    leave.set()
    thread.join(_GUARD)
    other.join(_GUARD)  # The wait returns, so its caller waits again, and polls.
    assert not other.is_alive()
    polls = iter([Found((), 0.0), Found({"b"}, 0.0)])
    poller.sleep(["b"], 0, time.monotonic() + _GUARD, lambda _: next(polls))
    assert next(polls, None) is None


def test_notification_before_the_wait_is_not_missed() -> None:
    poller = _poller()
    seen = poller.notifications
    poller.notify()
    poller.sleep(["q"], seen, time.monotonic() + _GUARD, _never_called)


def _never_called(_queues: Sequence[str]) -> Found:
    raise AssertionError("polled")


def test_wait_ends_in_time() -> None:
    poller = _poller(pause=0.02)
    until = time.monotonic() + 0.05
    poller.sleep(["q"], 0, until, _nothing)
    assert time.monotonic() >= until
    assert poller.waiting == 0


def test_poll_is_made_when_time_may_have_brought_a_job() -> None:
    poller = _poller(pause=_GUARD)
    poller.pause.first = 0.001  # the first poll comes at once, and returns that a job is due soon
    polls = iter([Found((), 0.001), Found({"q"}, _GUARD)])

    def poll(_queues: Sequence[str]) -> Found:
        poller.pause.first = _GUARD
        return next(polls)

    started = time.monotonic()
    poller.sleep(["q"], 0, started + 2 * _GUARD, poll)
    assert next(polls, None) is None
    assert time.monotonic() - started < _GUARD


def test_a_consumer_without_queues_does_not_wait_for_changes_of_queues_that_nobody_awaits_any_more() -> None:
    class Counted(PollPause):
        count = 0

        def next(self) -> float:
            self.count += 1
            return super().next()

    # Given a consumer that polls for another one, without queues of its own
    pause = Counted(first=0.02, longest=0.02, growth=0.0)
    poller = SharedPoller(pause)
    polled = threading.Event()

    def poll(_queues: Sequence[str]) -> Found:
        polled.set()
        return Found({"a"}, 1e-6)  # the other consumer leaves, and a change in its queue is near

    one = threading.Thread(target=poller.sleep, args=([], 0, time.monotonic() + 0.5, poll))
    one.start()
    _until(lambda: pause.count)
    other = _asleep(poller, ["a"], _never_called)
    assert polled.wait(_GUARD)
    other.join(_GUARD)
    # When it waits on, then it pauses between two looks
    one.join(_GUARD)
    assert pause.count < 100
