"""Jobs around kills of worker processes: ``python tests/soak/worker_losses.py --help``.

20,000 short jobs in batches, with a job in each batch that ends its own process: by ``kill -9``, or by an exit code.
The worker is the command line, ``multiq worker``. What happened is read from a file that the jobs write and from the
backend's own data, by its own client: nothing that the worker writes about itself has a part in it. At the end

- every job ran;
- a job ran again only if a process that ran it was killed by one of the killers;
- no job that has no time limit was ended in the middle;
- nothing is left in the store, buried jobs included.

beanstalkd may crash by itself (docs/beanstalk.md), and here it has no log: such a run is reported as a crash of the
server, and the script exits with 3 if nothing else was wrong.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

HERE = Path(__file__).parent
APPS = HERE.parent / "integration"
sys.path += [str(HERE.parent), str(APPS)]

from losses_app import TTR, WAYS, akiller, alasting, alimited, app, ashort, killer, lasting, limited, short  # noqa: E402
from servers.beanstalk import BeanstalkServer  # noqa: E402
from soak.raw_stores import connect_mysql  # noqa: E402
from stores import NAMES, STORES  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MODES = ("-t 1", "-t 2", "-t 4", "--concurrency 4")
_STALLED = 60.0  # seconds without a line of any job: longer than any lease, pause between restarts, or long job
_EVERY_LASTING = 8  # at least so many batches are between two batches of long jobs
_MOST_LASTING = 25  # about so many batches of long jobs are made in one run
_PROVES_NOTHING = 3  # the exit code after a crash of the server


class ServerEnded(Exception):
    """The server crashed, so that the run proves nothing about the workers."""


@dataclass
class Losses:
    """One run: the jobs that were enqueued, and the diary that they wrote."""

    folder: Path
    jobs: int
    kills: int
    window: int
    chance: random.Random
    enqueued: int = 0
    lasting: set[int] = field(default_factory=set)

    def batches(self) -> Iterator[set[int]]:
        """Enqueue one batch after the other. Yields each batch's numbers; an empty set: wait until all jobs are done.

        Long jobs have no killer in their batch, because a job that is killed too often is buried.
        """
        size = self.jobs // self.kills
        every = max(_EVERY_LASTING, self.kills // _MOST_LASTING)
        for number in range(self.kills):
            if number % every == every - 1:
                yield set()
                yield self._lasting_batch()
                yield set()
            yield self._batch(size, WAYS[number % len(WAYS)])

    def _batch(self, size: int, way: str | int) -> set[int]:
        """Enqueue some short jobs with a killer among them."""
        first = self.enqueued
        before = self.chance.randrange(size // 2, size)
        with _at_once():
            self._some_short(before)
            kill: Any = self.chance.choice([killer, akiller])
            kill.enqueue(self._next(), way)
            self._some_short(size - 1 - before)
        return set(range(first, self.enqueued))

    def _some_short(self, count: int) -> None:
        while count > 0:
            few = min(count, self.chance.randrange(1, 16))
            task: Any = self.chance.choice([short, short, ashort, limited, alimited])
            task.enqueue_many([(self._next(),) for _ in range(few)])
            count -= few

    def _lasting_batch(self) -> set[int]:
        """Enqueue jobs with a time limit, and right after them jobs without one that run for longer than that limit."""
        first = self.enqueued
        with _at_once():
            for task in (limited, alimited):
                task.enqueue_many([(self._next(),) for _ in range(10)])
        long: tuple[Any, ...] = (lasting, alasting)
        for task in long:
            self.lasting.add(self.enqueued)
            task.enqueue(self._next())
        return set(range(first, self.enqueued))

    def _next(self) -> int:
        self.enqueued += 1
        return self.enqueued - 1

    def diary(self) -> list[tuple[str, int, int]]:
        """The word, the number and the pid of each line."""
        with contextlib.suppress(FileNotFoundError):
            lines = (line.split() for line in (self.folder / "diary").read_text().splitlines())
            return [(word, int(number), int(pid)) for word, number, pid in lines]
        return []

    def ran(self) -> set[int]:
        return {number for word, number, _ in self.diary() if word == "ran"}

    def has_lasted(self) -> bool:
        return self.lasting <= {number for word, number, _ in self.diary() if word == "lasted"}

    def faults(self) -> list[str]:
        """The violations that the diary shows."""
        runs: defaultdict[int, list[int]] = defaultdict(list)
        diary = self.diary()
        killed = {pid for word, _, pid in diary if word == "kill"}
        lasted = {number for word, number, _ in diary if word == "lasted"}
        for word, number, pid in diary:
            if word == "ran":
                runs[number].append(pid)
        never = sorted(set(range(self.enqueued)) - runs.keys())
        again = {number: pids for number, pids in runs.items() if not set(pids[:-1]) <= killed}
        cut = sorted(number for number in self.lasting & runs.keys() if number not in lasted)
        faults = []
        if never:
            faults.append(f"{len(never)} of {self.enqueued} jobs never ran: {_some(never)}")
        if again:
            faults.append(f"{len(again)} jobs ran again although their process was not killed: {_some(again)}")
        if cut:
            faults.append(f"{len(cut)} jobs without a time limit were ended in the middle: {_some(cut)}")
        begun = len(list(self.folder.glob("killed-*")))  # a killer may be killed by another before it writes its line
        if begun != self.kills and not never:
            faults.append(f"{begun} jobs went to kill their process and must have been {self.kills}")
        return faults

    def summary(self) -> str:
        runs = Counter(number for word, number, _ in self.diary() if word == "ran")
        times = dict(sorted(Counter(runs.values()).items()))
        return f"{self.enqueued} jobs, {self.kills} kills; runs per job: {times}"


def lose(name: str, mode: str, folder: Path, *, jobs: int, kills: int, processes: int, seed: int) -> str:
    """Make one run. Returns a line of figures; raises ``AssertionError`` for violations, and ``ServerEnded``."""
    run = Losses(folder, jobs, kills, window=processes, chance=random.Random(seed))
    with _store(name, folder) as url:
        app.connect(url)
        try:
            with _worker(folder, url, [*mode.split(), "-p", str(processes)], name) as log:
                _go(run)
                stays = _wait_for(lambda: _raw_rows(name, url) == 0, TTR * 3)
        finally:
            app.close()
        faults = run.faults()
        if stays:
            faults.append(f"{_raw_rows(name, url)} rows are left in the store: {_left(name, url)}")
    if faults:
        raise AssertionError(f"{name}, {mode}, seed {seed}: " + "; ".join(faults) + "\n" + _tail(log))
    return run.summary()


def _go(run: Losses) -> None:
    """Enqueue a batch whenever the window has room, until all jobs have run or the run stalls."""
    open_batches: list[set[int]] = []
    for batch in run.batches():
        room = run.window if batch else 1
        open_batches += [batch] if batch else []
        while len(open_batches) >= room:
            if _stalls(run, open_batches):
                return
        if not batch and _wait_for(run.has_lasted, TTR * 3):
            return
    while open_batches and not _stalls(run, open_batches):
        pass


def _stalls(run: Losses, open_batches: list[set[int]]) -> bool:
    """Wait for the end of a batch. True: no job has written a line for longer than any step takes."""
    size, since = -1, time.monotonic()
    while time.monotonic() < since + _STALLED:
        ran = run.ran()
        done = [batch for batch in open_batches if batch <= ran]
        if done:
            for batch in done:
                open_batches.remove(batch)
            return False
        if len(ran) > size:
            size, since = len(ran), time.monotonic()
        if app.backend.queues() == [] and not any(batch <= run.ran() for batch in open_batches):
            return True  # no job is left that could still run
        time.sleep(0.02)
    return True


def _wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for a condition. True: the condition did not hold within *seconds*."""
    give_up_at = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > give_up_at:
            return True
        time.sleep(0.05)
    return False


