"""One library's turn: the same steps for every library, and a check that every job ran once."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil
from peers import marks
from peers.catalogue import JOBS
from peers.client import Client

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from peers.catalogue import Entry
    from peers.marks import Mark
    from peers.stores import Store

_AT_ONCE = 2000  # jobs that a library without bulk enqueue enqueues between two answers
_WARM = 50  # jobs that are checked but not measured
_STANDSTILL = 15.0  # if no job runs for this many seconds, the rest count as lost
_LATE_TWINS = 0.3  # seconds to wait for a job that runs a second time
_TOLERANCE = 1.0  # milliseconds: a job may begin this early, because times are kept in whole milliseconds
_PATIENCE = 120.0  # seconds to wait for an answer
_DELAYED = 40  # jobs


class Size(msgspec.Struct, frozen=True):
    """How much is done in one turn."""

    share: float = 1.0
    """Which part of the catalogue's jobs this turn runs."""
    pickup_seconds: float = 2.5
    idle_seconds: float = 4.0
    delays: tuple[float, float] = (1.0, 3.0)
    """The shortest and the longest delay, in seconds."""


class Account(msgspec.Struct, frozen=True):
    """How many jobs of a turn were lost, doubled or early."""

    jobs: int
    lost: int
    doubled: int
    """Runs of a job after its first run."""
    early: int
    """Delayed jobs that began before they were due."""

    @property
    def is_clean(self) -> bool:
        return self.lost == self.doubled == self.early == 0


class Description(msgspec.Struct, frozen=True):
    """A library's versions and settings, as its program reports them."""

    versions: dict[str, str]
    bulk: int | None
    """How many jobs one bulk call enqueues. If the value is None, the library has no bulk enqueue."""
    later: bool
    settings: str
    killed: str
    caveats: list[str]


class Turn(msgspec.Struct, frozen=True):
    """The figures of one turn. A figure is None if the library or the store does not support what it measures."""

    description: Description
    account: Account
    enqueue: float
    """Jobs enqueued per second, one by one."""
    bulk: float | None
    drain: float
    """Jobs drained per second, from the beginning of the first job to the beginning of the last job. All libraries run
    the same number of jobs."""
    producer_cpu: float
    """Seconds of the producer's processor time per 10,000 jobs enqueued one by one."""
    cpu: float
    """Seconds of the workers' processor time per 10,000 drained jobs."""
    pickup: list[float]
    """Milliseconds from just before the enqueue to the beginning of the job."""
    late: list[float]
    """Milliseconds from the time at which a delayed job was due to its beginning."""
    idle: float | None
    """Commands per second that idle workers send."""
    long_bulk: float | None = None
    """Jobs enqueued in bulk per second in the long run. If the value is None, there was no long run."""
    long_drain: float | None = None
    """Jobs drained per second in the long run."""


def take_turn(entry: Entry, python: Path, store: Store, size: Size) -> Turn:
    """Run one library through all steps on an empty store. Raises ``ProgramError`` when its program fails."""
    with (
        tempfile.TemporaryDirectory(prefix="multiq-peers-", dir=_memory()) as folder,
        store.fresh() as url,
        Client(python, f"peers.libraries.{entry.module}", url, Path(folder), patience=_PATIENCE) as client,
    ):
        return Steps(entry, client, store, size).take()


def account(seen: Sequence[Mark], numbers: Collection[int], early: int) -> Account:
    """Compare the jobs that ran with the *numbers* that were enqueued."""
    runs = Counter(mark.number for mark in seen)
    lost = sum(runs[number] == 0 for number in numbers)
    return Account(len(numbers), lost, runs.total() - len(runs), early)


