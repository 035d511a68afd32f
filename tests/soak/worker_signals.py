"""Signals at random moments of a worker's life: ``python tests/soak/worker_signals.py --help``.

A worker in one of its modes gets SIGTERM, alone or with its whole process group, at a moment between its start and the
middle of its work. Whatever the moment, it must exit with 0, and no job may stay reserved or be run twice.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parent / "integration")]

from processes import WorkerProcess, worker  # noqa: E402
from rich.progress import track  # noqa: E402
from stores import NAMES, STORES  # noqa: E402
from worker_app import app, quick, read_diary  # noqa: E402

MODES = ("processes=0", "processes=1", "processes=2", "processes=2, threads=3", "processes=1, concurrency=5")
LATEST = 0.8  # seconds after the start of the process


def main() -> None:
    options = _arguments()
    chance = random.Random(options.seed)
    print(f"seed {options.seed}")
    for name in options.backends:
        for number in track(range(options.signals), f"{name}, {options.signals} signals"):
            with tempfile.TemporaryDirectory(prefix="multiq-soak-") as folder, STORES[name](Path(folder)) as url:
                app.connect(url)
                _signal(Path(folder), url, MODES[number % len(MODES)], chance)
                app.close()
    print("all ended with 0; no job was left reserved, or run twice")


def _signal(folder: Path, url: str, mode: str, chance: random.Random) -> None:
    quick.enqueue_many([(number,) for number in range(1000)])
    with worker(folder, url, mode) as process:
        if chance.random() < 0.7:
            process.wait_until_working()
        else:
            _wait_for_python(process)
        time.sleep(chance.random() * LATEST)
        if chance.random() < 0.5:
            os.killpg(process.process.pid, signal.SIGTERM)
        else:
            process.send(signal.SIGTERM)
        code = process.wait()
        ended = [number for word, number, _, _ in read_diary(process.diary) if word == "end"]
        stats = app.queue().stats()
        assert code == 0, f"{mode}: exit code {code}"
        assert stats.reserved == 0, f"{mode}: {stats}"
        assert len(ended) == len(set(ended)) == 1000 - (stats.ready or 0), f"{mode}: {len(ended)} ended, {stats}"


def _wait_for_python(process: WorkerProcess) -> None:
    """Wait until Python's signal handlers are installed. A signal before that ends any Python program."""
    caught = Path(f"/proc/{process.process.pid}/status")
    bit = 1 << (signal.SIGTERM - 1)
    while process.process.poll() is None:
        line = next(line for line in caught.read_text().splitlines() if line.startswith("SigCgt:"))
        if int(line.split()[1], 16) & bit:
            return
        time.sleep(0.001)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("backends", nargs="*", default=NAMES)
    parser.add_argument("--signals", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    return parser.parse_args()


if __name__ == "__main__":
    main()
