"""Every job runs in a fresh copy of the worker's context, with its own ``current_job()``."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import context_app
import pytest
from context_app import app, coroutine, decorated, left, plain
from modes import in_each_mode, worker_of
from worker_app import read_diary

import multiq
from multiq.events import JobStarted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    url = f"sqlite:///{tmp_path}/jobs.db"
    app.connect(url)
    yield url
    app.close()


@in_each_mode
def test_a_job_sees_its_own_context_and_no_other_job_s(mode: str, tmp_path: Path, url: str) -> None:
    # Given jobs of plain, coroutine and decorated coroutine tasks, mixed, that set context variables
    tasks: list[multiq.Task[..., Any]] = [plain, coroutine, decorated]
    ids = {number: tasks[number % 3].enqueue(number).id for number in range(12)}
    # When a worker runs them
    with worker_of("context_app", tmp_path, url, f"{mode}, stop_when_empty=True") as process:
        assert process.wait() == 0
    # Then each job has seen its own id everywhere, the values that the program and a middleware had set, and no values
    # of other jobs
    seen = {(word, number) for word, number, _, _ in read_diary(process.diary)}
    hooks = {(f"hook:{job_id}:{job_id}", 0) for job_id in ids.values()}
    assert seen == hooks | {
        (word, number)
        for number, job_id in ids.items()
        for word in (f"job:{job_id}", f"request:{job_id}", "left:-1", "tone:program")
    }


@pytest.mark.parametrize("options", [{}, {"threads": 2}, {"concurrency": 2}], ids=str)
def test_jobs_leave_nothing_in_the_program_s_own_context(options: dict[str, int], url: str) -> None:
    # Given a program that has run a worker itself
    plain.enqueue(1)
    coroutine.enqueue(2)
    tone = context_app.tone.get()
    assert multiq.Worker(app, stop_when_empty=True, **options).run() == 0  # type: ignore[arg-type]
    # Then the program sees the same values as before
    assert (left.get(), context_app.tone.get()) == (-1, tone)
    with pytest.raises(LookupError):
        multiq.current_job()


def test_an_async_subscriber_outlives_the_job_of_its_event(url: str) -> None:
    # Given a subscriber that takes longer than the job
    told = []
    app = multiq.App(url)

    @app.task
    async def work(number: int) -> None:
        await asyncio.sleep(0.05)

    @app.on(JobStarted)
    async def tell(event: JobStarted) -> None:
        await asyncio.sleep(0.3)
        told.append(event.job.id)

    handle = work.enqueue(1)
    # When both share the worker's event loop
    assert multiq.Worker(app, concurrency=2, stop_when_empty=True).run() == 0
    app.close()
    # Then the job ends before the subscriber returns
    assert told == [handle.id]
