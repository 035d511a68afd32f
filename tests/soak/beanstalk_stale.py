"""Consumers are stopped for longer than their leases, at random moments: no late verdict may be accepted.

    python tests/soak/beanstalk_stale.py --seconds 120 --processes 4

Each process reserves batches from one queue, waits a little, and acks, releases or buries. It records which verdicts
were accepted. One process after the other is stopped (SIGSTOP) until its leases have ended and other processes have its
jobs. Then it continues. In the end the accepted verdicts of each job must be in the order of its attempts, one for each
attempt. An ack must be the last of them. Exits with 1 and prints why if they are not.

The server would not notice the ends of a stopped process's leases (see tests/drivers/beanstalk/test_server.py), so that
no verdict would be late. The proxy sends a command on the process's connection instead, and drops the reply.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from multiq.backend import Ack, Bury, GiveBack, Lease, NewJob, Release, Verdict
from multiq.backend.registry import open_backend
from multiq.errors import BackendUnavailable
from multiq.ids import new_ids

sys.path.append(str(Path(__file__).parent.parent))

from proxy import Proxy
from servers.beanstalk import BeanstalkServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy import _Link

T = TypeVar("T")

QUEUE = "stale"
TTR = 3.0
STOPPED = (3.2, 5.0)  # seconds
OTHERS_TURN = (0.0, 1.0)  # seconds from the end of its leases until the stopped process continues
BATCH = 20


class NoopProxy(Proxy):
    """A proxy that can send a command on behalf of a client that is stopped."""

    _WORD, _REPLY = b"peek 0\r\n", b"NOT_FOUND\r\n"

    def send_noop(self) -> None:
        with self._lock:
            for link in self._links:
                self._owed[link] = self._owed.get(link, 0) + 1
                link.server.sendall(self._WORD)

    def _replies(self, link: _Link) -> None:
        while data := link.server.recv(1 << 16):
            with self._lock:
                owed = self._owed.pop(link, 0)
                found = data.count(self._REPLY, 0) if owed else 0
                if owed > found:
                    self._owed[link] = owed - found
            if owed:  # drop the first replies: they cannot be the client's, which was stopped and sent nothing since
                data = data.replace(self._REPLY, b"", owed)
            link.client.sendall(data)

    def __init__(self, upstream: tuple[str, int] | str) -> None:
        self._owed: dict[_Link, int] = {}
        super().__init__(upstream)


class Entry(NamedTuple):
    """A verdict and its answer: when it was about to be sent, when the answer had come, and what they were."""

    sent_at: int
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
    """Reserve and settle until the process is ended from outside."""
    luck = random.Random(diary.name)
    with open_backend(url) as backend, backend.consumer([QUEUE]) as consumer, diary.open("a", buffering=1) as lines:
        while True:
            leases = _insist(lambda: consumer.reserve(BATCH, 1.0))
            time.sleep(luck.uniform(0, 0.05))
            verdicts = [verdict_on(lease, luck) for lease in leases]
            sent_at = time.monotonic_ns()
            answers = _insist(lambda verdicts=verdicts: consumer.settle(verdicts))  # type: ignore[misc]
            now = time.monotonic_ns()
            for verdict, answer in zip(verdicts, answers, strict=True):
                lease = verdict.lease
                word = type(verdict).__name__
                print(sent_at, now, lease.id, lease.attempt, word, int(answer is None), file=lines)


def _insist(call: Callable[[], list[T]]) -> list[T]:
    """Repeat a call until it succeeds, as a worker does: a call during which the process was stopped times out."""
    while True:
        with contextlib.suppress(BackendUnavailable):
            return call()


def verdict_on(lease: Lease, luck: random.Random) -> Verdict:
    draw = luck.random()
    if draw < 0.4:
        return Ack(lease)
    if draw < 0.6:
        return Release(lease)
    if draw < 0.75:
        return Release(lease, delay=1.0)
    return Bury(lease) if draw < 0.9 else GiveBack(lease)


def supervise(server: BeanstalkServer, folder: Path, count: int, seconds: float) -> int:
    links = [NoopProxy(server.address) for _ in range(count)]
    processes = [_process(link, folder / f"diary-{number}") for number, link in enumerate(links)]
    luck = random.Random(20261121)
    stops = 0
    with open_backend(server.url) as backend:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if (backend.stats(QUEUE).ready or 0) < 500:
                backend.enqueue(QUEUE, [NewJob(b"x", job_id, ttr=TTR) for job_id in new_ids(500)])
            backend.kick(QUEUE, 1000)
            victim = luck.randrange(count)
            os.kill(processes[victim].pid, signal.SIGSTOP)
            time.sleep(luck.uniform(*STOPPED))
            links[victim].send_noop()
            time.sleep(luck.uniform(*OTHERS_TURN))
            os.kill(processes[victim].pid, signal.SIGCONT)
            stops += 1
            time.sleep(luck.uniform(0, 0.2))
    failed = [process.returncode for process in processes if process.poll() is not None]
    for process in processes:
        process.terminate()
        process.wait()
    for link in links:
        link.close()
    if failed:
        print(f"{len(failed)} of {count} processes failed")
        return 1
    return judge([entry for file in folder.glob("diary-*") for entry in read(file)], stops)


def _process(link: Proxy, diary: Path) -> subprocess.Popen[bytes]:
    url = f"beanstalk://127.0.0.1:{link.port}"
    return subprocess.Popen([sys.executable, "-W", "error", __file__, "--work", url, str(diary)])


def read(file: Path) -> list[Entry]:
    lines = [line.split() for line in file.read_text().rpartition("\n")[0].splitlines()]
    return [
        Entry(int(sent_at), int(at), int(job_id), int(attempt), what, yes == "1")
        for sent_at, at, job_id, attempt, what, yes in lines
    ]


def judge(entries: list[Entry], stops: int) -> int:
    """Check the accepted verdicts of each job. Returns the exit code."""
    jobs: dict[int, list[Entry]] = defaultdict(list)
    for entry in sorted(entries, key=lambda entry: entry.attempt):
        if entry.is_accepted:
            jobs[entry.job_id].append(entry)
    wrong = {job_id: its for job_id, its in jobs.items() if not is_in_order(its)}
    refused = Counter(entry.what for entry in entries if not entry.is_accepted)
    print(
        f"{stops} stops, {len(jobs):,} jobs, {sum(map(len, jobs.values())):,} verdicts accepted, "
        f"{sum(refused.values()):,} late ones refused ({dict(refused)}); {len(wrong)} jobs with a late one that counted"
    )
    for job_id, its in list(wrong.items())[:5]:
        print(f"job {job_id}: {its}")
    return 1 if wrong or not jobs else 0


def is_in_order(its: list[Entry]) -> bool:
    """Whether a job's accepted verdicts can have come one after the other in the order of their attempts."""
    attempts = [entry.attempt for entry in its]
    is_late = any(one.sent_at > later.at for number, one in enumerate(its) for later in its[number + 1 :])
    is_acked_before = any(entry.what == "Ack" for entry in its[:-1])
    return len(set(attempts)) == len(attempts) and not is_late and not is_acked_before


if __name__ == "__main__":
    sys.exit(main())
