"""Verdicts that store outcomes and steps, around kills of the server: ``python tests/soak/settle_kills.py --help``.

Worker processes enqueue units, and settle their jobs. The verdict that acks a unit's first job keeps an outcome,
releases two held jobs, one of them in another queue, enqueues a job, and stores a note. Other verdicts store a memo, a
detail and a note with a release, a bury or a touch. Meanwhile

- ``redis`` and ``mysql``: the server is killed (SIGKILL) at random moments, and started again. Redis has ``appendfsync
  always``, MySQL ``innodb_flush_log_at_trx_commit=1``;
- ``sqlite``: a worker process is killed at random moments;
- ``sentinel``: replication to the replica is cut, and the primary is killed a moment later. The replica becomes the
  primary, and lacks the writes after the cut. A third of these failovers cut nothing.

After each kill the raw data is read in one snapshot, without any code of multiq. In each snapshot

- either the first job of a unit is there, and nothing that its ack stores, or it is gone, and everything that its ack
  stores is there. On Redis, steps for another queue may be in the outbox instead;
- a job has its memo or detail exactly if the note of the same verdict is there;
- except after a failover, each job that was acknowledged before the kill is there, and each acknowledged verdict was
  carried out. No refused verdict was carried out.

At the end no step is left, all released jobs are done, and no attempt of a job was handed out twice.

``--torn`` then cuts copies of Redis' log at random bytes, as a power failure may, and checks what a server reads from
each of them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.append(str(Path(__file__).parent.parent))

from servers.mysql import MysqlServer
from servers.process import until
from servers.redis import RedisServer, SentinelTrio
from soak.raw_effects import READERS, Snapshot, failing_to_read, read_redis

from multiq.backend import Ack, After, Arrive, Bury, Enqueue, NewJob, Put, Release, Terms, Touch
from multiq.backend.registry import open_backend
from multiq.errors import BackendUnavailable, EnqueueUncertain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from multiq.backend import Backend, Consumer, Lease, Verdict

HOME, OTHER = "home", "other"
WORKERS = 3
_TTR = 3.0  # seconds
_KEEP = 30 * 86400.0  # seconds
_DRAINED = 60.0  # seconds that the remaining work may take when no more faults happen
_PER_STORE = 25  # kills, after which the next ones find an empty store: a snapshot is read after each
_RELEASED, _BURIED, _TOUCHED = 1, 2, 3  # the verdict on a unit's first attempt, by the unit's number modulo 6


# --- a worker process ---------------------------------------------------------------------------------------


class Worker:
    """Enqueues units, and settles the jobs of all units, until it is killed or told to end."""

    def __init__(self, url: str, folder: Path, name: str) -> None:
        self._backend: Backend = open_backend(url)
        self._consumer: Consumer = self._backend.consumer([HOME, OTHER])
        self._folder = folder
        self._name = name
        self._chance = random.Random(name)
        self._diary = os.open(folder / "diary", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._number = 0

    def run(self) -> None:
        while not (self._folder / "end").exists():
            if not (self._folder / "drain").exists():
                self._enqueue_unit()
            with contextlib.suppress(BackendUnavailable):
                self._settle([self._verdict(lease) for lease in self._reserve()])
                if self._chance.random() < 0.1:
                    self._backend.kick(HOME, 10)
                    self._backend.relay([HOME, OTHER])
            time.sleep(0.002)

    def _enqueue_unit(self) -> None:
        unit = f"{self._name}-{self._number}"
        self._number += 1
        self._repeated(lambda: self._backend.enqueue(OTHER, [_job("then", unit, awaits=1)]))
        self._repeated(lambda: self._backend.enqueue(HOME, [_job("next", unit, awaits=1)]))
        # not repeated: the job may be done by then, and would be enqueued a second time
        with contextlib.suppress(BackendUnavailable, EnqueueUncertain):
            self._backend.enqueue(HOME, [_job("first", unit)])
            self._note("stored", f"first.{unit}", 0)

    def _reserve(self) -> list[Lease]:
        leases = self._consumer.reserve(5, 0.1)
        for lease in leases:
            self._note("took", lease.id, lease.attempt)
        return leases

    def _verdict(self, lease: Lease) -> Verdict:
        kind, _, unit = lease.id.partition(".")
        if kind != "first":
            return Ack(lease, After(keep=_KEEP, outcome=lease.id.encode()))
        style = int(unit.rpartition("-")[2]) % 6
        tried = (Put(HOME, f"tried.{unit}", b"x"),)
        if lease.attempt == 1 and style == _RELEASED:
            return Release(lease, 0.0, None, "again", After(memo=b"m" * 50, detail=b"d" * 50, steps=tried))
        if lease.attempt == 1 and style == _BURIED:
            return Bury(lease, "why", After(detail=b"d" * 50, steps=tried))
        if lease.attempt == 1 and style == _TOUCHED and not lease.memo:
            self._settle([Touch(lease, After(memo=b"m" * 50, steps=tried))])
        steps = (
            Arrive(HOME, f"next.{unit}", lease.id),
            Arrive(OTHER, f"then.{unit}", lease.id),
            Enqueue(OTHER, _job("new", unit)),
            Put(HOME, f"note.{unit}", b"x" * 100),
        )
        return Ack(lease, After(keep=_KEEP, outcome=lease.id.encode(), steps=steps))

    def _settle(self, verdicts: list[Verdict]) -> None:
        if not verdicts:
            return
        for verdict in verdicts:
            self._note("sent", verdict.lease.id, verdict.lease.attempt)
        answers = self._repeated(lambda: self._consumer.settle(verdicts))
        for verdict, error in zip(verdicts, answers, strict=True):
            word = "refused" if error else "acked" if isinstance(verdict, Ack) else "settled"
            self._note(word, verdict.lease.id, verdict.lease.attempt)

    def _repeated(self, call: Callable[[], Any]) -> Any:
        while True:
            try:
                return call()
            except (BackendUnavailable, EnqueueUncertain):
                self._note("repeats", "-", 0)
                time.sleep(0.01)

    def _note(self, word: str, job_id: str, attempt: int) -> None:
        os.write(self._diary, f"{word} {job_id} {attempt}\n".encode())


def _job(kind: str, unit: str, *, awaits: int = 0) -> NewJob:
    return NewJob(b"x" * 100, f"{kind}.{unit}", ttr=_TTR, terms=Terms(awaits) if awaits else None)


class Workers:
    """The worker processes, which are replaced when they end."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._folder = folder
        self._started = 0
        self._log = (folder / "workers.log").open("a")
        self._processes = [self._start() for _ in range(WORKERS)]

    def _start(self) -> subprocess.Popen[bytes]:
        self._started += 1
        return subprocess.Popen(
            [sys.executable, __file__, "--work", self._url, str(self._folder), f"w{self._started}"],
            stdout=self._log,
            stderr=self._log,
        )

    def kill_one(self, chance: random.Random) -> None:
        at = chance.randrange(WORKERS)
        self._processes[at].send_signal(signal.SIGKILL)
        self._processes[at].wait()
        self._processes[at] = self._start()

    def ended(self) -> list[int]:
        """The exit codes of workers that ended by themselves."""
        return [process.returncode for process in self._processes if process.poll() is not None]

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._log.close()


