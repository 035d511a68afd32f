"""A driver for a weak store, written for the tests: jobs as files in a plain folder, ``folder:///path``.

It can do as much as a cloud queue like SQS. It cannot show single jobs, delete by id, pause or purge. It has no
priorities, and delays jobs by 15 minutes at most. A job is a file in the folder of its queue. The file holds the body,
and its name all other data. So each change is one rename, which is atomic. A lock on the whole folder keeps two
processes apart.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from multiq.backend import (
    PRIORITY_DEFAULT,
    Abandon,
    Ack,
    Backend,
    Bury,
    Capabilities,
    Consumer,
    Gap,
    GiveBack,
    Lease,
    QueueStats,
    Release,
    Touch,
)
from multiq.driverkit.clock import SECOND, nanoseconds
from multiq.driverkit.fork import forks
from multiq.errors import BackendUnavailable, EnqueuePartial, LeaseLost

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from multiq.backend import NewJob, Verdict
    from multiq.driverkit.clock import Clock
    from multiq.settings.url import BackendUrl

POLL = 0.02  # seconds
LOCK, SEQUENCE, NEW = ".lock", ".sequence", ".new"  # beside the queues, whose names begin with no dot


@functools.cache
def _lock_of(_generation: int) -> threading.Lock:
    return threading.Lock()


def _one_thread() -> threading.Lock:
    """The lock for this process's threads, which the system's lock does not separate. A forked child gets a new one."""
    return _lock_of(forks.generation)


class JobFile(NamedTuple):
    """A job, parsed from its file's name. Times are nanoseconds."""

    state: str
    place: int
    """The number of its enqueue, and its id."""
    due: int
    """When a delay or lease ends; of a buried job, the number of its burial."""
    token: int
    """The number of its last reservation."""
    attempt: int
    crashes: int
    kicks: int
    enqueued: int
    ttr: int

    @property
    def name(self) -> str:
        return "-".join(map(str, self))

    @classmethod
    def of(cls, name: str) -> JobFile:
        state, *numbers = name.split("-")
        return cls(state, *map(int, numbers))


class FolderBackend(Backend):
    declared: ClassVar[Capabilities] = Capabilities(
        backend="folder",
        delay_resolution=1e-6,
        poll_interval=0.05,
        longest_delay=900.0,
        client_ids=Gap("not done", "a job's id is its number in the folder"),
        atomic_batches=Gap("cannot today", "a folder takes files one by one"),
        waits_in_server=Gap("never", "a folder has no server: a waiting consumer polls"),
        shared=True,
        persistent=True,
        disconnect_ends_lease=Gap("never", "there is no connection that could drop"),
        give_back=True,
        lists_jobs=Gap("not done", "this driver shows no jobs"),
        durable_attempts=True,
        transactional_enqueue=Gap("never", "there is no database whose transaction it could join"),
        reasons=Gap("not done", "a file's name has no room for a text"),
        stable_ids=Gap("not done", "this driver does not reschedule jobs"),
        portable_leases=True,
        fenced_late=True,
        priorities=Gap("not done", "jobs are ordered by their numbers alone"),
        inspection=Gap("not done", "this driver shows no jobs"),
        management=Gap("not done", "this driver finds no job by its id"),
        pausing=Gap("not done", "this driver has no place for a pause"),
        purging=Gap("not done", "this driver deletes no jobs but acked ones"),
    )

    def __init__(self, path: str | Path, *, clock: Clock = time.time_ns, create: bool = True) -> None:
        self._folder = Path(path)
        self._clock = clock
        self._create = create

    @classmethod
    def from_url(cls, url: BackendUrl) -> FolderBackend:
        return cls(url.path, create=url.create)

    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
        if connection is not None:
            raise self.unsupported("transactional_enqueue")
        ids: list[str] = []
        try:
            with self.locked() as now:
                (self._folder / queue).mkdir(exist_ok=True)
                for place, job in zip(self.numbers(len(jobs)), jobs, strict=True):
                    state, due = ("delayed", now + nanoseconds(job.delay)) if job.delay > 0 else ("ready", 0)
                    file = JobFile(state, place, due, 0, 0, 0, 0, now, nanoseconds(job.ttr))
                    new = self._folder / NEW
                    new.write_bytes(job.body)
                    new.rename(self._folder / queue / file.name)
                    ids.append(str(place))
        except BackendUnavailable as exc:
            if not ids:
                raise
            raise EnqueuePartial(dict(enumerate(ids)), len(jobs), str(exc)) from exc
        return ids

    def consumer(self, queues: Sequence[str]) -> FolderConsumer:
        return FolderConsumer(self, queues)

    def kick(self, queue: str, limit: int) -> int:
        with self.locked() as now:
            buried = [file for file in self.files(queue, now) if file.state == "buried"]
            buried.sort(key=lambda file: file.due)
            for file in buried[:limit]:
                self.move(queue, file, file._replace(state="ready", due=0, kicks=file.kicks + 1))
        return len(buried[:limit])

    def queues(self) -> list[str]:
        with self.locked():
            return sorted(path.name for path in self._folder.iterdir() if path.is_dir() and any(path.iterdir()))

    def stats(self, queue: str) -> QueueStats:
        with self.locked() as now:
            states = [file.state for file in self.files(queue, now)]
        counts = {state: states.count(state) for state in ("ready", "delayed", "reserved", "buried")}
        return QueueStats(queue=queue, **counts, paused_for=None)

    def close(self) -> None:
        """No file is open between two calls."""

    # --- for the consumer ---

    @contextlib.contextmanager
    def locked(self) -> Iterator[int]:
        """Hold the folder's lock. Yields the time. Raises ``BackendUnavailable`` for errors of the system."""
        try:
            if self._create:
                self._folder.mkdir(parents=True, exist_ok=True)
            with _one_thread(), (self._folder / LOCK).open("w") as lock:
                fcntl.lockf(lock, fcntl.LOCK_EX)  # not flock: a forked child would inherit it, and keep it
                yield self._clock()
        except OSError as exc:
            raise BackendUnavailable(f"the folder {self._folder} cannot be used: {exc}") from exc

    def numbers(self, count: int) -> range:
        """The next numbers of the folder's sequence."""
        path = self._folder / SEQUENCE
        last = int(path.read_text()) if path.exists() else 0
        new = self._folder / NEW
        new.write_text(str(last + count))
        new.rename(path)
        return range(last + 1, last + 1 + count)

    def files(self, queue: str, now: int) -> list[JobFile]:
        """The queue's jobs as they are now: delays and leases that have ended are over (1.2)."""
        try:
            names = [path.name for path in (self._folder / queue).iterdir()]
        except FileNotFoundError:
            return []
        files = [JobFile.of(name) for name in names]
        for at, file in enumerate(files):
            if file.state in {"delayed", "reserved"} and file.due <= now:
                crashes = file.crashes + (file.state == "reserved")
                files[at] = self.move(queue, file, file._replace(state="ready", due=0, crashes=crashes))
        return sorted(files, key=lambda file: file.place)

    def move(self, queue: str, old: JobFile, new: JobFile) -> JobFile:
        (self._folder / queue / old.name).rename(self._folder / queue / new.name)
        return new

    def body(self, queue: str, file: JobFile) -> bytes:
        return (self._folder / queue / file.name).read_bytes()

    def remove(self, queue: str, file: JobFile) -> None:
        (self._folder / queue / file.name).unlink()
        with contextlib.suppress(OSError):  # there are more
            (self._folder / queue).rmdir()


