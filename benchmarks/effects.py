"""The CPU time that a job costs the client and the server: plain jobs, jobs whose results are kept, and members of a
batch.

    python benchmarks/effects.py mysql kept --than plain              # kept results beside plain jobs
    python benchmarks/effects.py mysql plain --than-code ../multiq-old  # this code beside another checkout

Each measurement runs in a new process. The two measurements of a pair use one server, each with its own database: the
CPU time of two servers differs even if both run the same jobs. The two kinds of jobs take turns, so that the machine's
load affects both kinds in the same way. For each pair of measurements, the first speed is divided by the second. The
result is the median of these ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from multiq.backend import Lease

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests"))
_BATCH = 100
_HELD_ID = "after-all"
KINDS = ("plain", "kept", "members")
BACKENDS = ("redis", "mysql", "sqlite")


def measure(url: str, pid: int | None, kind: str, jobs: int) -> tuple[float, float]:
    """Returns the microseconds of CPU time of one enqueue, and of one reserve and ack.

    *pid*: the server's process. None: the backend has no server.
    """
    from multiq.backend import Ack, NewJob
    from multiq.backend.registry import open_backend
    from multiq.bench.servers import cpu_seconds
    from multiq.ids import new_id

    after = None
    if kind == "kept":
        from multiq.backend import After

        after = After(keep=3600, outcome=b"x" * 200)

    def cpu() -> float:
        return time.process_time() + ((cpu_seconds(pid) or 0.0) if pid else 0.0)

    with open_backend(url) as backend, backend.consumer(["q"]) as consumer:
        if kind == "members":
            from multiq.backend import After, Arrive, Terms

            backend.enqueue("q", [NewJob(b"x", _HELD_ID, terms=Terms(jobs))])
        # connects, and makes the tables, whose number differs by version
        backend.enqueue("first", [NewJob(b"x", new_id())])
        gc.collect()
        gc.freeze()  # a full collection in one of the two processes of a pair would count as the cost of its jobs
        began = cpu()
        for at in range(0, jobs, 1000):
            backend.enqueue("q", [NewJob(b"x" * 200, new_id()) for _ in range(min(1000, jobs - at))])
        enqueued = cpu()
        done = 0
        held: list[Lease] = []
        while done < jobs:
            if kind == "members":
                acks = [Ack(one, After(steps=(Arrive("q", _HELD_ID, one.id),))) for one in held]
            elif after is not None:
                acks = [Ack(one, after) for one in held]
            else:
                acks = [Ack(one) for one in held]
            _, held = consumer.exchange(acks, _BATCH, 1.0)
            done += len(held)
        consumer.settle([Ack(one) for one in held])
        drained = cpu()
    return (enqueued - began) / jobs * 1e6, (drained - enqueued) / jobs * 1e6


@contextlib.contextmanager
def _server(name: str) -> Iterator[tuple[Callable[[], str], int | None]]:
    """Start a server. Yields a function that returns the URL of a new database, and the server's process."""
    with contextlib.ExitStack() as stack:
        if name == "redis":
            from servers.redis import RedisServer

            redis = stack.enter_context(RedisServer())
            databases = itertools.count()
            yield lambda: f"{redis.url.rstrip('/')}/{next(databases)}", redis.pid
        elif name == "mysql":
            from servers.mysql import MysqlServer

            mysql = stack.enter_context(MysqlServer(innodb_flush_log_at_trx_commit="2"))
            names = (f"jobs{number}" for number in itertools.count())

            def create() -> str:
                database = next(names)
                mysql.ask(f"CREATE DATABASE {database}")
                return mysql.url(database)

            yield create, mysql.pid
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            files = itertools.count()
            yield lambda: f"sqlite:///{folder}/{next(files)}.db?synchronous=normal", None


def _in_process(url: str, pid: int | None, kind: str, jobs: int, code: Path) -> tuple[float, float]:
    environment = {**os.environ, "PYTHONPATH": f"{code}:{code / 'backends'}"}
    command = [sys.executable, __file__, url.partition(":")[0], kind, "--jobs", str(jobs), "--url", url]
    command += ["--pid", str(pid)] if pid else []
    said = subprocess.run(  # noqa: S603 - of this file
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout
    enqueue, drain = map(float, said.split())
    return enqueue, drain


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=BACKENDS)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument(
        "--than", choices=KINDS, help="the other kind to compare; default: the same kind, with other code"
    )
    parser.add_argument("--than-code", type=Path, default=ROOT, help="the root of another checkout")
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--pid", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.url:
        print(*measure(given.url, given.pid, given.kind, given.jobs))
        return 0
    other = given.than or given.kind
    first, second = [], []
    for at in range(given.rounds):
        with _server(given.backend) as (new_database, pid):
            for is_first in (True, False) if at % 2 else (False, True):
                url = new_database()
                if is_first:
                    first.append(_in_process(url, pid, given.kind, given.jobs, ROOT))
                else:
                    second.append(_in_process(url, pid, other, given.jobs, given.than_code))
    for what, index in (("enqueue", 0), ("drain", 1)):
        mine, theirs = [one[index] for one in first], [one[index] for one in second]
        ratios = [b / a for a, b in zip(mine, theirs, strict=True)]
        print(
            f"{given.backend}, {what}: {given.kind} {statistics.median(mine):.1f} us, {other} of the second "
            f"{statistics.median(theirs):.1f} us of CPU time a job; speed {statistics.median(ratios):.2f} of the "
            f"second's ({min(ratios):.2f} to {max(ratios):.2f}, {given.rounds} pairs)"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
