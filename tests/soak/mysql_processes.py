"""Eight processes on one MariaDB: nothing is lost, nothing is acked twice, and no deadlock reaches a caller.

    python tests/soak/mysql_processes.py --seconds 120 --processes 8

Each process enqueues in bulk (some delayed, of all priorities), takes jobs, acks most, releases, buries, gives back or
reschedules some, and lets some leases end: of those it sends the ack too late, and is refused. It writes down what it
enqueued and what it acked. In the end the rest is worked off, and the two lists must be the same. Prints how often
transactions were run again. Exits with 1 and says why if the lists differ, or if any call raised.
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
from multiq.errors import JobNotFound, JobReserved
from multiq.ids import new_ids
from multiq.registry import open_backend
from multiq_mysql import replay

sys.path.append(str(Path(__file__).parent.parent))

from servers.mysql import MysqlServer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from multiq.errors import LeaseLost

QUEUES = ["high", "default", "low"]
SHORT, LONG = 1.0, 60.0  # seconds that a lease lasts
LATE = 0.2  # of the jobs with a short lease: so many are forgotten until it has ended


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--settings", default="", help="of the server, as in transaction_isolation=SERIALIZABLE")
    parser.add_argument("--work", nargs=4, metavar=("FOLDER", "NAME", "SECONDS", "URL"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        folder, name, seconds, url = given.work
        return Hammer(Path(folder), name, url).run(float(seconds))
    settings = dict(pair.split("=") for pair in given.settings.split(",") if pair)
    with tempfile.TemporaryDirectory() as folder_name, MysqlServer(**settings) as server, server.database() as place:
        outcome = supervise(Path(folder_name), given.processes, given.seconds, place.url)
        print(f"the server counts {server.status('Innodb_deadlocks')} deadlocks")
        return outcome


def supervise(folder: Path, count: int, seconds: float, url: str) -> int:
    """Run the processes, work off what they leave, compare."""
    command = [sys.executable, "-W", "error", __file__, "--work", str(folder)]
    processes = [
        subprocess.Popen([*command, str(number), str(seconds), url], stderr=subprocess.PIPE, text=True)
        for number in range(count)
    ]
    complaints = [process.communicate()[1] for process in processes]
    failed = [complaint for process, complaint in zip(processes, complaints, strict=True) if process.returncode]
    if failed:
        print(f"{len(failed)} of {count} processes failed:\n{failed[0]}")
        return 1
    Hammer(folder, "rest", url).work_off()
    return judge(folder, seconds)


def judge(folder: Path, seconds: float) -> int:
    """Compare what was enqueued with what was acked."""
    diaries = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    enqueued = Counter(job_id for diary in diaries for job_id in diary["enqueued"])
    acked = Counter(job_id for diary in diaries for job_id in diary["acked"])
    calls = sum(diary["calls"] for diary in diaries)
    jobs = sum(diary["jobs"] for diary in diaries)
    refused = sum(diary["refused"] for diary in diaries)
    replays = sum((Counter(diary["replays"]) for diary in diaries), Counter[str]())
    lost, doubled = enqueued - acked, acked - enqueued
    print(
        f"{len(diaries) - 1} processes, {seconds:g} s: {sum(enqueued.values()):,} jobs enqueued, "
        f"{sum(acked.values()):,} acked, {sum(lost.values())} lost, {sum(doubled.values())} doubled; "
        f"{refused:,} verdicts refused after their leases; {calls / seconds:,.0f} calls/s and {jobs / seconds:,.0f} "
        f"verbs on jobs/s, slowest call {max(diary['slowest'] for diary in diaries) * 1000:.0f} ms; "
        f"run again, per 10,000 calls: {sum(replays.values()) / calls * 10_000:.2f}, per 10,000 verbs on jobs: "
        f"{sum(replays.values()) / jobs * 10_000:.2f} ({dict(replays)})"
    )
    return 1 if lost or doubled or not enqueued or not refused else 0


class Hammer:
    """One process at work."""

    def __init__(self, folder: Path, name: str, url: str) -> None:
        self.backend = open_backend(url)
        self.consumer = self.backend.consumer(QUEUES)
        self.luck = random.Random(name)
        self.diary_file = folder / f"{name}.json"
        self.enqueued: list[str] = []
        self.acked: list[str] = []
        self.calls = 0
        self.jobs = 0
        self.refused = 0
        self.slowest = 0.0
        self.verdicts: list[Verdict] = []
        self.forgotten: list[tuple[float, Lease]] = []
        """Leases that are acked too late, and from when on they are."""

    def run(self, seconds: float) -> int:
        """Enqueue and reserve for so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._timed(self._enqueue)
            for _ in range(3):
                self._timed(self._exchange)
            if self.luck.random() < 0.1:
                self._timed(self._manage)
            self._timed(self._too_late)
        self._settle_rest()
        self._write_diary()
        return 0

    def work_off(self) -> None:
        """Ack all that there is."""
        time.sleep(SHORT * 1.5)  # the last leases that were forgotten
        for queue in QUEUES:
            self.backend.kick(queue, 1_000_000)
        while leases := self.consumer.reserve(500, 2.0):
            self._note([Ack(lease) for lease in leases], self.consumer.settle([Ack(lease) for lease in leases]))
        left = {queue: self.backend.stats(queue) for queue in self.backend.queues()}
        if left:
            print(f"left over: {left}")
        self._write_diary()

    def _enqueue(self) -> None:
        luck = self.luck
        count = luck.choice([1, 10, 100])
        batch = [
            NewJob(
                body=os.urandom(luck.choice([0, 50, 500, 5000])),
                id=job_id,
                priority=luck.choice([0, 1024, 1024, 4000]),
                delay=luck.choice([0.0, 0.0, 0.0, 0.01, 0.3]),
                ttr=luck.choice([SHORT, LONG, LONG, LONG]),
            )
            for job_id in new_ids(count)
        ]
        self.enqueued += self.backend.enqueue(luck.choice(QUEUES), batch)
        self.jobs += count

    def _exchange(self) -> None:
        sent = self.verdicts
        answers, leases = self.consumer.exchange(
            sent, self.luck.choice([1, 10, 50, 100]), self.luck.choice([0.0, 0.01])
        )
        self._note(sent, answers)
        self.jobs += len(sent) + len(leases)
        self.verdicts = []
        for lease in leases:
            if lease.ttr == SHORT and self.luck.random() < LATE:
                self.forgotten.append((time.monotonic() + SHORT * 1.1, lease))
            else:
                self.verdicts.append(self._verdict(lease))

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
        for state in (State.READY, State.DELAYED, State.BURIED):
            for job in self.backend.jobs(queue, state, limit=3).jobs:
                try:
                    self.backend.reschedule(queue, job.id, self.luck.choice([0.0, 0.05]))
                except (JobNotFound, JobReserved):
                    continue  # somebody was faster
                self.jobs += 1
        if self.verdicts:
            (answer,) = self.consumer.settle([Touch(self.verdicts[0].lease)])
            self.refused += answer is not None

    def _too_late(self) -> None:
        now = time.monotonic()
        due = [lease for at, lease in self.forgotten if at <= now]
        self.forgotten = [(at, lease) for at, lease in self.forgotten if at > now]
        answers = self.consumer.settle([Ack(lease) for lease in due])
        if None in answers:
            raise AssertionError("an ack was taken after its lease had ended")
        self.refused += len(due)
        self.jobs += len(due)

    def _settle_rest(self) -> None:
        sent = [GiveBack(verdict.lease) for verdict in self.verdicts]
        self._note(sent, self.consumer.settle(sent))

    def _note(self, sent: Sequence[Verdict], answers: Sequence[LeaseLost | None]) -> None:
        for verdict, answer in zip(sent, answers, strict=True):
            if answer is None:
                self.acked += [verdict.lease.id] if isinstance(verdict, Ack) else []
            elif verdict.lease.ttr == SHORT:
                self.refused += 1  # this machine was slow
            else:
                raise AssertionError(f"a lease was lost before its time: {answer}")

    def _timed(self, call: Callable[[], None]) -> None:
        started = time.monotonic()
        call()
        self.calls += 1
        self.slowest = max(self.slowest, time.monotonic() - started)

    def _write_diary(self) -> None:
        diary = {
            "enqueued": self.enqueued,
            "acked": self.acked,
            "calls": self.calls,
            "jobs": self.jobs,
            "refused": self.refused,
            "slowest": self.slowest,
            "replays": replay.counted,
        }
        self.diary_file.write_text(json.dumps(diary))


if __name__ == "__main__":
    sys.exit(main())
