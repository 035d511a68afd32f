"""Schedulers with wrong clocks that are stopped and killed: ``python tests/soak/schedule_losses.py --help``.

Eight processes make the occurrences of schedules of every second. The clock of each process (``time.time``) is wrong,
by up to 90 seconds. About three times a second one of the processes is killed and replaced, or stopped for up to five
seconds. The jobs are reserved here, and at the end

- each occurrence of each schedule, from the first to the last, was handed out exactly once;
- no occurrence was handed out before its time by the server's clock.

``--plant`` puts a bug into the schedulers, to show that the bug is found.
"""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parent / "integration")]

from stores import STORES  # noqa: E402

import multiq  # noqa: E402
from multiq.backend import Ack  # noqa: E402
from multiq.envelope import decode_envelope  # noqa: E402

if TYPE_CHECKING:
    from multiq.backend import Lease

SCHEDULERS = 8
SKEW = 90.0  # seconds
QUEUE = "ticks"
_FAULT_EVERY = 0.3  # seconds
_STOPPED = 5.0  # seconds, at most
_LEFT = 30.0  # seconds after which each occurrence that a dead process has left must have been handed out
_STALLED = 60.0  # seconds without a new occurrence
# seconds without a new occurrence after which no process is killed or stopped: on a busy machine, a new process may
# take longer to start than it lives
_CALM = 5.0


class Run(NamedTuple):
    """A job that was handed out."""

    schedule: str
    occurrence: float
    at: float
    """By the server's clock, and at most a few milliseconds late."""


class Fleet:
    """Scheduler processes, which are killed, stopped and replaced."""

    def __init__(self, url: str, folder: Path, chance: random.Random, plant: str) -> None:
        self._environment = {**os.environ, "MULTIQ_URL": url, "PLANT": plant}
        self._log = (folder / "schedulers.log").open("a")
        self._chance = chance
        self._skews = [SKEW * (2 * number / (SCHEDULERS - 1) - 1) for number in range(SCHEDULERS)]
        self._processes = [self._start(skew) for skew in self._skews]
        self._stopped: set[int] = set()  # numbers of processes
        self.kills = self.stops = 0

    def _start(self, skew: float) -> subprocess.Popen[bytes]:
        environment = self._environment | {"SKEW": str(skew)}
        return subprocess.Popen(
            [sys.executable, str(HERE / "skewed_scheduler.py")], env=environment, stdout=self._log, stderr=self._log
        )

    def disturb(self) -> None:
        """Kill one of the processes, or stop it for a while."""
        number = self._chance.randrange(SCHEDULERS)
        if number in self._stopped:
            return
        process = self._processes[number]
        if self._chance.random() < 0.3:  # a new process takes half a second to start
            process.send_signal(signal.SIGKILL)
            process.wait()
            self._processes[number] = self._start(self._skews[number])
            self.kills += 1
        else:
            process.send_signal(signal.SIGSTOP)
            self._stopped.add(number)
            # a thread continues the process, because this thread may wait for a lock which the process holds
            timer = threading.Timer(self._chance.uniform(0.2, _STOPPED), self._continue, (number,))
            timer.daemon = True
            timer.start()
            self.stops += 1

    def _continue(self, number: int) -> None:
        self._processes[number].send_signal(signal.SIGCONT)
        self._stopped.discard(number)

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._log.close()


def main() -> int:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as place, STORES[arguments.backend](Path(place)) as url:
        faults = run(
            url, Path(place), arguments.schedules, arguments.number, arguments.seed, plant=arguments.plant, tells=True
        )
    for fault in faults[:20]:
        print("FAULT", fault)
    return 1 if faults else 0


def run(
    url: str, folder: Path, schedules: int, number: int, seed: int, *, plant: str = "", tells: bool = False
) -> list[str]:
    """Run until *number* occurrences have been handed out. Returns the faults that were found."""
    runs: list[Run] = []
    app = multiq.App(url)

    @app.task(queue=QUEUE)
    def tick() -> None: ...

    with app, app.backend.consumer([QUEUE]) as consumer:
        for at in range(schedules):
            app.schedules.add(f"s{at}", tick.s(), "* * * * * *", misfire="all")
        fleet = Fleet(url, folder, random.Random(seed), plant)
        try:
            disturb_at = progress_at = time.monotonic()
            while len({run[:2] for run in runs}) < number:
                leases = consumer.reserve(100, 0.1)
                now = app.backend.now(QUEUE)
                runs += [_run(lease, now) for lease in leases]
                consumer.settle([Ack(lease) for lease in leases])
                if leases:
                    progress_at = time.monotonic()
                if time.monotonic() > progress_at + _STALLED:
                    return [f"no occurrence for {_STALLED:g} s, after {len(runs)}: see schedulers.log"]
                if disturb_at < time.monotonic() < progress_at + _CALM:
                    disturb_at = time.monotonic() + _FAULT_EVERY
                    fleet.disturb()
        finally:
            fleet.end()
        # A scheduler that was killed may have left occurrences in an outbox, or reserved there. Workers relay them.
        give_up_at = time.monotonic() + _LEFT
        leases = []
        while leases or (check(runs, schedules) and time.monotonic() < give_up_at):
            app.backend.relay([QUEUE])
            leases = consumer.reserve(100, 0.5)
            now = app.backend.now(QUEUE)
            runs += [_run(lease, now) for lease in leases]
            consumer.settle([Ack(lease) for lease in leases])
        if tells:
            _tell(runs, fleet)
    return check(runs, schedules)


def check(runs: list[Run], schedules: int) -> list[str]:
    """Return the faults in a history."""
    faults = []
    counts = collections.Counter(run[:2] for run in runs)
    faults += [f"{name} at {at:.0f} was handed out {count} times" for (name, at), count in counts.items() if count > 1]
    faults += [
        f"{run.schedule} at {run.occurrence:.0f} was {run.occurrence - run.at:.3f} s early"
        for run in runs
        if run.at < run.occurrence
    ]
    for at in range(schedules):
        seen = sorted(when for name, when in counts if name == f"s{at}")
        if not seen:
            faults.append(f"s{at} was never handed out")
            continue
        missing = {*range(int(seen[0]), int(seen[-1]) + 1)} - {int(when) for when in seen}
        faults += [f"s{at} at {when} was not made" for when in sorted(missing)]
    return faults


def _run(lease: Lease, now: float) -> Run:
    headers = decode_envelope(lease.body).headers
    return Run(headers["multiq-schedule"], dt.datetime.fromisoformat(headers["multiq-occurrence"]).timestamp(), now)


def _tell(runs: list[Run], fleet: Fleet) -> None:
    late = sorted(run.at - run.occurrence for run in runs)
    print(
        f"{len(runs)} occurrences, {fleet.kills} kills, {fleet.stops} stops; late: "
        f"p50 {late[len(late) // 2] * 1000:.1f} ms, "
        f"p99 {late[len(late) * 99 // 100] * 1000:.1f} ms, most {late[-1] * 1000:.1f} ms"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("backend", choices=[name for name in STORES if name != "beanstalk"])
    parser.add_argument("--schedules", type=int, default=40)
    parser.add_argument("--number", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plant", default="", choices=["", "local-clock", "no-condition"])
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
