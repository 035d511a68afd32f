"""A pair beyond the contract: held jobs under all verbs, what goes to the server and what to the store, and what plain
jobs cost."""

from __future__ import annotations

import datetime as dt
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from servers.beanstalk import BeanstalkServer
from servers.process import until
from servers.redis import RedisServer

import multiq
from multiq.backend import (
    MAX_STEPS,
    Ack,
    After,
    Arrive,
    Bury,
    Drop,
    Enqueue,
    GiveBack,
    NewJob,
    Put,
    Release,
    State,
    Terms,
    Touch,
)
from multiq.backend.memory import MemoryBackend
from multiq.backend.paired import consumer as consumer_module
from multiq.backend.paired.backend import Paired, paired_class
from multiq.backend.paired.layout import stored_step
from multiq.backend.registry import load_driver, open_backend
from multiq.cancellation import requests, withdraw
from multiq.control.flags import DOWN, RESTART, Control
from multiq.envelope import decode_envelope
from multiq.errors import (
    BackendCorrupt,
    BackendUnavailable,
    JobHeld,
    JobNotFound,
    NameInvalid,
    OptionInvalid,
    Unsupported,
)
from multiq.fault_proxy import Latency, Proxy
from multiq.schedules import Scheduler
from multiq.settings.url import with_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from multiq.backend import Consumer, Verdict

QUEUE = "default"


class CountingStore(MemoryBackend):
    """A memory backend that counts its calls, and can be unreachable."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.is_down = False
        self.silence = 0.0  # seconds before a call fails

    def __getattribute__(self, name: str) -> Any:
        if name in {"enqueue", "consumer", "note", "notes", "carry_out", "outcomes", "peek", "stats", "relay"}:
            self.calls.append(name)
            if self.is_down:
                time.sleep(self.silence)
                raise BackendUnavailable("the store is down")
        return super().__getattribute__(name)


@pytest.fixture(scope="module")
def server() -> Iterator[BeanstalkServer]:
    with BeanstalkServer() as server:
        yield server


@pytest.fixture
def store() -> CountingStore:
    return CountingStore()


@pytest.fixture
def pair(server: BeanstalkServer, store: CountingStore) -> Iterator[Paired]:
    with paired_class(load_driver("beanstalk"), MemoryBackend)(open_backend(server.url), store) as pair:
        yield pair
        pair.purge(QUEUE, [State.READY, State.DELAYED, State.BURIED, State.HELD])
        assert pair.queues() == []


@pytest.fixture
def app(pair: Paired) -> Iterator[multiq.App]:
    with multiq.App(backend=pair) as app:
        yield app


def at_of(headers: dict[str, str]) -> float:
    """The time of a schedule's job."""
    return dt.datetime.fromisoformat(headers["multiq-occurrence"]).timestamp()


def _held(job_id: str = "held", awaits: int = 1, **options: float) -> NewJob:
    return NewJob(job_id.encode(), job_id, terms=Terms(awaits), **options)  # type: ignore[arg-type]


def test_a_plain_job_makes_no_call_of_the_store(pair: Paired, store: CountingStore) -> None:
    # Given a consumer that has looked for released jobs, as each one does every five seconds
    with pair.consumer([QUEUE]) as consumer:
        assert consumer.reserve(1, 0) == []
        store.calls.clear()
        # When a job is enqueued, reserved, touched and acked
        (number,) = pair.enqueue(QUEUE, [NewJob(b"plain", "ignored")])
        (lease,) = consumer.reserve(1, 0)
        assert consumer.settle([Touch(lease)]) == [None]
        assert consumer.exchange([Ack(lease)], 1, 0) == ([None], [])
    # Then the job went to the server unchanged, and the store was not called
    assert (lease.id, lease.body) == (number, b"plain")
    assert store.calls == []


def test_plain_jobs_run_while_the_store_is_down(pair: Paired, store: CountingStore) -> None:
    pair.enqueue(QUEUE, [NewJob(b"plain", "any")])
    store.is_down = True
    with pair.consumer([QUEUE]) as consumer:
        (lease,) = consumer.reserve(1, 0)
        assert consumer.settle([Ack(lease)]) == [None]
    store.is_down = False