class FolderConsumer(Consumer):
    def __init__(self, backend: FolderBackend, queues: Sequence[str]) -> None:
        self.queues = tuple(queues)
        self._backend = backend
        self._interrupted = False

    def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
        order = self.queues if queues is None else self.in_order(queues)
        give_up_at = time.monotonic() + timeout
        while True:
            self.asked_at = time.monotonic()
            with self._backend.locked() as now:
                found = (lease for queue in dict.fromkeys(order) for lease in self._take(queue, now))
                leases = list(itertools.islice(found, limit))
            left = give_up_at - time.monotonic()
            if leases or left <= 0 or self._interrupted:
                self._interrupted = False
                return leases
            time.sleep(min(POLL, left))

    def _take(self, queue: str, now: int) -> Iterator[Lease]:
        backend = self._backend
        for file in backend.files(queue, now):
            if file.state != "ready":
                continue
            (token,) = backend.numbers(1)
            held = file._replace(state="reserved", due=now + file.ttr, token=token, attempt=file.attempt + 1)
            backend.move(queue, file, held)
            yield Lease(
                queue=queue,
                id=str(held.place),
                token=str(token),
                body=backend.body(queue, held),
                priority=PRIORITY_DEFAULT,
                ttr=held.ttr / SECOND,
                attempt=held.attempt,
                crashes=held.crashes,
                kicks=held.kicks,
                age=(now - held.enqueued) / SECOND,
            )

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        with self._backend.locked() as now:
            return [self._settle(verdict, now) for verdict in verdicts]

    def _settle(self, verdict: Verdict, now: int) -> LeaseLost | None:
        backend, lease = self._backend, verdict.lease
        which = "reserved", lease.id, lease.token
        for file in backend.files(lease.queue, now):
            if (file.state, str(file.place), str(file.token)) == which:
                break
        else:
            return LeaseLost(lease.queue, lease.id)
        match verdict:
            case Ack():
                backend.remove(lease.queue, file)
                return None
            case Touch():
                new = file._replace(due=now + file.ttr)
            case Bury():
                new = file._replace(state="buried", due=backend.numbers(1)[0])
            case GiveBack(delay=delay):
                state, due = ("delayed", now + nanoseconds(delay)) if delay > 0 else ("ready", 0)
                new = file._replace(state=state, due=due, attempt=file.attempt - 1)
            case Abandon():
                new = file._replace(state="ready", due=0, crashes=file.crashes + 1)
            case Release(delay=delay):
                state, due = ("delayed", now + nanoseconds(delay)) if delay > 0 else ("ready", 0)
                new = file._replace(state=state, due=due)
        backend.move(lease.queue, file, new)
        return None

    def interrupt(self) -> None:
        self._interrupted = True

    def close(self) -> None:
        """Reserved jobs stay reserved until their leases end."""
