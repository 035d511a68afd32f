"""Enqueues of coroutines: which of them are sent in one call, in which order, and which error each caller gets."""

from __future__ import annotations

import asyncio
import datetime as dt
import itertools
import logging
import threading
from typing import TYPE_CHECKING, Any

import pytest
from servers.process import until

import multiq
from multiq import (
    BackendFull,
    BackendTimeout,
    EnqueueUncertain,
    OptionInvalid,
    PayloadTooLarge,
    Unsupported,
    async_enqueue,
)
from multiq.async_calls import threads_of
from multiq.backend import NewJob, State
from multiq.backend.memory import MemoryBackend
from multiq.conformance.threads import HANGS
from multiq.errors import EnqueuePartial

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence


class Gate(MemoryBackend):
    """Makes the first enqueue wait until ``go_on`` is set. Bodies over *limit* bytes are too large.

    From the second call on, each call raises the error that the next of *errors* makes from the jobs. None: the call
    succeeds.
    """

    def __init__(self, limit: int = 100) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.calls: list[list[NewJob]] = []
        self.connections: list[Any] = []
        self.limit = limit
        self.errors: list[Callable[[str, Sequence[NewJob]], Exception] | None] = []

    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
        self.calls.append([*jobs])
        self.connections.append(connection)
        if len(self.calls) == 1 or connection is not None:
            self.go_on.wait()
        elif self.errors and (error := self.errors.pop(0)) is not None:
            raise error(queue, jobs)
        for job in jobs:
            if len(job.body) > self.limit:
                raise PayloadTooLarge(len(job.body), self.limit, "make it smaller")
        return super().enqueue(queue, jobs)

    @property
    def sizes(self) -> list[int]:
        return [len(jobs) for jobs in self.calls]


@pytest.fixture
def backend() -> Iterator[Gate]:
    backend = Gate()
    yield backend
    backend.go_on.set()


@pytest.fixture
def queue(backend: Gate) -> multiq.Queue:
    return multiq.App(backend=backend).queue()


async def behind_a_call(backend: Gate, queue: multiq.Queue, calls: Callable[[], Sequence[Awaitable[Any]]]) -> list[Any]:
    """Begin *calls* while another enqueue is being made. Returns their results or errors."""
    first = asyncio.ensure_future(queue.aenqueue("first"))
    await asyncio.to_thread(until, lambda: backend.calls, "the first enqueue is being made")
    waiting = [asyncio.ensure_future(call) for call in calls()]
    await asyncio.sleep(0)
    backend.go_on.set()
    await first
    return await asyncio.gather(*waiting, return_exceptions=True)


def bodies(queue: multiq.Queue) -> list[Any]:
    return [job.value for job in queue.jobs("ready", limit=2000)]


def test_enqueues_that_wait_at_the_same_time_go_in_one_call(backend: Gate, queue: multiq.Queue) -> None:
    handles = asyncio.run(behind_a_call(backend, queue, lambda: [queue.aenqueue(number) for number in range(50)]))

    # then the order is that of the calls, and each caller gets the handle of its own job
    assert backend.sizes == [1, 50]
    assert bodies(queue) == ["first", *range(50)]
    assert [handle.peek().value for handle in handles] == [*range(50)]


def test_an_enqueue_that_is_alone_is_one_call(backend: Gate, queue: multiq.Queue) -> None:
    backend.go_on.set()

    async def main() -> None:
        for number in range(5):
            await queue.aenqueue(number)

    asyncio.run(main())
    assert backend.sizes == [1] * 5


def test_enqueues_of_a_busy_loop_go_in_few_calls_although_each_call_is_fast(backend: Gate, queue: multiq.Queue) -> None:
    # given calls that end before the event loop begins the next enqueue
    backend.go_on.set()

    async def enqueue(number: int) -> None:
        until(lambda: not threads_of(backend).is_busy, "the calls before have ended")
        await queue.aenqueue(number)

    async def main() -> None:
        await queue.aenqueue("first")
        await asyncio.gather(*(enqueue(number) for number in range(50)))

    asyncio.run(main())
    # then the first enqueue is sent at once, and the others wait until all that are ready have begun
    assert backend.sizes == [1, 1, 49]
    assert bodies(queue) == ["first", *range(50)]


