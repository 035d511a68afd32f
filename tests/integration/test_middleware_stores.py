"""Middleware on each backend: what it writes at the enqueue comes back at each run, and its verdicts are stored."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from stores import NAMES, PAIRED, STORES

import multiq

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Baggage(multiq.Middleware):
    """Gives each job a header, and records the header with which each job runs."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str | None]] = []
        self.story: list[tuple[Any, ...]] = []

    def enqueue(self, sending: multiq.Sending) -> Iterator[None]:
        for job in sending.jobs:
            job.headers["way"] = f"{sending.kind}, 'quoted', é"
        yield
        self.sent += [(sending.kind, job.id) for job in sending.jobs]

    def run(self, job: multiq.JobContext) -> Iterator[None]:
        self.story.append(("run", job.id, job.attempt, job.headers["way"]))
        yield

    def ended(self, job: multiq.JobContext, ending: multiq.Ending) -> None:
        self.story.append((ending.verdict, job.id))


@pytest.fixture(params=[*NAMES, PAIRED])
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[multiq.App]:
    with STORES[request.param](tmp_path) as url, multiq.App(url) as app:
        yield app


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"threads": 3}, marks=pytest.mark.long),
        pytest.param({"concurrency": 3}, marks=pytest.mark.long),
    ],
    ids=["inline", "threads", "coroutines"],
)
def test_middleware_s_headers_come_back_at_each_run(app: multiq.App, options: dict[str, int]) -> None:
    # given middleware, and jobs enqueued in each way, one of which fails once
    middleware = Baggage()
    app.middleware(middleware)

    @app.task(max_attempts=2, backoff=0)
    async def work(number: int) -> None:
        if number == 1 and multiq.current_job().attempt == 1:
            raise ValueError(number)

    async def enqueue() -> str:
        handle = await work.aenqueue(2)
        return handle.id

    first = work.enqueue(1).id
    second = asyncio.run(enqueue())
    others = [handle.id for handle in work.enqueue_many([(3,), (4,)])]
    # then it knows the ids of the jobs after each enqueue
    assert middleware.sent == [("one", first), ("one", second), *(("many", job_id) for job_id in others)]
    # when a worker runs them
    assert multiq.Worker(app, stop_when_empty=True, **options).run() == 0  # type: ignore[arg-type]
    # then each run, also the retry, has seen the header, and middleware got each verdict
    runs = {("run", job_id, 1, "one, 'quoted', é") for job_id in (first, second)}
    runs |= {("run", first, 2, "one, 'quoted', é")}
    runs |= {("run", job_id, 1, "many, 'quoted', é") for job_id in others}
    verdicts = {("retried", first), *(("done", job_id) for job_id in (first, second, *others))}
    if app.backend.declared.give_back:
        assert set(middleware.story) == runs | verdicts
        assert len(middleware.story) == len(runs) + len(verdicts)
    else:  # The store counts the reservation of a job that a worker gives back before it has started.
        seen = {(what, job_id, *rest[1:]) for what, job_id, *rest in middleware.story}
        assert seen == {(what, job_id, *rest[1:]) for what, job_id, *rest in runs | verdicts}


def test_middleware_changes_and_refuses_what_the_store_gets(app: multiq.App) -> None:
    class Rules(multiq.Middleware):
        def enqueue(self, sending: multiq.Sending) -> Iterator[None]:
            for job in sending.jobs:
                if job.args[0] == "refused":
                    raise multiq.EnqueueRefused("no room")
                job.set(queue="elsewhere", priority=7)
            yield

    app.middleware(Rules())

    @app.task
    def work(word: str) -> None: ...

    # when middleware changes one job, and refuses another one
    handle = work.enqueue("moved")
    with pytest.raises(multiq.EnqueueRefused, match="no room"):
        work.enqueue("refused")
    with pytest.raises(multiq.EnqueueRefused, match="no room"):
        work.enqueue_many([("moved",), ("refused",)])
    # then only the first job is stored, with the changes
    assert handle.peek().priority == 7
    assert [app.queue(name).stats().ready for name in ("elsewhere", "default")] == [1, 0]


def test_middleware_is_around_the_jobs_of_a_chain(app: multiq.App) -> None:
    if not app.backend.declared.holds:
        pytest.skip("this backend has no flows")
    middleware = Baggage()
    app.middleware(middleware)

    @app.task(keep=60)
    def add(a: int, b: int) -> int:
        return a + b

    # when a chain of two jobs is sent and run
    multiq.chain(add.s(1, 2), add.s(3)).enqueue()
    assert multiq.Worker(app, stop_when_empty=True).run() == 0
    # then both have the header, and their ids were known after the enqueue
    ids = [job_id for _, job_id in middleware.sent]
    assert [kind for kind, _ in middleware.sent] == ["flow", "flow"]
    assert middleware.story == [
        entry for job_id in ids for entry in (("run", job_id, 1, "flow, 'quoted', é"), ("done", job_id))
    ]


def test_a_worker_reserves_nothing_while_middleware_says_no(app: multiq.App) -> None:
    asked: list[str] = []

    class Door(multiq.Middleware):
        def before_fetch(self, worker: str) -> bool:
            asked.append(worker)
            return len(asked) > 1

        def run(self, job: multiq.JobContext) -> Iterator[None]:
            assert len(asked) > 1
            yield

    app.middleware(Door())

    @app.task(max_attempts=1)
    def work() -> None: ...

    # given a job, and middleware that refuses once
    work.enqueue()
    # when a worker runs, then the job is run after the middleware has agreed
    assert multiq.Worker(app, stop_when_empty=True).run() == 0
    stats = app.queue().stats()
    assert (stats.ready, stats.buried) == (0, 0)
