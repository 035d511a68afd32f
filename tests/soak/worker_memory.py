"""Whether a worker's memory and open files grow over many jobs: ``python tests/soak/worker_memory.py --help``.

A worker with one child runs no-op jobs. The child's memory and open files are read after the first 50,000 jobs and
after the last one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parent / "integration"), str(HERE.parent.parent / "benchmarks")]

from bench_app import app, noop  # noqa: E402
from beside import environment  # noqa: E402
from rich.progress import Progress  # noqa: E402
from stores import NAMES, STORES  # noqa: E402

WARM = 50_000
BATCH = 1_000
AHEAD = 20_000  # jobs that wait in the queue, at most

CODE = "import multiq, bench_app; multiq.Worker(bench_app.app, processes=1).run()"


def main() -> None:
    options = _arguments()
    for name in options.backends:
        with tempfile.TemporaryDirectory(prefix="multiq-soak-") as folder, STORES[name](Path(folder)) as url:
            app.connect(url)
            process = subprocess.Popen([sys.executable, "-c", CODE], env=environment(url))
            try:
                _feed(WARM, f"{name}, warm")
                child = _child(process.pid)
                before = _look(child)
                _feed(options.jobs - WARM, name)
                after = _look(child)
            finally:
                process.terminate()
                process.wait()
            app.close()
        print(f"{name}: {before[0]:.1f} -> {after[0]:.1f} MiB, {before[1]} -> {after[1]} open files")


def _feed(jobs: int, what: str) -> None:
    with Progress() as progress:
        bar = progress.add_task(what, total=jobs)
        for at in range(0, jobs, BATCH):
            noop.enqueue_many([(number,) for number in range(BATCH)])
            while (app.queue().stats().ready or 0) > AHEAD:
                time.sleep(0.05)
            progress.update(bar, completed=at + BATCH)
        while any((app.queue().stats().ready, app.queue().stats().reserved)):
            time.sleep(0.1)


def _child(pid: int) -> psutil.Process:
    """The child that has worked. (The sidecar has used less CPU time, as it mostly sleeps.)"""
    return max(psutil.Process(pid).children(), key=lambda process: sum(process.cpu_times()[:2]))


def _look(process: psutil.Process) -> tuple[float, int]:
    return process.memory_info().rss / 2**20, process.num_fds()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("backends", nargs="*", default=NAMES)
    parser.add_argument("--jobs", type=int, default=1_000_000)
    return parser.parse_args()


if __name__ == "__main__":
    main()
