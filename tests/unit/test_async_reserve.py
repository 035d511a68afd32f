"""Coroutines that wait for jobs: which coroutine gets which job, how long each waits, and that no job is lost."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from servers.process import until

import multiq
from multiq import BackendTimeout, BackendUnavailable, LeaseLost, QueueEmpty
from multiq.async_calls import THREADS
from multiq.async_reserve import _Waiter
from multiq.backend import GiveBack, State
from multiq.backend.memory import MemoryBackend, MemoryConsumer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from multiq.backend import Lease, Verdict


@pytest.fixture(params=["memory", "sqlite"])
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[multiq.App]:
    # on a busy machine, a call may wait longer for the file's lock than the default of 10 s
    url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/jobs.db?timeout=60"
    with multiq.App(url) as app:
        yield app


@pytest.fixture
def queue(app: multiq.App) -> multiq.Queue:
    return app.queue()


async def settled() -> None:
    """Let coroutines that have begun come to their first wait."""
    for _ in range(3):
        await asyncio.sleep(0)


def reserving_threads() -> set[int | None]:
    return {thread.ident for thread in threading.enumerate() if thread.name == "multiq-async-reserve"}


def test_a_hundred_waiting_coroutines_have_one_thread_and_are_served_in_turn(queue: multiq.Queue) -> None:
    async def main() -> None:
        before = threading.active_count()

        # given a hundred coroutines that wait for a job
        await queue.astats()
        waiting = [asyncio.ensure_future(queue.areserve(60)) for _ in range(100)]
        await asyncio.sleep(0.05)
        assert threading.active_count() - before <= 4

        # when jobs come
        await queue.aenqueue_many([*range(100)])

        # then each coroutine gets one, in the order in which they began to wait
        jobs = await asyncio.gather(*waiting)
        assert [job.body for job in jobs] == [*range(100)]
        for job in jobs:
            await job.aack()
        assert (await queue.astats()).reserved == 0

    asyncio.run(main())


def test_the_end_of_the_block_acks_and_an_exception_releases(queue: multiq.Queue) -> None:
    async def main() -> None:
        await queue.aenqueue_many([1, 2])
        async with await queue.areserve(5) as job:
            assert job.body == 1
        with pytest.raises(ZeroDivisionError):
            async with await queue.areserve(5) as job:
                raise ZeroDivisionError
        stats = await queue.astats()
        assert (stats.ready, stats.delayed, stats.reserved) == (0, 1, 0)

    asyncio.run(main())


def test_each_verdict_has_a_coroutine(queue: multiq.Queue) -> None:
    async def main() -> None:
        await queue.aenqueue_many([1, 2, 3])
        first, second, third = await queue.areserve_many(3, 5)
        await first.atouch()
        await first.aack()
        await second.arelease(60, reason="later")
        await third.abury("why")
        with pytest.raises(multiq.JobSettled):
            await first.aack()
        stats = await queue.astats()
        assert (stats.delayed, stats.buried, stats.reserved) == (1, 1, 0)

    asyncio.run(main())


def test_an_empty_queue_raises_after_the_timeout_of_each(queue: multiq.Queue) -> None:
    async def main() -> None:
        # given a coroutine that waits for long
        long = asyncio.ensure_future(queue.areserve(60))
        await asyncio.sleep(0.02)

        # when other coroutines wait for a shorter time, then their waits end before its wait
        with pytest.raises(QueueEmpty, match="within 0 s"):
            await queue.areserve()
        with pytest.raises(QueueEmpty, match=r"within 0\.1 s"):
            await queue.areserve(0.1)
        assert await queue.areserve_many(5, 0.01) == []
        assert not long.done()

        # and the first coroutine still gets a job
        await queue.aenqueue(1)
        await (await long).aack()

    asyncio.run(main())


def test_a_limit_is_the_most_jobs_of_one_coroutine(queue: multiq.Queue) -> None:
    async def main() -> None:
        await queue.aenqueue_many([*range(10)])
        parts = await asyncio.gather(queue.areserve_many(4, 5), queue.areserve_many(4, 5), queue.areserve_many(4, 5))
        assert sorted(job.body for part in parts for job in part) == [*range(10)]
        assert max(map(len, parts)) == 4

    asyncio.run(main())


@pytest.mark.parametrize("way", ["cancel", "timeout"])
def test_the_end_of_a_wait_searches_no_other_waits(
    queue: multiq.Queue, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparisons = itertools.count()
    compare = _Waiter.__eq__

    def counted(one: _Waiter, other: object) -> bool:
        next(comparisons)
        return compare(one, other)

    monkeypatch.setattr(_Waiter, "__eq__", counted)

    async def main() -> None:
        # given many coroutines that wait
        await queue.astats()
        waiting = [asyncio.ensure_future(queue.areserve(60 if way == "cancel" else 0.2)) for _ in range(100)]
        await settled()

        # when their waits end, those first that have begun last
        if way == "cancel":
            for task in reversed(waiting):
                task.cancel()
        ends = await asyncio.gather(*waiting, return_exceptions=True)

        # then no wait was compared with each of the others
        assert {type(end) for end in ends} == {asyncio.CancelledError if way == "cancel" else QueueEmpty}
        assert next(comparisons) < 100

    asyncio.run(main())


def test_a_cancelled_wait_takes_no_job(queue: multiq.Queue) -> None:
    async def main() -> None:
        waiting = asyncio.ensure_future(queue.areserve(60))
        await asyncio.sleep(0.02)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await queue.aenqueue(1)
        async with await queue.areserve(5) as job:
            assert (job.body, job.attempt) == (1, 1)

    asyncio.run(main())


def test_a_job_of_a_coroutine_that_is_cancelled_meanwhile_is_given_back(queue: multiq.Queue) -> None:
    async def main() -> None:
        # given a job that is reserved for a coroutine
        before = reserving_threads()
        waiting = asyncio.ensure_future(queue.areserve(60))
        while not reserving_threads() - before:  # noqa: ASYNC110 - the thread sets no event
            await asyncio.sleep(0.01)
        queue.enqueue(1)  # blocks the loop, so the coroutine cannot continue
        until(lambda: queue.stats().reserved == 1, "the job is reserved")

        # when the coroutine is cancelled before it has got the job
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

        # then the job is ready again, and no attempt is counted
        async with await queue.areserve(5) as job:
            assert (job.body, job.attempt) == (1, 1)

    asyncio.run(main())


class SlowConsumer(MemoryConsumer):
    """Keeps the jobs that it has reserved until a test lets them go, and counts the jobs that are given back."""

    has_jobs: ClassVar[threading.Event]
    may_go: ClassVar[threading.Event]
    given_back: ClassVar[int]
    calls: ClassVar[int]
    ends: ClassVar[int]

    @classmethod
    def backend(cls) -> MemoryBackend:
        class Slow(MemoryBackend):
            def consumer(self, queues: Sequence[str]) -> MemoryConsumer:
                consumer = super().consumer(queues)
                consumer.__class__ = cls
                return consumer

        cls.has_jobs, cls.may_go = threading.Event(), threading.Event()
        cls.given_back = cls.calls = cls.ends = 0
        return Slow()

    def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
        SlowConsumer.calls += 1
        leases = super().reserve(limit, timeout, queues)
        if leases:
            self.has_jobs.set()
            assert self.may_go.wait(60)
        SlowConsumer.ends += 1
        return leases

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        SlowConsumer.given_back += sum(isinstance(verdict, GiveBack) for verdict in verdicts)
        return super().settle(verdicts)


async def job_on_its_way(queue: multiq.Queue) -> tuple[asyncio.Future[Any], asyncio.Future[Any]]:
    """Let a call reserve a job for a coroutine, and then let another coroutine wait. Returns both coroutines."""
    first = asyncio.ensure_future(queue.areserve(60))
    await queue.aenqueue(1)
    await asyncio.to_thread(SlowConsumer.has_jobs.wait, 60)
    second = asyncio.ensure_future(queue.areserve(60))
    await settled()
    return first, second


def test_a_job_goes_to_a_coroutine_that_began_to_wait_while_the_job_was_reserved() -> None:
    queue = multiq.App(backend=SlowConsumer.backend()).queue()

    async def main() -> None:
        # given a job that is being reserved for a coroutine, and another coroutine that waits
        first, second = await job_on_its_way(queue)

        # when the first one is cancelled
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        SlowConsumer.may_go.set()

        # then the other coroutine gets the job, and the job is not given back in between
        async with await second as job:
            assert (job.body, job.attempt) == (1, 1)
        assert SlowConsumer.given_back == 0

    asyncio.run(main())


@pytest.mark.parametrize("is_answered", [False, True])
def test_a_job_of_a_coroutine_that_is_cancelled_meanwhile_goes_to_the_next(*, is_answered: bool) -> None:
    queue = multiq.App(backend=SlowConsumer.backend()).queue()

    async def main() -> None:
        # given a job for the first of two coroutines, on its way to their loop, and a call for the second one
        first, second = await job_on_its_way(queue)
        loop: Any = asyncio.get_running_loop()
        calls = SlowConsumer.calls
        SlowConsumer.may_go.set()
        # blocks the loop, so the coroutine cannot continue
        until(lambda: loop._ready and SlowConsumer.calls > calls, "the loop has got the job")

        # when the first coroutine is cancelled, before or after the loop has answered its wait
        if is_answered:
            loop.call_soon(first.cancel)
        else:
            first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first

        # then the second coroutine gets the job, and the job is not given back in between
        job = await second
        assert (job.body, job.attempt, SlowConsumer.given_back) == (1, 1, 0)

        # and the call ends, because no coroutine waits for its jobs any more
        await asyncio.to_thread(until, lambda: SlowConsumer.calls == SlowConsumer.ends, "the call has ended")

    asyncio.run(main())


def test_a_job_of_a_coroutine_that_is_closed_meanwhile_is_given_back(queue: multiq.Queue) -> None:
    async def main() -> None:
        # given a job for a coroutine, on its way to the loop
        await queue.astats()
        coroutine = queue.areserve(60)
        coroutine.send(None)
        loop: Any = asyncio.get_running_loop()
        queue.enqueue(1)  # blocks the loop
        until(lambda: queue.stats().reserved == 1 and loop._ready, "the loop has got the job")

        # when the coroutine is closed, which does not cancel its future
        coroutine.close()

        # then another coroutine gets the job
        async with await queue.areserve(5) as job:
            assert job.body == 1

    asyncio.run(main())


def test_no_coroutine_gets_a_cancelled_coroutine_s_job_whose_lease_has_ended(queue: multiq.Queue) -> None:
    async def main() -> None:
        # given a job for the first of two coroutines, on its way to their loop
        await queue.astats()
        first = asyncio.ensure_future(queue.areserve(60))
        second = asyncio.ensure_future(queue.areserve(60))
        await settled()
        loop: Any = asyncio.get_running_loop()
        queue.enqueue(1, ttr=1)  # blocks the loop, so the coroutine cannot continue
        until(lambda: queue.stats().reserved == 1 and loop._ready, "the loop has got the job")

        # when the lease ends before the first coroutine is cancelled
        queue.pause(60)  # so that the job is not reserved again at once
        until(lambda: queue.stats().ready == 1, "the lease has ended")
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first

        # then the second coroutine gets the job with a new lease
        await settled()
        queue.resume()
        job = await second
        assert job.attempt == 2

    asyncio.run(main())


@pytest.mark.long
def test_cancelled_coroutines_lose_no_job(queue: multiq.Queue) -> None:
    async def main() -> None:
        # given jobs that come while coroutines are cancelled at random times
        got: list[Any] = []

        async def consumer(patience: float) -> None:
            while True:
                try:
                    async with asyncio.timeout(patience):
                        job = await queue.areserve(60)
                except TimeoutError:
                    # the patience stays near a fiftieth of the time so far: if it were constant, a busy machine could
                    # always need longer than that for a reserve, and no coroutine would get a job
                    patience *= 1.02
                    continue
                got.append(job.body)
                await job.aack()

        # fewer consumers than multiq has threads, because an ack fails if it waits 10 s for a thread
        consumers = [asyncio.ensure_future(consumer(0.001 * (1 + number % 7))) for number in range(THREADS - 4)]
        for first in range(0, 200, 10):
            await queue.aenqueue_many([*range(first, first + 10)])
            await asyncio.sleep(0.002)

        # then each job is received once
        await asyncio.to_thread(
            until,
            lambda: (
                any(task.done() for task in consumers)  # by an error, which is shown below
                or (len(got) >= 200 and not queue.stats().reserved)
            ),
            "all jobs are acked",
        )
        for task in consumers:
            task.cancel()
        ends = await asyncio.gather(*consumers, return_exceptions=True)
        assert [end for end in ends if not isinstance(end, asyncio.CancelledError)] == []
        assert sorted(got) == [*range(200)]

    asyncio.run(main())


def test_jobs_for_a_loop_that_has_ended_are_given_back(queue: multiq.Queue) -> None:
    async def main() -> None:
        asyncio.ensure_future(queue.areserve(60))  # noqa: RUF006 - left behind on purpose
        await asyncio.sleep(0.02)

    asyncio.run(main())
    queue.enqueue(1)
    with queue.reserve(5) as job:
        assert job.body == 1


def test_jobs_for_a_loop_that_is_closed_before_it_delivers_them_are_given_back(queue: multiq.Queue) -> None:
    # given a coroutine that waits, and its loop, which has been stopped
    async def main() -> asyncio.Task[multiq.Job]:
        before = reserving_threads()
        waiting = asyncio.create_task(queue.areserve(60))
        await asyncio.to_thread(until, lambda: reserving_threads() - before, "the coroutine waits for jobs")
        return waiting

    loop = asyncio.new_event_loop()
    waiting = loop.run_until_complete(main())
    # when a job is reserved for the coroutine, and the loop is closed
    queue.enqueue(1)
    until(lambda: queue.stats().reserved == 1, "the job is reserved")
    until(lambda: loop._ready, "the loop has got the job")  # type: ignore[attr-defined]
    loop.close()
    # then another consumer gets the job, before its lease ends
    with queue.reserve(5) as job:
        assert job.body == 1
    waiting._log_destroy_pending = False  # type: ignore[attr-defined]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("is_answered", [False, True])
def test_a_forked_child_gives_back_no_job_of_its_parent(tmp_path: Path, *, is_answered: bool) -> None:
    queue = multiq.App(f"sqlite:///{tmp_path}/jobs.db?timeout=60").queue()

    # given a job for a coroutine, on its way to a loop that has been stopped, or in a future that is done
    async def main() -> asyncio.Task[multiq.Job]:
        await queue.astats()
        waiting = asyncio.create_task(queue.areserve(60))
        await settled()
        return waiting

    loop: Any = asyncio.new_event_loop()
    waiting: Any = loop.run_until_complete(main())
    queue.enqueue(1)
    until(lambda: queue.stats().reserved == 1 and loop._ready, "the loop has got the job")
    if is_answered:
        loop.call_soon(loop.stop)  # the loop answers the wait, and the coroutine would continue in the next step
        loop.run_forever()

    # when the parent forks, and the child closes the loop and the coroutine
    child = os.fork()
    if child == 0:
        loop.close()
        waiting.get_coro().close()
        time.sleep(0.3)  # a thread would give the job back
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

    # then the parent's coroutine still has the job
    job = loop.run_until_complete(waiting)
    job.ack()
    loop.close()
    queue.close()


def test_aclose_ends_the_waits_and_the_app_can_be_used_again(app: multiq.App, queue: multiq.Queue) -> None:
    async def main() -> None:
        await queue.astats()  # opens the backend, so that the coroutines wait at once
        waiting = [asyncio.ensure_future(queue.areserve(60)) for _ in range(3)]
        await settled()
        await app.aclose()
        for task in waiting:
            with pytest.raises(BackendUnavailable, match="was closed while the coroutine waited"):
                await task
        await queue.aenqueue(1)
        async with await queue.areserve(5) as job:
            assert job.body == 1
        await app.aclose()

    asyncio.run(main())


def test_the_last_coroutine_s_thread_ends_when_the_queue_is_closed(queue: multiq.Queue) -> None:
    async def main() -> None:
        await queue.astats()  # opens the backend, so that the coroutine waits at once
        waiting = asyncio.ensure_future(queue.areserve(60))
        await settled()
        await queue.aclose()
        await asyncio.gather(waiting, return_exceptions=True)

    before = {thread.ident for thread in threading.enumerate()}
    asyncio.run(main())
    until(
        lambda: (
            not any(
                thread.name == "multiq-async-reserve" and thread.ident not in before for thread in threading.enumerate()
            )
        ),
        "the thread has ended",
    )


def test_a_cancelled_ack_is_carried_out_before_the_cancellation_is_raised(queue: multiq.Queue) -> None:
    async def main() -> None:
        handle = await queue.aenqueue(1)
        job = await queue.areserve(5)
        acking = asyncio.ensure_future(job.aack())
        await settled()
        acking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await acking
        assert await handle.astate() is State.GONE

    asyncio.run(main())


def test_an_error_of_the_backend_reaches_all_who_wait() -> None:
    class FailingConsumer(MemoryConsumer):
        is_down = True

        def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
            if FailingConsumer.is_down:
                raise BackendTimeout("no answer")
            return super().reserve(limit, timeout, queues)

    class Failing(MemoryBackend):
        def consumer(self, queues: Sequence[str]) -> MemoryConsumer:
            consumer = super().consumer(queues)
            consumer.__class__ = FailingConsumer
            return consumer

    queue = multiq.App(backend=Failing()).queue()

    async def main() -> None:
        errors = await asyncio.gather(*(queue.areserve(60) for _ in range(5)), return_exceptions=True)
        assert [type(error) for error in errors] == [BackendTimeout] * 5
        assert all(a is not b for a, b in itertools.combinations(errors, 2)), "each caller has an error of its own"
        FailingConsumer.is_down = False
        await queue.aenqueue(1)
        assert (await queue.areserve(5)).body == 1

    asyncio.run(main())


def test_a_stop_iteration_of_a_backend_ends_the_wait() -> None:
    class Stopping(MemoryBackend):
        def consumer(self, queues: Sequence[str]) -> MemoryConsumer:
            consumer = super().consumer(queues)
            consumer.__class__ = StoppingConsumer
            return consumer

    class StoppingConsumer(MemoryConsumer):
        def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
            raise StopIteration

    async def main() -> None:
        queue = multiq.App(backend=Stopping()).queue()
        async with asyncio.timeout(60):
            with pytest.raises(RuntimeError, match="the call raised StopIteration"):
                await queue.areserve(0)

    asyncio.run(main())


def test_a_coroutine_whose_wait_has_failed_at_once_gets_no_job() -> None:
    class Failing(MemoryBackend):
        is_down = True

        def consumer(self, queues: Sequence[str]) -> MemoryConsumer:
            if self.is_down:
                raise BackendUnavailable("no connection")
            return super().consumer(queues)

    backend = Failing()
    queue = multiq.App(backend=backend).queue()

    async def main() -> None:
        # given a coroutine that has got an error, because the backend made no consumer
        with pytest.raises(BackendUnavailable, match="no connection"):
            await queue.areserve(60)

        # when a job comes, then the coroutine that waits gets it
        backend.is_down = False
        await queue.aenqueue(1)
        async with await queue.areserve(5) as job:
            assert job.body == 1

    asyncio.run(main())


@pytest.mark.parametrize("way", ["close", "aclose"])
def test_no_consumer_is_closed_while_another_thread_uses_it(way: str) -> None:
    class BusyConsumer(MemoryConsumer):
        calls: ClassVar[list[str]] = []

        def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
            self.calls.append("reserve")
            leases = super().reserve(limit, timeout, queues)
            time.sleep(0.05)  # a driver may need the connection after its wait
            self.calls.append("end")
            return leases

        def close(self) -> None:
            self.calls.append("close")

    class Busy(MemoryBackend):
        def consumer(self, queues: Sequence[str]) -> MemoryConsumer:
            consumer = super().consumer(queues)
            consumer.__class__ = BusyConsumer
            return consumer

    app = multiq.App(backend=Busy())

    async def main() -> None:
        waiting = asyncio.ensure_future(app.queue().areserve(1))
        await asyncio.to_thread(until, lambda: BusyConsumer.calls, "a reserve has begun")
        if way == "aclose":
            await app.aclose()
        else:
            await asyncio.to_thread(app.close)
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(main())
    calls = BusyConsumer.calls
    assert "close" in calls
    assert calls[calls.index("close") - 1] == "end"


def test_a_call_that_hangs_does_not_keep_its_consumer_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiq.queue._CLOSE_PATIENCE", 0.02)
    has_begun, is_closed = threading.Event(), threading.Event()

    class HangingConsumer(MemoryConsumer):
        def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
            has_begun.set()
            assert is_closed.wait(10)
            return []

        def close(self) -> None:
            is_closed.set()

    class Hanging(MemoryBackend):
        def consumer(self, queues: Sequence[str]) -> MemoryConsumer:
            consumer = super().consumer(queues)
            consumer.__class__ = HangingConsumer
            return consumer

    app = multiq.App(backend=Hanging())

    async def main() -> None:
        waiting = asyncio.ensure_future(app.queue().areserve(60))
        await asyncio.to_thread(has_begun.wait, 10)
        await app.aclose()
        with pytest.raises(BackendUnavailable, match="was closed"):
            await waiting

    asyncio.run(main())
    assert is_closed.is_set()


def test_a_lost_lease_is_told_by_the_coroutine_too(queue: multiq.Queue) -> None:
    async def main() -> None:
        await queue.aenqueue(1, ttr=1)
        job = await queue.areserve(5)
        await asyncio.to_thread(until, lambda: queue.stats().ready == 1, "the lease has ended")
        with pytest.raises(LeaseLost):
            await job.aack()

    asyncio.run(main())