@contextlib.contextmanager
def _store(name: str, folder: Path) -> Iterator[str]:
    """The URL of a store. A beanstalkd that has crashed raises ``ServerEnded`` in place of any error of the block."""
    if name != "beanstalk":
        with STORES[name](folder) as url:
            yield url
        return
    with BeanstalkServer() as server:
        try:
            yield server.url
        finally:
            if server.ended_by:
                raise ServerEnded(f"beanstalkd was ended by {server.ended_by}: this run proves nothing")


@contextlib.contextmanager
def _worker(folder: Path, url: str, options: list[str], name: str) -> Iterator[Path]:
    """Run ``multiq worker``, and stop it by SIGTERM at the end. Yields its log file."""
    environment = {
        **os.environ,
        "MULTIQ_URL": url,
        "LOSSES_FOLDER": str(folder),
        "LOSSES_MAX_CRASHES": "0" if name == "beanstalk" else "5",
        "PYTHONPATH": str(APPS),
    }
    path = folder / "worker.log"
    command = [sys.executable, "-m", "multiq", "worker", "losses_app:app", "--kill-after", "0.2", *options]
    with path.open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder, start_new_session=True)
    try:
        yield path
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
        assert code == 0, f"the worker ended with {code}\n{_tail(path)}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# --- the stores, by their own clients ----------------------------------------------------------------------