# --- the faults ---------------------------------------------------------------------------------------------


class Store(NamedTuple):
    """A store, with the code that makes one fault on it and reads its raw data."""

    url: str
    fault: Callable[[random.Random, Workers], None]
    read: Callable[[], Snapshot]
    keeps_all: bool = True
    """Whether all acknowledged jobs and verdicts are there after the fault."""
    log: Path | None = None
    """The folder of Redis' log."""


@contextlib.contextmanager
def _redis() -> Iterator[Store]:
    with RedisServer(appendonly="yes", appendfsync="always") as server:

        def fault(_chance: random.Random, _workers: Workers) -> None:
            server.kill()
            server.start()

        yield Store(server.url, fault, lambda: read_redis(server.port), log=server.folder / "appendonlydir")


@contextlib.contextmanager
def _mysql() -> Iterator[Store]:
    with MysqlServer(innodb_flush_log_at_trx_commit="1") as server, server.database() as place:

        def fault(_chance: random.Random, _workers: Workers) -> None:
            server.kill()
            server.start()

        yield Store(place.url, fault, lambda: READERS["mysql"](place.url))


@contextlib.contextmanager
def _sqlite() -> Iterator[Store]:
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/jobs.db?synchronous=full"
        yield Store(url, lambda chance, workers: workers.kill_one(chance), lambda: READERS["sqlite"](url))


