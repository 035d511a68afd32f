"""Middleware around enqueues and runs: what it sees, what it may change, and what its errors do."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import pytest
from servers.process import until

import multiq
from multiq import State, testing
from multiq.backend.around import ConsumerAround
from multiq.backend.memory import MemoryBackend
from multiq.errors import BackendError, EnqueueRefused, EnqueueUncertain, OptionInvalid
from multiq.schedules.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from multiq.backend import Consumer, Lease, NewJob, Verdict
    from multiq.errors import LeaseLost

MODES: list[dict[str, Any]] = [{}, {"threads": 3}, {"concurrency": 5}]


@pytest.fixture
def app() -> multiq.App:
    return multiq.App("memory://")


def drain(app: multiq.App, **options: Any) -> int:
    return multiq.Worker(app, stop_when_empty=True, **options).run()


class Recorder(multiq.Middleware):
    """Records all calls, and gives each job a header."""

    def __init__(self, name: str = "m") -> None:
        self.name = name
        self.story: list[Any] = []

    def enqueue(self, sending: multiq.Sending) -> Iterator[None]:
        self.story.append(("enqueue", sending.kind, [(job.task, list(job.args)) for job in sending.jobs]))
        for job in sending.jobs:
            job.headers["by"] = self.name
        try:
            yield
        except BaseException as exc:
            self.story.append(("not sent", type(exc).__name__))
            raise
        self.story.append(("sent", [job.id for job in sending.jobs]))

    def run(self, job: multiq.JobContext) -> Iterator[None]:
        self.story.append(("run", job.task, job.attempt, job.headers.get("by")))
        yield

    def ended(self, job: multiq.JobContext, ending: multiq.Ending) -> None:
        self.story.append(("ended", job.task, ending.verdict))


def add(app: multiq.App) -> multiq.Task[[int], int]:
    @app.task(max_attempts=2, backoff=0)
    def double(number: int) -> int:
        if number < 0:
            raise ValueError("negative")
        return number * 2

    return double


# --- enqueue ---


def test_middleware_sees_an_enqueue_and_the_id_after_it(app: multiq.App) -> None:
    # Given middleware
    seen = Recorder()
    app.middleware(seen)
    # When a job is enqueued
    handle = add(app).enqueue(1)
    # Then the middleware was called before and after, and the job has its header
    assert seen.story == [("enqueue", "one", [("double", [1])]), ("sent", [handle.id])]
    assert handle.peek().value["headers"] == {"by": "m"}


def test_middleware_sees_all_jobs_of_an_enqueue_many_at_once(app: multiq.App) -> None:
    seen = Recorder()
    app.middleware(seen)
    handles = add(app).enqueue_many([(1,), {"number": 2}], ids=["a", "b"])
    assert [handle.id for handle in handles] == ["a", "b"]
    assert seen.story == [("enqueue", "many", [("double", [1]), ("double", [])]), ("sent", ["a", "b"])]


@pytest.mark.parametrize("is_open", [False, True])
def test_middleware_runs_in_the_coroutine_that_enqueues(is_open: bool) -> None:
    # Given middleware that reads a context variable of the caller
    app, seen, request = multiq.App("memory://"), list[Any](), ContextVar[str]("request")
    task = add(app)
    if is_open:
        app.backend  # noqa: B018 - opens it

    class Request(multiq.Middleware):
        def enqueue(self, sending: multiq.Sending) -> Iterator[None]:
            for job in sending.jobs:
                job.headers["request"] = request.get()
            yield
            seen.append((request.get(), [job.id for job in sending.jobs], threading.current_thread().name))

    app.middleware(Request())

    async def handle(number: int) -> list[multiq.JobHandle]:
        request.set(f"r{number}")
        one = await task.aenqueue(number)
        return [one, *await task.aenqueue_many([(number,)])]

    async def main() -> list[list[multiq.JobHandle]]:
        return await asyncio.gather(*(handle(number) for number in range(5)))

    # When several coroutines enqueue at once
    found = asyncio.run(main())
    # Then each coroutine got its own value
    for number, handles in enumerate(found):
        assert [handle.peek().value["headers"]["request"] for handle in handles] == [f"r{number}"] * 2
    here = threading.current_thread().name
    assert sorted(seen) == sorted(
        (f"r{number}", [handle.id], here) for number, handles in enumerate(found) for handle in handles
    )


def test_middleware_changes_options(app: multiq.App) -> None:
    class Later(multiq.Middleware):
        def enqueue(self, sending: multiq.Sending) -> Iterator[None]:
            for job in sending.jobs:
                job.set(priority=int(job.args[0]), delay=60, queue="late", max_attempts=1)
            yield

    app.middleware(Later())
    handles = add(app).options(priority=7).enqueue_many([(1,), (2,)])
    for handle, priority in zip(handles, (1, 2), strict=True):
        info = handle.peek()
        assert (handle.queue, info.priority, info.state) == ("late", priority, State.DELAYED)
        assert info.value["max_attempts"] == 1


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"priority": -1}, "priority"),
        ({"colour": 1}, "colour"),
        ({"headers": {}}, "middleware must not set headers"),
        ({"id": "mine"}, "middleware must not set id"),
        ({"max_attempts": 9}, "max_attempts must be at most 2"),
    ],
)
def test_middleware_cannot_set_what_no_caller_could(app: multiq.App, wrong: dict[str, Any], complaint: str) -> None:
    class Wrong(multiq.Middleware):
        def enqueue(self, sending: multiq.Sending) -> Iterator[None]:
            sending.jobs[0].set(**wrong)
            yield

    app.middleware(Wrong())
    with pytest.raises((OptionInvalid, TypeError), match=complaint):
        add(app).enqueue(1)
    assert app.queue().stats().ready == 0


def test_middleware_cannot_tear_a_batch_apart(app: multiq.App) -> None:
    class Spread(multiq.Middleware):
        def enqueue(self, sending: multiq.Sending) -> Iterator[None]:
            for number, job in enumerate(sending.jobs):
                job.set(queue=f"q{number}")
            yield

    app.middleware(Spread())
    with pytest.raises(OptionInvalid, match="the jobs of one enqueue_many in one queue, got q0, q1"):
        add(app).enqueue_many([(1,), (2,)])


def test_middleware_cannot_send_headers_that_are_no_texts(app: multiq.App) -> None:
    class Wrong(multiq.Middleware):
        def enqueue(self, sending: multiq.Sending) -> Iterator[None]:
            sending.jobs[0].headers["n"] = 1  # type: ignore[assignment]  # wrong on purpose
            yield

    app.middleware(Wrong())
    with pytest.raises(multiq.ArgumentsInvalid, match="headers must be strings by name"):
        add(app).enqueue(1)


@pytest.mark.parametrize("how", ["enqueue", "enqueue_many", "aenqueue", "flow", "batch"])
def test_middleware_refuses_an_enqueue(app: multiq.App, how: str) -> None:
    # Given outer middleware that watches, and inner middleware that refuses
    seen = Recorder()

    class Quota(multiq.Middleware):
        def enqueue(self, sending: multiq.Sending) -> Iterator[None]:
            raise EnqueueRefused("the customer has used up its jobs")
            yield

    app.middleware(seen)
    app.middleware(Quota())
    task = add(app)
    enqueue = {
        "enqueue": lambda: task.enqueue(1),
        "enqueue_many": lambda: task.enqueue_many([(1,)]),
        "aenqueue": lambda: asyncio.run(task.aenqueue(1)),
        "flow": lambda: multiq.chain(task.s(1), task.s()).enqueue(),
        "batch": lambda: multiq.batch([task.s(1)]).enqueue(),
    }
    # When a job is enqueued, then the caller gets the error, and nothing is stored
    with pytest.raises(EnqueueRefused, match="used up its jobs"):
        enqueue[how]()  # type: ignore[no-untyped-call]
    assert app.backend.queues() == []
    assert seen.story[-1] == ("not sent", "EnqueueRefused")


def test_the_first_middleware_is_the_outermost(app: multiq.App) -> None:
    story: list[str] = []

    class Named(multiq.Middleware):
        def __init__(self, name: str) -> None:
            self.name = name

        def enqueue(self, sending: multiq.Sending) -> Iterator[None]:
            story.append(f"+{self.name}")
            yield
            story.append(f"-{self.name}")

        def run(self, job: multiq.JobContext) -> Iterator[None]:
            story.append(f"run +{self.name}")
            yield
            story.append(f"run -{self.name}")

        def ended(self, job: multiq.JobContext, ending: multiq.Ending) -> None:
            story.append(f"ended {self.name}")

    for name in ("a", "b"):
        app.middleware(Named(name))

    @app.task(middleware=[Named("c")])
    def work() -> None:
        story.append("work")

    @app.task
    def other() -> None: ...

    work.enqueue()
    assert story == ["+a", "+b", "+c", "-c", "-b", "-a"]
    story.clear()
    drain(app)
    assert story[:7] == ["run +a", "run +b", "run +c", "work", "run -c", "run -b", "run -a"]
    assert story[7:] == ["ended c", "ended b", "ended a"]
    # And a task's own middleware is not around other tasks
    story.clear()
    other.enqueue()
    drain(app)
    assert not any("c" in word for word in story if "ended" not in word)
    assert "ended c" not in story


class Losing(MemoryBackend):
    """Stores jobs, and loses the reply."""

    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
        super().enqueue(queue, jobs, connection=connection)
        raise EnqueueUncertain(queue, jobs, "the reply was lost", accepted={}, unsent=[], client_ids=True)


def test_an_error_of_the_enqueue_reaches_the_caller_whatever_middleware_does() -> None:
    # Given middleware that swallows errors, and middleware that replaces them
    app = multiq.App(backend=Losing())

    class Swallow(multiq.Middleware):
        def enqueue(self, sending: multiq.Sending) -> Iterator[None]:
            with contextlib.suppress(BackendError):
                yield

    class Replace(multiq.Middleware):
        def enqueue(self, sending: multiq.Sending) -> Iterator[None]:
            try:
                yield
            except BackendError:
                raise RuntimeError("something else") from None

    app.middleware(Replace())
    app.middleware(Swallow())
    # When the reply to an enqueue is lost, then the caller gets the error, and the error repeats one job
    with pytest.raises(EnqueueUncertain) as caught:
        add(app).enqueue(1)
    assert len(caught.value.jobs) == 1
    assert app.queue().stats().ready == 1


def test_an_error_after_the_jobs_are_stored_is_only_logged(app: multiq.App, caplog: pytest.LogCaptureFixture) -> None:
    class Late(multiq.Middleware):
        def enqueue(self, sending: multiq.Sending) -> Iterator[None]:
            yield
            raise RuntimeError("too late")

    app.middleware(Late())
    handle = add(app).enqueue(1)
    assert handle.state() == "ready"
    assert caplog.messages == ["middleware failed after an enqueue; the enqueue is not affected"]


def test_middleware_is_around_a_typed_task_and_its_handle_still_decodes(app: multiq.App) -> None:
    seen = Recorder()
    app.middleware(seen)

    @app.task(keep=60)
    def next_day(day: dt.date) -> dt.date:
        return day + dt.timedelta(days=1)

    handle = next_day.enqueue(dt.date(2027, 1, 31))
    drain(app)
    assert handle.result() == dt.date(2027, 2, 1)
    assert seen.story[0] == ("enqueue", "one", [("next_day", [dt.date(2027, 1, 31)])])


# --- flows and schedules ---


def test_middleware_sees_all_jobs_of_a_chain_and_its_headers_reach_each_of_them(app: multiq.App) -> None:
    # Given middleware that gives each job of a chain another header, and moves the second to another queue
    class Number(multiq.Middleware):
        def enqueue(self, sending: multiq.Sending) -> Iterator[None]:
            for number, job in enumerate(sending.jobs):
                job.headers["number"] = str(number)
            sending.jobs[1].set(queue="second")
            yield
            ids.extend(job.id for job in sending.jobs)
            flows.append(sending.flow)

    ids: list[str | None] = []
    flows: list[str | None] = []
    ran: list[tuple[str, str, int]] = []
    app.middleware(Number())

    @app.task
    def note(number: int) -> int:
        job = multiq.current_job()
        ran.append((job.queue, job.headers["number"], number))
        return number + 1

    chain = multiq.chain(note.s(1), note.s(), catch=note.s(0))
    # When it is enqueued twice, because a chain may be enqueued again
    for _ in range(2):
        handle = chain.enqueue()
        assert [job.id for job in handle.jobs()] == ids[-3:]
        assert flows[-1] == handle.id
    # Then the jobs run with their headers, and in their queues
    drain(app, queues=["default", "second"])
    assert sorted(ran) == [("default", "0", 1)] * 2 + [("second", "1", 2)] * 2


def test_middleware_sees_the_members_of_a_batch_and_those_that_are_added(app: multiq.App) -> None:
    seen = Recorder()
    app.middleware(seen)
    task = add(app)

    @app.task
    def finish() -> None: ...

    handle = multiq.batch([task.s(1), task.s(2)], then=finish.s()).enqueue()
    ids = [job.id for job in handle.jobs()]
    assert seen.story[0] == ("enqueue", "flow", [("double", [1]), ("double", [2]), ("finish", [])])
    assert sorted(seen.story[1][1]) == sorted(ids)
    handle.add([task.s(3)])
    assert seen.story[2] == ("enqueue", "flow", [("double", [3])])
    drain(app)
    runs = [entry for entry in seen.story if entry[0] == "run"]
    assert len(runs) == 4
    assert all(entry[-1] == "m" for entry in runs)


def test_a_task_s_own_middleware_sees_only_its_jobs_of_a_flow(app: multiq.App) -> None:
    own = Recorder()
    task = add(app)

    @app.task(middleware=[own])
    def mine() -> None: ...

    multiq.group(task.s(1), mine.s(), mine.s()).enqueue()
    assert own.story[0] == ("enqueue", "flow", [("mine", []), ("mine", [])])


def test_middleware_sees_the_jobs_of_a_schedule(app: multiq.App) -> None:
    # Given a schedule that is due every second, and middleware
    seen = Recorder()
    app.middleware(seen)
    task = add(app)
    app.schedules.add("often", task.s(4), every=1)
    # When a scheduler makes its jobs
    Scheduler(app, ahead=3).look()
    # Then the middleware was called for these jobs, and they have its header
    kind, how, jobs = seen.story[0]
    assert (kind, how) == ("enqueue", "schedule")
    stored = app.queue().jobs("delayed").jobs
    assert len(stored) == len(jobs) >= 2
    assert seen.story[1] == ("sent", [job.id for job in stored])
    assert {job.value["headers"]["by"] for job in stored} == {"m"}
    # And for the job of a schedule that is run by hand
    seen.story.clear()
    handle = app.schedules.run("often")
    assert seen.story == [("enqueue", "schedule", [("double", [4])]), ("sent", [handle.id])]


def test_a_refused_occurrence_is_left_out_and_a_broken_middleware_delays_it(
    app: multiq.App, caplog: pytest.LogCaptureFixture
) -> None:
    errors: list[Exception] = [RuntimeError("a bug"), EnqueueRefused("closed")]

    class Gate(multiq.Middleware):
        def enqueue(self, sending: multiq.Sending) -> Iterator[None]:
            if errors:
                raise errors[0]
            yield

    app.middleware(Gate())
    app.schedules.add("often", add(app).s(4), every=1)
    # When the middleware fails, then no job is made, and the schedule has not advanced
    scheduler = Scheduler(app, ahead=3)
    scheduler.look()
    assert "middleware failed: RuntimeError: a bug" in caplog.text
    assert (app.queue().stats().delayed, app.schedules.get("often").last) == (0, None)
    # When the middleware refuses, then the occurrences are left out
    del errors[0]
    Scheduler(app, ahead=3).look()
    assert "middleware refuses" in caplog.text
    assert app.queue().stats().delayed == 0
    # When the middleware lets occurrences pass, then only later ones are made
    left_out = app.schedules.get("often").last
    assert left_out is not None
    errors.clear()


# --- runs ---


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_middleware_sees_each_attempt_and_what_becomes_of_the_job(app: multiq.App, mode: dict[str, Any]) -> None:
    seen = Recorder()
    app.middleware(seen)
    add(app).enqueue(-1)
    drain(app, **mode)
    assert seen.story[2:] == [
        ("run", "double", 1, "m"), ("ended", "double", "retried"),
        ("run", "double", 2, "m"), ("ended", "double", "buried"),
    ]  # fmt: skip


def test_middleware_is_told_of_jobs_whose_task_was_not_called(app: multiq.App) -> None:
    seen = Recorder()
    app.middleware(seen)
    app.queue().enqueue(b"no envelope")
    app.queue().enqueue({"multiq": 1, "task": "double", "args": [1, 2, 3]})
    late = add(app).options(expires=0.001).enqueue(1)
    until(lambda: (late.peek().age or 0.0) > 0.001, "the job has expired")
    drain(app)
    ends = [entry for entry in seen.story if entry[0] == "ended"]
    assert sorted(ends, key=str) == [
        ("ended", "double", "buried"), ("ended", "double", "expired"), ("ended", None, "buried"),
    ]  # fmt: skip


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("is_coroutine", [False, True])
def test_middleware_and_the_task_share_a_state(app: multiq.App, mode: dict[str, Any], is_coroutine: bool) -> None:
    found: list[Any] = []

    class Session(multiq.Middleware):
        def run(self, job: multiq.JobContext) -> Iterator[None]:
            job.state["session"] = f"session {job.id}"
            yield

        def ended(self, job: multiq.JobContext, ending: multiq.Ending) -> None:
            found.append(job.state)

    app.middleware(Session())

    def plain() -> None:
        job = multiq.current_job()
        job.state["task"] = job.state["session"]

    async def coroutine() -> None:
        plain()

    handle = app.task(name="work", timeout=60)(coroutine if is_coroutine else plain).enqueue()
    drain(app, **mode)
    assert found == [{"session": f"session {handle.id}", "task": f"session {handle.id}"}]


def test_arun_is_around_coroutines_and_run_around_plain_functions(app: multiq.App) -> None:
    story: list[str] = []

    class Both(multiq.Middleware):
        def run(self, job: multiq.JobContext) -> Iterator[None]:
            story.append(f"run {job.task}")
            yield

        async def arun(self, job: multiq.JobContext) -> AsyncIterator[None]:
            await asyncio.sleep(0)
            story.append(f"arun {job.task}")
            yield

    app.middleware(Both())
    app.task(name="plain")(lambda: None).enqueue()

    @app.task
    async def coroutine() -> None: ...

    coroutine.enqueue()
    drain(app, concurrency=2)
    assert sorted(story) == ["arun coroutine", "run plain"]


def test_middleware_that_catches_the_error_makes_the_job_a_success(app: multiq.App) -> None:
    class Forgive(multiq.Middleware):
        def run(self, job: multiq.JobContext) -> Iterator[None]:
            with contextlib.suppress(ValueError):
                yield

    app.middleware(Forgive())
    handle = add(app).enqueue(-1)
    drain(app)
    assert handle.state() == "gone"


def test_middleware_that_fails_after_the_task_fails_the_job(app: multiq.App) -> None:
    class Commit(multiq.Middleware):
        def run(self, job: multiq.JobContext) -> Iterator[None]:
            yield
            raise ConnectionError("the commit failed")

    app.middleware(Commit())
    handle = add(app).enqueue(1)
    drain(app)
    assert handle.peek().reason == "ConnectionError: the commit failed"


def test_middleware_that_does_not_yield_fails_the_job_and_an_enqueue(app: multiq.App) -> None:
    class Silent(multiq.Middleware):
        def run(self, job: multiq.JobContext) -> Iterator[None]:
            return
            yield

    handle = add(app).enqueue(1)
    app.middleware(Silent())
    drain(app)
    assert "generator didn't yield" in str(handle.peek().reason)


@pytest.mark.parametrize("name", ["enqueue", "run", "arun"])
def test_a_method_that_is_no_generator_is_refused(app: multiq.App, name: str) -> None:
    wrong = type("Wrong", (multiq.Middleware,), {name: lambda self, it: None})
    with pytest.raises(multiq.ArgumentsInvalid, match="must be a generator method, with its work before and after"):
        app.middleware(wrong())


@pytest.mark.parametrize("wrong", [multiq.Middleware, 3, print], ids=str)
def test_what_is_no_middleware_is_refused(app: multiq.App, wrong: Any) -> None:
    with pytest.raises(multiq.ArgumentsInvalid, match=r"must be an object of a subclass of multiq\.Middleware"):
        app.middleware(wrong)


def test_a_registry_brings_the_middleware_of_its_tasks() -> None:
    # Given a registry whose task has middleware, included in an app
    own, tasks = Recorder(), multiq.Tasks()

    @tasks.task(middleware=[own])
    def work() -> None: ...

    app = multiq.App("memory://")
    app.include(tasks)
    # When its task is enqueued and run
    work.enqueue()
    drain(app)
    # Then the middleware was around both
    assert [entry[0] for entry in own.story] == ["enqueue", "sent", "run", "ended"]


# --- the testing kit ---


def test_middleware_runs_with_sync_and_null_and_fake() -> None:
    seen = Recorder()
    with multiq.App("sync://") as app:
        app.middleware(seen)
        task = add(app)
        task.enqueue(1)
        assert [entry[0] for entry in seen.story] == ["enqueue", "run", "ended", "sent"]
        seen.story.clear()
        with testing.fake(app) as fake:
            task.enqueue(2)
            fake.assert_enqueued(task, (2,))
            assert [entry[0] for entry in seen.story] == ["enqueue", "sent"]
    with multiq.App("null://") as app:
        app.middleware(seen := Recorder())
        add(app).enqueue(1)
        assert [entry[0] for entry in seen.story] == ["enqueue", "sent"]


class Noted(ConsumerAround):
    """A consumer that records its calls to settle."""

    def __init__(self, inner: Consumer, name: str, calls: list[str]) -> None:
        super().__init__(inner)
        self._name, self._calls = name, calls

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        self._calls.append(f"{self._name} {len(verdicts)}")
        return super().settle(verdicts)

    def exchange(
        self, verdicts: Sequence[Verdict], limit: int, timeout: float, queues: Sequence[str] | None = None
    ) -> tuple[list[LeaseLost | None], list[Lease]]:
        self._calls += [f"{self._name} {len(verdicts)}"] if verdicts else []
        return super().exchange(verdicts, limit, timeout, queues)


class Around(multiq.Middleware):
    def __init__(self, name: str, calls: list[str]) -> None:
        self._name = name
        self._calls = calls

    def consumer(self, consumer: Consumer, worker: str) -> Consumer:
        if self._name == "broken":
            raise ValueError(self._name)
        return Noted(consumer, self._name, self._calls)


def test_middleware_is_around_the_calls_of_a_worker(app: multiq.App, caplog: pytest.LogCaptureFixture) -> None:
    # given three middlewares, one of which fails
    calls: list[str] = []
    for name in ("outer", "broken", "inner"):
        app.middleware(Around(name, calls))

    @app.task
    def noop() -> None: ...

    noop.enqueue()
    # when a worker runs a job
    assert drain(app) == 0
    # then its verdict went through the others, of which the first one is the outermost
    assert calls == ["outer 1", "inner 1"]
    assert "middleware failed in consumer()" in caplog.text
