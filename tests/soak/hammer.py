"""Many processes use one store. Each process records what it enqueued and what it acked, and the two lists must be the
same.

A subclass for each store decides what a process enqueues, how it settles and what is a failure. One of them is in
``sqlite_processes.py``.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from typing import TYPE_CHECKING, Any

from multiq.backend import Ack, Bury, GiveBack, Release

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from multiq.backend import Backend, Lease, Verdict
    from multiq.errors import LeaseLost

QUEUES = ["high", "default", "low"]


class Hammer(ABC):
    """The work of one process; a subclass for each store defines the calls of a turn."""

    def __init__(self, backend: Backend, folder: Path, name: str) -> None:
        self.backend = backend
        self.consumer = backend.consumer(QUEUES)
        self.luck = random.Random(name)
        self.diary_file = folder / f"{name}.json"
        self.name = name
        self.enqueued: list[str] = []
        self.acked: list[str] = []
        self.calls = 0
        self.slowest = 0.0
        self.verdicts: list[Verdict] = []

    @abstractmethod
    def turn(self) -> None:
        """Enqueue, reserve, settle, and make other calls."""

    def refuse(self, verdict: Verdict, answer: LeaseLost) -> None:
        """Called when a verdict was refused. Raises unless a subclass expects that."""
        raise AssertionError(f"a lease was lost before its time: {answer}")

    def diary(self) -> dict[str, Any]:
        """What this process did, as JSON values."""
        return {"enqueued": self.enqueued, "acked": self.acked, "calls": self.calls, "slowest": self.slowest}

    def run(self, seconds: float) -> int:
        """Take turns for *seconds*. Returns the exit code."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.turn()
        sent = [GiveBack(verdict.lease) for verdict in self.verdicts]
        self.note(sent, self.consumer.settle(sent))
        self._write_diary()
        return 0

    def work_off(self) -> None:
        """Reserve and ack until nothing is left."""
        for queue in QUEUES:
            self.backend.kick(queue, 1_000_000)
        while leases := self.consumer.reserve(500, 2.0):
            self.note([Ack(lease) for lease in leases], self.consumer.settle([Ack(lease) for lease in leases]))
        left = {queue: self.backend.stats(queue) for queue in self.backend.queues()}
        if left:
            print(f"left over: {left}")
        self._write_diary()

    def timed(self, call: Callable[[], None]) -> None:
        started = time.monotonic()
        call()
        self.calls += 1
        self.slowest = max(self.slowest, time.monotonic() - started)

    def verdict(self, lease: Lease) -> Verdict:
        """A random verdict on a lease, mostly an ack."""
        draw = self.luck.random()
        if draw < 0.85:
            return Ack(lease)
        if draw < 0.9:
            return Release(lease, delay=self.luck.choice([0.0, 0.05]), reason="later")
        return Bury(lease, "set aside") if draw < 0.93 else GiveBack(lease)

    def note(self, sent: Sequence[Verdict], answers: Sequence[LeaseLost | None]) -> None:
        for verdict, answer in zip(sent, answers, strict=True):
            if answer is not None:
                self.refuse(verdict, answer)
            elif isinstance(verdict, Ack):
                self.acked.append(verdict.lease.id)

    def _write_diary(self) -> None:
        self.diary_file.write_text(json.dumps(self.diary()))


def run(
    program: str, folder: Path, count: int, seconds: float, where: str, *, meanwhile: Callable[[], None] | None = None
) -> bool:
    """Run the processes, ``program --work FOLDER NAME SECONDS WHERE``. Returns whether all of them succeeded.

    What the first failed process said is printed. *meanwhile* is called while the processes run.
    """
    command = [sys.executable, "-W", "error", program, "--work", str(folder)]
    processes = [
        subprocess.Popen([*command, str(number), str(seconds), where], stderr=subprocess.PIPE, text=True)
        for number in range(count)
    ]
    while meanwhile is not None and any(process.poll() is None for process in processes):
        meanwhile()
        time.sleep(0.1)
    complaints = [process.communicate()[1] for process in processes]
    failed = [complaint for process, complaint in zip(processes, complaints, strict=True) if process.returncode]
    if failed:
        print(f"{len(failed)} of {count} processes failed:\n{failed[0]}")
    return not failed


class Sum:
    """The sum of what all processes did."""

    def __init__(self, folder: Path) -> None:
        self.diaries = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
        """The last result is that of the process that worked off the remaining jobs."""
        self.enqueued = Counter(job_id for diary in self.diaries for job_id in diary["enqueued"])
        self.acked = Counter(job_id for diary in self.diaries for job_id in diary["acked"])
        self.slowest = max(diary["slowest"] for diary in self.diaries)

    def of(self, what: str) -> int:
        return sum(diary[what] for diary in self.diaries)

    @property
    def is_right(self) -> bool:
        """Whether any job was enqueued, and each job was acked once."""
        return bool(self.enqueued) and self.enqueued == self.acked

    def told(self, seconds: float) -> str:
        lost, doubled = self.enqueued - self.acked, self.acked - self.enqueued
        return (
            f"{len(self.diaries) - 1} processes, {seconds:g} s: {self.enqueued.total():,} jobs enqueued, "
            f"{self.acked.total():,} acked, {lost.total()} lost, {doubled.total()} doubled"
        )