@contextlib.contextmanager
def _sentinel() -> Iterator[Store]:
    with SentinelTrio(appendonly="yes") as trio:
        servers = [trio.primary, trio.replica]

        def primary() -> RedisServer:
            (found,) = [one for one in servers if one.is_running and _role(one) == "master"]
            return found

        def is_well() -> bool:
            roles = sorted(_role(one) for one in servers)
            if roles != ["master", "slave"] or trio.primary_port != primary().port:
                return False
            (replica,) = [one for one in servers if _role(one) == "slave"]
            return bool(replica.ask("INFO", "replication")["master_link_status"] == "up") and all(
                _agrees(sentinel, primary().port) for sentinel in trio.sentinels
            )

        def fault(chance: random.Random, _workers: Workers) -> None:
            old = primary()
            (replica,) = [one for one in servers if one is not old]
            if chance.random() < 2 / 3:
                replica.ask("REPLICAOF", "127.0.0.1", 1)  # nothing listens there
                time.sleep(chance.uniform(0.01, 0.2))
            old.kill()
            until(lambda: _role(replica) == "master", "the replica is promoted")
            time.sleep(chance.uniform(0.0, 0.5))
            old.start()
            until(is_well, "the old primary is a replica, and the sentinels know it")

        yield Store(trio.url, fault, lambda: read_redis(primary().port), keeps_all=False)


def _role(server: RedisServer) -> str:
    with failing_to_read():
        return str(server.ask("INFO", "replication")["role"])
    return "unknown"


def _agrees(sentinel: RedisServer, port: int) -> bool:
    flat = [word.decode() for word in sentinel.ask("SENTINEL", "MASTER", "multiq", raw=True)]
    told = dict(zip(flat[::2], flat[1::2], strict=True))
    return (int(told["port"]), told["flags"], told["num-slaves"]) == (port, "master", "1")


STORES: dict[str, Callable[[], contextlib.AbstractContextManager[Store]]] = {
    "redis": _redis,
    "mysql": _mysql,
    "sqlite": _sqlite,
    "sentinel": _sentinel,
}


# --- one store ----------------------------------------------------------------------------------------------


def run(backend: str, kills: int, seed: int, *, torn: int = 0) -> tuple[list[str], Counter[str]]:
    """Make *kills* kills. Returns the faults that were found, and counts."""
    chance = random.Random(seed)
    counts: Counter[str] = Counter()
    with STORES[backend]() as store, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with contextlib.closing(open_backend(store.url)) as opened:
            opened.stats(HOME)  # makes the tables
        workers = Workers(store.url, folder)
        faults: list[str] = []
        try:
            for _ in range(kills):
                _until_more(folder, 100)
                time.sleep(chance.uniform(0.0, 0.25))
                store.fault(chance, workers)
                counts["kills"] += 1
                # read before the snapshot, so that everything in the diary must be in the snapshot
                diary = _diary(folder)
                snapshot = store.read()
                faults += _check(snapshot, is_all_kept=store.keeps_all)
                if store.keeps_all:
                    faults += _check_kept(snapshot, diary)
                counts["snapshots with steps in the outbox"] += bool(snapshot.outbox)
                if faults or workers.ended():
                    break
            if not faults:
                _until_more(folder, 100)
            (folder / "drain").touch()
            if not faults and not workers.ended():
                faults += _drain(store, workers)
        finally:
            faults += [f"a worker ended by itself, with {code}" for code in workers.ended()]
            if faults:
                print((folder / "workers.log").read_text()[-3000:])
            workers.end()
        diary, snapshot = _diary(folder), store.read()
        faults += _check(snapshot, is_all_kept=store.keeps_all)
        faults += _check_end(snapshot, diary, is_all_kept=store.keeps_all)
        counts += _counts(snapshot, diary)
        if torn and store.log is not None:
            faults += _check_torn(store.log, torn, chance, counts)
    return faults, counts