def test_an_enqueue_is_sent_although_another_loop_has_ended_before_it_sent_its_own(
    backend: Gate, queue: multiq.Queue
) -> None:
    # given a loop that was stopped in the turn in which an enqueue had to wait for the others of this turn
    backend.go_on.set()

    async def enqueue(number: int) -> None:
        until(lambda: not threads_of(backend).is_busy, "the calls before have ended")
        if number == 2:
            asyncio.get_running_loop().stop()
        await queue.aenqueue(number)

    loop = asyncio.new_event_loop()
    tasks = [loop.create_task(enqueue(number)) for number in range(3)]
    loop.run_forever()
    # when another loop enqueues, then its jobs are sent
    asyncio.run(asyncio.wait_for(queue.aenqueue("other"), HANGS))
    assert bodies(queue)[0] == 0
    assert "other" in bodies(queue)
    # and the first loop, which runs again, sends its own
    loop.run_until_complete(asyncio.wait_for(asyncio.gather(*tasks), HANGS))
    assert sorted(bodies(queue), key=str) == [0, 1, 2, "other"]
    loop.close()


def test_an_enqueue_that_waits_for_others_may_be_cancelled(backend: Gate, queue: multiq.Queue) -> None:
    # given an event loop that begins four enqueues in one turn, after calls that were fast
    backend.go_on.set()
    notes: dict[int, str] = {}

    async def enqueue(number: int) -> None:
        until(lambda: not threads_of(backend).is_busy, "the calls before have ended")
        try:
            await queue.aenqueue(number)
        except asyncio.CancelledError as exc:
            notes[number] = exc.__notes__[0]
            raise

    async def main() -> None:
        tasks = [asyncio.ensure_future(enqueue(number)) for number in range(4)]
        await asyncio.sleep(0)
        # when three of them are cancelled at once
        for task in tasks[1:]:
            task.cancel()
        await asyncio.wait(tasks)
        await queue.aenqueue("next")

    asyncio.run(asyncio.wait_for(main(), HANGS))
    # then the note of each is true, and the next enqueue is sent
    stored = bodies(queue)
    assert "next" in stored
    assert {number: "was sent, and goes on" in note for number, note in notes.items()} == {
        number: number in stored for number in (1, 2, 3)
    }


def test_each_queue_has_calls_of_its_own(backend: Gate, queue: multiq.Queue) -> None:
    app = multiq.App(backend=backend)

    async def main() -> None:
        # given a queue whose enqueue hangs
        first = asyncio.ensure_future(queue.aenqueue("first"))
        await asyncio.to_thread(until, lambda: backend.calls, "the first enqueue is being made")

        # when a job is enqueued to another queue, then it does not wait
        await app.queue("other").aenqueue(1)
        assert not first.done()
        backend.go_on.set()
        await first

    asyncio.run(main())


def test_tasks_and_queues_of_a_backend_share_calls(backend: Gate, queue: multiq.Queue) -> None:
    app = multiq.App(backend=backend)

    @app.task
    def work(number: int) -> None: ...

    asyncio.run(
        behind_a_call(
            backend,
            queue,
            lambda: [
                work.aenqueue(1),
                work.options(priority=5).aenqueue(2),
                work.aenqueue_many([(3,), (4,)]),
                work.options(delay=60).aenqueue_many([(5,)]),
                queue.aenqueue("plain"),
                queue.aenqueue_many([b"a", b"b"]),
            ],
        )
    )
    assert backend.sizes == [1, 8]
    assert [job.priority for job in backend.calls[1]] == [1024, 5, 1024, 1024, 1024, 1024, 1024, 1024]
    assert queue.stats().delayed == 1


