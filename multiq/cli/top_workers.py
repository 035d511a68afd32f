"""Reads the workers of a connection for ``multiq top``.

A worker's answer has the ids of its running jobs. The task names of the running jobs are read from the store.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from multiq.control.flags import missing_for_control
from multiq.control.presence import FIRST_ANSWERS, Viewer
from multiq.errors import JobNotFound, MultiqError
from multiq.formatting import UNKNOWN, count, duration, many
from multiq.job import JobInfo
from multiq.terminal_escapes import safe

from .output import Column, table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from rich.table import Table

    from multiq.app import App
from multiq.control.presence import Answer, Run

_LOOKED_UP = 100  # the most jobs whose names are read from the store at one refresh
_STEP = 0.1  # seconds between two reads of the answers, before the first table is shown


class Running(msgspec.Struct, frozen=True):
    """A running job in the output of ``multiq top``."""

    process: str
    """The worker process, as ``host:pid``."""
    queue: str
    id: str
    seconds: float
    task: str | None
    """The name of the job's task. None means that the job is done, has no task, or was not read from the store."""
    attempt: int | None


class WorkerNow(msgspec.Struct, frozen=True):
    """A worker in the output of ``multiq top``."""

    worker: str
    state: str
    up_for: float
    queues: list[str]
    processes: int
    at_a_time: int
    running: int
    jobs: list[Running]
    """The running jobs. The job that has run longest is first. A worker with very many jobs reports only some of its
    jobs."""


class Workers:
    """Collects the answers of workers during a ``with`` block. Raises ``Unsupported`` if the backend lacks a capability
    that is needed to ask the workers.
    """

    def __init__(self, app: App) -> None:
        if not app.backend.capabilities.shared:
            raise app.backend.unsupported("shared")
        missing = missing_for_control(app.backend)
        if missing is not None:
            raise missing
        self._app = app
        self._viewer = Viewer(app.backend)
        # maps a job's run to its task and attempt
        self._names: dict[tuple[str, str, int], tuple[str | None, int | None]] = {}
        self._asked = 0

    def __enter__(self) -> Self:
        self._viewer.start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._viewer.close()
        except MultiqError:
            return  # the workers will clear the viewer's queue

    def wait(self) -> list[WorkerNow]:
        """Wait ``FIRST_ANSWERS`` seconds. Returns all workers that have answered."""
        give_up_at = time.monotonic() + FIRST_ANSWERS
        while time.monotonic() < give_up_at:
            self._viewer.read()
            time.sleep(_STEP)
        return self.now()

    def now(self) -> list[WorkerNow]:
        known, self._names, self._asked = self._names, {}, 0
        return [self._shown(answer, known) for answer in self._viewer.read()]

    def _shown(self, answer: Answer, known: dict[tuple[str, str, int], tuple[str | None, int | None]]) -> WorkerNow:
        host = answer.worker.rpartition(":")[0]
        jobs = []
        for process in answer.processes:
            for run in process.runs:
                key = run.queue, run.id, process.pid
                if key not in known and self._asked < _LOOKED_UP:
                    self._asked += 1
                    known[key] = self._name(run)
                task, attempt = self._names[key] = known.get(key, (None, None))
                jobs.append(Running(f"{host}:{process.pid}", run.queue, run.id, run.seconds, task, attempt))
        return WorkerNow(
            worker=answer.worker,
            state=answer.state,
            up_for=answer.up_for,
            queues=answer.queues,
            processes=len(answer.processes),
            at_a_time=answer.at_a_time,
            running=answer.running,
            jobs=sorted(jobs, key=lambda job: -job.seconds),
        )

    def _name(self, run: Run) -> tuple[str | None, int | None]:
        try:
            job = JobInfo.of(self._app.backend.peek(run.queue, run.id))
        except JobNotFound:
            return None, None
        return job.task, job.attempt


def workers_table(workers: Sequence[WorkerNow]) -> Table:
    columns = [
        Column("WORKER", gives_way=True),
        Column("STATE"),
        Column("UP", right=True),
        Column("PROCESSES", right=True),
        Column("RUNNING", right=True),
        Column("QUEUES", gives_way=True),
    ]
    return table(columns, [_worker_row(worker) for worker in workers])


def jobs_table(workers: Sequence[WorkerNow], rows: int | None) -> Table:
    """Return a table of at most *rows* running jobs. The job that has run longest is first. None: all jobs."""
    jobs = sorted((job for worker in workers for job in worker.jobs), key=lambda job: -job.seconds)
    columns = [
        Column("PROCESS", gives_way=True),
        Column("TASK", gives_way=True),
        Column("QUEUE", gives_way=True),
        Column("FOR", right=True),
        Column("ATTEMPT", right=True),
        Column("ID", gives_way=True),
    ]
    return table(columns, [_job_row(job) for job in jobs[:rows]])


def count_jobs(workers: Sequence[WorkerNow]) -> int:
    return sum(worker.running for worker in workers)


def headline(workers: Sequence[WorkerNow]) -> str:
    """Return a title like ``2 workers run 3 jobs``."""
    verb = "runs" if len(workers) == 1 else "run"
    return f"{many(len(workers), 'worker')} {verb} {many(count_jobs(workers), 'job')}"


def _worker_row(worker: WorkerNow) -> list[str]:
    slots = worker.processes * worker.at_a_time
    return [
        safe(worker.worker),
        safe(worker.state),
        duration(worker.up_for),
        f"{worker.processes} x {worker.at_a_time}",
        f"{count(worker.running)} of {count(slots)}",
        safe(",".join(worker.queues)),
    ]


def _job_row(job: Running) -> list[Any]:
    attempt = UNKNOWN if job.attempt is None else count(job.attempt)
    return [safe(job.process), safe(job.task or UNKNOWN), safe(job.queue), duration(job.seconds), attempt, safe(job.id)]
