"""Large batches: the driver sends them in slices, in order, and reports which jobs of a batch were stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from proxy import CutReply, Proxy

from multiq.backend import NewJob, State
from multiq.backend.registry import open_backend
from multiq.errors import BackendFull, EnqueuePartial, EnqueueUncertain
from multiq.ids import new_id, new_ids
from multiq_redis import enqueue

if TYPE_CHECKING:
    from servers.redis import RedisServer

    from multiq.backend import Backend

QUEUE = "mail"


def batch(count: int, size: int = 1) -> list[NewJob]:
    return [NewJob(b"x" * size, job_id) for job_id in new_ids(count)]


def scripts(server: RedisServer) -> int:
    stats = server.ask("INFO", "commandstats")
    return sum(int(stats[name]["calls"]) for name in ("cmdstat_evalsha", "cmdstat_eval") if name in stats)


def taken_by(backend: Backend) -> list[str]:
    ids: list[str] = []
    after = None
    while True:
        page = backend.jobs(QUEUE, State.READY, limit=1000, after=after)
        ids += [job.id for job in page.jobs]
        if (after := page.after) is None:
            return ids


def test_large_batch_is_sliced_and_keeps_its_order(server: RedisServer, backend: Backend) -> None:
    jobs = batch(3 * enqueue.MOST_JOBS + 1)
    backend.enqueue(QUEUE, jobs[:2])  # so that the server knows the script
    before = scripts(server)
    assert backend.enqueue(QUEUE, jobs) == [job.id for job in jobs]
    assert scripts(server) - before == 4
    assert taken_by(backend) == [job.id for job in jobs]


def test_batch_of_large_bodies_is_sliced(server: RedisServer, backend: Backend) -> None:
    jobs = batch(20, enqueue.MOST_BYTES // 4)
    backend.enqueue(QUEUE, batch(2))
    before = scripts(server)
    backend.enqueue(QUEUE, jobs)
    assert scripts(server) - before == 5
    assert taken_by(backend)[2:] == [job.id for job in jobs]


def test_body_larger_than_a_slice_is_sent_alone(server: RedisServer, backend: Backend) -> None:
    jobs = [*batch(1), *batch(1, enqueue.MOST_BYTES + 1), *batch(1)]
    backend.enqueue(QUEUE, jobs)
    assert taken_by(backend) == [job.id for job in jobs]


@pytest.mark.parametrize("count", [1, 2, 1000])
def test_one_script_takes_all_of_its_jobs_or_none(server: RedisServer, backend: Backend, count: int) -> None:
    assert count <= enqueue.MOST_JOBS
    backend.enqueue(QUEUE, batch(10))
    server.set("maxmemory", "1")
    with pytest.raises(BackendFull):
        backend.enqueue(QUEUE, batch(count))
    assert backend.stats(QUEUE).ready == 10


def test_full_server_between_slices_reports_exactly_what_was_taken(server: RedisServer, backend: Backend) -> None:
    # Given a server with room for some slices of a batch, but not for all
    backend.enqueue(QUEUE, batch(100))
    backend.purge(QUEUE, [State.READY])
    server.set("maxmemory", str(server.ask("INFO", "memory")["used_memory"] + 3_000_000))
    jobs = batch(20 * enqueue.MOST_JOBS, 100)
    with pytest.raises(EnqueuePartial, match="maxmemory") as caught:
        backend.enqueue(QUEUE, jobs)
    # Then the server has stored the first slices as a whole, and the error lists their jobs
    accepted = caught.value.accepted
    assert 0 < len(accepted) < len(jobs)
    assert len(accepted) % enqueue.MOST_JOBS == 0
    assert list(accepted.items()) == [(at, job.id) for at, job in enumerate(jobs[: len(accepted)])]
    assert taken_by(backend) == list(accepted.values())
    # And when there is room again, a repetition of the whole batch adds the other jobs
    server.set("maxmemory", "0")
    backend.enqueue(QUEUE, jobs)
    assert taken_by(backend) == [job.id for job in jobs]


def test_id_in_two_slices_is_one_job(backend: Backend) -> None:
    twice = NewJob(b"first", new_id())
    jobs = [twice, *batch(enqueue.MOST_JOBS), NewJob(b"second", twice.id)]
    assert len(backend.enqueue(QUEUE, jobs)) == len(jobs)
    assert backend.stats(QUEUE).ready == enqueue.MOST_JOBS + 1
    assert backend.peek(QUEUE, twice.id).body == b"first"


@pytest.mark.parametrize("at", [0, 3])
def test_connection_cut_between_slices_leaves_each_job_once(server: RedisServer, at: int) -> None:
    with Proxy(("127.0.0.1", server.port)) as proxy, open_backend(f"redis://127.0.0.1:{proxy.port}") as backend:
        backend.enqueue(QUEUE, batch(2))
        proxy.arm(CutReply(at=at))
        jobs = batch(3 * enqueue.MOST_JOBS)
        backend.enqueue(QUEUE, jobs)
        assert not proxy.is_armed
        assert taken_by(backend)[2:] == [job.id for job in jobs]


def test_server_lost_between_slices_is_uncertain_and_a_repetition_completes_the_batch(
    server: RedisServer,
) -> None:
    # Given a connection that breaks in the second slice, at each attempt
    with Proxy(("127.0.0.1", server.port)) as proxy, open_backend(f"redis://127.0.0.1:{proxy.port}") as backend:
        backend.enqueue(QUEUE, batch(2))
        proxy.arm(CutReply(at=len(b"$2\r\nok\r\n"), times=1000))
        jobs = batch(3 * enqueue.MOST_JOBS)
        with pytest.raises(EnqueueUncertain) as caught:
            backend.enqueue(QUEUE, jobs)
        proxy.disarm()
        # Then the first slice is stored, the second slice is uncertain, and the third was not sent
        first, second, third = (jobs[at : at + enqueue.MOST_JOBS] for at in range(0, len(jobs), enqueue.MOST_JOBS))
        assert caught.value.accepted == {at: job.id for at, job in enumerate(first)}
        assert caught.value.ids == tuple(job.id for job in second)
        assert caught.value.unsent == tuple(third)
        # When the same call is made again
        backend.enqueue(QUEUE, jobs)
        assert taken_by(backend)[2:] == [job.id for job in jobs]