def _until_more(folder: Path, lines: int) -> None:
    """Wait until the workers have written some more lines."""
    file = folder / "diary"
    size = file.stat().st_size if file.exists() else 0
    until(lambda: file.exists() and file.stat().st_size > size + lines * 12, "the workers work")


def _drain(store: Store, workers: Workers) -> list[str]:
    give_up_at = time.monotonic() + _DRAINED
    while True:
        snapshot = store.read()
        left = {job: state for job, state in snapshot.jobs.items() if state != "held"}
        if not left and not snapshot.outbox:
            return []
        if time.monotonic() > give_up_at or workers.ended():
            return [f"{len(left)} jobs and {len(snapshot.outbox)} groups of steps are left: {list(left.items())[:3]}"]
        time.sleep(0.1)


def _diary(folder: Path) -> list[tuple[str, str, int]]:
    lines = (folder / "diary").read_bytes().decode().splitlines(keepends=True)
    words = [line.split() for line in lines if line.endswith("\n")]
    return [(word, job_id, int(attempt)) for word, job_id, attempt in words]


# --- the checks ---------------------------------------------------------------------------------------------


def _check(snapshot: Snapshot, *, is_all_kept: bool = True) -> list[str]:
    """Verdicts that are carried out in part. After a failover, a unit may lack the held job that was
    enqueued at the old primary, and have the first job that was enqueued at the new one."""
    ids = {job_id for _, job_id in (*snapshot.jobs, *snapshot.outcomes)}
    units = {one.partition(".")[2] for one in ids | snapshot.notes}
    outbox = b"\n".join(snapshot.outbox)
    faults = []
    for unit in sorted(units):
        first = (HOME, f"first.{unit}")
        is_there, is_gone = first in snapshot.jobs, first in snapshot.outcomes
        next_, then, new = (HOME, f"next.{unit}"), (OTHER, f"then.{unit}"), (OTHER, f"new.{unit}")
        forwarded = {kind: f"{kind}.{unit}\x80".encode("latin-1") in outbox for kind in ("then", "new")}
        effects = {
            "next is released": next_ in snapshot.outcomes or snapshot.jobs.get(next_, "held") != "held",
            "then is released": then in snapshot.outcomes
            or snapshot.jobs.get(then, "held") != "held"
            or forwarded["then"],
            "new is enqueued": new in snapshot.outcomes or new in snapshot.jobs or forwarded["new"],
            "the note is stored": f"note.{unit}" in snapshot.notes,
        }
        if is_there and is_gone:
            faults.append(f"{first} is there, and so is its outcome")
        for what, job in (("next is released", next_), ("then is released", then)):
            if not is_all_kept and not effects[what] and job not in snapshot.jobs:
                del effects[what]
        if wrong := [what for what, holds in effects.items() if holds != is_gone]:
            states = [snapshot.jobs.get(job, "done or unknown") for job in (first, next_, then, new)]
            faults.append(f"unit {unit}, whose jobs are {states}: wrong about {wrong}")
        faults += _check_tried(snapshot, unit, is_there=is_there, is_gone=is_gone)
    return faults


def _check_tried(snapshot: Snapshot, unit: str, *, is_there: bool, is_gone: bool) -> list[str]:
    style = int(unit.rpartition("-")[2]) % 6
    is_tried = f"tried.{unit}" in snapshot.notes
    first = (HOME, f"first.{unit}")
    stored = {_RELEASED: snapshot.memos, _TOUCHED: snapshot.memos, _BURIED: snapshot.details}.get(style, set())
    if is_there and (first in stored) != is_tried:
        return [f"{first}, style {style}: its memo or detail is there: {first in stored}, its note: {is_tried}"]
    if is_tried and not is_there and not is_gone:
        return [f"{first}: the note of its first attempt is there, and the job is not"]
    return []


