"""multiq compared with the simplest loop on a server. Each server has a subclass; all servers are measured in the same
way."""

from __future__ import annotations

import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from baselines import baseline_of
from bench_app import app, noop
from beside import (
    BODY,
    QUEUE,
    Figures,
    Workers,
    expect,
    in_turns,
    latencies,
    median_rate,
    per_second,
    send,
)

from multiq.backend import NewJob
from multiq.bench.adapter import PUT_BATCH as BULK
from multiq.ids import new_id, new_ids

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from multiq.bench.adapter import Baseline

IDLE_SECONDS = 10
_LOOK = 0.002  # seconds between two checks whether the queue is empty


class BesideServer(ABC):
    """The measurements on one server. Before each measurement, the jobs and tables of the previous measurement are
    removed."""

    asks: ClassVar[str] = "commands"
    """The unit of the value that ``asked`` returns."""
    drain_asks: ClassVar[str] = "commands"
    """The unit of the value that ``asked_by_drain`` returns."""
    singles: ClassVar[float] = 1 / 4
    """Which part of ``--jobs`` is enqueued one by one."""
    delay: ClassVar[float] = 0.5
    """The delay of a delayed job, in seconds. Some servers support whole seconds only."""
    settling: ClassVar[float] = 1
    """How many seconds pass until an idle worker's requests have reached their lowest rate."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.jobs: int = options.jobs
        self.repeats: int = options.repeats
        self.samples: int = options.samples

    def measurements(self) -> dict[str, Callable[[], Figures]]:
        """The measurements, each with its name, in the order in which they are taken."""
        return {
            "enqueue one by one": self.single_enqueue,
            "bulk enqueue by 1,000": self.bulk_enqueue,
            "drain, two inline workers": self.drain,
            "one idle worker": self.latency,
            "idle worker": self.idle,
        }

    # --- what a server is asked for ---

    @abstractmethod
    def empty(self) -> AbstractContextManager[str]:
        """The URL of a store without jobs."""

    def connected(self) -> AbstractContextManager[str]:
        """Like ``empty``, but the app is connected to the store, and has made its first call."""
        return self.empty()

    @abstractmethod
    def all_wait(self, url: str, workers: int) -> None:
        """Wait until *workers* worker processes wait for jobs on the store."""

    @abstractmethod
    def emptiness(self, url: str) -> AbstractContextManager[Callable[[], bool]]:
        """A quick check that all jobs are gone, through a connection that multiq does not use."""

    @abstractmethod
    def asked(self) -> int:
        """How many requests workers have sent to the server so far."""

    def asked_by_drain(self) -> int:
        """Like ``asked``, for servers that count requests differently during a drain."""
        return self.asked()

    def limit_one_by_one(self, count: int) -> float:
        """Jobs per second of the simplest loop that enqueues each job with one round trip."""
        return self._leanest(lambda baseline: baseline.put_one_by_one(count))

    # --- the three figures beside their limits ---

    def single_enqueue(self) -> Figures:
        """The backend's rate of single enqueues, including the creation of the id."""
        count = int(self.jobs * self.singles)

        def put() -> None:
            for _ in range(count):
                app.backend.enqueue(QUEUE, [NewJob(BODY, new_id())])

        def as_tasks() -> None:
            for number in range(count):
                noop.enqueue(number)

        return self._enqueue(count, put, as_tasks, lambda: self.limit_one_by_one(count))

    def bulk_enqueue(self) -> Figures:
        """The backend's rate of enqueues of 1,000 jobs at a time, including the creation of the ids."""

        def put() -> None:
            for _ in range(0, self.jobs, BULK):
                app.backend.enqueue(QUEUE, [NewJob(BODY, job_id) for job_id in new_ids(BULK)])

        return self._enqueue(
            self.jobs,
            put,
            self._enqueue_many,
            lambda: self._leanest(lambda baseline: baseline.put_in_batches(self.jobs)),
        )

    def drain(self) -> Figures:
        """The rate of two worker processes with one job at a time. The baseline is one loop that deletes the last 100
        jobs and takes the next 100."""
        counted: list[float] = []

        def ours() -> float:
            with self.connected() as url, Workers(url, processes=2):
                self.all_wait(url, 2)
                app.queue().pause(3600)
                self._enqueue_many()
                time.sleep(0.2)
                with self.emptiness(url) as is_empty:
                    before = self.asked_by_drain()
                    rate = per_second(self.jobs, lambda: _work_off(is_empty))
                    counted.append((self.asked_by_drain() - before) / self.jobs)
            return rate

        def theirs(baseline: Baseline) -> float:
            baseline.put_in_batches(self.jobs)
            return baseline.take_in_batches()

        figures = in_turns(self.repeats, ours, lambda: self._leanest(theirs))
        return {**figures, f"{self.drain_asks} per job": statistics.median(counted)}

    # --- figures without a baseline ---

    def latency(self) -> Figures:
        """How fast an idle worker picks up jobs, and how late it begins delayed jobs."""
        with tempfile.TemporaryDirectory(prefix="multiq-bench-") as folder, self.connected() as url:
            stamps = Path(folder, "stamps")
            with Workers(url, processes=1, stamps=stamps):
                self.all_wait(url, 1)
                send(stamps, 20)  # warm
                pickup = latencies("pickup", send(stamps, self.samples))
                return {**pickup, **latencies("delayed, late", send(stamps, self.samples, self.delay))}

    def idle(self) -> Figures:
        """How many requests an idle worker sends."""
        with self.connected() as url, Workers(url, processes=1):
            self.all_wait(url, 1)
            time.sleep(self.settling)
            before = self.asked()
            time.sleep(IDLE_SECONDS)
            return {f"{self.asks}/s": (self.asked() - before) / IDLE_SECONDS}

    # --- how ---

    def _enqueue(
        self, count: int, put: Callable[[], object], put_tasks: Callable[[], object], baseline: Callable[[], float]
    ) -> Figures:
        """Two rates: enqueues through the backend, compared with the baseline, and enqueues through a task. A task also
        encodes the arguments and makes a handle."""

        def measured(work: Callable[[], object]) -> float:
            with self.connected():
                rate = per_second(count, work)
                expect(app.queue().stats().ready, count)
                return rate

        figures = in_turns(self.repeats, lambda: measured(put), baseline)
        return {**figures, "as tasks /s": median_rate(self.repeats, lambda: measured(put_tasks))}

    def _enqueue_many(self) -> None:
        for at in range(0, self.jobs, BULK):
            noop.enqueue_many([(number,) for number in range(at, at + BULK)])

    def _leanest(self, work: Callable[[Baseline], float]) -> float:
        with self.empty() as url, baseline_of(url, BODY) as baseline:
            return work(baseline)


def _work_off(is_empty: Callable[[], bool]) -> None:
    app.queue().resume()
    while not is_empty():
        time.sleep(_LOOK)
