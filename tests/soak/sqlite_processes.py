"""Eight processes on one SQLite file: nothing is lost, nothing is done twice, and nobody sees a lock.

    python tests/soak/sqlite_processes.py --seconds 60 --processes 8

Each process enqueues small batches (some delayed, of all priorities), takes jobs, acks most, releases, buries or gives
back some, and writes down what it enqueued and what it acked. In the end the rest is worked off, and the two lists
must be the same. Exits with 1 and says why if they are not, or if any call raised.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from multiq.backend import Ack, Bury, GiveBack, Lease, NewJob, Release, State, Touch, Verdict
from multiq_sqlite.backend import SqliteBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from multiq.errors import LeaseLost

QUEUES = ["high", "default", "low"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--options", default="", help="of the URL, as in synchronous=normal")
    parser.add_argument("--work", nargs=4, metavar=("FOLDER", "NAME", "SECONDS", "OPTIONS"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        folder, name, seconds, options = given.work
        return Hammer(Path(folder), name, options).run(float(seconds))
    with tempfile.TemporaryDirectory() as folder_name:
        return supervise(Path(folder_name), given.processes, given.seconds, given.options)


def supervise(folder: Path, count: int, seconds: float, options: str) -> int:
    """Run the processes, work off what they leave, compare."""
    command = [sys.executable, "-W", "error", __file__, "--work", str(folder)]
    processes = [
        subprocess.Popen([*command, str(number), str(seconds), options], stderr=subprocess.PIPE, text=True)
        for number in range(count)
    ]
    largest_log = 0
    while any(process.poll() is None for process in processes):
        log = folder / "jobs.db-wal"
        largest_log = max(largest_log, log.stat().st_size if log.exists() else 0)
        time.sleep(0.1)
    complaints = [process.communicate()[1] for process in processes]
    failed = [complaint for process, complaint in zip(processes, complaints, strict=True) if process.returncode]
    if failed:
        print(f"{len(failed)} of {count} processes failed:\n{failed[0]}")
        return 1
    Hammer(folder, "rest", options).work_off()
    return judge(folder, seconds, largest_log)


def judge(folder: Path, seconds: float, largest_log: int) -> int:
    """Compare what was enqueued with what was acked."""
    diaries = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    enqueued = Counter(job_id for diary in diaries for job_id in diary["enqueued"])
    acked = Counter(job_id for diary in diaries for job_id in diary["acked"])
    calls = sum(diary["calls"] for diary in diaries)
    slowest = max(diary["slowest"] for diary in diaries)
    fewest, most = min(len(d["acked"]) for d in diaries[:-1]), max(len(d["acked"]) for d in diaries[:-1])
    lost, doubled = enqueued - acked, acked - enqueued
    print(
        f"{len(diaries) - 1} processes, {seconds:g} s: {sum(enqueued.values()):,} jobs enqueued, "
        f"{sum(acked.values()):,} acked, {sum(lost.values())} lost, {sum(doubled.values())} doubled; "
        f"{calls / seconds:,.0f} calls/s, slowest call {slowest * 1000:.0f} ms, "
        f"{fewest:,} to {most:,} jobs per process, log up to {largest_log / 1e6:.1f} MB"
    )
    return 1 if lost or doubled or not enqueued else 0


class Hammer:
    """One process at work."""

    def __init__(self, folder: Path, name: str, options: str) -> None:
        settings = dict(pair.split("=") for pair in options.split("&") if pair)
        self.backend = SqliteBackend(str(folder / "jobs.db"), **settings)  # type: ignore[arg-type]
        self.consumer = self.backend.consumer(QUEUES)
        self.luck = random.Random(name)
        self.diary_file = folder / f"{name}.json"
        self.name = name
        self.enqueued: list[str] = []
        self.acked: list[str] = []
        self.calls = 0
        self.slowest = 0.0
        self.verdicts: list[Verdict] = []

    def run(self, seconds: float) -> int:
        """Enqueue and reserve for so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._timed(self._enqueue)
            self._timed(self._exchange)
            if self.luck.random() < 0.02:
                self._timed(self._manage)
        self._settle_rest()
        self._write_diary()
        return 0

    def work_off(self) -> None:
        """Ack all that there is."""
        for queue in QUEUES:
            self.backend.kick(queue, 1_000_000)
        while leases := self.consumer.reserve(500, 2.0):
            self._note([Ack(lease) for lease in leases], self.consumer.settle([Ack(lease) for lease in leases]))
        left = {queue: self.backend.stats(queue) for queue in self.backend.queues()}
        if left:
            print(f"left over: {left}")
        self._write_diary()

    def _enqueue(self) -> None:
        batch = [
            NewJob(
                body=os.urandom(self.luck.choice([0, 50, 500, 5000])),
                id=f"{self.name}-{len(self.enqueued) + number}",
                priority=self.luck.choice([0, 1024, 1024, 4000]),
                delay=self.luck.choice([0.0, 0.0, 0.0, 0.01, 0.3]),
                ttr=60.0,
            )
            for number in range(self.luck.randint(1, 15))
        ]
        self.enqueued += self.backend.enqueue(self.luck.choice(QUEUES), batch)

    def _exchange(self) -> None:
        sent = self.verdicts
        answers, leases = self.consumer.exchange(sent, self.luck.randint(1, 25), self.luck.choice([0.0, 0.01]))
        self._note(sent, answers)
        self.verdicts = [self._verdict(lease) for lease in leases]

    def _verdict(self, lease: Lease) -> Verdict:
        dice = self.luck.random()
        if dice < 0.85:
            return Ack(lease)
        if dice < 0.9:
            return Release(lease, delay=self.luck.choice([0.0, 0.05]), reason="later")
        return Bury(lease, "set aside") if dice < 0.93 else GiveBack(lease)

    def _manage(self) -> None:
        queue = self.luck.choice(QUEUES)
        self.backend.kick(queue, 50)
        self.backend.stats(queue)
        self.backend.jobs(queue, self.luck.choice([State.READY, State.DELAYED]), limit=20)
        if self.verdicts:
            self.consumer.settle([Touch(self.verdicts[0].lease)])

    def _settle_rest(self) -> None:
        sent = [GiveBack(verdict.lease) for verdict in self.verdicts]
        self._note(sent, self.consumer.settle(sent))

    def _note(self, sent: Sequence[Verdict], answers: Sequence[LeaseLost | None]) -> None:
        refused = [answer for answer in answers if answer is not None]
        if refused:
            raise AssertionError(f"a lease was lost before its time: {refused[0]}")
        self.acked += [verdict.lease.id for verdict in sent if isinstance(verdict, Ack)]

    def _timed(self, call: Callable[[], None]) -> None:
        started = time.monotonic()
        call()
        self.calls += 1
        self.slowest = max(self.slowest, time.monotonic() - started)

    def _write_diary(self) -> None:
        diary = {"enqueued": self.enqueued, "acked": self.acked, "calls": self.calls, "slowest": self.slowest}
        self.diary_file.write_text(json.dumps(diary))


if __name__ == "__main__":
    sys.exit(main())