def _check_kept(snapshot: Snapshot, diary: list[tuple[str, str, int]]) -> list[str]:
    """Verdicts that were acknowledged and are missing, and verdicts that were refused and carried out."""
    faults = []
    for word, job_id, attempt in diary:
        job = (HOME if job_id.startswith(("first", "next")) else OTHER, job_id)
        if word == "stored" and job not in snapshot.jobs and job not in snapshot.outcomes:
            faults.append(f"{job} was stored, and is lost")
        if word == "acked" and snapshot.outcomes.get(job) != attempt:
            faults.append(f"attempt {attempt} of {job} was acked, its outcome is {snapshot.outcomes.get(job)}")
        if word == "refused" and snapshot.outcomes.get(job) == attempt:
            faults.append(f"attempt {attempt} of {job} was refused, and has an outcome")
    return faults


def _check_end(snapshot: Snapshot, diary: list[tuple[str, str, int]], *, is_all_kept: bool) -> list[str]:
    faults = []
    for queue, job_id in snapshot.outcomes:
        kind, _, unit = job_id.partition(".")
        if kind == "first":
            after = [(HOME, f"next.{unit}"), (OTHER, f"then.{unit}"), (OTHER, f"new.{unit}")]
            known = after if is_all_kept else [job for job in after if job in snapshot.jobs]
            faults += [f"{job} is not done, {job_id} is" for job in known if job not in snapshot.outcomes]
        elif (HOME, f"first.{unit}") not in snapshot.outcomes:
            faults.append(f"{(queue, job_id)} is done, the first job of its unit is not")
    if is_all_kept:
        faults += _check_kept(snapshot, diary)
        taken = Counter((job_id, attempt) for word, job_id, attempt in diary if word == "took")
        faults += [f"attempt {one[1]} of {one[0]} was handed out {n} times" for one, n in taken.items() if n > 1]
    return faults


def _counts(snapshot: Snapshot, diary: list[tuple[str, str, int]]) -> Counter[str]:
    words = Counter(word for word, _, _ in diary)
    acked = {(job_id, attempt) for word, job_id, attempt in diary if word == "acked"}
    attempts = {job_id: attempt for (_, job_id), attempt in snapshot.outcomes.items()}
    return Counter(
        {
            "verdicts sent": words["sent"],
            "refused": words["refused"],
            "calls repeated": words["repeats"],
            "units done": sum(job_id.startswith("first") for _, job_id in snapshot.outcomes),
            "acks that were lost": sum(attempts.get(job_id) != attempt for job_id, attempt in acked),
        }
    )


def _check_torn(log: Path, cuts: int, chance: random.Random, counts: Counter[str]) -> list[str]:
    """Cut copies of the log at random bytes, each read by a server of its own."""
    (whole,) = [path.read_bytes() for path in log.glob("*.incr.aof")]
    for _ in range(cuts):
        with RedisServer(appendonly="yes", appendfsync="always") as server:
            server.stop()
            folder = server.folder / "appendonlydir"
            shutil.rmtree(folder)
            shutil.copytree(log, folder)
            (file,) = folder.glob("*.incr.aof")
            file.write_bytes(whole[: chance.randrange(len(whole))])
            server.start()
            counts["torn logs"] += 1
            if faults := _check(read_redis(server.port)):
                return faults
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=STORES, nargs="?")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--torn", type=int, default=0, help="Redis: this many cuts of its log after the kills")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--work", nargs=3, metavar=("URL", "FOLDER", "NAME"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        url, folder, name = given.work
        Worker(url, Path(folder), name).run()
        return 0
    began, total, faults = time.monotonic(), Counter[str](), list[str]()
    for at in range(0, given.kills, _PER_STORE):
        is_last = at + _PER_STORE >= given.kills
        found, counts = run(
            given.backend, min(_PER_STORE, given.kills - at), given.seed + at, torn=given.torn if is_last else 0
        )
        faults += found
        total += counts
        if faults:
            break
    for fault in faults[:20]:
        print("FAULT", fault)
    told = ", ".join(f"{count} {what}" for what, count in total.items())
    print(f"{given.backend}, seed {given.seed}: {told}; {time.monotonic() - began:.0f} s, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