class Steps:
    """The steps of one turn, in order."""

    def __init__(self, entry: Entry, client: Client, store: Store, size: Size) -> None:
        self._entry = entry
        self._client = client
        self._store = store
        self._size = size
        self._next = 0

    def take(self) -> Turn:
        description = msgspec.convert(self._client.ask("describe"), Description)
        self._client.ask("prepare")
        jobs = self._some(JOBS)
        enqueue, producer_cpu = self._enqueue("enqueue", self._some(self._entry.one))
        rest = jobs - self._next
        bulk = None if description.bulk is None else self._enqueue("enqueue_bulk", rest - _WARM)[0]
        while (rest := jobs - self._next) > 0:  # a library without bulk enqueue; not measured
            self._client.ask("enqueue", first=self._take(min(rest, _AT_ONCE)), count=min(rest, _AT_ONCE))
        drain, cpu = self._drain()
        pickup = self._pickup()
        late = self._delayed() if description.later else []
        idle = self._store.commands(self._size.idle_seconds)
        time.sleep(_LATE_TWINS)
        self._client.ask("stop")
        long_bulk, long_drain = self._long_run() if self._entry.long else (None, None)
        early = sum(one < -_TOLERANCE for one in late)
        done = account(marks.read(self._client.marks), range(self._next), early)
        per_second = None if idle is None else idle / self._size.idle_seconds
        return Turn(
            description, done, enqueue, bulk, drain, producer_cpu, cpu, pickup, late, per_second, long_bulk, long_drain
        )

    def _enqueue(self, do: str, count: int) -> tuple[float, float]:
        """Jobs per second, and CPU seconds per 10,000 jobs. A few jobs to connect and warm up are not counted."""
        self._client.ask(do, first=self._take(_WARM), count=_WARM)
        took = self._client.ask(do, first=self._take(count), count=count)
        return count / took["seconds"], took["cpu"] / count * 10_000

    def _long_run(self) -> tuple[float, float]:
        """Enqueue in bulk, and drain with new workers. Returns the jobs per second of both steps."""
        count = self._some(self._entry.long)
        bulk = self._enqueue("enqueue_bulk", count)[0]
        drain = self._drain()[0]
        time.sleep(_LATE_TWINS)
        self._client.ask("stop")
        return bulk, drain

    def _some(self, jobs: int) -> int:
        """The number of *jobs* that this turn runs."""
        return max(_WARM, int(jobs * self._size.share))

    def _drain(self) -> tuple[float, float]:
        """Run all waiting jobs. Returns the jobs per second, and the CPU seconds per 10,000 jobs."""
        ran_before = {mark.number for mark in marks.read(self._client.marks)}
        workers = [psutil.Process(pid) for pid in self._client.ask("start")["pids"]]
        self._wait_for(len(ran_before) + 1)
        begun, before = marks.count(self._client.marks), _processor_seconds(workers)
        self._wait_for(self._next)
        used = _processor_seconds(workers) - before
        ran = [mark.at for mark in marks.read(self._client.marks) if mark.number not in ran_before]
        return (len(ran) - 1) / (ran[-1] - ran[0]) * 1e9, used / max(1, len(ran) - begun) * 10_000

    def _pickup(self) -> list[float]:
        most = int(self._size.pickup_seconds * 1000)
        first = self._next
        sent = self._client.ask("pickup", first=first, count=most, seconds=self._size.pickup_seconds)["sent"]
        self._take(len(sent))
        return self._since(first, sent)

    def _delayed(self) -> list[float]:
        rng = random.Random(7)  # noqa: S311 - the same delays for all
        delays = [rng.uniform(*self._size.delays) for _ in range(_DELAYED)]
        first = self._take(len(delays))
        due = self._client.ask("delayed", first=first, delays=delays)["due"]
        time.sleep(self._size.delays[1])
        self._wait_for(self._next)
        return self._since(first, due)

    def _since(self, first: int, times: Sequence[int]) -> list[float]:
        """The milliseconds from each of the *times* to the first run of its job. Lost jobs are left out."""
        began: dict[int, int] = {}
        for mark in marks.read(self._client.marks):
            began.setdefault(mark.number, mark.at)
        return [(began[number] - at) / 1e6 for number, at in enumerate(times, first) if number in began]

    def _wait_for(self, count: int) -> None:
        """Wait until *count* jobs have run, or until no job has run for a long time. ``account`` counts the jobs that
        did not run as lost."""
        seen, give_up_at = 0, time.monotonic() + _STANDSTILL
        while (now := marks.count(self._client.marks)) < count:
            if now > seen:
                seen, give_up_at = now, time.monotonic() + _STANDSTILL
            elif time.monotonic() > give_up_at:
                break
            time.sleep(0.005)
        if now == 0:
            raise NothingRanError(f"no job began within {_STANDSTILL:g} s. {self._client.log_end()}")

    def _take(self, count: int) -> int:
        """Reserve *count* new job numbers, and return the first."""
        first = self._next
        self._next += count
        return first


class NothingRanError(Exception):
    """The workers began no job."""


def _memory() -> Path | None:
    """A folder in memory, so that the marks' writes to disk do not affect the figures. If the result is None, the
    user's ``TMPDIR`` is used."""
    shm = Path("/dev/shm")  # noqa: S108 - a private folder is created in it
    return shm if shm.is_dir() and "TMPDIR" not in os.environ else None


def _processor_seconds(workers: Sequence[psutil.Process]) -> float:
    """The CPU seconds of the given processes and of their living children."""
    total = 0.0
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [worker, *worker.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    total += times.user + times.system
    return total
