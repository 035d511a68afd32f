"""Reserved jobs, handles of enqueued jobs, and records of listed jobs."""

from __future__ import annotations

import contextlib
import datetime as dt
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

import multiq
from multiq import JobNotFound, JobReserved, JobSettled, LeaseLost, OptionInvalid, State
from multiq.backend import PRIORITY_MAX
from multiq.backend.memory import MemoryBackend
from multiq.driverkit.clock import ManualClock
from multiq.job import describe
from multiq.validation import REASON_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from multiq import Queue


@pytest.fixture
def queue() -> Iterator[Queue]:
    with multiq.App("memory://") as app:
        yield app.queue("q")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def timed_queue(clock: ManualClock) -> Queue:
    """A queue with a clock that the test moves."""
    app = multiq.App("memory://")
    app._backend = MemoryBackend(clock=clock)
    return app.queue("q")


# --- a reserved job ---


def test_leaving_the_block_acks(queue: Queue) -> None:
    handle = queue.enqueue("work")
    with queue.reserve() as job:
        assert (job.body, job.attempt, job.crashes, job.queue, job.id) == ("work", 1, 0, "q", handle.id)
        assert handle.state() is State.RESERVED
    assert handle.state() is State.GONE


def test_an_exception_releases_with_a_backoff_and_goes_on(queue: Queue) -> None:
    handle = queue.enqueue("work")
    with pytest.raises(ZeroDivisionError), queue.reserve():
        _ = 1 / 0
    info = handle.peek()
    assert info.state is State.DELAYED
    assert info.reason == "ZeroDivisionError: division by zero"
    assert info.due_in is not None
    assert 0 < info.due_in <= 1


def test_being_interrupted_releases_too(queue: Queue) -> None:
    handle = queue.enqueue("work")
    with pytest.raises(KeyboardInterrupt), queue.reserve():
        raise KeyboardInterrupt
    assert handle.state() is State.DELAYED


def test_a_job_that_was_settled_in_the_block_is_left_alone(queue: Queue) -> None:
    handle = queue.enqueue("work")
    with queue.reserve() as job:
        job.bury("broken beyond repair")
    assert handle.peek().reason == "broken beyond repair"
    queue.kick()
    with contextlib.suppress(RuntimeError), queue.reserve() as job:
        job.release(delay=60)
        raise RuntimeError
    assert handle.state() is State.DELAYED


def test_a_lost_lease_is_raised_when_the_block_ends(timed_queue: Queue, clock: ManualClock) -> None:
    timed_queue.enqueue("work", ttr=10)
    with pytest.raises(LeaseLost, match=r"the lease of job .* of queue 'q' has ended"), timed_queue.reserve():
        clock.advance(11)


def test_the_error_of_the_block_comes_first_and_carries_what_else_went_wrong(
    timed_queue: Queue, clock: ManualClock
) -> None:
    def outlast_the_lease() -> None:
        clock.advance(11)
        raise ZeroDivisionError

    timed_queue.enqueue("work", ttr=10)
    with pytest.raises(ZeroDivisionError) as raised, timed_queue.reserve():
        outlast_the_lease()
    (note,) = raised.value.__notes__
    assert note.startswith("and the job could not be released: the lease of job")


def test_a_touch_keeps_the_lease(timed_queue: Queue, clock: ManualClock) -> None:
    timed_queue.enqueue("work", ttr=10)
    with timed_queue.reserve() as job:
        for _ in range(3):
            clock.advance(9)
            job.touch()


def test_a_job_whose_lease_ended_is_handed_out_again_and_its_crash_counted(
    timed_queue: Queue, clock: ManualClock
) -> None:
    timed_queue.enqueue("work", ttr=10)
    timed_queue.reserve()
    clock.advance(11)
    job = timed_queue.reserve()
    assert (job.attempt, job.crashes, job.age) == (2, 1, 11.0)


@pytest.mark.parametrize(
    "settle",
    [
        lambda job: job.ack(),
        lambda job: job.release(),
        lambda job: job.bury(),
        lambda job: job.touch(),
    ],
)
def test_a_job_takes_one_verdict(queue: Queue, settle: Callable[[multiq.Job], None]) -> None:
    queue.enqueue("work")
    job = queue.reserve()
    job.ack()
    with pytest.raises(JobSettled, match="was settled already: a reservation takes one verdict"):
        settle(job)


def test_a_touch_is_not_a_verdict(queue: Queue) -> None:
    queue.enqueue("work")
    job = queue.reserve()
    job.touch()
    job.touch()
    job.ack()


def test_release_takes_a_delay_a_priority_and_a_reason(queue: Queue) -> None:
    handle = queue.enqueue("work", priority=5)
    queue.reserve().release(dt.timedelta(minutes=1), priority=9, reason="later")
    info = handle.peek()
    assert (info.state, info.priority, info.reason, info.attempt) == (State.DELAYED, 9, "later", 1)
    handle.reschedule(delay=0)
    queue.reserve().release()
    assert (handle.state(), handle.peek().priority) == (State.READY, 9)


@pytest.mark.parametrize("wrong", [{"delay": -1}, {"priority": PRIORITY_MAX + 1}, {"delay": "soon"}])
def test_a_verdict_with_a_wrong_option_changes_nothing(queue: Queue, wrong: Any) -> None:
    handle = queue.enqueue("work")
    job = queue.reserve()
    with pytest.raises(OptionInvalid):
        job.release(**wrong)
    assert handle.state() is State.RESERVED
    job.ack()


