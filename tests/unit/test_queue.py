"""A queue without tasks: bodies of JSON or bytes, reserving, and management."""

from __future__ import annotations

import datetime as dt
import gc
import os
import queue as stdlib_queue
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import multiq
from multiq import (
    ArgumentsInvalid,
    BackendTimeout,
    BackendUnavailable,
    JobNotFound,
    NameInvalid,
    OptionInvalid,
    PayloadInvalid,
    PayloadTooLarge,
    QueueEmpty,
    State,
    Unsupported,
)
from multiq.backend.memory import MemoryBackend
from multiq.uncertain_enqueue import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from multiq import Queue
    from multiq.backend import NewJob


@pytest.fixture
def app() -> Iterator[multiq.App]:
    with multiq.App("memory://") as app:
        yield app


@pytest.fixture
def queue(app: multiq.App) -> Queue:
    return app.queue("q")


# --- producing ---


@pytest.mark.parametrize(
    "body", [None, 0, "", "text", [], {}, {"a": [1, {"b": None}]}, b"", b"\xff", b"x" * 10_000_000]
)
def test_a_body_comes_back_as_it_went_in(queue: Queue, body: Any) -> None:
    queue.enqueue(body)
    assert queue.reserve().body == body


def test_bytes_are_enqueued_unchanged(queue: Queue) -> None:
    queue.enqueue(b'{"a": 1}')
    assert queue.reserve().raw == b'{"a": 1}'


def test_options_arrive_with_the_job(queue: Queue) -> None:
    info = queue.enqueue("x", delay=dt.timedelta(hours=1), priority=3, ttr=120).peek()
    assert (info.priority, info.ttr, info.state) == (3, 120.0, State.DELAYED)
    later = queue.enqueue("x", at=dt.datetime.now(dt.UTC) + dt.timedelta(hours=2)).peek()
    assert later.due_in is not None
    assert 7000 < later.due_in <= 7200


def test_many_bodies_are_enqueued_together_and_keep_their_order(queue: Queue) -> None:
    handles = queue.enqueue_many(({"n": number} for number in range(100)), priority=5)
    jobs = queue.reserve_many(1000)
    assert [job.body["n"] for job in jobs] == list(range(100))
    assert [job.id for job in jobs] == [handle.id for handle in handles]
    assert {job.priority for job in jobs} == {5}


def test_enqueue_many_of_nothing_returns_nothing(queue: Queue) -> None:
    assert queue.enqueue_many([]) == []
    assert queue.stats().ready == 0


@pytest.mark.parametrize("body", ["abc", b"abc", {"a": 1}])
def test_one_body_where_a_list_belongs_is_refused(queue: Queue, body: Any) -> None:
    with pytest.raises(ArgumentsInvalid, match="enqueue_many must have a list of bodies, got"):
        queue.enqueue_many(body)


def test_one_wrong_body_refuses_the_whole_call(queue: Queue) -> None:
    with pytest.raises(PayloadInvalid, match="value is of type set"):
        queue.enqueue_many([1, {2}, 3])
    assert queue.stats().ready == 0


def test_json_has_a_limit_that_the_settings_set() -> None:
    with multiq.App("memory://", settings=multiq.Settings(max_body=100)) as app:
        with pytest.raises(PayloadTooLarge, match="a body of 102 bytes is over the limit of 100 bytes"):
            app.queue().enqueue("x" * 100)
        app.queue().enqueue("x" * 98)


@pytest.mark.parametrize(
    "wrong",
    [{"delay": -1}, {"priority": -1}, {"ttr": 0}, {"at": dt.datetime(2035, 1, 1)}, {"delay": "soon"}],  # noqa: DTZ001
)
def test_a_wrong_option_is_refused_before_anything_is_stored(queue: Queue, wrong: Any) -> None:
    for enqueue in (queue.enqueue, queue.enqueue_many):
        with pytest.raises(OptionInvalid):
            enqueue(["x"], **wrong)
    assert queue.stats().ready == 0


def test_a_transaction_of_the_caller_s_is_refused_where_there_is_none_to_join(queue: Queue) -> None:
    with pytest.raises(
        Unsupported, match=r"the memory backend does not support transactional_enqueue \(never: .*sqlite"
    ):
        queue.enqueue("x", connection=object())
    assert queue.stats().ready == 0


