"""Durability: what a killed or restarted beanstalkd, or one with a failing disk, keeps and forgets.

The table in ``docs/durability.md`` says the same.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

import pytest
import strace
from faults import DEADLINE, QUEUE, Load, new, numbers
from processes import until, worker
from worker_app import app

from multiq.backend import Ack, Bury, Release, State
from multiq.backend.registry import open_backend
from multiq.errors import BackendError, BackendFull, EnqueueUncertain, LeaseLost

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from servers.beanstalk import BeanstalkServer

    from multiq.backend import Backend

    NewBeanstalk = Callable[..., BeanstalkServer]

KILLS = int(os.environ.get("MULTIQ_TEST_KILLS", "3"))
JOBS_BETWEEN = int(os.environ.get("MULTIQ_TEST_JOBS", "100"))


# --- kill -9 ---------------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "end", ["kill", pytest.param("crash", marks=pytest.mark.long), pytest.param("stop", marks=pytest.mark.long)]
)
def test_acknowledged_jobs_survive_kills_and_restarts_under_load(
    new_beanstalk: NewBeanstalk, tmp_path: Path, producer: Callable[[str], None], end: str
) -> None:
    # Given a server that syncs before it answers, a worker, and a producer that notes what was acknowledged
    server = new_beanstalk(binlog=True, fsync_ms=0)
    producer(f"{server.url}?timeout={DEADLINE}")
    resumed: list[float] = []
    with worker(tmp_path, app.url, "threads=2") as process:
        process.wait_until_working()
        with Load() as load:
            # When the server ends in the middle of this load, again and again
            for _ in range(KILLS):
                load.goes_on(JOBS_BETWEEN)
                getattr(server, end)()
                time.sleep(0.2)
                done = len(numbers(process.diary, "end"))
                server.start()
                accepted_at = time.monotonic()
                until(lambda done=done: len(numbers(process.diary, "end")) > done, what=lambda: process.log)  # type: ignore[misc]
                resumed.append(time.monotonic() - accepted_at)
            load.goes_on(JOBS_BETWEEN, what=lambda: process.log)
        # Then the worker continues by itself, and runs every acknowledged job
        acknowledged, uncertain = set(load.acknowledged), set(load.uncertain)
        until(lambda: acknowledged <= set(numbers(process.diary, "end")), what=lambda: process.log)
        until(lambda: app.backend.queues() == [])
        done_in_all = set(numbers(process.diary, "end"))
    assert done_in_all <= acknowledged | uncertain
    print(
        f"\n{KILLS} times {end}: {len(acknowledged)} acknowledged, none lost; {len(uncertain)} uncertain, of which "
        f"{len(done_in_all & uncertain)} were there; resumed after {', '.join(f'{s:.2f}' for s in resumed)} s"
    )


def test_killed_server_keeps_jobs_and_forgets_counts(new_beanstalk: NewBeanstalk) -> None:
    server = new_beanstalk(binlog=True, fsync_ms=0)
    with open_backend(server.url) as backend, backend.consumer([QUEUE]) as consumer:
        held, retried, late, spoilt, kicked, delayed = backend.enqueue(
            QUEUE, [*(new(priority=10 + number, ttr=600) for number in range(5)), new(delay=3600, priority=3)]
        )
        leases = {lease.id: lease for lease in consumer.reserve(5, 0)}
        assert consumer.settle(
            [Release(leases[retried], priority=77), Release(leases[late], delay=3600, priority=88)]
        ) == [None, None]
        assert consumer.settle([Bury(leases[spoilt], "bad"), Bury(leases[kicked], "bad")]) == [None, None]
        backend.kick_job(QUEUE, kicked)
        backend.pause(QUEUE, 3600)
        before = {job_id: backend.peek(QUEUE, job_id) for job_id in (held, retried, late, spoilt, kicked, delayed)}
        assert [job.attempt for job in before.values()] == [1, 1, 1, 1, 1, 0]

        server.kill()
        server.start()

        after = {job_id: backend.peek(QUEUE, job_id) for job_id in before}
        states = [after[job_id].state for job_id in (held, retried, late, spoilt, kicked, delayed)]
        # Every job is there, and what was reserved is ready
        assert states == [
            State.READY,
            State.READY,
            State.DELAYED,
            State.BURIED,
            State.READY,
            State.DELAYED,
        ]
        assert all(3500 < (after[job_id].due_in or 0) <= 3600 for job_id in (late, delayed))
        assert [job.ttr for job in after.values()] == [job.ttr for job in before.values()]
        # The log has a release with a delay, a burial and a kick, and the attempts of each job at that moment
        kept = (late, spoilt, kicked, delayed)
        assert [after[job_id].attempt for job_id in kept] == [1, 1, 1, 0]
        assert [after[job_id].priority for job_id in kept] == [88, before[spoilt].priority, before[kicked].priority, 3]
        assert [(after[job_id].kicks, after[job_id].crashes) for job_id in kept] == [
            (before[job_id].kicks, before[job_id].crashes) for job_id in kept
        ]
        # The log has no reserves and no releases without a delay: after the restart, the attempts and the new priority
        # are lost
        assert [after[job_id].attempt for job_id in (held, retried)] == [0, 0]
        assert (before[retried].priority, after[retried].priority) == (77, 11)
        # The pause is lost at the restart, too
        assert backend.stats(QUEUE).paused_for is None
        # The lease ends with its connection
        (answer,) = consumer.settle([Ack(leases[held])])
        assert isinstance(answer, LeaseLost)


def test_restart_without_log_loses_all_jobs(new_beanstalk: NewBeanstalk) -> None:
    server = new_beanstalk()
    with open_backend(server.url) as backend:
        backend.enqueue(QUEUE, [new(), new(delay=3600)])
        server.stop()
        server.start()
        assert backend.stats(QUEUE).ready == 0
        assert backend.queues() == []


def test_batch_unanswered_by_killed_server_is_uncertain_and_each_job_whole(
    new_beanstalk: NewBeanstalk,
) -> None:
    server = new_beanstalk(binlog=True, fsync_ms=0)
    bodies = [b"%d:" % number + b"x" * 100 for number in range(3000)]
    with open_backend(server.url) as backend, server.client() as client:

        def kill_in_the_middle() -> None:
            until(lambda: int(client.stats()["total-jobs"]) > 300, timeout=60)
            server.kill()

        killer = threading.Thread(target=kill_in_the_middle)
        killer.start()
        with pytest.raises(EnqueueUncertain) as caught:
            backend.enqueue(QUEUE, [new(body) for body in bodies])
        killer.join()
        server.start()
        certain = len(caught.value.accepted)
        assert [job.body for job in (*caught.value.jobs, *caught.value.unsent)] == bodies[certain:]
        with backend.consumer([QUEUE]) as consumer:
            leases = []
            while found := consumer.reserve(500, 0):
                leases += found
            stored = [lease.body for lease in leases]
        assert stored == bodies[: len(stored)]
        assert len(stored) >= certain > 0


# --- a disk that fails -----------------------------------------------------------------------------------


def failing_write(server: BeanstalkServer) -> AbstractContextManager[None]:
    """The next write to the server's log fails."""
    (log,) = server.binlog_files[-1:]
    return strace.injecting(server, "write", "error=EIO:when=1", "-P", str(log))