def _raw_rows(name: str, url: str) -> int:
    """How many jobs the store holds, in any state."""
    return _ROWS[name](url)


def _rows_of_sqlite(url: str) -> int:
    import sqlite3

    with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as db:
        return int(db.execute("SELECT count(*) FROM multiq_jobs").fetchone()[0])


def _rows_of_redis(url: str) -> int:
    import redis

    with contextlib.closing(redis.Redis.from_url(url)) as client:
        ask: Any = client.execute_command  # redis-py does not annotate it
        return sum(int(ask("HLEN", key)) for key in client.scan_iter("multiq:*:jobs"))


def _rows_of_mysql(url: str) -> int:
    with contextlib.closing(connect_mysql(url)) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM multiq_jobs")
        row = cursor.fetchone()
        return int(row[0]) if row else 0


def _rows_of_beanstalk(url: str) -> int:
    import greenstalk

    parts = urlsplit(url)
    with greenstalk.Client((parts.hostname or "", parts.port or 11300), encoding=None) as client:
        stats: Any = client.stats()
    return sum(int(stats[f"current-jobs-{state}"]) for state in ("ready", "reserved", "delayed", "buried"))


_ROWS = {
    "sqlite": _rows_of_sqlite,
    "redis": _rows_of_redis,
    "mysql": _rows_of_mysql,
    "beanstalk": _rows_of_beanstalk,
}


def _left(name: str, url: str) -> object:
    """Details of the jobs that are left."""
    if name == "beanstalk":
        return _left_in_beanstalk(url)
    app.connect(url)
    try:
        return dict(Counter(info.reason for info in app.queue().jobs("buried")))
    finally:
        app.close()


def _left_in_beanstalk(url: str) -> list[dict[str, object]]:
    """The server's stats of up to ten jobs."""
    import greenstalk

    parts = urlsplit(url)
    left: list[dict[str, object]] = []
    with greenstalk.Client((parts.hostname or "", parts.port or 11300), encoding=None) as client:
        stats: Any = client.stats()
        for number in range(int(stats["total-jobs"]), 0, -1):
            with contextlib.suppress(greenstalk.NotFoundError):
                left.append(dict(client.stats_job(number)))
            if len(left) == 10:
                break
    return left


# --- small things ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _at_once() -> Iterator[None]:
    """Pause the queues during the block, so that children then reserve many jobs at once."""
    app.queue().pause(60)
    yield
    app.queue().resume()


def _some(numbers: Any) -> str:
    return str(list(numbers)[:5])


def _tail(log: Path) -> str:
    return "\n".join(log.read_text().splitlines()[-25:])


def main() -> int:
    options = _arguments()
    seed = random.randrange(10**6) if options.seed is None else options.seed
    failed = proved_nothing = 0
    for name in options.backends:
        for mode in options.mode or MODES:
            began = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="multiq-losses-") as folder:
                try:
                    says = lose(
                        name, mode, Path(folder), jobs=options.jobs, kills=options.kills,
                        processes=options.processes, seed=seed,
                    )  # fmt: skip
                except AssertionError as exc:
                    failed += 1
                    says = f"FAILED: {exc}"
                except ServerEnded as exc:
                    proved_nothing += 1
                    says = f"{exc}"
            print(f"{name:9}  {mode:15}  {time.monotonic() - began:4.0f} s  seed {seed}  {says}", flush=True)
    if failed:
        return 1
    return _PROVES_NOTHING if proved_nothing else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("backends", nargs="*", default=NAMES)
    parser.add_argument("--mode", action="append", help="as for `multiq worker`; may be given again", metavar="OPTIONS")
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seed", type=int)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
