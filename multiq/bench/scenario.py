"""One repeat of one workload on one target: its queue, its processes, its timing, and its jobs."""

from __future__ import annotations

import contextlib
import shutil
import time
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from multiq.backend import STORED_STATES, State

from .adapter import Counters
from .processes import RunProcesses, WorkerOptions
from .run_log import RunLogs
from .verification import Evidence, Sent
from .work import numbers_of, sweep

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from multiq.backend.capabilities import Capabilities

    from .adapter import Adapter
    from .app import BenchApp
    from .processes import LoadProcess, WorkerProcess
    from .run_log import Run

R = TypeVar("R")

PATIENCE = 60.0
"""Seconds without progress after which the wait ends. At the end of the wait, jobs that are still missing count as a
violation."""

_START = 60.0  # seconds that a worker may take until its processes have begun
_QUIET = 1.5  # seconds: if no run has ended for this time and the store is empty, missing jobs count as lost
_LOOK = 0.002  # seconds between two readings of the run logs
_REST = 0.01  # seconds between two requests for the store's counts

_STORED = (State.READY, State.DELAYED, State.BURIED)


class Cost(msgspec.Struct):
    """The cost of the measured part of a repeat."""

    seconds: float = 0.0
    cpu: float | None = 0.0
    """CPU seconds of the run's processes."""
    before: Counters = Counters()
    after: Counters = Counters()

    def metrics(self, jobs: int) -> dict[str, float | None]:
        """The figures. The keys of the result are the names in ``COSTS``. A figure whose unit is per job is divided by
        *jobs*."""
        spent = self.after.since(self.before)

        def each(amount: float | None, scale: float = 1.0) -> float | None:
            return None if amount is None or not jobs else amount * scale / jobs

        return {
            "commands": each(spent.commands),
            "bytes": None if spent.received is None or spent.sent is None else each(spent.received + spent.sent),
            "client CPU": each(self.cpu, 1e6),
            "server CPU": each(spent.cpu, 1e6),
            "server memory": None if spent.memory is None else spent.memory / 1e6,
        }


class RunningWorker:
    def __init__(self, worker: WorkerProcess, run_logs: RunLogs) -> None:
        self.worker = worker
        self.run_logs = run_logs

    def wait_until_ready(self, processes: int) -> None:
        """Wait until *processes* of the worker's processes have begun to reserve."""
        self.wait_until_begun(processes)
        time.sleep(0.05)  # a process reserves soon after it has created its run log

    def wait_until_begun(self, processes: int = 1) -> None:
        """Wait until *processes* of the worker's processes have a run log."""
        give_up_at = time.monotonic() + _START
        while len(self.run_logs.look()) < processes and time.monotonic() < give_up_at:
            time.sleep(_LOOK)

    def wait_until_ended(self, runs: int) -> None:
        """Wait until *runs* runs have ended, or until no run has ended for ``PATIENCE`` seconds."""
        self.wait_until_begun()
        ended, changed_at = 0, time.monotonic()
        while ended < runs and time.monotonic() - changed_at < PATIENCE:
            time.sleep(_LOOK)
            before, ended = ended, self.run_logs.ended()
            if ended != before:
                changed_at = time.monotonic()