def test_log_stays_off_after_a_failed_write_and_doctor_reports_it(new_beanstalk: NewBeanstalk) -> None:
    strace.require()
    server = new_beanstalk(binlog=True, fsync_ms=0)
    with open_backend(server.url) as backend:
        backend.enqueue(QUEUE, [new(b"before")])
        assert log_level(server) == "ok"
        # When a single write fails
        with failing_write(server), pytest.raises(BackendError):
            backend.enqueue(QUEUE, [new(b"failed")])
        # Then that job was refused, and those after it are acknowledged, though they are in no log
        backend.enqueue(QUEUE, [new(b"after") for _ in range(5)])
        assert log_level(server) == "bad"
        server.kill()
        server.start()
        with backend.consumer([QUEUE]) as consumer:
            assert [lease.body for lease in consumer.reserve(10, 0)] == [b"before"]


def log_level(server: BeanstalkServer) -> str:
    """The level of the doctor's finding on the log."""
    with open_backend(server.url) as backend:
        return {finding.what: finding.level for finding in backend.doctor()}["binlog-records-written"]


def test_full_log_refuses_jobs_until_there_is_room(new_beanstalk: NewBeanstalk) -> None:
    server = new_beanstalk(binlog=True, fsync_ms=0, log_file_size=8192)
    assert server.binlog is not None
    with open_backend(server.url) as backend, backend.consumer([QUEUE]) as consumer:
        server.binlog.rename(server.folder / "away")
        acknowledged = _fill(backend)
        assert acknowledged > 0
        # Verdicts still succeed, because a put also reserves room in the log for the job's later changes
        (lease,) = consumer.reserve(1, 0)
        assert consumer.settle([Ack(lease)]) == [None]
        (server.folder / "away").rename(server.binlog)
        backend.enqueue(QUEUE, [new(b"last")])
        server.kill()
        server.start()
        assert backend.stats(QUEUE).ready == acknowledged


def _fill(backend: Backend) -> int:
    """Enqueue until the server refuses. Returns how many jobs it took."""
    taken = 0
    while True:
        try:
            taken += len(backend.enqueue(QUEUE, [new(b"x" * 500)]))
        except BackendFull:
            return taken
