"""The system refuses to start threads, as at a process limit: jobs wait for a thread, and are not lost."""

from __future__ import annotations

import contextvars
import threading

import pytest

import multiq
from multiq.job import JobTasks, job_tasks
from multiq.worker.execution import thread_pool
from multiq.worker.execution.thread_pool import ThreadPool


class Refusals:
    """The number of threads that the simulated system still refuses to a pool."""

    left = 0


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> Refusals:
    refusals = Refusals()

    class Thread(threading.Thread):
        def start(self) -> None:
            if refusals.left:
                refusals.left -= 1
                raise RuntimeError("can't start new thread")
            super().start()

    class Module:
        """The module ``threading``, as the pools see it."""

        Lock = threading.Lock

    Module.Thread = Thread  # type: ignore[attr-defined]
    monkeypatch.setattr(thread_pool, "threading", Module)
    return refusals


def test_a_call_that_was_refused_is_not_made_later(refusals: Refusals) -> None:
    pool = ThreadPool(2, "pool")
    made: list[str] = []
    refusals.left = 1

    with pytest.raises(RuntimeError, match="new thread"):
        pool.submit(made.append, "refused")
    pool.submit(made.append, "taken").result(10)

    assert made == ["taken"]


def test_calls_share_the_threads_that_there_are(refusals: Refusals) -> None:
    pool, go = ThreadPool(2, "pool"), threading.Event()
    first = pool.submit(go.wait, 10)
    refusals.left = 1

    second = pool.submit(str, 2)
    go.set()

    assert (first.result(10), second.result(10)) == (True, "2")


def test_plain_jobs_beside_coroutines_wait_for_a_thread(refusals: Refusals) -> None:
    app = multiq.App("memory://")
    ran: list[int] = []

    @app.task
    def plain(number: int) -> None:
        ran.append(number)

    plain.enqueue_many([(number,) for number in range(6)])
    worker = multiq.Worker(app, concurrency=2, stop_when_empty=True, grace=1)
    guard = threading.Timer(10, worker.stop)
    guard.start()
    refusals.left = 2

    worker.run()
    guard.cancel()

    assert sorted(ran) == list(range(6))


def test_a_refusal_is_tried_again_once_a_second_however_many_jobs_wait(refusals: Refusals) -> None:
    app = multiq.App("memory://")
    ran: list[int] = []

    @app.task
    def plain(number: int) -> None:
        ran.append(number)

    @app.task
    async def coroutine() -> None:
        """When this job ends, the waiting jobs are tried again."""

    plain.enqueue_many([(number,) for number in range(20)])
    coroutine.enqueue_many([()] * 20)
    worker = multiq.Worker(app, concurrency=30, stop_when_empty=True, grace=1)
    refusals.left = many = 1_000_000
    tries: list[int] = []

    def relieve() -> None:
        tries.append(many - refusals.left)
        refusals.left = 0

    relief, guard = threading.Timer(2.5, relieve), threading.Timer(15, worker.stop)
    relief.start()
    guard.start()

    worker.run()
    guard.cancel()

    assert 1 <= tries[0] <= 4
    assert sorted(ran) == list(range(20))


def test_threads_that_an_ended_job_has_left_make_room_for_those_of_others() -> None:
    # Given a job that has filled a pool, and has more calls waiting
    pool, go, begun = ThreadPool(2, "pool"), threading.Event(), threading.Barrier(3)
    job = JobTasks()
    context = contextvars.copy_context()
    context.run(job_tasks.set, job)

    def last() -> bool:
        begun.wait(10)
        return go.wait(60)

    left = [context.run(pool.submit, last) for _ in range(4)]
    waiting = [pool.submit(int) for _ in range(3)]
    begun.wait(10)  # both threads make calls of the job
    assert not any(each.done() for each in waiting)
    # When the job has ended
    job.is_over = True
    pool.write_off()
    # Then the calls of other jobs are made, and its own calls that had not begun are not
    assert [each.result(10) for each in waiting] == [0, 0, 0]
    assert [each.cancelled() for each in left] == [False, False, True, True]
    # And when its running calls have ended, their threads end, too, and the pool has as many threads as before
    go.set()
    assert [each.result(10) for each in left[:2]] == [True, True]
    barrier = threading.Barrier(2)
    assert sorted(each.result(10) for each in [pool.submit(barrier.wait, 10) for _ in range(2)]) == [0, 1]
    pool.shutdown()


def test_a_thread_that_has_just_taken_an_ended_job_s_call_delays_no_other_call() -> None:
    # Given many jobs, each of which ends while threads are about to make its calls
    for _ in range(300):
        pool, go = ThreadPool(2, "pool"), threading.Event()
        job = JobTasks()
        context = contextvars.copy_context()
        context.run(job_tasks.set, job)
        for _ in range(4):
            context.run(pool.submit, go.wait, 60)
        waiting = pool.submit(int)
        job.is_over = True
        pool.write_off()
        # Then the call of another job is made
        assert waiting.result(10) == 0
        go.set()
        pool.shutdown()
