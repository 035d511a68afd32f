"""Eight processes on one MariaDB: nothing is lost, nothing is acked twice, and no deadlock reaches a caller.

    python tests/soak/mysql_processes.py --seconds 120 --processes 8

Each process enqueues in bulk (some jobs delayed, of all priorities) and takes jobs. It acks most of them, and releases,
buries, gives back or reschedules others. It lets some leases end, and acks these jobs too late, so that the acks are
refused. Each process records what it enqueued and what it acked. In the end the remaining jobs are acked, and the two
lists must be the same. Prints how often transactions were run again. Exits with 1 and prints why if the lists differ,
or if any call raised.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multiq.backend import Ack, NewJob, State, Touch
from multiq.backend.registry import open_backend
from multiq.driverkit.call_retry import repetitions
from multiq.errors import JobNotFound, JobReserved
from multiq.ids import new_ids

sys.path.append(str(Path(__file__).parent.parent))

from servers.mysql import MysqlServer
from soak import hammer
from soak.hammer import QUEUES

if TYPE_CHECKING:
    from multiq.backend import Lease, Verdict
    from multiq.errors import LeaseLost

SHORT, LONG = 1.0, 60.0  # seconds that a lease lasts
LATE = 0.2  # the share of jobs with a short lease that are kept until the lease has ended


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
    if not hammer.run(__file__, folder, count, seconds, url):
        return 1
    time.sleep(SHORT * 1.5)  # until the last of the leases that were kept have ended
    Hammer(folder, "rest", url).work_off()
    return judge(hammer.Sum(folder), seconds)


def judge(total: hammer.Sum, seconds: float) -> int:
    """Compare what was enqueued with what was acked. Returns the exit code."""
    calls, jobs, refused = total.of("calls"), total.of("jobs"), total.of("refused")
    retries = sum((Counter(diary["retries"]) for diary in total.diaries), Counter[str]())
    print(
        f"{total.told(seconds)}; "
        f"{refused:,} verdicts refused after their leases; {calls / seconds:,.0f} calls/s and {jobs / seconds:,.0f} "
        f"verbs on jobs/s, slowest call {total.slowest * 1000:.0f} ms; "
        f"run again, per 10,000 calls: {sum(retries.values()) / calls * 10_000:.2f}, per 10,000 verbs on jobs: "
        f"{sum(retries.values()) / jobs * 10_000:.2f} ({dict(retries)})"
    )
    return 0 if total.is_right and refused else 1


class Hammer(hammer.Hammer):
    """The work of one process."""

    def __init__(self, folder: Path, name: str, url: str) -> None:
        super().__init__(open_backend(url), folder, name)
        self.jobs = 0
        self.refused = 0
        self.forgotten: list[tuple[float, Lease]] = []
        """Leases that are acked too late, each with the earliest time of its ack."""

    def turn(self) -> None:
        self.timed(self._enqueue)
        for _ in range(3):
            self.timed(self._exchange)
        if self.luck.random() < 0.1:
            self.timed(self._manage)
        self.timed(self._too_late)

    def refuse(self, verdict: Verdict, answer: LeaseLost) -> None:
        if verdict.lease.ttr != SHORT:
            super().refuse(verdict, answer)
        self.refused += 1  # the machine was slow, so the lease has ended

    def diary(self) -> dict[str, Any]:
        counts = {failure.name: count for failure, count in repetitions.items()}
        return {**super().diary(), "jobs": self.jobs, "refused": self.refused, "retries": counts}

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
        self.note(sent, answers)
        self.jobs += len(sent) + len(leases)
        self.verdicts = []
        for lease in leases:
            if lease.ttr == SHORT and self.luck.random() < LATE:
                self.forgotten.append((time.monotonic() + SHORT * 1.1, lease))
            else:
                self.verdicts.append(self.verdict(lease))

    def _manage(self) -> None:
        queue = self.luck.choice(QUEUES)
        self.backend.kick(queue, 50)
        self.backend.stats(queue)
        for state in (State.READY, State.DELAYED, State.BURIED):
            for job in self.backend.jobs(queue, state, limit=3).jobs:
                try:
                    self.backend.reschedule(queue, job.id, self.luck.choice([0.0, 0.05]))
                except (JobNotFound, JobReserved):
                    continue  # another process was faster
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


if __name__ == "__main__":
    sys.exit(main())