def test_a_body_is_decoded_and_its_bytes_are_there_too(queue: Queue) -> None:
    for body in ({"a": [1]}, b"\xff\x00", b'{"b": 2}'):
        queue.enqueue(body)
    first, second, third = queue.reserve_many(3)
    assert (first.body, first.raw) == ({"a": [1]}, b'{"a":[1]}')
    assert (second.body, second.raw) == (b"\xff\x00", b"\xff\x00")
    assert (third.body, third.raw) == ({"b": 2}, b'{"b": 2}')


def test_a_job_can_be_settled_by_another_thread(queue: Queue) -> None:
    handles = queue.enqueue_many(range(50))
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda job: job.ack(), queue.reserve_many(50)))
    assert {handle.state() for handle in handles} == {State.GONE}


def test_a_job_can_be_settled_while_the_thread_that_reserved_it_waits_for_the_next(queue: Queue) -> None:
    # Given a thread that reserved a job and waits for another one
    queue.enqueue("first")
    jobs: list[multiq.Job] = []

    def reserve_two() -> None:
        jobs.append(queue.reserve(timeout=30))
        jobs.append(queue.reserve(timeout=30))

    waiting = threading.Thread(target=reserve_two)
    waiting.start()
    while not jobs:
        pass
    # When another thread acks the first job, then the ack does not wait for the reserve
    jobs[0].ack()
    assert len(jobs) == 1
    assert queue.stats().reserved == 0
    # And the first thread still waits
    queue.enqueue("second")
    waiting.join(30)
    assert jobs[1].body == "second"


def test_a_job_shows_what_it_is(queue: Queue) -> None:
    handle = queue.enqueue("secret")
    job = queue.reserve()
    assert repr(job) == f"Job(queue='q', id='{handle.id}', attempt=1)"
    assert repr(handle) == f"JobHandle(queue='q', id='{handle.id}')"


# --- a handle ---


def test_a_handle_returns_the_state_of_its_job(queue: Queue) -> None:
    handle = queue.enqueue("work", delay=60)
    assert handle.state() is State.DELAYED
    handle.reschedule(delay=0)
    assert handle.state() is State.READY
    job = queue.reserve()
    assert handle.state() is State.RESERVED
    job.bury()
    assert handle.state() is State.BURIED
    handle.cancel()
    assert handle.state() is State.GONE


def test_a_running_job_is_neither_deleted_nor_rescheduled(queue: Queue) -> None:
    handle = queue.enqueue("work")
    job = queue.reserve()
    with pytest.raises(JobReserved, match="is being run right now: wait until it is settled"):
        queue.delete(handle.id)
    with pytest.raises(JobReserved):
        handle.reschedule(delay=5)
    job.ack()
    for verb in (handle.cancel, handle.reschedule, handle.peek):
        with pytest.raises(JobNotFound, match="it is done, was deleted, or was never there"):
            verb()


def test_a_job_is_rescheduled_to_a_delay_or_a_point_in_time(queue: Queue) -> None:
    handle = queue.enqueue("work", delay=3600)
    handle.reschedule(at=dt.datetime.now(dt.UTC) + dt.timedelta(minutes=1))
    due_in = handle.peek().due_in
    assert due_in is not None
    assert 50 < due_in <= 60
    with pytest.raises(OptionInvalid, match="must not both be given"):
        handle.reschedule(1, at=dt.datetime.now(dt.UTC))


def test_handles_are_equal_by_queue_and_id(queue: Queue) -> None:
    one, other = queue.enqueue(1), queue.enqueue(2)
    assert one == queue.reschedule(one.id, 5)
    assert len({one, other, queue.reschedule(one.id, 6)}) == 2
    assert one != other
    assert one != one.id


# --- records of jobs ---


def test_peek_returns_everything_and_changes_nothing(queue: Queue) -> None:
    handle = queue.enqueue({"n": 1}, priority=7, ttr=90, delay=60)
    for _ in range(2):
        info = handle.peek()
        assert (info.queue, info.id, info.state, info.value) == ("q", handle.id, State.DELAYED, {"n": 1})
        assert (info.priority, info.ttr, info.attempt, info.crashes, info.kicks) == (7, 90.0, 0, 0, 0)
        assert (info.reason, info.body, info.task) == (None, b'{"n":1}', None)
        assert info.due_in is not None
        assert info.age is not None
        assert 59 < info.due_in <= 60
        assert 0 <= info.age < 30


@pytest.mark.parametrize(
    ("body", "task"),
    [
        (b'{"multiq":1,"task":"mail.reset"}', "mail.reset"),
        (b'{"multiq":9,"task":"from.the.future"}', "from.the.future"),
        (b'{"task":"no mark"}', None),
        (b'{"multiq":1,"task":7}', None),
        (b"[]", None),
        (b"\xff", None),
    ],
)
def test_the_task_of_a_job_is_known_if_it_is_one(queue: Queue, body: bytes, task: str | None) -> None:
    assert queue.enqueue(body).peek().task == task


# --- the current job, and describing errors ---


def test_current_job_raises_outside_of_a_task() -> None:
    with pytest.raises(LookupError, match="no multiq job runs here"):
        multiq.current_job()


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no"), "ValueError: no"),
        (ValueError(), "ValueError"),
        (KeyError("a"), "KeyError: 'a'"),
        (SystemExit(3), "SystemExit: 3"),
        (ValueError("broken \ud800"), "ValueError: broken ?"),
        (Mute(), "Mute: (its message could not be made)"),
    ],
)
def test_an_error_is_described_by_its_kind_and_message(error: BaseException, text: str) -> None:
    assert describe(error) == text


def test_a_long_error_is_cut() -> None:
    assert len(describe(ValueError("x" * 10_000))) == REASON_MAX