class Scenario:
    """The queue, the processes and the records of a workload.

    *app* inspects and cleans up the store in this process. The constructor creates *folder*.
    """

    def __init__(self, app: BenchApp, adapter: Adapter, queue: str, folder: Path, *, own: str = "") -> None:
        """*own* is a prefix of queue names that only this run uses."""
        self.app = app
        self.queue = queue
        self._own = own
        self._there_before = set(app.backend.queues())
        self.evidence = Evidence(sent=[], runs=[])
        self._adapter = adapter
        self._folder = folder
        folder.mkdir()
        self._processes = RunProcesses(app.url, are_processes=self.capabilities.shared is True)
        self._run_logs: list[RunLogs] = []

    @property
    def capabilities(self) -> Capabilities:
        return self.app.backend.capabilities

    @property
    def enqueued(self) -> int:
        """The number of jobs whose enqueue was acknowledged."""
        return sum(sent.jobs for sent in self.evidence.sent)

    # --- doing ---

    def take(self, function: Callable[..., R], *arguments: Any) -> LoadProcess[R]:
        """Start a process that is ready to run *function* on this repeat's queue."""
        return self._processes.take(function, self.queue, *arguments)

    def enqueue(self, function: Callable[..., list[Sent]], *arguments: Any, patience: float = 60.0) -> Cost:
        """Enqueue in one process, and record the sent jobs. The cost is measured from the start signal of the enqueuing
        process."""
        process = self.take(function, *arguments)
        cost = Cost()
        with self.measured(cost):
            process.go()
            done = process.result(patience)
        cost.cpu = done.cpu
        cost.seconds = (done.result[-1].returned - done.result[0].called) / 1e9
        self.evidence.sent += done.result
        return cost

    @contextlib.contextmanager
    def measured(self, cost: Cost) -> Iterator[None]:
        """Measure the server's counts and the time of the ``with`` block, and add them to *cost*."""
        cost.before = self._adapter.counters()
        began = time.monotonic()
        yield
        cost.seconds = time.monotonic() - began
        cost.after = self._adapter.counters()

    @contextlib.contextmanager
    def working(self, processes: int, cost: Cost | None = None, *, runs: int | None = None) -> Iterator[RunningWorker]:
        """Run a worker of *processes* processes, stop it at the end, and record its runs and its CPU time.

        *runs* is the number of expected runs. By default, *runs* is the number of jobs that are already enqueued.
        """
        folder = self._folder / f"run-logs-{len(self._run_logs)}"
        folder.mkdir()
        run_logs = RunLogs(folder)
        self._run_logs.append(run_logs)
        capacity = 4 * (self.enqueued if runs is None else runs) + 1000
        running = RunningWorker(
            self._processes.start_worker(WorkerOptions(self.queue, folder, capacity, processes)), run_logs
        )
        try:
            yield running
            running.worker.stop()
        finally:
            self.evidence.runs += run_logs.runs()
        if cost is not None and cost.cpu is not None:
            cpu = run_logs.cpu()
            cost.cpu = None if cpu is None else cost.cpu + cpu

    def drain(self, running: RunningWorker, runs: int | None = None) -> None:
        """Wait until *runs* runs have ended and the store holds no job. The default is one run for each job."""
        expected = self.enqueued if runs is None else runs
        running.wait_until_begun()
        ended, changed_at = -1, time.monotonic()
        while ended <= _again_and_again(expected):
            now, before = time.monotonic(), ended
            ended = running.run_logs.ended()
            if ended != before:
                changed_at = now
            if ended < expected and now - changed_at < _QUIET:
                time.sleep(_LOOK)
                continue
            left = self.left()
            if left == 0 and (ended >= expected or now - changed_at >= _QUIET):
                return  # the verification reports the missing jobs as lost
            if left is None and now - changed_at >= _QUIET:
                return
            if now - changed_at >= PATIENCE:
                return  # the verification reports the remaining jobs as left over
            time.sleep(_REST)

    def sweep(self) -> None:
        """Take the ready jobs in batches, in this process. The order of the jobs is verified if the backend promises an
        order."""
        most = _again_and_again(self.enqueued)
        runs = sweep(self.app, self.queue, most)
        self.evidence.in_order = self.capabilities.total_order is True
        while runs:  # even if one reply is empty, the store may have jobs
            self.evidence.runs += runs
            most -= len(runs)
            runs = sweep(self.app, self.queue, most, _REST) if self.left() != 0 and most > 0 else []

    # --- looking, and tidying up ---

    def left(self) -> int | None:
        """The number of jobs in the store, in any state. The result is None if the store cannot count its jobs."""
        counts = self._counts().values()
        return None if None in counts else sum(count for count in counts if count is not None)

    def empty(self) -> None:
        """Take all ready jobs out of the queue without running them, and record their numbers."""
        self.evidence.emptied += self._numbers()

    def close(self) -> Evidence:
        """End all processes, record which jobs the store still holds, and remove these jobs."""
        self._processes.__exit__()
        for run_logs in self._run_logs:
            run_logs.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self.evidence.left = self._counts()
        found = self._numbers()  # asks for jobs even if the store counts zero jobs
        self.evidence.emptied += found
        self.evidence.found_after = len(found)
        self.evidence.purged = self.app.queue(self.queue).purge(list(_STORED))  # even if the store counts no jobs
        self.evidence.elsewhere = dict(self._removed_elsewhere())
        return self.evidence

    def _removed_elsewhere(self) -> Iterator[tuple[str, int | None]]:
        """Empty the queues that appeared during the repeat. Yields each queue with the store's count of its jobs."""
        for name in sorted(set(self.app.backend.queues()) - self._there_before - {self.queue}):
            if name.startswith(self._own):
                counts = self._counts(name).values()
                yield name, None if None in counts else sum(count for count in counts if count is not None)
                self.app.backend.purge(name, list(_STORED))

    def _counts(self, queue: str = "") -> dict[str, int | None]:
        stats = self.app.backend.stats(queue or self.queue)
        return {state: getattr(stats, state) for state in STORED_STATES}

    def _numbers(self) -> array[int]:
        return numbers_of(self.app, self.queue, _again_and_again(self.enqueued))


def _again_and_again(jobs: int) -> int:
    """An upper limit for the runs of *jobs* jobs. A store exceeds the limit only by handing out jobs again and
    again."""
    return 2 * jobs + 1000


def timeline(runs: list[Run], began: int, parts: int = 40) -> list[tuple[float, float]]:
    """Jobs finished per second over time, in about *parts* intervals of at least 20 ms. *began* is in ns."""
    ends = sorted(run.end for run in runs if run.is_finished)
    if not ends:
        return []
    width = max((ends[-1] - began) / parts, 20e6)
    counts = [0] * (int((ends[-1] - began) / width) + 1)
    for end in ends:
        counts[max(0, int((end - began) / width))] += 1
    return [(index * width / 1e9, count * 1e9 / width) for index, count in enumerate(counts)]