@pytest.mark.parametrize("name", ["", "a b", "ä", "a\r\nb", "-a", ".a", "a" * 129, "a/b", "a\x00", None, 7])
def test_a_name_that_some_backend_could_not_take_is_refused_everywhere(app: multiq.App, name: Any) -> None:
    with pytest.raises(NameInvalid, match="a queue name must have"):
        app.queue(name)


# --- a backend that drops connections ---


class Dropping(MemoryBackend):
    """Takes the jobs and then drops the connection, *drops* times."""

    def __init__(self, drops: int, error: type[BackendUnavailable] = BackendUnavailable) -> None:
        super().__init__()
        self.drops = drops
        self.error = error
        self.calls = 0

    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
        self.calls += 1
        ids = super().enqueue(queue, jobs)
        if self.calls <= self.drops:
            raise self.error("the reply was lost")
        return ids


def on(backend: MemoryBackend) -> Queue:
    app = multiq.App("memory://")
    app._backend = backend
    return app.queue("q")


def test_an_enqueue_whose_reply_was_lost_is_repeated_and_adds_nothing_twice() -> None:
    backend = Dropping(drops=2)
    handles = on(backend).enqueue_many([1, 2, 3])
    assert backend.calls == 3
    assert [job.id for job in on(backend).reserve_many(10)] == [handle.id for handle in handles]


def test_an_enqueue_gives_up_after_a_while() -> None:
    backend = Dropping(drops=1000)
    with pytest.raises(BackendUnavailable, match="the reply was lost"):
        on(backend).enqueue(1)
    assert 3 < backend.calls < 20  # with growing pauses
    assert PATIENCE <= 2


def test_an_enqueue_that_ran_into_its_deadline_is_not_repeated() -> None:
    backend = Dropping(drops=1, error=BackendTimeout)
    with pytest.raises(BackendTimeout):
        on(backend).enqueue(1)
    assert backend.calls == 1


# --- consuming ---


def test_an_empty_queue_says_so_at_once_or_after_the_timeout(queue: Queue) -> None:
    with pytest.raises(QueueEmpty, match=r"queue 'q' had no due job within 0 s"):
        queue.reserve()
    with pytest.raises(stdlib_queue.Empty):
        queue.reserve(timeout=0.05)
    assert queue.reserve_many(10) == []


def test_a_waiting_reserve_wakes_for_a_job(queue: Queue) -> None:
    threading.Timer(0.05, queue.enqueue, ["late"]).start()
    assert queue.reserve(timeout=30).body == "late"


@pytest.mark.parametrize("wrong", [{"limit": 0}, {"limit": -1}, {"limit": 2.5}, {"limit": 1, "timeout": -1}])
def test_a_wrong_limit_or_timeout_is_refused(queue: Queue, wrong: Any) -> None:
    with pytest.raises(OptionInvalid):
        queue.reserve_many(**wrong)