def test_a_job_whose_outcome_cannot_be_stored_is_not_deleted(pair: Paired, store: CountingStore) -> None:
    (number,) = pair.enqueue(QUEUE, [NewJob(b"kept", "any")])
    with pair.consumer([QUEUE]) as consumer:
        (lease,) = consumer.reserve(1, 0)
        ack = Ack(lease, After(keep=60, outcome=b"value"))
        store.is_down = True
        with pytest.raises(BackendUnavailable, match="the store is down"):
            consumer.settle([ack])
        store.is_down = False
        assert pair.peek(QUEUE, number).state is State.RESERVED
        assert consumer.settle([ack]) == [None]
    (outcome,) = pair.outcomes(QUEUE, [number])
    assert outcome is not None
    assert outcome.body == b"value"


def test_a_tracked_job_is_put_off_while_the_store_is_down_and_others_run(pair: Paired, store: CountingStore) -> None:
    # Given a job of a step, and a plain job behind it
    assert pair.carry_out([Enqueue(QUEUE, NewJob(b"step", "step"))])
    with pair.consumer([QUEUE]) as consumer:
        assert consumer.reserve(0, 0) == []
        # When the store is down
        store.is_down = True
        with pytest.raises(BackendUnavailable) as failure:
            consumer.reserve(1, 0)
        assert failure.value.is_partial
        # Then the job of the step waits for a while, and the plain job can run
        assert consumer.reserve(1, 0) == []
        pair.enqueue(QUEUE, [NewJob(b"plain", "any")])
        (plain,) = consumer.reserve(2, 0)
        assert (plain.body, consumer.settle([Ack(plain)])) == (b"plain", [None])
        # When the store is back, then the job of the step runs
        store.is_down = False
        (lease,) = consumer.reserve(1, 10)
        assert (lease.id, lease.attempt) == ("step", 2)
        assert consumer.settle([Ack(lease)]) == [None]


