"""Calls of coroutines run on threads of multiq's own: how many, in which context, and what a cancellation leaves."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import trio
from servers.process import until

import multiq
from multiq import BackendTimeout, BackendUnavailable, MultiqError, async_calls
from multiq.backend import QueueStats, State
from multiq.backend.memory import MemoryBackend
from multiq.conformance.forks import ended_well, fork

if TYPE_CHECKING:
    from collections.abc import Iterator

THREADS = async_calls.THREADS


class Hung(MemoryBackend):
    """Answers ``stats`` only when ``go_on`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.begun: list[str] = []
        self.contexts: list[str] = []

    def stats(self, queue: str) -> QueueStats:
        self.begun.append(queue)
        self.contexts.append(request.get("none"))
        self.go_on.wait()
        return super().stats(queue)


request: contextvars.ContextVar[str] = contextvars.ContextVar("request")


@pytest.fixture
def backend() -> Iterator[Hung]:
    backend = Hung()
    yield backend
    backend.go_on.set()


@pytest.fixture
def queue(backend: Hung) -> multiq.Queue:
    return multiq.App(backend=backend).queue()


def test_a_hung_server_does_not_delay_an_unrelated_to_thread(backend: Hung, queue: multiq.Queue) -> None:
    async def main() -> str:
        # given more calls to a hung server than there are threads anywhere
        calls = [asyncio.ensure_future(queue.astats()) for _ in range(100)]
        await asyncio.to_thread(until, lambda: len(backend.begun) == THREADS, "all threads are busy")

        # when the loop runs something else, on its executor and on another backend's threads
        other = multiq.App("memory://").queue()
        answer = await asyncio.to_thread(lambda: "done"), (await other.astats()).ready

        # then the other work is done before the server answers
        assert not any(call.done() for call in calls)
        backend.go_on.set()
        assert {(await call).ready for call in calls} == {0}
        return str(answer)

    assert asyncio.run(main()) == "('done', 0)"


def test_at_most_sixteen_calls_of_a_backend_run_at_a_time(backend: Hung, queue: multiq.Queue) -> None:
    async def main() -> None:
        before = threading.enumerate()
        calls = [asyncio.ensure_future(queue.astats()) for _ in range(THREADS + 5)]
        await asyncio.to_thread(until, lambda: len(backend.begun) == THREADS, "all threads are busy")
        began = [thread for thread in threading.enumerate() if thread not in before]
        assert sum(thread.name.startswith("multiq-async") for thread in began) == THREADS
        backend.go_on.set()
        await asyncio.gather(*calls)

    asyncio.run(main())
    assert len(backend.begun) == THREADS + 5


def test_a_call_runs_in_the_context_of_its_caller(backend: Hung, queue: multiq.Queue) -> None:
    backend.go_on.set()

    async def caller(name: str) -> None:
        request.set(name)
        await queue.astats()

    async def main() -> None:
        await asyncio.gather(*(caller(f"request {number}") for number in range(5)))

    asyncio.run(main())
    assert sorted(backend.contexts) == [f"request {number}" for number in range(5)]


def test_a_call_that_is_cancelled_before_it_begins_is_not_made(backend: Hung, queue: multiq.Queue) -> None:
    async def main() -> None:
        # given a call that waits for a thread
        calls = [asyncio.ensure_future(queue.astats()) for _ in range(THREADS)]
        await asyncio.to_thread(until, lambda: len(backend.begun) == THREADS, "all threads are busy")
        late = asyncio.ensure_future(queue.astats())
        await asyncio.sleep(0)

        # when it is cancelled
        late.cancel()
        with pytest.raises(asyncio.CancelledError) as cancelled:
            await late

        # then the call is never made
        backend.go_on.set()
        await asyncio.gather(*calls)
        await queue.astats()
        assert len(backend.begun) == THREADS + 1
        assert not hasattr(cancelled.value, "__notes__")

    asyncio.run(main())


def test_a_cancelled_call_that_has_begun_says_that_it_goes_on(backend: Hung, queue: multiq.Queue) -> None:
    async def main() -> None:
        call = asyncio.ensure_future(queue.astats())
        await asyncio.to_thread(until, lambda: backend.begun, "the call has begun")
        call.cancel()
        with pytest.raises(asyncio.CancelledError) as cancelled:
            await call
        assert cancelled.value.__notes__ == ["multiq: the call had begun, and goes on"]

    asyncio.run(main())


def test_a_call_that_waited_too_long_for_a_thread_is_not_made(
    backend: Hung, queue: multiq.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        # given calls that wait for a thread, longer than allowed
        calls = [asyncio.ensure_future(queue.astats()) for _ in range(THREADS)]
        await asyncio.to_thread(until, lambda: len(backend.begun) == THREADS, "all threads are busy")
        late = [asyncio.ensure_future(queue.astats()) for _ in range(3)]
        await asyncio.sleep(0)
        monkeypatch.setattr(async_calls, "MOST_WAIT", 0.0)

        # when the threads are free again
        backend.go_on.set()

        # then these calls fail, and the server has not received them
        errors = await asyncio.gather(*late, return_exceptions=True)
        assert [type(error) for error in errors] == [BackendTimeout] * 3
        await asyncio.gather(*calls)
        assert len(backend.begun) == THREADS

    asyncio.run(main())


def test_the_error_of_a_call_is_raised_to_its_caller(queue: multiq.Queue) -> None:
    with pytest.raises(multiq.JobNotFound, match="has no job 123"):
        asyncio.run(queue.apeek("123"))


def test_an_error_that_a_future_refuses_does_not_hang_the_caller(backend: Hung) -> None:
    def stop() -> None:
        raise StopIteration("the end")

    with pytest.raises(RuntimeError, match="the call raised StopIteration"):
        asyncio.run(async_calls.run(backend, stop))


def test_run_to_end_is_left_only_when_the_call_has_ended(backend: Hung) -> None:
    ended: list[str] = []

    def call() -> None:
        backend.begun.append("call")
        backend.go_on.wait()
        ended.append("call")

    async def main() -> None:
        # given a call that has begun, and that is cancelled, even twice
        task = asyncio.ensure_future(async_calls.run_to_end(backend, call))
        await asyncio.to_thread(until, lambda: backend.begun, "the call has begun")
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0)
            assert not task.done()

        # when the call ends
        backend.go_on.set()

        # then the cancellation is raised
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == ["call"]

    asyncio.run(main())


def test_loops_in_several_threads_share_an_app() -> None:
    app = multiq.App("memory://")
    queue = app.queue()
    failures: list[BaseException] = []

    async def produce(first: int) -> None:
        handles = await asyncio.gather(*(queue.aenqueue(number) for number in range(first, first + 50)))
        assert {await handle.astate() for handle in handles[:5]} == {State.READY}

    def loop(first: int) -> None:
        try:
            asyncio.run(produce(first))
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=loop, args=[1000 * number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert queue.stats().ready == 200


def test_a_forked_child_starts_with_threads_of_its_own(tmp_path: Any) -> None:
    # given an app whose threads still run
    app = multiq.App(f"sqlite:///{tmp_path}/jobs.db")
    asyncio.run(app.queue().aenqueue("parent"))

    async def produce() -> None:
        await asyncio.gather(*(app.queue().aenqueue(number) for number in range(10)))
        async with await app.queue().areserve(5) as job:
            assert job.body == "parent"
        assert (await app.queue().astats()).ready == 10

    # when a child uses the app, then its coroutines work
    assert ended_well(fork(lambda: asyncio.run(produce())))
    assert asyncio.run(app.queue().astats()).ready == 10
    app.close()


def test_a_fork_beside_waiting_coroutines_leaves_both_processes_working(tmp_path: Any) -> None:
    app = multiq.App(f"sqlite:///{tmp_path}/jobs.db")
    queue = app.queue()

    async def main() -> None:
        # given coroutines that wait for jobs and for the backend in a parent process
        waiting = [asyncio.ensure_future(queue.areserve(60)) for _ in range(3)]
        sending = asyncio.ensure_future(app.queue("other").aenqueue(1))
        await asyncio.sleep(0.01)

        # when a child process uses the app on a thread on which no loop runs
        child = await asyncio.to_thread(fork, lambda: asyncio.run(app.queue("third").aenqueue(1)))
        assert await asyncio.to_thread(ended_well, child)

        # then the parent's coroutines continue
        await sending
        await queue.aenqueue_many([1, 2, 3])
        for job in await asyncio.gather(*waiting):
            await job.aack()
        await app.aclose()

    asyncio.run(main())
    assert (queue.stats().ready, app.queue("third").stats().ready) == (0, 1)
    app.close()


def test_an_app_starts_no_thread_before_its_first_coroutine() -> None:
    program = (
        "import asyncio, sys, threading, multiq\n"
        "app = multiq.App('memory://'); app.queue().enqueue(1)\n"
        "assert threading.active_count() == 1 and 'multiq.async_calls' not in sys.modules\n"
        "asyncio.run(app.queue().aenqueue(2))\n"
        "assert threading.active_count() > 1\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_interpreter_ends_a_call_that_is_being_made_before_it_exits() -> None:
    # given a program that ends while its enqueue is being made
    program = """
import asyncio, threading, time, multiq
from multiq.backend.memory import MemoryBackend

begun = threading.Event()

class Slow(MemoryBackend):
    def enqueue(self, queue, jobs, *, connection=None):
        begun.set()
        time.sleep(0.2)
        print("stored", flush=True)
        return super().enqueue(queue, jobs)

async def main():
    task = asyncio.ensure_future(multiq.App(backend=Slow()).queue().aenqueue(1))
    while not begun.is_set():
        await asyncio.sleep(0.001)

asyncio.run(main())
print("main is over", flush=True)
"""
    # when the program ends, then its exit waits for the enqueue, and nothing is printed to stderr
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "main is over\nstored\n"
    assert done.stderr == ""


def test_without_an_asyncio_loop_the_error_names_the_way_out(queue: multiq.Queue) -> None:
    coroutine = queue.aenqueue(1)
    with pytest.raises(MultiqError, match=r"must be awaited on an asyncio event loop.*trio.to_thread.run_sync"):
        coroutine.send(None)


@pytest.mark.parametrize("call", ["aenqueue", "astats", "areserve", "aresult"])
def test_a_program_on_trio_gets_a_clear_error(call: str) -> None:
    queue = multiq.App("memory://").queue()

    async def main() -> None:
        if call == "aenqueue":
            await queue.aenqueue(1)
        elif call == "aresult":
            await queue.enqueue(1).aresult()
        else:
            await getattr(queue, call)()

    with pytest.raises(MultiqError, match="none runs here: with trio"):
        trio.run(main)


def test_anyio_on_asyncio_cancels_a_wait_without_losing_a_job() -> None:
    queue = multiq.App("memory://").queue()

    async def main() -> int | None:
        with anyio.move_on_after(0.05):
            await queue.areserve(60)
        await queue.aenqueue(1)
        async with anyio.create_task_group() as group:
            for number in range(10):
                group.start_soon(queue.aenqueue, number)
        # The reserve that was cancelled may have had a job, and gives it back.
        while (await queue.astats()).ready != 11:  # noqa: ASYNC110 - nothing tells of it
            await anyio.sleep(0.01)
        return (await queue.astats()).ready

    assert anyio.run(main) == 11


def test_a_thread_that_the_system_refuses_is_an_error_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    queue = multiq.App(backend=MemoryBackend()).queue()
    with monkeypatch.context() as patch:
        patch.setattr(async_calls, "start_new_thread", refuse)
        for call in (queue.astats, lambda: queue.aenqueue(1), queue.areserve):
            with pytest.raises(BackendUnavailable, match="no thread could be started"):
                asyncio.run(call())

    # and the next call starts a thread
    assert asyncio.run(queue.aenqueue(2)).state() is State.READY
    assert asyncio.run(queue.areserve(5)).body == 2


def test_calls_wait_for_the_first_thread_if_the_system_refuses_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    queue = multiq.App(backend=MemoryBackend()).queue()

    async def main() -> list[multiq.QueueStats]:
        return await asyncio.gather(*(queue.astats() for _ in range(10)))

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert len(asyncio.run(main())) == 10


def test_an_iteration_yields_what_comes_before_an_error(backend: Hung) -> None:
    def items() -> Iterator[int]:
        yield from range(250)
        raise BackendTimeout("too slow")

    async def main() -> list[int]:
        seen: list[int] = []
        try:
            async for item in async_calls.iterate(backend, items()):
                seen.append(item)  # noqa: PERF401 - an error must leave the items before it
        except BackendTimeout:
            return seen
        raise AssertionError("the error was lost")

    assert asyncio.run(main()) == list(range(250))