def test_threads_share_a_queue_and_get_no_job_twice(queue: Queue) -> None:
    queue.enqueue_many(range(500))
    taken: list[int] = []

    def drain() -> None:
        while jobs := queue.reserve_many(7):
            for job in jobs:
                taken.append(job.body)
                job.ack()

    threads = [threading.Thread(target=drain) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(taken) == list(range(500))


def test_a_thread_s_connection_ends_with_the_thread(app: multiq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a count of the connections that were closed
    queue, closed = app.queue("q"), []
    made: list[weakref.ref[object]] = []
    make = app.backend.consumer

    def counted(queues: Sequence[str]) -> Any:
        consumer: Any = make(queues)
        consumer.close = lambda: closed.append(1)
        made.append(weakref.ref(consumer))
        return consumer

    monkeypatch.setattr(app.backend, "consumer", counted)
    # When some threads reserve and end
    for _ in range(5):
        thread = threading.Thread(target=queue.reserve_many, args=(1,))
        thread.start()
        thread.join(30)
    # Then their connections are closed, although the app is still open
    gc.collect()
    assert len(made) == len(closed) == 5
    assert [consumer() for consumer in made] == [None] * 5


def test_a_job_keeps_its_connection_though_its_thread_has_ended(queue: Queue) -> None:
    handle = queue.enqueue("x")
    jobs: list[multiq.Job] = []
    thread = threading.Thread(target=lambda: jobs.append(queue.reserve()))
    thread.start()
    thread.join(30)
    gc.collect()
    jobs[0].ack()
    assert handle.state() is State.GONE


def test_a_forked_child_reserves_on_a_connection_of_its_own(tmp_path: Any) -> None:
    with multiq.App(f"sqlite:///{tmp_path}/q.db") as app:
        queue = app.queue("q")
        queue.enqueue_many(range(4))
        queue.reserve().ack()
        pid = os.fork()
        if pid == 0:
            queue.reserve().ack()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        queue.reserve().ack()
        assert queue.stats().ready == 1


def test_a_closed_app_can_be_used_again(tmp_path: Any) -> None:
    app = multiq.App(f"sqlite:///{tmp_path}/q.db")
    queue = app.queue("q")
    for number in range(3):
        queue.enqueue(number)
        assert queue.reserve().body == number
        app.close()


# --- managing ---


def test_stats_count_the_jobs_of_each_state(queue: Queue) -> None:
    queue.enqueue_many([1, 2, 3, 4])
    queue.enqueue(5, delay=60)
    queue.reserve()
    queue.reserve().bury("why")
    stats = queue.stats()
    assert (stats.queue, stats.ready, stats.delayed, stats.reserved, stats.buried) == ("q", 2, 1, 1, 1)
    assert stats.paused_for is None


def test_listings_come_in_pages(queue: Queue) -> None:
    queue.enqueue_many(range(7))
    first = queue.jobs("ready", limit=3)
    assert ([info.value for info in first], len(first)) == ([0, 1, 2], 3)
    second = queue.jobs("ready", limit=3, after=first.after)
    third = queue.jobs("ready", limit=3, after=second.after)
    assert [info.value for info in second] + [info.value for info in third] == [3, 4, 5, 6]
    assert third.after is None


def test_kick_brings_back_the_longest_buried_and_no_more_than_asked_for(queue: Queue) -> None:
    queue.enqueue_many(range(3))
    for _ in range(3):
        queue.reserve().bury()
    assert queue.kick() == 1
    assert queue.reserve().body == 0
    assert queue.kick(10) == 2


def test_one_job_is_kicked_rescheduled_or_deleted_by_its_id(queue: Queue) -> None:
    job_id = queue.enqueue("x", delay=60).id
    queue.kick_job(job_id)
    assert queue.peek(job_id).state is State.READY
    assert queue.reschedule(job_id, 60).id == job_id
    assert queue.peek(job_id).state is State.DELAYED
    queue.delete(job_id)
    for verb in (queue.peek, queue.delete, queue.kick_job, queue.reschedule):
        with pytest.raises(JobNotFound):
            verb(job_id)


@pytest.mark.parametrize("job_id", ["", "\ud800", "a\nb", None, 17])
def test_an_invalid_id_is_refused_before_the_store_is_asked(queue: Queue, job_id: Any) -> None:
    for verb in (queue.peek, queue.delete, queue.kick_job, queue.reschedule):
        with pytest.raises(OptionInvalid, match="a job's id must be the text"):
            verb(job_id)


def test_a_paused_queue_hands_nothing_out_until_it_is_resumed(queue: Queue) -> None:
    queue.enqueue("x")
    queue.pause(60)
    assert queue.reserve_many(1) == []
    paused_for = queue.stats().paused_for
    assert paused_for is not None
    assert 59 < paused_for <= 60
    queue.resume()
    assert queue.reserve().body == "x"


def test_purge_deletes_all_but_what_runs_or_the_given_states(queue: Queue) -> None:
    queue.enqueue_many([1, 2, 3])
    queue.enqueue(4, delay=60)
    queue.reserve()
    assert queue.purge("delayed") == 1
    assert queue.purge() == 2
    assert queue.stats().reserved == 1
    with pytest.raises(OptionInvalid, match=r"a job's state must be one of .*, got 'gone'"):
        queue.purge(["ready", "gone"])


# --- all together ---


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30))
def test_jobs_come_by_priority_then_age_and_none_is_missing(wanted: list[tuple[int, bool]]) -> None:
    with multiq.App("memory://") as app:
        queue = app.queue("q")
        for number, (priority, is_delayed) in enumerate(wanted):
            queue.enqueue(number, priority=priority, delay=0.001 if is_delayed else 0)
        time.sleep(0.005)
        seen = [job.body for job in queue.reserve_many(100)]
        assert seen == sorted(range(len(wanted)), key=lambda number: (wanted[number][0], number))


def test_a_cursor_that_is_not_text_is_refused() -> None:
    with pytest.raises(OptionInvalid, match="after must be the cursor"):
        multiq.App("memory://").queue().jobs("ready", after=3)  # type: ignore[arg-type]
