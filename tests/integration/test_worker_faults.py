"""Faults of workers, on each backend, with real processes and real signals. W1 to W15 number the faults."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import TYPE_CHECKING

import psutil
import pytest
from processes import until, worker
from worker_app import (
    EXCEPTIONS,
    aendless,
    aflood,
    app,
    athrow,
    bulky,
    clutch,
    endless,
    flood,
    greedy,
    kill_a_thread,
    nap,
    quick,
    read_diary,
    suicide,
    throw,
)

from multiq import State
from multiq.backend import Ack, NewJob
from multiq.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from processes import WorkerProcess

WAYS = ["told", "asleep", "deaf", "stuck"]


def words(process: WorkerProcess, word: str) -> list[int]:
    return [number for said, number, _, _ in read_diary(process.diary) if said == word]


def pid_of(process: WorkerProcess, job: int) -> int:
    """The process in which a job began last."""
    until(lambda: job in words(process, "start"))
    return [pid for said, number, pid, _ in read_diary(process.diary) if (said, number) == ("start", job)][-1]


def is_taken_over(taker: WorkerProcess, stopped: Sequence[psutil.Process]) -> None:
    """Wait until the job of stopped processes has begun once more."""
    missed_at = time.monotonic() + 8
    until(lambda: words(taker, "start").count(1) == 2 or time.monotonic() > missed_at)
    if not app.backend.capabilities.portable_leases:
        # beanstalkd may not notice the end of a lease until its holder sends something: docs/durability.md
        for process in stopped:
            process.resume()
    until(lambda: words(taker, "start").count(1) == 2)


def counts() -> tuple[int | None, ...]:
    stats = app.queue().stats()
    return stats.ready, stats.delayed, stats.reserved, stats.buried


# --- deaths ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["processes=2", "processes=1", "processes=2, threads=3", "processes=1, concurrency=3"])
def test_w1_the_job_of_a_killed_child_starts_again_at_once(tmp_path: Path, url: str, mode: str) -> None:
    # Given a child in the middle of a long job, whose lease would last for ten minutes
    long = nap.options(ttr=600).enqueue(0, 300)
    with worker(tmp_path, url, mode) as process:
        victim = pid_of(process, 0)
        # When the child is killed
        os.kill(victim, signal.SIGKILL)
        # Then its job starts again, in another process, long before its lease would have ended
        until(lambda: words(process, "start").count(0) == 2)
        assert pid_of(process, 0) != victim
        info = long.peek()
        assert info.attempt in {2, None}
        assert info.crashes in {1, None}
        if app.backend.capabilities.reasons:
            assert info.reason == "its worker process died: was killed by SIGKILL"


@pytest.mark.long
def test_w1_jobs_that_finished_before_the_kill_are_not_run_again(tmp_path: Path, url: str) -> None:
    # Given an inline child that has done short jobs and not yet settled them, and that now runs a job that kills it
    if not app.backend.capabilities.portable_leases:
        pytest.skip("its leases end with its connection: no other process can settle them")
    quick.enqueue_many([(number,) for number in range(200)])
    with worker(tmp_path, url, "processes=1") as process:
        until(lambda: len(words(process, "end")) == 200)  # the prefetch has grown, because the jobs are short
        app.queue().pause(60)
        quick.enqueue_many([(number,) for number in range(1000, 1010)])
        suicide.enqueue(5000)
        app.queue().resume()
        until(lambda: words(process, "start").count(5000) == 3 and counts() == (0, 0, 0, 1))
        # Then each of the short jobs ran once
        assert sorted(words(process, "end")) == [*range(200), *range(1000, 1010)]


def test_w2_when_the_whole_worker_is_killed_its_jobs_start_again_elsewhere(tmp_path: Path, url: str) -> None:
    # Given a worker with its supervisor, killed as by the loss of its machine
    handle = nap.enqueue(1, 300)  # its ttr is 2
    with worker(tmp_path, url, "processes=1") as process:
        pid_of(process, 1)
        process.kill()
    # When another worker runs, then it gets the job when the lease is over, and the crash is counted
    with worker(tmp_path, url, "processes=1") as process:
        until(lambda: words(process, "start").count(1) == 2)
        info = handle.peek()
        assert (info.attempt or 2, info.crashes or 1) == (2, 1)


@pytest.mark.long
def test_w3_a_job_that_asks_for_too_much_memory_fails_and_its_process_lives(tmp_path: Path, url: str) -> None:
    handle = greedy.enqueue(1)
    with worker(tmp_path, url, "processes=1") as process:
        until(lambda: handle.state() is State.BURIED)
        quick.enqueue(2)
        until(lambda: 2 in words(process, "end"))
        assert {pid for _, _, pid, _ in read_diary(process.diary)} == {pid_of(process, 2)}
        assert "MemoryError" in process.log


def test_w8_a_poison_job_is_buried_after_its_crashes_and_the_workers_live_on(tmp_path: Path, url: str) -> None:
    # Given a job that kills its process each time
    handle = suicide.enqueue(1)
    with worker(tmp_path, url, "processes=2") as process:
        # Then it is buried after three runs, and the workers still work
        until(lambda: handle.state() is State.BURIED)
        assert words(process, "start") == [1, 1, 1]
        quick.enqueue(2)
        until(lambda: 2 in words(process, "end"))
        process.send(signal.SIGTERM)
        assert process.wait() == 0, process.log


@pytest.mark.long
def test_w15_a_worker_process_whose_heartbeat_dies_ends_and_is_replaced(tmp_path: Path, url: str) -> None:
    # Given a job during which the heartbeat dies of an error
    kill_a_thread.enqueue(1)
    with worker(tmp_path, url, "processes=1") as process:
        # Then its process does not continue as if it were healthy: the job runs again, in another process
        until(lambda: 1 in words(process, "end"))
        assert len({pid for _, _, pid, _ in read_diary(process.diary)}) == 2
        assert "an unexpected error" in process.log


# --- hung and stuck processes ------------------------------------------------------------------------------


@pytest.mark.one_row
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["processes=1", "processes=1, threads=3"])
def test_w4_a_job_over_its_time_limit_ends_whatever_it_does_and_its_neighbours_are_not_blamed(
    tmp_path: Path, url: str, mode: str, way: str
) -> None:
    # Given a job that runs for minutes, and neighbours that take a second and have one attempt only
    late = endless.enqueue(1, way)
    # Jobs in a reply that a stuck process cannot read any more stay reserved until their leases end.
    is_strict = way != "stuck" and bool(app.backend.capabilities.give_back)
    neighbour = nap.options(ttr=60, max_attempts=1) if is_strict else nap.options(ttr=5)
    neighbours = neighbour.enqueue_many([(number, 1.0) for number in range(10, 13)])
    with worker(tmp_path, url, f"{mode}, kill_after=0.3") as process:
        # Then the job is ended and retried until its attempts are used up, and buried
        until(lambda: late.state() is State.BURIED)
        assert words(process, "start").count(1) == 2
        if app.backend.capabilities.reasons:
            assert late.peek().reason == "the task ran longer than its timeout of 0.3 s"
        # And the other jobs were all done, none with an attempt that was not its own
        until(lambda: counts() == (0, 0, 0, 1))
        assert set(words(process, "end")) == {10, 11, 12}
        assert all(handle.state() is State.GONE for handle in neighbours)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.long
def test_w4_a_coroutine_over_its_time_limit_ends_whatever_it_does(tmp_path: Path, url: str, way: str) -> None:
    late = aendless.enqueue(1, way)
    with worker(tmp_path, url, "processes=1, concurrency=3, kill_after=0.3") as process:
        until(lambda: late.state() is State.BURIED)
        assert words(process, "start") == [1, 1]
        quick.enqueue(2)
        until(lambda: 2 in words(process, "end"))


@pytest.mark.long
def test_a_job_that_keeps_the_interpreter_to_itself_for_three_leases_is_run_once(tmp_path: Path, url: str) -> None:
    # Given a job that holds the lock for three times its ttr, and a worker beside it that would take it over
    if not app.backend.capabilities.portable_leases:
        pytest.skip("only its own connection can touch a lease: docs/worker.md says so")
    clutch.enqueue(1, 3)
    with worker(tmp_path, url, "processes=2") as process:
        until(lambda: 1 in words(process, "end"))
        until(lambda: counts() == (0, 0, 0, 0))
        assert words(process, "start") == [1]
        assert "lost" not in process.log


def test_w5_a_worker_stopped_beyond_its_lease_cannot_settle_what_others_took_over(tmp_path: Path, url: str) -> None:
    # Given a worker that is stopped in the middle of a job, its sidecar included
    handle = nap.options(ttr=1).enqueue(1, 3)
    with worker(tmp_path, url, "processes=1") as first:
        pid_of(first, 1)
        group = [psutil.Process(first.process.pid), *psutil.Process(first.process.pid).children()]
        for member in group:
            member.suspend()
        # When another worker has got the job since, and the first worker continues
        with worker(tmp_path, url, "processes=1") as second:
            is_taken_over(second, group)
            for member in group:
                member.resume()
            # Then the first worker's verdict is refused, and the second worker's counts
            until(lambda: "lost" in first.log)
            until(lambda: handle.state() is State.GONE)
            until(lambda: words(second, "end").count(1) == 2)
            assert "lost" not in second.log


@pytest.mark.long
def test_a_stopped_child_s_job_is_not_kept_alive_by_the_sidecar(tmp_path: Path, url: str) -> None:
    # Given a child that is stopped, and no other process of its worker
    nap.options(ttr=1).enqueue(1, 3)
    with worker(tmp_path, url, "processes=2") as process:
        victim = psutil.Process(pid_of(process, 1))
        victim.suspend()
        # Then its job goes to another worker, because no process of this worker can run it
        is_taken_over(process, [victim])
        victim.resume()
        until(lambda: words(process, "end").count(1) == 2)


@pytest.mark.one_row
@pytest.mark.parametrize("task", [flood, aflood])
def test_w13_w14_a_time_limit_in_the_middle_of_a_driver_s_call_leaves_the_connection_in_step(
    tmp_path: Path, url: str, task: object
) -> None:
    # Given a job whose time is over while it enqueues, and that enqueues one more job then
    handle = task.enqueue(1)  # type: ignore[attr-defined]
    mode = "processes=1" if task is flood else "processes=1, concurrency=2"
    with worker(tmp_path, url, mode) as process:
        until(lambda: handle.state() is State.BURIED)
        (sent,) = words(process, "sent")
    # Then each enqueue that returned is stored once, in order. The interrupted call may be stored, too
    with app.backend.consumer(["flood"]) as consumer:
        bodies = []
        while leases := consumer.reserve(500, 0):
            bodies += [json.loads(lease.body)["args"][0] for lease in leases]
            consumer.settle([Ack(lease) for lease in leases])
    expected = [[*range(sent), -1], [*range(sent + 1), -1]]
    if task is aflood:
        expected.append([*range(sent), -1, sent])  # the thread of the interrupted call runs on during the last call
    assert bodies in expected, bodies[-3:]


# --- malformed jobs ----------------------------------------------------------------------------------------


@pytest.mark.one_row
@pytest.mark.parametrize("body", [b"", b"\x00\xff garbage", b"[1, 2", b'{"multiq": 99, "task": "quick"}', b'"text"'])
def test_w9_what_cannot_be_read_is_buried_as_it_is_and_the_worker_goes_on(
    tmp_path: Path, url: str, body: bytes
) -> None:
    app.backend.enqueue("default", [NewJob(body, new_id())])
    with worker(tmp_path, url, "processes=1") as process:
        until(lambda: counts() == (0, 0, 0, 1))
        (buried,) = app.queue().jobs("buried", limit=1)
        assert buried.body == body
        quick.enqueue(2)
        until(lambda: 2 in words(process, "end"))


def test_w10_an_unknown_task_waits_for_the_deployment_that_brings_it(tmp_path: Path, url: str) -> None:
    app.backend.enqueue("default", [NewJob(b'{"multiq": 1, "task": "os.system", "args": ["true"]}', new_id())])
    with worker(tmp_path, url, "processes=1") as process:
        until(lambda: counts() == (0, 1, 0, 0))
        assert "knows no task 'os.system'" in process.log


@pytest.mark.long
@pytest.mark.parametrize("mode", ["", "threads=2", "concurrency=2"])
def test_w11_whatever_a_job_raises_is_its_failure_and_not_the_worker_s(tmp_path: Path, url: str, mode: str) -> None:
    # Given jobs that raise unusual exceptions, one whose text never ends, and one with a text of 100 MB
    task = athrow if "concurrency" in mode else throw
    handles = {kind: task.enqueue(number, kind) for number, kind in enumerate(EXCEPTIONS)}
    with worker(tmp_path, url, f"processes=1, {mode}") as process:
        # Then each is buried with a shortened reason, and one process has run all of them and still works
        until(lambda: counts() == (0, 0, 0, len(EXCEPTIONS)))
        quick.enqueue(100)
        until(lambda: 100 in words(process, "end"))
        assert len({pid for _, _, pid, _ in read_diary(process.diary)}) == 1
        assert len(process.log) < 1_000_000
        if app.backend.capabilities.reasons:
            reasons = {kind: handle.peek().reason or "" for kind, handle in handles.items()}
            assert all(kind in reason and len(reason) < 10_000 for kind, reason in reasons.items()), reasons


def test_w12_a_result_of_any_size_does_no_harm(tmp_path: Path, url: str) -> None:
    bulky.enqueue(1)
    quick.enqueue(2)
    with worker(tmp_path, url, "processes=1") as process:
        until(lambda: 2 in words(process, "end") and counts() == (0, 0, 0, 0))
        assert words(process, "end") == [1, 2]
        assert len({pid for _, _, pid, _ in read_diary(process.diary)}) == 1


# --- signals -----------------------------------------------------------------------------------------------


@pytest.mark.one_row
@pytest.mark.parametrize("mode", ["processes=2", "processes=1, threads=2", "processes=1, concurrency=2"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_w6_the_first_signal_lets_jobs_end_and_the_second_one_gives_them_back(
    tmp_path: Path, url: str, mode: str, number: signal.Signals
) -> None:
    # Given a worker with two jobs at work, one of them for minutes, and more that wait
    nap.enqueue(1, 1.0)
    nap.enqueue(2, 300)
    with worker(tmp_path, url, mode) as process:
        until(lambda: sorted(words(process, "start")) == [1, 2])
        quick.enqueue_many([(10,), (11,)])
        # When it gets a stop signal, then the short job is finished, and no other job is started
        process.send(number)
        until(lambda: words(process, "end") == [1] and counts() == (2, 0, 1, 0))
        assert process.process.poll() is None
        # When it gets a second signal, then it ends at once, and all remaining jobs are ready
        process.send(number)
        assert process.wait() == 130, process.log
    assert counts() == (3, 0, 0, 0)
    assert words(process, "end") == [1]


# --- no process is left behind -----------------------------------------------------------------------------


def test_w7_a_program_that_has_used_its_connections_can_start_workers(tmp_path: Path, url: str) -> None:
    # Given a program that uses its connections before and after it starts a worker
    start = "[worker_app.quick.enqueue(n) for n in range(20)] and worker_app.app.queue().stats().ready and 2"
    with worker(tmp_path, url, f"processes={start}, stop_when_empty=True") as process:
        assert process.wait() == 0, process.log
        assert sorted(words(process, "end")) == list(range(20))
    assert counts() == (0, 0, 0, 0)


def test_when_the_supervisor_is_killed_nothing_is_left_of_it(tmp_path: Path, url: str) -> None:
    # Given a supervisor whose children run jobs
    nap.options(ttr=60).enqueue(1, 1.5)
    with worker(tmp_path, url, "processes=2") as process:
        pid_of(process, 1)
        family = psutil.Process(process.process.pid).children()
        assert len(family) == 3
        # When the supervisor is killed
        os.kill(process.process.pid, signal.SIGKILL)
        # Then the children finish the jobs that they have begun, and all processes end
        until(lambda: not any(_lives(member) for member in family))
        assert words(process, "end") == [1]
    assert counts() == (0, 0, 0, 0)


@pytest.mark.long
def test_a_sidecar_that_is_killed_is_replaced_and_the_work_goes_on(tmp_path: Path, url: str) -> None:
    with worker(tmp_path, url, "processes=1") as process:
        process.wait_until_working()
        supervisor = psutil.Process(process.process.pid)
        quick.enqueue(1)
        child = pid_of(process, 1)
        (sidecar,) = [member.pid for member in supervisor.children() if member.pid != child]
        os.kill(sidecar, signal.SIGKILL)
        until(lambda: "the sidecar died" in process.log)
        until(lambda: len(supervisor.children()) == 2)
        quick.enqueue(2)
        until(lambda: 2 in words(process, "end"))
        process.send(signal.SIGTERM)
        assert process.wait() == 0, process.log


@pytest.mark.long
def test_a_service_manager_that_signals_the_whole_group_stops_it_gracefully(tmp_path: Path, url: str) -> None:
    # Given a job that runs for a while
    nap.enqueue(1, 1.0)
    with worker(tmp_path, url, "processes=2") as process:
        pid_of(process, 1)
        # When every process of the worker gets SIGTERM, as from systemd
        os.killpg(process.process.pid, signal.SIGTERM)
        # Then the job is finished, and the exit code is 0
        assert process.wait() == 0, process.log
        assert words(process, "end") == [1]


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