def test_wrong_arguments_are_refused_at_once_and_hold_up_nobody(backend: Gate, queue: multiq.Queue) -> None:
    task = multiq.App(backend=backend).task(name="work")(lambda number: None)
    results = asyncio.run(
        behind_a_call(
            backend,
            queue,
            lambda: [
                queue.aenqueue(1),
                task.aenqueue(),  # type: ignore[call-arg]
                queue.aenqueue(object()),
                queue.aenqueue(1, delay=-1),
                queue.aenqueue_many("text"),
                task.options(id="one").aenqueue_many([(1,)]),
                queue.aenqueue(2),
            ],
        )
    )
    assert [type(result) for result in results] == [
        multiq.JobHandle, multiq.ArgumentsInvalid, multiq.PayloadInvalid, OptionInvalid, multiq.ArgumentsInvalid,
        OptionInvalid, multiq.JobHandle,
    ]  # fmt: skip
    assert bodies(queue) == ["first", 1, 2]


def test_a_body_that_is_too_large_fails_only_its_own_enqueue(backend: Gate, queue: multiq.Queue) -> None:
    results = asyncio.run(
        behind_a_call(
            backend, queue, lambda: [queue.aenqueue(b"x" * 101 if number == 37 else number) for number in range(100)]
        )
    )
    wrong = [(number, type(result)) for number, result in enumerate(results) if isinstance(result, Exception)]
    assert wrong == [(37, PayloadTooLarge)]
    assert bodies(queue) == ["first", *(number for number in range(100) if number != 37)]


def test_a_batch_with_a_body_that_is_too_large_stays_whole(backend: Gate, queue: multiq.Queue) -> None:
    results = asyncio.run(
        behind_a_call(
            backend,
            queue,
            lambda: [queue.aenqueue(1), queue.aenqueue_many([2, b"x" * 101, 3]), queue.aenqueue_many([4, 5])],
        )
    )
    assert isinstance(results[1], PayloadTooLarge)
    assert bodies(queue) == ["first", 1, 4, 5]


def test_each_caller_is_told_that_its_own_jobs_are_uncertain(backend: Gate, queue: multiq.Queue) -> None:
    def lose_reply(name: str, jobs: Sequence[NewJob]) -> Exception:
        MemoryBackend.enqueue(backend, name, jobs[:2])
        error = EnqueueUncertain(name, jobs, "the reply was lost", client_ids=True)
        error.__cause__ = BackendTimeout("no answer")
        return error

    async def main() -> None:
        # given three enqueues in one call, whose reply is lost
        backend.errors = [lose_reply]
        errors = await behind_a_call(
            backend, queue, lambda: [queue.aenqueue(1), queue.aenqueue_many([2, 3]), queue.aenqueue(4)]
        )

        # then each error is about the jobs of its own caller
        assert [type(error) for error in errors] == [EnqueueUncertain] * 3
        assert [len(error.jobs) for error in errors] == [1, 2, 1]
        assert len({error.ids for error in errors}) == 3
        assert all(isinstance(error.__cause__, BackendTimeout) for error in errors)

        # and repeats only these jobs, under their ids
        one = await errors[0].arepeat()
        assert (one.id,) == errors[0].ids
        assert [handle.id for handle in await errors[1].arepeat()] == list(errors[1].ids)
        assert backend.sizes == [1, 4, 1, 2]

    asyncio.run(main())
    assert sorted(map(str, bodies(queue))) == ["1", "2", "3", "first"]


def test_each_caller_is_told_which_of_its_jobs_are_stored(backend: Gate, queue: multiq.Queue) -> None:
    def store_three(name: str, jobs: Sequence[NewJob]) -> Exception:
        MemoryBackend.enqueue(backend, name, jobs[:3])
        error = EnqueuePartial({at: jobs[at].id for at in range(3)}, len(jobs), "the disk is full")
        error.__cause__ = BackendFull("the disk is full")
        return error

    # given a backend that stores three of six jobs, and then none
    backend.errors = [store_three, *(2 * [lambda *_: BackendFull("the disk is full")])]
    results = asyncio.run(
        behind_a_call(
            backend,
            queue,
            lambda: [queue.aenqueue_many([1, 2]), queue.aenqueue_many([3, 4]), queue.aenqueue_many([5, 6])],
        )
    )

    # then the first caller has its jobs, the second caller has one of two, and the third has none
    assert [handle.peek().value for handle in results[0]] == [1, 2]
    assert isinstance(results[1], EnqueuePartial)
    assert (list(results[1].accepted), results[1].total) == ([0], 2)
    assert isinstance(results[2], BackendFull)
    assert bodies(queue) == ["first", 1, 2, 3]