def test_a_consumer_that_could_not_look_into_the_store_does_not_see_all_jobs(
    pair: Paired, store: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a job that the store has released, and a store that is down
    monkeypatch.setattr(consumer_module, "_MOVE_EVERY", 0.0)
    pair.enqueue(QUEUE, [_held()])
    assert store.carry_out([Arrive("+default", "held", "someone")])
    store.is_down = True
    with pair.consumer([QUEUE]) as consumer:
        # When the consumer finds no job, then this does not show that no job is due
        assert (consumer.reserve(1, 0), consumer.sees_all) == ([], False)
        # When the store is back, then the consumer gets the job
        store.is_down = False
        (lease,) = consumer.reserve(1, 10)
        assert (lease.id, consumer.sees_all) == ("held", True)
        assert consumer.settle([Ack(lease)]) == [None]
        assert (consumer.reserve(1, 0), consumer.sees_all) == ([], True)


def test_a_consumer_that_has_put_a_job_off_does_not_see_all_jobs_until_it_is_due(
    pair: Paired, store: CountingStore
) -> None:
    # Given a job of a step, which is put off because the store is down
    assert pair.carry_out([Enqueue(QUEUE, NewJob(b"step", "step"))])
    with pair.consumer([QUEUE]) as consumer:
        assert (consumer.reserve(0, 0), consumer.sees_all) == ([], True)
        store.is_down = True
        with pytest.raises(BackendUnavailable):
            consumer.reserve(1, 0)
        # When the store is back, then the consumer does not see all jobs until it has got the job
        store.is_down = False
        assert (consumer.reserve(1, 0), consumer.sees_all) == ([], False)
        (lease,) = consumer.reserve(1, 10)
        assert lease.id == "step"
        assert consumer.settle([Ack(lease)]) == [None]
        until(lambda: consumer.sees_all, "the time of the job that was put off is over")


def test_a_plain_ack_does_not_wait_for_an_ack_that_the_store_must_keep(pair: Paired, store: CountingStore) -> None:
    # Given two reserved jobs, of which one keeps its outcome
    pair.enqueue(QUEUE, [NewJob(b"kept", "any"), NewJob(b"plain", "any")])
    with pair.consumer([QUEUE]) as consumer:
        kept, plain = consumer.reserve(2, 0)
        # When both are acked in one call while the store is down
        store.is_down = True
        with pytest.raises(BackendUnavailable) as failure:
            consumer.settle([Ack(kept, After(keep=60, outcome=b"value")), Ack(plain)])
        # Then the error says that the plain job is settled, and that job is gone
        assert (failure.value.is_partial, failure.value.settled) == (True, {plain.token: None})
        with pytest.raises(JobNotFound):
            pair.primary.peek(QUEUE, plain.id)
        # When the store is back, then the other job can be settled
        store.is_down = False
        assert consumer.settle([Ack(kept, After(keep=60, outcome=b"value"))]) == [None]
    (outcome,) = pair.outcomes(QUEUE, [kept.id])
    assert outcome is not None


def test_a_silent_store_is_spared_so_that_leases_are_touched_in_time(pair: Paired, store: CountingStore) -> None:
    # Given a store that is silent for a while before it fails
    pair.enqueue(QUEUE, [NewJob(b"kept", "any")])
    with pair.consumer([QUEUE]) as consumer:
        (kept,) = consumer.reserve(1, 0)
        verdict = Ack(kept, After(keep=60, outcome=b"value"))
        store.is_down, store.silence = True, 0.2
        with pytest.raises(BackendUnavailable):
            consumer.settle([verdict])
        # When the verdict is repeated at once, then the store is not called
        store.calls.clear()
        with pytest.raises(BackendUnavailable, match="the store is down"):
            consumer.settle([verdict])
        assert store.calls == []
        # And it is called again some time later
        store.is_down = False
        until(lambda: _is_settled(consumer, verdict), "the store is called again")


def _is_settled(consumer: Consumer, verdict: Verdict) -> bool:
    try:
        return consumer.settle([verdict]) == [None]
    except BackendUnavailable:
        return False


def test_a_server_that_hangs_does_not_stop_the_calls_of_the_store() -> None:
    with BeanstalkServer() as server:
        store = CountingStore()
        made: Any = paired_class(load_driver("beanstalk"), MemoryBackend)
        with made(open_backend(f"{server.url}?timeout=1"), store) as pair, pair.consumer([QUEUE]) as consumer:
            # Given a released job in the server, and one that another process has left in the store
            pair.carry_out([Enqueue(QUEUE, NewJob(b"tracked", "tracked"))])
            store.carry_out([stored_step(Enqueue(QUEUE, NewJob(b"left", "left")))])
            # When the server hangs while a consumer puts this job, and then answers again
            server.pause()
            with pytest.raises(BackendUnavailable):
                consumer.reserve(1, 0)
            server.go_on()
            until(server.answers, "the server answers")
            # Then the next jobs are looked up in the store, and none of them is put off
            assert "tracked" in {lease.id for lease in consumer.reserve(2, 5)}


def test_the_verbs_tell_the_truth_about_held_jobs(pair: Paired, app: multiq.App) -> None:
    queue = app.queue()
    # Given held jobs beside a plain one
    pair.enqueue(QUEUE, [_held("a"), _held("b", delay=100.0), _held("c", 2), _held("d")])
    plain = queue.enqueue(1)
    # Then all methods find the held jobs
    stats = queue.stats()
    assert (stats.ready, stats.held) == (1, 4)
    assert [job.id for job in queue.jobs("held")] == ["a", "b", "c", "d"]
    assert (queue.peek("c").awaits, queue.peek("c").body, queue.peek("c").ttr) == (2, b"c", 60.0)
    assert pair.queues() == [QUEUE]
    with pytest.raises(JobHeld):
        queue.reschedule("a", 5)
    # When one held job is kicked, one is deleted, and one is released by an arrival
    queue.kick_job("b")
    queue.delete("d")
    assert pair.carry_out([Arrive(QUEUE, "a", "x")])
    # Then the kicked job, without its delay, and the released job are ready in the server, under their ids
    assert [queue.peek(job_id).state for job_id in ("a", "b", "c")] == [State.READY, State.READY, State.HELD]
    assert (queue.stats().ready, queue.stats().held) == (3, 1)
    with pytest.raises(JobNotFound):
        queue.peek("d")
    queue.delete("b")
    with pytest.raises(JobNotFound):
        queue.kick_job("b")
    # And a purge deletes all held jobs
    assert queue.purge(["ready", "held"]) == 3
    assert queue.stats() == multiq.QueueStats(
        queue=QUEUE, ready=0, delayed=0, reserved=0, buried=0, paused_for=None, held=0
    )
    assert plain.status() == "unknown"


def test_a_tracked_job_keeps_its_id_when_it_is_rescheduled_buried_and_kicked(pair: Paired) -> None:
    assert pair.carry_out([Enqueue(QUEUE, NewJob(b"step", "step"))])
    assert pair.reschedule(QUEUE, "step", 50) == "step"
    assert pair.peek(QUEUE, "step").state is State.DELAYED
    pair.kick_job(QUEUE, "step")
    with pair.consumer([QUEUE]) as consumer:
        (lease,) = consumer.reserve(1, 0)
        assert (lease.id, lease.body) == ("step", b"step")
        bury = Bury(lease, "why", After(detail=b"where", memo=b"memo"))
        assert consumer.settle([bury]) == [None]
        record = pair.peek(QUEUE, "step")
        assert (record.state, record.reason, record.detail, record.memo) == (State.BURIED, "why", b"where", b"memo")
        assert pair.kick(QUEUE, 1) == 1
        (lease,) = consumer.reserve(1, 0)
        assert lease.memo == b"memo"
        assert consumer.settle([Ack(lease)]) == [None]


@pytest.mark.long
def test_a_job_is_not_lost_if_a_reschedule_takes_longer_than_the_delay(server: BeanstalkServer, pair: Paired) -> None:
    with Proxy(("127.0.0.1", server.port)) as proxy:
        made: Any = paired_class(load_driver("beanstalk"), MemoryBackend)
        far = made(open_backend(f"beanstalk://127.0.0.1:{proxy.port}?timeout=30"), pair.store)
        # Given a delayed job of a flow, a consumer, and a program with a slow network
        pair.carry_out([Enqueue(QUEUE, NewJob(b"tracked", "tracked", delay=300))])
        assert far.peek(QUEUE, "tracked").state is State.DELAYED
        proxy.mode = Latency(1.5)
        with pair.consumer([QUEUE]) as consumer:
            # When the new job is due before the program has deleted the old job
            rescheduling = threading.Thread(target=far.reschedule, args=(QUEUE, "tracked", 1))
            rescheduling.start()
            leases = []
            while rescheduling.is_alive():
                leases += consumer.reserve(1, 0.1)
            # Then the job runs once
            leases += consumer.reserve(1, 5)
            assert [lease.id for lease in leases] == ["tracked"]
            assert consumer.settle([Ack(lease) for lease in leases]) == [None]
        far.primary.close()


def test_an_enqueue_of_the_id_of_a_job_that_is_there_adds_none(pair: Paired) -> None:
    step = Enqueue(QUEUE, NewJob(b"step", "step"))
    assert pair.carry_out([step])
    assert pair.carry_out([step])
    with pair.consumer([QUEUE]) as consumer:
        assert pair.carry_out([step])
        leases = consumer.reserve(5, 0)
        assert [lease.id for lease in leases] == ["step"]
        # And a later job of the same id is another job
        assert consumer.settle([Ack(leases[0])]) == [None]
        assert pair.carry_out([step])
        (again,) = consumer.reserve(5, 0)
        assert consumer.settle([Ack(again)]) == [None]


def test_a_memo_and_a_reason_of_a_plain_job_are_gone_with_it(pair: Paired, store: CountingStore) -> None:
    (number,) = pair.enqueue(QUEUE, [NewJob(b"plain", "any")])
    with pair.consumer([QUEUE]) as consumer:
        (lease,) = consumer.reserve(1, 0)
        assert consumer.settle([Touch(lease, After(memo=b"one"))]) == [None]
        assert pair.peek(QUEUE, number).memo == b"one"
        assert consumer.settle([Release(lease, reason="again")]) == [None]
        assert pair.peek(QUEUE, number).reason == "again"
        (lease,) = consumer.reserve(1, 0)
        assert lease.memo == b"one"
        assert consumer.settle([GiveBack(lease, after=After(memo=b"two"))]) == [None]
        (lease,) = consumer.reserve(1, 0)
        assert lease.memo == b"two"
        assert consumer.settle([Ack(lease)]) == [None]
    assert store.notes(f"+{QUEUE}").notes == []


def test_a_consumer_keeps_nothing_of_the_jobs_that_it_has_settled(pair: Paired) -> None:
    # Given a job of a flow and a plain job
    pair.carry_out([Enqueue(QUEUE, NewJob(b"tracked", "tracked"))])
    pair.enqueue(QUEUE, [NewJob(b"plain", "ignored")])
    with pair.consumer([QUEUE]) as consumer:
        # When they fail for the same reason again, are given back, and are acked
        for _ in range(3):
            consumer.settle([Release(lease, reason="ValueError") for lease in consumer.reserve(2, 5)])
        for _ in range(3):
            consumer.exchange([GiveBack(lease) for lease in consumer.reserve(2, 5)], 0, 0)
        leases = consumer.reserve(2, 5)
        consumer.settle([Touch(lease, After(memo=b"memo")) for lease in leases])
        consumer.settle([verdict for lease in leases for verdict in (Touch(lease), Ack(lease))])
        # Then the consumer has no data about them
        assert len(leases) == 2
        assert consumer._runs == {}


def test_an_exchange_hands_out_the_jobs_behind_copies(pair: Paired) -> None:
    # Given a job of a flow that has ended, copies of it in the server, and a plain job behind them
    pair.carry_out([Enqueue(QUEUE, NewJob(b"tracked", "tracked"))])
    copy = pair.primary.jobs(QUEUE, State.READY).jobs[0].body
    with pair.consumer([QUEUE]) as consumer:
        (lease,) = consumer.reserve(1, 5)
        consumer.settle([Ack(lease)])
        pair.enqueue(QUEUE, [NewJob(b"first", "ignored")])
        (lease,) = consumer.reserve(1, 5)
        pair.primary.enqueue(QUEUE, [NewJob(copy, "ignored"), NewJob(copy, "ignored")])
        (number,) = pair.enqueue(QUEUE, [NewJob(b"behind", "ignored")])
        # When the consumer acks a job and asks for the next one
        answers, leases = consumer.exchange([Ack(lease)], 1, 0)
        # Then it gets the plain job
        assert (answers, [lease.id for lease in leases]) == ([None], [number])
        consumer.settle([Ack(lease) for lease in leases])


def test_a_purge_drops_what_the_store_knows_about_the_jobs(pair: Paired, store: CountingStore) -> None:
    pair.enqueue(QUEUE, [NewJob(b"plain", "any")])
    with pair.consumer([QUEUE]) as consumer:
        (lease,) = consumer.reserve(1, 0)
        assert consumer.settle([Bury(lease, "why", After(detail=b"x" * 100))]) == [None]
    assert len(store.notes(f"+{QUEUE}").notes) == 1
    assert pair.purge(QUEUE, [State.BURIED]) == 1
    assert store.notes(f"+{QUEUE}").notes == []


@pytest.mark.parametrize("body", [b"\x00multiq+", b"\x00multiq+\x00\x00x", b"\x00multiq+\x00\x05hello"])
def test_a_body_that_looks_like_the_pairs_own_comes_back_unchanged(pair: Paired, body: bytes) -> None:
    (number,) = pair.enqueue(QUEUE, [NewJob(body, "any")])
    assert pair.peek(QUEUE, number).body == body
    with pair.consumer([QUEUE]) as consumer:
        (lease,) = consumer.reserve(1, 0)
        assert (lease.id, lease.body) == (number, body)
        assert consumer.settle([Ack(lease)]) == [None]


def test_the_notes_of_a_program_are_apart_from_those_of_the_pair(pair: Paired) -> None:
    assert pair.carry_out([Put("home", key, key.encode()) for key in ("a", "~", "~j/x", "~~")])
    assert pair.carry_out([Enqueue("home", NewJob(b"step", "step"))])
    assert [note.key for note in pair.notes("home").notes] == ["a", "~", "~j/x", "~~"]
    page = pair.notes("home", "~", limit=2)
    assert [note.key for note in page.notes] == ["~", "~j/x"]
    assert [note.key for note in pair.notes("home", "~", after=page.after).notes] == ["~~"]
    pair.delete("home", "step")


def test_names_and_ids_that_a_pair_cannot_take_are_refused(pair: Paired) -> None:
    with pytest.raises(OptionInvalid, match="must not be a number on a backend with a store, got '17'"):
        pair.enqueue(QUEUE, [_held("17")])
    with pytest.raises(NameInvalid, match="must have at most 127 characters on a backend with a store, got 128"):
        pair.enqueue("q" * 128, [_held()])
    with pytest.raises(NameInvalid, match="must have at most 127 characters on a backend with a store, got 128"):
        pair.enqueue("q" * 128, [NewJob(b"plain", "ignored")])


def test_a_pair_refuses_what_its_server_lacks_with_its_own_name(pair: Paired) -> None:
    with pytest.raises(Unsupported) as refusal:
        raise pair.unsupported("client_ids")
    assert refusal.value.backend == "beanstalk+store"


def test_a_pause_of_a_schedule_deletes_its_jobs_in_the_server_and_those_on_the_way_to_it(
    app: multiq.App, pair: Paired, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given the jobs of two schedules: some are in the server, and some are not yet put to it
    @app.task(queue=QUEUE)
    def work() -> None: ...

    for name in "there", "coming":
        app.schedules.add(name, work.s(), every=1)
        with monkeypatch.context() as patch:
            if name == "coming":
                patch.setattr(pair._mover, "move", lambda _queues: None)
            Scheduler(app, ahead=3.0).look()
        # When the schedules are paused
        app.schedules.pause(name)
    ended = time.time()
    # Then no job of a later time is left
    pair.relay([QUEUE])
    headers = [decode_envelope(record.body).headers for record in pair.jobs(QUEUE, State.DELAYED).jobs]
    assert [header["multiq-schedule"] for header in headers if at_of(header) > ended] == []
    pair.purge(RESTART, [State.HELD])


def test_a_job_on_the_way_to_the_server_is_shown_with_its_delay(pair: Paired, store: CountingStore) -> None:
    store.carry_out([stored_step(Enqueue(QUEUE, NewJob(b"1", "late", delay=30.0)))])
    record = pair.peek(QUEUE, "late")
    assert (record.state, record.due_in) == (State.DELAYED, 30.0)
    pair.delete(QUEUE, "late")


def test_jobs_released_by_threads_at_once_are_each_put_once(pair: Paired) -> None:
    ids = [f"job-{at}" for at in range(60)]
    pair.enqueue(QUEUE, [_held(job_id) for job_id in ids])

    def release(some: list[str]) -> None:
        for job_id in some:
            assert pair.carry_out([Arrive(QUEUE, job_id, "x")])

    threads = [threading.Thread(target=release, args=(ids[at::4],)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pair.relay([QUEUE]) == 0
    with pair.consumer([QUEUE]) as consumer:
        leases = consumer.reserve(100, 0)
        assert sorted(lease.id for lease in leases) == sorted(ids)
        assert consumer.settle([Ack(lease) for lease in leases]) == [None] * len(ids)


def test_a_program_with_many_queues_has_few_connections_to_the_store(server: BeanstalkServer) -> None:
    # Given a store that has a connection for each consumer
    with RedisServer() as store, open_backend(with_store(server.url, store.url)) as pair:
        # When a program puts jobs to many queues
        names = [f"tenant-{number}" for number in range(100)]
        for name in names:
            pair.carry_out([Enqueue(name, NewJob(b"job", f"{name}.job"))])
        # Then it does not keep a connection for each queue, and all jobs are put
        with store.client() as client:
            assert client.info("clients")["connected_clients"] < len(names) / 2
        assert [pair.stats(name).ready for name in names] == [1] * len(names)
        for name in names:
            pair.purge(name, [State.READY])


def test_a_thread_does_not_wait_for_another_one_that_puts_jobs_to_a_hanging_server(store: CountingStore) -> None:
    with BeanstalkServer() as server:
        made: Any = paired_class(load_driver("beanstalk"), MemoryBackend)
        with made(open_backend(f"{server.url}?timeout=30"), store) as pair:
            assert pair.capabilities.max_body is not None  # the server's limit is known now
            # Given a server that hangs while a thread puts a job to it
            server.pause()
            first = threading.Thread(target=pair.carry_out, args=([Enqueue(QUEUE, NewJob(b"first", "first"))],))
            first.start()
            until(lambda: store.stats(f"+{QUEUE}").reserved == 1, "the thread puts the job")
            # When another thread enqueues a job
            assert pair.carry_out([Enqueue(QUEUE, NewJob(b"second", "second"))])
            # Then it does not wait for the first one
            assert first.is_alive()
            server.go_on()
            first.join()
            # And the next relay puts the job
            assert pair.relay([QUEUE]) == 0
            assert (pair.primary.stats(QUEUE).ready, store.queues()) == (2, [])


def test_a_queue_whose_jobs_cannot_be_put_does_not_stop_the_jobs_of_other_queues(pair: Paired) -> None:
    # Given a queue whose first job cannot be put, because its note in the store cannot be read
    pair.store.carry_out([Put("+broken", "~j/first", b"\xff")])
    steps = [stored_step(Enqueue(queue, NewJob(b"job", "first"))) for queue in ("broken", QUEUE)]
    pair.store.carry_out(steps)
    # When the jobs of two queues are put
    with pytest.raises(BackendCorrupt):
        pair.relay(["broken", QUEUE])
    # Then the job of the other queue is put
    assert pair.primary.stats(QUEUE).ready == 1
    pair.store.carry_out([Drop("+broken", "~j/first")])
    pair.purge("broken", [State.READY])


def test_the_doctor_checks_both_backends(server: BeanstalkServer, tmp_path: Path) -> None:
    # Given a pair whose store is not there yet
    url = with_store(server.url, f"sqlite:///{tmp_path}/store.db")
    with open_backend(url, create=False) as pair:
        found = {finding.what: finding for finding in pair.doctor()}
        # Then the doctor has checked the server, and reports the fault of the store
        assert found["-b"].level == "bad"
        assert f"no file {tmp_path}/store.db" in found["store: reachable"].why
    # When the store is there, and a released job cannot be put
    with open_backend(url) as pair:
        assert isinstance(pair, Paired)
        pair.store.enqueue(f"+{QUEUE}", [NewJob(b"another program's", "foreign")])
        assert pair.relay([QUEUE]) == 0
        found = {finding.what: finding for finding in pair.doctor()}
        assert found["store: synchronous"].level == "ok"
        assert found[f"store: queue {QUEUE}"].level == "bad"
        assert pair.stats(QUEUE).buried == 1
        (job,) = pair.jobs(QUEUE, State.BURIED).jobs
        assert (job.id, job.reason) == ("foreign", "it is not a job of a pair: another program has enqueued it here")
        assert pair.purge(QUEUE, [State.BURIED]) == 1


def test_an_ack_with_as_many_steps_as_there_may_be_carries_out_all(pair: Paired) -> None:
    # Given a tracked job, and a held one
    assert pair.carry_out([Enqueue(QUEUE, NewJob(b"step", "step"))])
    pair.enqueue(QUEUE, [_held(awaits=MAX_STEPS)])
    with pair.consumer([QUEUE]) as consumer:
        (lease,) = consumer.reserve(1, 0)
        # When its ack keeps an outcome, and has a thousand steps
        steps = tuple(Arrive(QUEUE, "held", str(at)) for at in range(MAX_STEPS))
        assert consumer.settle([Ack(lease, After(keep=60, steps=steps))]) == [None]
        # Then all members have arrived
        (released,) = consumer.reserve(1, 0)
        assert released.id == "held"
        assert consumer.settle([Ack(released)]) == [None]


def test_a_released_job_that_the_server_refuses_is_buried_and_can_be_kicked(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/store.db"
    with BeanstalkServer(max_job_size=3000) as small, open_backend(with_store(small.url, store)) as pair:
        # Given a held job that has become too large for the current server
        with BeanstalkServer() as large, open_backend(with_store(large.url, store)) as other:
            other.enqueue(QUEUE, [NewJob(b"x" * 4000, "large", terms=Terms(1)), _held()])
        # When it is released together with another job
        assert pair.carry_out([Arrive(QUEUE, "large", "a"), Arrive(QUEUE, "held", "a")])
        # Then the other job is put, and the large job is buried with the reason
        assert pair.peek(QUEUE, "held").state is State.READY
        record = pair.peek(QUEUE, "large")
        assert record.state is State.BURIED
        assert "is over the limit of 3,000 bytes" in (record.reason or "")
        # And a kick tries the put again
        assert pair.kick(QUEUE, 5) == 1
        assert pair.peek(QUEUE, "large").state is State.BURIED
        pair.delete(QUEUE, "large")
        pair.delete(QUEUE, "held")
        assert pair.queues() == []


def test_the_doctor_calls_a_store_in_memory_bad(pair: Paired) -> None:
    assert {finding.level for finding in pair.doctor() if finding.what == "store"} == {"bad"}


def test_a_forked_child_uses_both_backends(server: BeanstalkServer, tmp_path: Path) -> None:
    with open_backend(with_store(server.url, f"sqlite:///{tmp_path}/store.db")) as pair:
        assert pair.carry_out([Enqueue(QUEUE, NewJob(b"parent", "parent"))])
        child = os.fork()
        if child == 0:
            status = 1
            try:
                pair.carry_out([Enqueue(QUEUE, NewJob(b"child", "child"))])
                with pair.consumer([QUEUE]) as consumer:
                    leases = consumer.reserve(2, 5)
                    status = 0 if consumer.settle([Ack(lease) for lease in leases]) == [None, None] else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert pair.queues() == []


def test_a_request_to_cancel_outlives_the_program_that_has_made_it(server: BeanstalkServer, pair: Paired) -> None:
    # Given a program that asks all workers to look for cancelled jobs
    backend = paired_class(load_driver("beanstalk"), MemoryBackend)(open_backend(server.url), pair.store)
    Control(backend).ask_cancels(60)
    # When this program ends, then workers still see its request for a while
    backend.primary.close()
    until(lambda: pair.primary.stats(DOWN).paused_for is None, "beanstalkd has forgotten the pause")
    assert Control(pair).are_cancels_asked()
    # When the pause is ended, then they do not see it any more
    pair.resume(DOWN)
    assert not Control(pair).are_cancels_asked()


def test_the_verbs_leave_other_jobs_alone_when_beanstalkd_has_lost_its_jobs(store: CountingStore) -> None:
    # Given a job of a step, and a note about the job's number in the store
    with BeanstalkServer() as server:
        pair = paired_class(load_driver("beanstalk"), MemoryBackend)(open_backend(server.url), store)
        assert pair.carry_out([Enqueue(QUEUE, NewJob(b"lost", "flow.1"))])
        number = pair._number(QUEUE, "flow.1")
        # When beanstalkd is restarted without a log, and gives another job the same number
        server.kill()
        server.start()
        assert pair.enqueue(QUEUE, [NewJob(b"new", "any", delay=100)]) == [number]
        # Then no method finds the lost job, and none changes the other job
        for call in (
            lambda: pair.delete(QUEUE, "flow.1"),
            lambda: pair.kick_job(QUEUE, "flow.1"),
            lambda: pair.reschedule(QUEUE, "flow.1", 5),
            lambda: pair.peek(QUEUE, "flow.1"),
        ):
            with pytest.raises(JobNotFound, match=r"flow\.1"):
                call()
        assert pair.delete_many(QUEUE, ["flow.1"]) != [None]
        record = pair.peek(QUEUE, str(number))
        assert (record.body, record.state) == (b"new", State.DELAYED)
        pair.close()


def test_attempts_are_counted_from_one_after_a_restart_of_beanstalkd(store: CountingStore) -> None:
    with BeanstalkServer(binlog=True) as server:
        made: Any = paired_class(load_driver("beanstalk"), MemoryBackend)
        with made(open_backend(server.url), store) as pair:
            # Given a job of which four reservations were no attempts, and beanstalkd that was started again
            pair.carry_out([Enqueue(QUEUE, NewJob(b"tracked", "tracked"))])
            with pair.consumer([QUEUE]) as consumer:
                for _ in range(4):
                    (lease,) = consumer.reserve(1, 5)
                    assert consumer.settle([GiveBack(lease, after=After(is_uncounted=True))]) == [None]
                assert pair.peek(QUEUE, "tracked").attempt == 0
            server.kill()
            server.start()
            # When the job is tried again and again
            counted = []
            with pair.consumer([QUEUE]) as consumer:
                for _ in range(6):
                    (lease,) = consumer.reserve(1, 5)
                    counted.append(lease.attempt)
                    assert consumer.settle([Release(lease, reason="ValueError")]) == [None]
            # Then each run is an attempt
            assert counted == [1, 2, 3, 4, 5, 6]
            assert pair.peek(QUEUE, "tracked").attempt == 6


def test_a_job_does_not_get_the_memo_of_a_lost_job_with_its_number_and_body(store: CountingStore) -> None:
    with BeanstalkServer() as server:
        pair = paired_class(load_driver("beanstalk"), MemoryBackend)(open_backend(server.url), store)
        # Given a job with a memo, which beanstalkd has lost
        (number,) = pair.enqueue(QUEUE, [NewJob(b"same", "any")])
        with pair.consumer([QUEUE]) as consumer:
            (lease,) = consumer.reserve(1, 10)
            assert consumer.settle([Release(lease, 0, after=After(memo=b"charged"))]) == [None]
        server.kill()
        server.start()
        # When another job has its number and its body, and fails
        assert pair.enqueue(QUEUE, [NewJob(b"same", "any")]) == [number]
        with pair.consumer([QUEUE]) as consumer:
            (lease,) = consumer.reserve(1, 10)
            assert (lease.attempt, lease.memo) == (1, b"")
            assert consumer.settle([Release(lease, 0, reason="failed")]) == [None]
            # Then its next run does not get the memo
            (lease,) = consumer.reserve(1, 10)
            assert (lease.attempt, lease.memo) == (2, b"")
            assert consumer.settle([Ack(lease)]) == [None]
        pair.close()


def test_a_request_to_cancel_a_job_of_less_than_a_second_is_about_it(pair: Paired, app: multiq.App) -> None:
    # Given a job whose age beanstalkd counts in whole seconds, and a request right after its enqueue
    handle = app.queue().enqueue("work")
    job = app.queue().reserve()
    assert handle.cancel() == "requested"
    # When a worker reads the request later, then the request applies to this job
    (stored,) = requests(pair)
    for later in (0.0, 0.3, 0.7):
        read = msgspec.structs.replace(stored, age=stored.age + later)
        assert read.is_about_job_there(pair)
    # But it does not apply to a job that is seconds younger than the request
    assert not msgspec.structs.replace(stored, age=stored.age + 5).is_about_job_there(pair)
    withdraw(pair, QUEUE, handle.id)
    pair.resume(DOWN)
    job.ack()
