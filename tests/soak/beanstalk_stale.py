"""Consumers that are stopped for longer than their leases, at random moments, again and again: no late verdict counts.

    python tests/soak/beanstalk_stale.py --seconds 120 --processes 4

Each process reserves batches from one queue, waits a little, and acks, releases or buries; it writes down which
verdicts were accepted. One of them after the other is stopped (SIGSTOP) until its leases have ended and others have its
jobs, and goes on. In the end the accepted verdicts of each job must be in the order of its attempts, one for each, with
at most one ack, after which there is nothing. Exits with 1 and says why if they are not.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

from multiq.backend import Ack, Bury, GiveBack, Lease, NewJob, Release, Verdict
from multiq.errors import BackendError
from multiq.ids import new_ids
from multiq.registry import open_backend

sys.path.append(str(Path(__file__).parent.parent))

from servers.beanstalk import BeanstalkServer

QUEUE = "stale"
TTR = 3.0
STOPPED = (3.2, 5.0)  # seconds
BATCH = 20


class Entry(NamedTuple):
    """A verdict, and when its answer came."""

    at: int
    job_id: int
    attempt: int
    what: str
    is_accepted: bool


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--work", nargs=2, metavar=("URL", "DIARY"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        url, diary = given.work
        work(url, Path(diary))
    with tempfile.TemporaryDirectory() as folder, BeanstalkServer() as server:
        return supervise(server, Path(folder), given.processes, given.seconds)


def work(url: str, diary: Path) -> None:
    """Reserve and settle until somebody ends it."""
    luck = random.Random(diary.name)
    with open_backend(url) as backend, backend.consumer([QUEUE]) as consumer, diary.open("a", buffering=1) as lines:
        while True:
            try:
                leases = consumer.reserve(BATCH, 1.0)
                time.sleep(luck.uniform(0, 0.05))
                verdicts = [verdict_on(lease, luck) for lease in leases]
                answers = consumer.settle(verdicts)
            except BackendError as exc:
                raise SystemExit(f"the server was there all the time: {exc}") from exc
            now = time.monotonic_ns()
            for verdict, answer in zip(verdicts, answers, strict=True):
                lease = verdict.lease
                word = type(verdict).__name__
                print(now, lease.id, lease.attempt, word, int(answer is None), file=lines)


def verdict_on(lease: Lease, luck: random.Random) -> Verdict:
    dice = luck.random()
    if dice < 0.4:
        return Ack(lease)
    if dice < 0.6:
        return Release(lease)
    if dice < 0.75:
        return Release(lease, delay=1.0)
    return Bury(lease) if dice < 0.9 else GiveBack(lease)


def supervise(server: BeanstalkServer, folder: Path, count: int, seconds: float) -> int:
    command = [sys.executable, "-W", "error", __file__, "--work", server.url]
    processes = [subprocess.Popen([*command, str(folder / f"diary-{number}")]) for number in range(count)]
    luck = random.Random(20261121)
    stops = 0
    with open_backend(server.url) as backend:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if (backend.stats(QUEUE).ready or 0) < 500:
                backend.enqueue(QUEUE, [NewJob(b"x", job_id, ttr=TTR) for job_id in new_ids(500)])
            backend.kick(QUEUE, 1000)
            victim = luck.choice(processes)
            os.kill(victim.pid, signal.SIGSTOP)
            time.sleep(luck.uniform(*STOPPED))
            os.kill(victim.pid, signal.SIGCONT)
            stops += 1
            time.sleep(luck.uniform(0, 0.2))
    failed = [process.returncode for process in processes if process.poll() is not None]
    for process in processes:
        process.terminate()
        process.wait()
    if failed:
        print(f"{len(failed)} of {count} processes failed")
        return 1
    return judge([entry for file in folder.glob("diary-*") for entry in read(file)], stops)


def read(file: Path) -> list[Entry]:
    lines = [line.split() for line in file.read_text().rpartition("\n")[0].splitlines()]
    return [Entry(int(at), int(job), int(attempt), what, yes == "1") for at, job, attempt, what, yes in lines]


def judge(entries: list[Entry], stops: int) -> int:
    """Whether the accepted verdicts of each job make sense."""
    jobs: dict[int, list[Entry]] = defaultdict(list)
    for entry in sorted(entries):
        if entry.is_accepted:
            jobs[entry.job_id].append(entry)
    wrong = {}
    for job_id, its in jobs.items():
        attempts = [entry.attempt for entry in its]
        acks = [number for number, entry in enumerate(its) if entry.what == "Ack"]
        if attempts != sorted(set(attempts)) or acks not in ([], [len(its) - 1]):
            wrong[job_id] = its
    refused = Counter(entry.what for entry in entries if not entry.is_accepted)
    print(
        f"{stops} stops, {len(jobs):,} jobs, {sum(map(len, jobs.values())):,} verdicts accepted, "
        f"{sum(refused.values()):,} late ones refused ({dict(refused)}); {len(wrong)} jobs with a late one that counted"
    )
    for job_id, its in list(wrong.items())[:5]:
        print(f"job {job_id}: {its}")
    return 1 if wrong or not jobs else 0


if __name__ == "__main__":
    sys.exit(main())
