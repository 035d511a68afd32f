"""Eight processes on one SQLite file: nothing is lost, nothing is done twice, and no call fails for a lock.

    python tests/soak/sqlite_processes.py --seconds 60 --processes 8

Each process enqueues small batches (some jobs delayed, of all priorities) and takes jobs. It acks most of them, and
releases, buries or gives back others. It records what it enqueued and what it acked. In the end the remaining jobs are
acked, and the two lists must be the same. Exits with 1 and prints why if they differ, or if any call raised.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from multiq.backend import NewJob, State, Touch
from multiq_sqlite.backend import SqliteBackend

sys.path.append(str(Path(__file__).parent.parent))

from soak import hammer
from soak.hammer import QUEUES


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
    log = folder / "jobs.db-wal"
    largest_log = 0

    def look() -> None:
        nonlocal largest_log
        largest_log = max(largest_log, log.stat().st_size if log.exists() else 0)

    if not hammer.run(__file__, folder, count, seconds, options, meanwhile=look):
        return 1
    Hammer(folder, "rest", options).work_off()
    return judge(hammer.Sum(folder), seconds, largest_log)


def judge(total: hammer.Sum, seconds: float, largest_log: int) -> int:
    """Compare what was enqueued with what was acked. Returns the exit code."""
    shares = [len(diary["acked"]) for diary in total.diaries[:-1]]
    print(
        f"{total.told(seconds)}; "
        f"{total.of('calls') / seconds:,.0f} calls/s, slowest call {total.slowest * 1000:.0f} ms, "
        f"{min(shares):,} to {max(shares):,} jobs per process, log up to {largest_log / 1e6:.1f} MB"
    )
    return 0 if total.is_right else 1


class Hammer(hammer.Hammer):
    """The work of one process."""

    def __init__(self, folder: Path, name: str, options: str) -> None:
        settings = dict(pair.split("=") for pair in options.split("&") if pair)
        super().__init__(SqliteBackend(str(folder / "jobs.db"), **settings), folder, name)  # type: ignore[arg-type]

    def turn(self) -> None:
        self.timed(self._enqueue)
        self.timed(self._exchange)
        if self.luck.random() < 0.02:
            self.timed(self._manage)

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
        self.note(sent, answers)
        self.verdicts = [self.verdict(lease) for lease in leases]

    def _manage(self) -> None:
        queue = self.luck.choice(QUEUES)
        self.backend.kick(queue, 50)
        self.backend.stats(queue)
        self.backend.jobs(queue, self.luck.choice([State.READY, State.DELAYED]), limit=20)
        if self.verdicts:
            self.consumer.settle([Touch(self.verdicts[0].lease)])


if __name__ == "__main__":
    sys.exit(main())
