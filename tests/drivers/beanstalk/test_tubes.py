"""Queues as tubes: their order, their pauses, missing tubes, and tubes of other programs."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from servers.process import until

from multiq.backend import Ack, Bury, NewJob, State
from multiq.backend.registry import open_backend
from multiq.errors import JobNotFound, JobReserved, Unsupported
from multiq.ids import new_id
from multiq_beanstalk.pool import Session

if TYPE_CHECKING:
    from servers.beanstalk import BareClient, BeanstalkServer

    from multiq.backend import Backend

QUEUE = "mail"


def new(body: bytes = b"x", **options: Any) -> NewJob:
    return NewJob(body, new_id(), **options)


# --- order -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_batch_is_filled_from_earlier_queues_first(backend: Backend, count: int) -> None:
    queues = [f"q{number}" for number in range(count)]
    for priority, queue in enumerate(reversed(queues)):
        backend.enqueue(queue, [new(queue.encode(), priority=priority)] * 3)
    with backend.consumer(queues) as consumer:
        taken = []
        while leases := consumer.reserve(4, 0):
            taken += [lease.queue for lease in leases]
            assert consumer.settle([Ack(lease) for lease in leases]) == [None] * len(leases)
    assert taken == [queue for queue in queues for _ in range(3)]


def test_reserve_from_many_queues_tries_only_those_with_jobs(backend: Backend, client: BareClient) -> None:
    queues = [f"q{number}" for number in range(20)]
    backend.enqueue(queues[-1], [new()])
    backend.enqueue(queues[7], [new(delay=60)])
    backend.enqueue(queues[9], [new()])
    backend.pause(queues[9], 60)
    with backend.consumer(queues) as consumer:
        before = int(client.stats()["cmd-reserve-with-timeout"])
        assert [lease.queue for lease in consumer.reserve(1, 0)] == [queues[-1]]
        assert int(client.stats()["cmd-reserve-with-timeout"]) - before == 2


# --- pauses ----------------------------------------------------------------------------------------------


def test_pause_of_an_empty_queue_lasts_as_long_as_its_backend(backend: Backend, client: BareClient) -> None:
    backend.pause(QUEUE, 3600)
    assert backend.queues() == [QUEUE]
    assert 3590 < (backend.stats(QUEUE).paused_for or 0) <= 3600
    # the tube remains after its last job is gone
    backend.enqueue(QUEUE, [new()])
    with backend.consumer([QUEUE]) as consumer:
        assert consumer.reserve(1, 0) == []
    assert backend.purge(QUEUE, [State.READY]) == 1
    assert backend.stats(QUEUE).paused_for is not None
    # the tube exists only because the backend watches it
    backend.close()
    until(lambda: client.stats("tube", QUEUE) == {}, "the tube is gone")
    assert backend.stats(QUEUE).paused_for is None


def test_pause_of_a_queue_with_jobs_outlasts_its_backend(server: BeanstalkServer, backend: Backend) -> None:
    with open_backend(server.url) as other:
        other.enqueue(QUEUE, [new()])
        other.pause(QUEUE, 3600)
    assert backend.stats(QUEUE).paused_for is not None
    backend.resume(QUEUE)
    assert backend.stats(QUEUE).paused_for is None


def test_ended_pauses_keep_no_tubes(backend: Backend, client: BareClient) -> None:
    for number in range(5):
        backend.pause(f"q{number}", 3600)
        backend.resume(f"q{number}")
    backend.pause(QUEUE, 3600)
    until(lambda: client.ask(b"list-tubes").count(b"- q") == 0, "they are gone")
    assert backend.queues() == [QUEUE]


def test_queue_can_be_paused_after_the_pause_connection_was_lost(server: BeanstalkServer, backend: Backend) -> None:
    backend.pause("before", 1)
    time.sleep(2.1)  # now the pause is over; the next pause stops watching its tube
    server.kill()
    server.start()
    backend.pause(QUEUE, 3600)
    assert backend.queues() == [QUEUE]


# --- tubes that are not there, and those of others -------------------------------------------------------


def test_stats_of_a_missing_tube_are_zero_and_create_no_tube(backend: Backend, client: BareClient) -> None:
    stats = backend.stats(QUEUE)
    assert (stats.ready, stats.delayed, stats.reserved, stats.buried, stats.paused_for) == (0, 0, 0, 0, None)
    backend.resume(QUEUE)
    with pytest.raises(JobNotFound):
        backend.peek(QUEUE, "1")
    assert client.stats("tube", QUEUE) == {}


def test_queues_lists_tubes_with_jobs_and_valid_names(backend: Backend, client: BareClient) -> None:
    for tube in ("default", "a/b+c", "x" * 200, "used"):
        client.put(b"x", tube=tube, delay=60)
    client.ask(b"use nothing")
    client.ask(b"watch nothing-either")
    assert backend.queues() == ["default", "used"]


def test_job_of_another_tube_is_not_found_and_stays(backend: Backend, client: BareClient) -> None:
    job_id = str(client.put(b"x", tube="other", delay=60))
    for call in (
        backend.peek,
        backend.delete,
        backend.kick_job,
        lambda queue, job: backend.reschedule(queue, job, 0),
    ):
        with pytest.raises(JobNotFound):
            call(QUEUE, job_id)
    assert client.stats("job", job_id)["state"] == "delayed"


# --- what can be seen ------------------------------------------------------------------------------------


def test_delete_of_a_reserved_job_never_raises_not_found(
    backend: Backend, client: BareClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job_id,) = backend.enqueue(QUEUE, [new()])
    client.watch(QUEUE)
    ask = Session.ask

    def ask_while_it_is_held(session: Session, *commands: bytes, **options: Any) -> Any:
        if commands != (b"delete %b" % job_id.encode(),):
            return ask(session, *commands, **options)
        assert client.reserve() is not None
        replies = ask(session, *commands, **options)
        assert client.ask(b"release %b 1024 0" % job_id.encode()) == b"RELEASED"
        return replies

    monkeypatch.setattr(Session, "ask", ask_while_it_is_held)
    with pytest.raises(JobReserved):
        backend.delete(QUEUE, job_id)
    with pytest.raises(JobReserved):
        backend.reschedule(QUEUE, job_id, 3600)
    stats = backend.stats(QUEUE)
    assert (stats.ready, stats.delayed) == (1, 0)


def test_listing_shows_the_first_job_and_that_there_are_more(backend: Backend) -> None:
    for state in (State.READY, State.DELAYED, State.RESERVED, State.BURIED):
        page = backend.jobs(QUEUE, state)
        assert (page.jobs, page.after) == ([], None)
    first, second, *_ = backend.enqueue(QUEUE, [new(b"first"), new(b"second"), new(delay=60)])
    page = backend.jobs(QUEUE, State.READY, limit=1)
    assert [job.id for job in page.jobs] == [first]
    assert page.after is not None
    assert [job.due_in for job in backend.jobs(QUEUE, State.DELAYED).jobs] in ([60], [59])
    with pytest.raises(Unsupported, match="lists_jobs"):
        backend.jobs(QUEUE, State.READY, limit=1, after=page.after)
    page = backend.jobs(QUEUE, State.READY)
    assert [job.id for job in page.jobs] == [first]
    with pytest.raises(Unsupported, match="lists_jobs"):
        backend.jobs(QUEUE, State.READY, after=page.after)
    with backend.consumer([QUEUE]) as consumer:
        (lease,) = consumer.reserve(1, 0)
        with pytest.raises(Unsupported, match="lists_jobs"):
            backend.jobs(QUEUE, State.RESERVED, limit=1)
        assert consumer.settle([Bury(lease)]) == [None]
    assert [job.id for job in backend.jobs(QUEUE, State.BURIED).jobs] == [first]
    page = backend.jobs(QUEUE, State.READY)
    assert ([job.id for job in page.jobs], page.after) == ([second], None)


# --- kicking ---------------------------------------------------------------------------------------------


def test_kick_never_takes_a_delayed_job(server: BeanstalkServer, backend: Backend) -> None:
    """The server's own ``kick`` takes delayed jobs when no job is buried. Here several clients kick at once."""
    backend.enqueue(QUEUE, [new(b"late", delay=3600)] * 50)
    backend.enqueue(QUEUE, [new()] * 50)
    with backend.consumer([QUEUE]) as consumer:
        leases = consumer.reserve(50, 0)
        assert consumer.settle([Bury(lease) for lease in leases]) == [None] * 50
    backends = [open_backend(server.url) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        kicked = list(pool.map(lambda one: one.kick(QUEUE, 40), backends))
    for one in backends:
        one.close()
    stats = backend.stats(QUEUE)
    assert (sum(kicked), stats.ready, stats.delayed, stats.buried) == (50, 50, 50, 0)