def test_a_backend_that_cannot_be_reached_is_asked_once_for_all_callers(backend: Gate, queue: multiq.Queue) -> None:
    backend.errors = [lambda *_: BackendTimeout("no answer")]
    errors = asyncio.run(behind_a_call(backend, queue, lambda: [queue.aenqueue(number) for number in range(10)]))
    assert [(type(error), str(error)) for error in errors] == [(BackendTimeout, "no answer")] * 10
    assert all(a is not b for a, b in itertools.combinations(errors, 2)), "each caller has an error of its own"
    assert backend.sizes == [1, 10]


def test_an_enqueue_that_waited_too_long_is_not_sent(
    backend: Gate, queue: multiq.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def calls() -> list[Awaitable[Any]]:
        monkeypatch.setattr(async_enqueue, "MOST_WAIT", 0.0)  # the first enqueue has begun by now
        return [queue.aenqueue(1), queue.aenqueue(2)]

    results = asyncio.run(behind_a_call(backend, queue, calls))
    assert [type(result) for result in results] == [BackendTimeout] * 2
    assert "was not sent" in str(results[0])
    assert backend.sizes == [1]


def test_a_call_has_at_most_a_thousand_jobs_and_a_megabyte(backend: Gate, queue: multiq.Queue) -> None:
    backend.limit = 10**7

    def calls() -> list[Awaitable[Any]]:
        small = [queue.aenqueue_many([*range(400)]) for _ in range(3)]
        return [*small, *(queue.aenqueue(b"x" * 600_000) for _ in range(2)), queue.aenqueue_many([*range(1500)])]

    asyncio.run(behind_a_call(backend, queue, calls))
    assert backend.sizes == [1, 800, 401, 1, 1500]


def test_jobs_with_the_same_id_go_in_different_calls(backend: Gate, queue: multiq.Queue) -> None:
    handles = asyncio.run(
        behind_a_call(
            backend,
            queue,
            lambda: [
                queue.aenqueue(1, id="same"),
                queue.aenqueue(2, id="other"),
                queue.aenqueue(3, id="same"),
                queue.aenqueue(4),
            ],
        )
    )
    assert [handle.id for handle in handles[:3]] == ["same", "other", "same"]
    assert backend.sizes == [1, 2, 2]
    assert bodies(queue) == ["first", 1, 2, 4]


def test_the_time_before_a_call_counts_as_delay(backend: Gate, queue: multiq.Queue) -> None:
    asyncio.run(behind_a_call(backend, queue, lambda: [queue.aenqueue(1, delay=60), queue.aenqueue(2)]))
    delayed, ready = backend.calls[1]
    assert 0 < delayed.delay < 60
    assert ready.delay == 0


class TestTransactions:
    def test_an_enqueue_with_a_connection_is_a_call_of_its_own(self, backend: Gate, queue: multiq.Queue) -> None:
        connection = object()

        def calls() -> list[Awaitable[Any]]:
            return [
                queue.aenqueue(1),
                queue.aenqueue(2, connection=connection),
                queue.aenqueue_many([3, 4], connection=connection),
                queue.aenqueue(5),
            ]

        asyncio.run(behind_a_call(backend, queue, calls))
        alone = [
            [job.body for job in jobs]
            for jobs, used in zip(backend.calls, backend.connections, strict=True)
            if used is connection
        ]
        assert sorted(alone) == [[b"2"], [b"3", b"4"]]

    def test_a_cancelled_enqueue_with_a_connection_waits_until_the_connection_is_free(
        self, backend: Gate, queue: multiq.Queue
    ) -> None:
        async def main() -> None:
            # given an enqueue that uses the caller's connection
            task = asyncio.ensure_future(queue.aenqueue(1, connection=object()))
            await asyncio.to_thread(until, lambda: backend.calls, "the enqueue is being made")

            # when it is cancelled, then its caller continues only after the call's end
            task.cancel()
            await asyncio.sleep(0.01)
            assert not task.done()
            backend.go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert queue.stats().ready == 1

        asyncio.run(main())

    def test_a_backend_without_transactions_refuses_a_connection(self) -> None:
        with pytest.raises(Unsupported):
            asyncio.run(multiq.App("memory://").queue().aenqueue(1, connection=object()))


class TestCancellation:
    def test_an_enqueue_that_waits_is_not_sent(self, backend: Gate, queue: multiq.Queue) -> None:
        async def main() -> None:
            first = asyncio.ensure_future(queue.aenqueue("first"))
            await asyncio.to_thread(until, lambda: backend.calls, "the first enqueue is being made")
            others = [asyncio.ensure_future(queue.aenqueue(number)) for number in range(3)]
            await asyncio.sleep(0)
            others[1].cancel()
            with pytest.raises(asyncio.CancelledError) as cancelled:
                await others[1]
            backend.go_on.set()
            await asyncio.gather(first, others[0], others[2])
            (note,) = cancelled.value.__notes__
            assert "was not sent (ids " in note

        asyncio.run(main())
        assert bodies(queue) == ["first", 0, 2]

    def test_an_enqueue_that_was_sent_goes_on(self, backend: Gate, queue: multiq.Queue) -> None:
        async def main() -> str:
            task = asyncio.ensure_future(queue.aenqueue("first"))
            await asyncio.to_thread(until, lambda: backend.calls, "the enqueue is being made")
            task.cancel()
            with pytest.raises(asyncio.CancelledError) as cancelled:
                await task
            backend.go_on.set()
            await asyncio.to_thread(until, lambda: queue.stats().ready == 1, "the job is stored")
            (note,) = cancelled.value.__notes__
            return note

        note = asyncio.run(main())
        assert "was sent, and goes on" in note
        assert backend.calls[0][0].id in note

    def test_a_timeout_shows_what_became_of_the_job(self, backend: Gate, queue: multiq.Queue) -> None:
        async def main() -> None:
            async with asyncio.timeout(None) as limit, asyncio.TaskGroup() as group:
                group.create_task(end_when_sent(limit))
                await queue.aenqueue(1)

        async def end_when_sent(limit: asyncio.Timeout) -> None:
            await asyncio.to_thread(until, lambda: backend.calls, "the enqueue is being made")
            limit.reschedule(0)

        with pytest.raises(TimeoutError) as raised:
            asyncio.run(main())
        assert raised.value.__cause__ is not None
        assert "was sent, and goes on" in raised.value.__cause__.__notes__[0]

    def test_a_failure_after_a_cancellation_is_logged(
        self, backend: Gate, queue: multiq.Queue, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def main() -> None:
            task = asyncio.ensure_future(queue.aenqueue(b"x" * 101))
            await asyncio.to_thread(until, lambda: backend.calls, "the enqueue is being made")
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            backend.go_on.set()
            await asyncio.to_thread(until, lambda: caplog.records, "the failure is logged")

        with caplog.at_level(logging.WARNING, "multiq.async"):
            asyncio.run(main())
        assert "failed after its coroutine was cancelled: a body of 101 bytes" in caplog.text

    def test_a_failure_after_the_loop_s_end_is_logged(
        self, backend: Gate, queue: multiq.Queue, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def main() -> None:
            task = asyncio.ensure_future(queue.aenqueue(b"x" * 101))
            await asyncio.to_thread(until, lambda: backend.calls, "the enqueue is being made")
            task.cancel()

        with caplog.at_level(logging.WARNING, "multiq.async"):
            asyncio.run(main())
            backend.go_on.set()
            until(lambda: caplog.records, "the failure is logged")
        assert "a body of 101 bytes" in caplog.text


def test_aclose_waits_for_enqueues_that_have_begun(backend: Gate) -> None:
    app = multiq.App(backend=backend)
    queue = app.queue()

    async def main() -> None:
        enqueues = [asyncio.ensure_future(queue.aenqueue(number)) for number in range(5)]
        await asyncio.to_thread(until, lambda: backend.calls, "the first enqueue is being made")
        closing = asyncio.ensure_future(app.aclose())
        await asyncio.sleep(0.01)
        assert not closing.done()
        backend.go_on.set()
        await closing
        assert all(enqueue.done() for enqueue in enqueues)

    asyncio.run(main())
    assert queue.stats().ready == 5


def test_an_app_is_closed_at_the_end_of_async_with() -> None:
    async def main() -> None:
        async with multiq.App("memory://") as app:
            assert (await app.queue().aenqueue(1)).state() is State.READY
        async with multiq.App("memory://"):  # an app that was never used
            pass

    asyncio.run(main())


def test_a_task_with_a_rich_result_has_handles_that_decode_it(backend: Gate) -> None:
    app = multiq.App(backend=backend)
    backend.go_on.set()

    @app.task(keep=60)
    def day(text: str) -> dt.date:
        return dt.date.fromisoformat(text)

    async def main() -> list[multiq.JobHandle]:
        return [await day.aenqueue("2035-01-01"), *(await day.aenqueue_many([("2035-01-02",)]))]

    handles = asyncio.run(main())
    multiq.Worker(app, stop_when_empty=True).run()
    assert [handle.result(0) for handle in handles] == [dt.date(2035, 1, 1), dt.date(2035, 1, 2)]


def test_each_caller_on_sync_gets_the_error_of_its_own_job() -> None:
    app = multiq.App("sync://")
    ran: list[int] = []

    @app.task(max_attempts=1)
    def work(number: int) -> None:
        ran.append(number)
        if number == 3:
            raise ZeroDivisionError

    async def main() -> list[Any]:
        return await asyncio.gather(*(work.aenqueue(number) for number in range(6)), return_exceptions=True)

    results = asyncio.run(main())
    assert [type(result) for result in results] == [
        *(3 * [multiq.JobHandle]), ZeroDivisionError, *(2 * [multiq.JobHandle])
    ]  # fmt: skip
    assert sorted(ran) == [*range(6)]


class TestTheFirstEnqueueOfAnApp:
    """Its coroutine waits until a thread has opened the backend."""

    def test_an_enqueue_sends_the_arguments_that_it_was_called_with(self) -> None:
        app = multiq.App("memory://")

        @app.task(keep=60)
        def count(words: dict[str, int]) -> None: ...

        async def main() -> list[Any]:
            # given enqueues that have begun, on an app that is not connected yet
            words = {"tea": 1}
            calls = [asyncio.create_task(call) for call in (
                count.aenqueue(words), count.aenqueue_many([(words,)]), app.queue().aenqueue({"args": [words]}),
                app.queue().aenqueue_many([{"args": [words]}]),
            )]  # fmt: skip
            await asyncio.sleep(0)
            # when the caller changes the argument
            words["tea"] = 2
            await asyncio.gather(*calls)
            return [job.value["args"] for job in app.queue().jobs("ready")]

        # then the jobs have the argument's earlier value
        assert asyncio.run(main()) == [[{"tea": 1}]] * 4

    def test_a_later_enqueue_does_not_overtake_an_earlier_one(self) -> None:
        async def main() -> list[Any]:
            # given an enqueue whose backend was opened a moment ago
            app = multiq.App("memory://")
            first = asyncio.create_task(app.queue().aenqueue(1))
            while not app.has_backend:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0)
            # when another enqueue begins before the loop has continued with the first one
            await asyncio.gather(first, app.queue().aenqueue(2))
            return bodies(app.queue())

        # then the jobs have the order of the calls
        assert [asyncio.run(main()) for _ in range(10)] == [[1, 2]] * 10

    def test_a_cancelled_enqueue_is_told_that_it_was_not_sent(self) -> None:
        async def main() -> None:
            app = multiq.App("memory://")
            with pytest.raises(TimeoutError) as raised:
                async with asyncio.timeout(0):
                    await app.queue("mail").aenqueue(1)
            cause = raised.value.__cause__
            assert cause is not None
            assert cause.__notes__ == ["multiq: the enqueue for queue 'mail' was not sent"]

        asyncio.run(main())

    def test_a_store_without_outcomes_refuses_keep(self) -> None:
        app = multiq.App("beanstalk://127.0.0.1:1")

        @app.task(keep=60)
        def count(words: dict[str, int]) -> None: ...

        with pytest.raises(Unsupported):
            asyncio.run(count.aenqueue({}))
        with pytest.raises(Unsupported):
            asyncio.run(count.aenqueue_many([({},)]))
