"""Stale verdicts, of leases that have ended in every possible way: each must be refused and change nothing.

    python tests/soak/stale.py                      10,000 of them, on all four backends
    python tests/soak/stale.py redis --verdicts 500
    python tests/soak/stale.py --page               and renew the table of docs/reliability.md

Two lanes work on one store, each with three processes that use multiq as any program does (``stale_actor.py``): the
first holds jobs, the second (the rival) takes them over, and the third puts jobs and sends verdicts on leases of the
others. Each round ends
the leases of a few hundred jobs: by their time; while the server is killed and started again with what it has on its
disk (with SQLite all processes are killed); or, on beanstalkd, by their connection. ``KINDS`` lists what happens to the
jobs then. Each old lease gets one verdict, alone or in a batch among valid ones, by ``settle`` or ``exchange``.

The judge is this process, which opens no backend. It reads the raw store with the store's own client, before the
verdict and after it, and knows by its own records which reservation of each job was the last. A verdict is stale if the
store says that the job is not held or the lease's time is over, or if a later reservation was made. It must be refused
with ``LeaseLost``, and the job's record must stay as it was, to the byte. A valid verdict must be carried out, as the
store shows.
Exits with 1 if one of these rules is broken. With ``SOAK_MUTANT="no fence"`` (see ``mutants.py``) these rules are
broken.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

HERE = Path(__file__).parent
if str(HERE.parent) not in sys.path:
    sys.path[:0] = [str(HERE.parent)]

from proxy import Proxy  # noqa: E402
from servers.beanstalk import BeanstalkServer  # noqa: E402
from servers.mysql import MysqlServer  # noqa: E402
from servers.redis import RedisServer  # noqa: E402
from soak.page import conditions, renew  # noqa: E402
from soak.stale_actor import LONG, PATIENCE, VERBS, Answer, Order  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from multiq.backend import Lease

BACKENDS = ("sqlite", "redis", "beanstalk", "mysql")
VERDICTS = 2500  # for each backend
LANES = 2
A_WHOLE_ONE = 1.0  # second: beanstalkd reports the rest of a lease in whole seconds


@dataclass(frozen=True)
class Kind:
    """How a lease ended, and which process sends the late verdict."""

    name: str
    live: str = ""
    """What the lease's holder first does with the job. If set, the lease lasts for an hour, so time does not end it."""
    taken: str = ""
    """What another process does with the job afterwards."""
    speaker: str = "holder"
    only: tuple[str, ...] = BACKENDS
    is_live: bool = False
    """The lease has not ended, but belongs to another connection."""


_WITH_IDS = ("sqlite", "redis", "mysql")  # beanstalkd numbers the jobs itself

KINDS = (
    Kind("time over, not taken again"),
    Kind("another one holds it", taken="hold"),
    Kind("another one acked it", taken="ack"),
    Kind("another one released it", taken="release"),
    Kind("another one released it for later", taken="release later"),
    Kind("another one buried it", taken="bury"),
    Kind("another one buried it, kicked", taken="kick"),
    Kind("rescheduled", taken="reschedule"),
    Kind("deleted", taken="delete"),
    Kind("deleted, put again under its id", taken="put again", only=_WITH_IDS),
    Kind("the same, and another one holds it", taken="put again and hold", only=_WITH_IDS),
    Kind("its consumer reserved it again", taken="reserve again"),
    Kind("released and reserved again by its consumer", live="release", taken="reserve again"),
    Kind("its consumer had settled it", live="settle"),
    Kind("not taken again, verdict from another process", speaker="third"),
    Kind("the new holder sends a verdict for the old lease", taken="hold", speaker="rival"),
    Kind("not ended, verdict from another connection", live="keep", speaker="third", only=("beanstalk",), is_live=True),
)


# --- the processes --------------------------------------------------------------------------------------------


class Actor:
    """A process that uses multiq, and carries out one order after the other."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._start()

    def ask(self, do: str, queue: str, **more: Any) -> Answer:
        pipe, out = self._process.stdin, self._process.stdout
        assert pipe is not None
        assert out is not None
        pipe.write(msgspec.json.encode(Order(do, queue, **more)) + b"\n")
        pipe.flush()
        line = out.readline()
        assert line, f"the process of {self._url} has ended"
        answer = msgspec.json.decode(line, type=Answer)
        assert not answer.error, answer.error
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def again(self) -> None:
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-W", "error", str(HERE / "stale_actor.py"), self._url]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


# --- the raw stores ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """A job, as it is in its store."""

    state: str
    """``gone`` if the store does not have the job."""
    is_over: bool = False
    """Reserved, but the lease's time is over by the server's clock, so that a reserve may take the job."""
    left: float = 0.0
    """Seconds until the lease ends."""
    kept: tuple[Any, ...] = ()
    """The parts that the end of a lease does not change: body, priority, ttr."""
    record: tuple[Any, ...] = ()
    """All of the record, except values that change with time."""

    @property
    def is_held(self) -> bool:
        return self.state == "reserved" and not self.is_over


GONE = Seen("gone")
_SQL_STATES = {0: "ready", 1: "delayed", 2: "reserved", 3: "buried", 4: "ready"}


class Site(ABC):
    """A store: how programs connect to it, how the script reads its raw data, and how it is restarted."""

    ttr = 2.0
    endings: tuple[str, ...] = ("time", "restart")

    @abstractmethod
    def url(self, _role: str) -> str:
        """The URL for programs of this role."""

    @abstractmethod
    def look(self, queue: str, ids: Iterable[str]) -> dict[str, Seen]:
        """What the raw store holds of these jobs."""

    @abstractmethod
    def restart(self, lanes: Sequence[Lane]) -> None:
        """Kill the server, or each process of an embedded store, and start it again."""

    def cut(self, lane: int) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no connection that could be cut for lane {lane}")


class SqliteSite(Site):
    def __init__(self, folder: Path) -> None:
        self._file = folder / "jobs.db"

    def url(self, _role: str) -> str:
        return f"sqlite:///{self._file}?timeout=30"

    def look(self, queue: str, ids: Iterable[str]) -> dict[str, Seen]:
        columns = "id, state, due_at, body, priority, ttr, seq, enqueued_at, attempt, crashes, kicks, token, reason"
        with contextlib.closing(sqlite3.connect(self._file, timeout=30)) as db:
            rows = db.execute(f"SELECT {columns} FROM multiq_jobs WHERE queue = ?", (queue,)).fetchall()  # noqa: S608
        now = time.time_ns()
        found = {row[0]: _of_row(row, (row[2] - now) / 1e9) for row in rows}
        return {job_id: found.get(job_id, GONE) for job_id in ids}

    def restart(self, lanes: Sequence[Lane]) -> None:
        """Kill all processes that have the file open, because there is no server."""
        actors = [actor for lane in lanes for actor in lane.actors.values()]
        for actor in actors:
            actor.kill()
        for actor in actors:
            actor.again()


def _of_row(row: tuple[Any, ...], left: float) -> Seen:
    """The job of a row that begins with id, state, end of the state, body, priority, ttr."""
    return Seen(_SQL_STATES[row[1]], row[1] == 2 and left < 0, left, row[3:6], tuple(row))


class MysqlSite(Site):
    def __init__(self, server: MysqlServer, database: str) -> None:
        self._server = server
        self._database = database

    def url(self, _role: str) -> str:
        return self._server.url(self._database)

    def look(self, queue: str, ids: Iterable[str]) -> dict[str, Seen]:
        columns = "id, state, place, body, priority, ttr, seq, enqueued_at, attempt, crashes, kicks, token, reason"
        now = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
        rows = self._server.ask(
            f"SELECT {columns}, CAST(place AS SIGNED) - {now} FROM multiq_jobs WHERE queue = %s",  # noqa: S608
            queue.encode(),
            database=self._database,
        )
        found = {str(uuid.UUID(bytes=bytes(row[0]))): _of_row(row[:-1], row[-1] / 1e6) for row in rows}
        return {job_id: found.get(job_id, GONE) for job_id in ids}

    def restart(self, _lanes: Sequence[Lane]) -> None:
        self._server.kill()
        self._server.start()


class RedisSite(Site):
    """The keys and the record's first bytes are those of docs/redis.md and lua/include/record.lua."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server

    def url(self, _role: str) -> str:
        return self._server.url

    def look(self, queue: str, ids: Iterable[str]) -> dict[str, Seen]:
        base = f"multiq:{{{queue}}}:"
        ask = self._server.ask
        flat = ask("HGETALL", f"{base}jobs", raw=True)
        places: dict[bytes, tuple[str, bytes, float]] = {}
        for state in ("ready", "delayed", "reserved", "buried"):
            pairs = ask("ZRANGE", base + state, 0, -1, "WITHSCORES", raw=True)
            for member, score in zip(pairs[::2], pairs[1::2], strict=True):
                packed = member[12:]
                # a job must not be in two states at once
                twice = packed in places
                places[packed] = ("in two states" if twice else state, member, float(score))
        seconds, micros = ask("TIME", raw=True)
        now = int(seconds) * 10**6 + int(micros)
        found: dict[str, Seen] = {}
        for packed, record in zip(flat[::2], flat[1::2], strict=True):
            state, member, score = places.get(packed, ("in no state", b"", 0.0))
            left = (score - now) / 1e6
            kept = (record[16:28], record[53:])  # priority and ttr; then the body, after flags and attempts
            is_over = state == "reserved" and left < 0
            found[str(uuid.UUID(bytes=packed))] = Seen(state, is_over, left, kept, (state, member, score, record))
        return {job_id: found.get(job_id, GONE) for job_id in ids}

    def restart(self, _lanes: Sequence[Lane]) -> None:
        self._server.kill()
        self._server.start()


class BeanstalkSite(Site):
    """A lease belongs to a connection, so that its holder connects through a proxy that can cut it."""

    ttr = 3.0
    endings = ("time", "restart", "cut")

    def __init__(self, server: BeanstalkServer, proxies: Sequence[Proxy]) -> None:
        self._server = server
        self._proxies = proxies
        self._lanes = itertools.count()

    def url(self, role: str) -> str:
        if role == "holder":
            return f"beanstalk://127.0.0.1:{self._proxies[next(self._lanes)].port}"
        return self._server.url

    def look(self, _queue: str, ids: Iterable[str]) -> dict[str, Seen]:
        found: dict[str, Seen] = {}
        with self._server.client() as client:
            for job_id in ids:
                stats = client.stats("job", job_id)
                if not stats:
                    found[job_id] = GONE
                    continue
                _, _, body = client.ask(b"peek " + job_id.encode()).partition(b"\r\n")
                left = float(stats.pop("time-left"))
                stats.pop("age")
                kept = (body, stats["pri"], stats["ttr"])
                # do not use ``is_over`` here: the server reports the job as reserved until it can be handed out again
                found[job_id] = Seen(stats["state"], False, left, kept, (*stats.items(), body))
        return found

    def restart(self, _lanes: Sequence[Lane]) -> None:
        self._server.kill()
        self._server.start()

    def cut(self, lane: int) -> None:
        self._proxies[lane].cut()


@contextlib.contextmanager
def site_of(name: str, folder: Path) -> Iterator[Site]:
    if name == "sqlite":
        yield SqliteSite(folder)
    elif name == "redis":
        with RedisServer(appendonly="yes", appendfsync="always") as redis:
            yield RedisSite(redis)
    elif name == "mysql":
        with MysqlServer() as mysql, mysql.database() as place:
            yield MysqlSite(mysql, place.name)
    else:
        with BeanstalkServer(binlog=True) as server, contextlib.ExitStack() as stack:
            yield BeanstalkSite(server, [stack.enter_context(Proxy(server.address)) for _ in range(LANES)])


# --- what is done, and the judge ---------------------------------------------------------------------------


@dataclass
class Sums:
    """The results on one backend."""

    said: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Stale verdicts that were sent, by kind and verb."""
    accepted: Counter[tuple[str, str]] = field(default_factory=Counter)
    ways: Counter[str] = field(default_factory=Counter)
    """How stale verdicts were sent, and how their leases had ended."""
    changed: int = 0
    """Jobs whose records a stale verdict changed."""
    live: int = 0
    """Leases that had not ended according to the judge: an error of this script."""
    valid: int = 0
    valid_refused: int = 0
    without_effect: int = 0
    """Valid verdicts that were accepted although the store does not show their effect."""
    taken: int = 0
    """Jobs that a paused queue handed out."""
    repeated: int = 0
    why: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.said.total()

    @property
    def refused(self) -> int:
        return self.total - self.accepted.total()

    @property
    def is_right(self) -> bool:
        wrong = (
            self.accepted.total(), self.changed, self.live, self.valid_refused, self.without_effect, self.taken
        )  # fmt: skip
        return not any(wrong) and bool(self.total) and bool(self.valid)


class Lane:
    """Three processes, and the queues of a round: one for each kind."""

    def __init__(self, site: Site, name: str, number: int, luck: random.Random, sums: Sums) -> None:
        self.site = site
        self.number = number
        self.actors = {role: Actor(site.url(role)) for role in ("holder", "rival", "third")}
        self._luck = luck
        self._sums = sums
        self._kinds = [kind for kind in KINDS if name in kind.only]
        self._verbs = [verb for verb in VERBS if name != "beanstalk" or verb != "abandon"]
        self._newest: dict[str, str] = {}
        self._rounds = itertools.count()

    def round(self, ending: str, each: int, end: Callable[[str], None]) -> None:
        """End *each* leases of each kind, and send a verdict on each lease.

        Four kinds at a time, so that verdicts come soon after the lease's end, which may be handled by other code of
        the driver than verdicts that come much later.
        """
        number = next(self._rounds)
        kinds = [kind for kind in self._kinds if ending == "time" or not kind.is_live]
        self._luck.shuffle(kinds)
        leases: dict[Kind, list[Lease]] = {}
        queues = {kind: f"stale-{self.number}-{number}-{at}" for at, kind in enumerate(kinds)}
        for at, (kind, queue) in enumerate(queues.items()):
            ttr = LONG if kind.live else self.site.ttr + at // 4
            self._ask("third", "put", queue, ids=_new_ids(each), ttr=ttr)
            leases[kind] = self._reserve("holder", queue, each)
            if kind.live == "release":
                self._settle("holder", queue, leases[kind], ["release"] * each)
            elif kind.live == "settle":
                first = itertools.cycle(("ack", "release", "bury", "release later"))
                self._settle("holder", queue, leases[kind], list(itertools.islice(first, each)))
        end(ending)
        for kind, queue in queues.items():
            if not kind.live:
                self._until_over(queue, leases[kind])
            self._take(kind, queue, leases[kind])
            self._come_late(kind, queue, leases[kind], ending)
        for actor in self.actors.values():
            actor.ask("leave", "")

    def after_the_end(self, ending: str) -> None:
        if ending == "cut":
            self.site.cut(self.number)
        for actor in self.actors.values():
            actor.ask("look", "nothing")

    def close(self) -> None:
        for actor in self.actors.values():
            actor.kill()

    # --- the processes ---

    def _ask(self, role: str, do: str, queue: str, **more: Any) -> Answer:
        answer = self.actors[role].ask(do, queue, **more)
        self._sums.repeated += answer.repeated
        return answer

    def _reserve(self, role: str, queue: str, count: int) -> list[Lease]:
        leases = self._ask(role, "reserve", queue, count=count).leases
        assert len(leases) == count, f"{len(leases)} of {count} jobs of {queue} were handed out"
        for lease in leases:
            assert self._newest.get(lease.id) != lease.token, f"{lease} has the token of the one before"
            self._newest[lease.id] = lease.token
        return leases

    def _settle(self, role: str, queue: str, leases: list[Lease], verbs: list[str]) -> None:
        """Settle leases in time, and in a call of their own."""
        lost = self._ask(role, "settle", queue, leases=leases, verbs=verbs).lost
        self._sums.valid += len(leases)
        self._sums.valid_refused += sum(lost)

    def _until_over(self, queue: str, leases: list[Lease]) -> None:
        """Wait until the leases have ended, as the store shows."""
        give_up_at = time.monotonic() + PATIENCE
        while any(seen.is_held for seen in self.site.look(queue, [lease.id for lease in leases]).values()):
            assert time.monotonic() < give_up_at, f"leases of {queue} do not end"
            time.sleep(0.02)

    def _take(self, kind: Kind, queue: str, leases: list[Lease]) -> None:
        """Carry out what the kind says on the jobs, once the leases have ended."""
        ids = [lease.id for lease in leases]
        if kind.taken in {"reschedule", "delete", "put again", "put again and hold"}:
            self._ask("rival", "reschedule" if kind.taken == "reschedule" else "delete", queue, ids=ids)
            if kind.taken.startswith("put again"):
                assert self._ask("third", "put", queue, ids=ids, ttr=self.site.ttr).ids == ids
            if kind.taken == "put again and hold":
                self._reserve("rival", queue, len(leases))
        elif kind.taken == "reserve again":
            self._reserve("holder", queue, len(leases))
        elif kind.taken:
            new = self._reserve("rival", queue, len(leases))
            if kind.taken != "hold":
                verb = "bury" if kind.taken == "kick" else kind.taken
                self._settle("rival", queue, new, [verb] * len(new))
            if kind.taken == "kick":
                self._ask("rival", "kick", queue, ids=ids)

    # --- the late one, and the judge ---

    def _come_late(self, kind: Kind, queue: str, leases: list[Lease], ending: str) -> None:
        """Send half of the verdicts alone, and the others in batches with valid verdicts in between.

        After a restart the first verdict uses a connection that is dead, unless its consumer has reserved since.
        """
        valid_queue = f"{queue}-valid"
        do = self._luck.choice(["settle", "exchange"])
        said = list(zip(self._shuffled(itertools.cycle(self._verbs), len(leases)), leases, strict=True))
        alone, batched = said[: len(said) // 2], said[len(said) // 2 :]
        if do == "exchange":  # so that the exchange only settles, and has no job to hand out
            self._ask("rival", "pause", queue)
        ids = [lease.id for lease in leases]
        looked_at = time.monotonic()
        before = self.site.look(queue, ids)
        self._check_that_all_are_stale(kind, leases, before)
        self._say(kind, queue, [[each] for each in alone], do, ending)
        self._ask("third", "put", valid_queue, ids=_new_ids(len(batched)), ttr=LONG)
        valid = self._reserve(kind.speaker, queue, len(batched))
        assert {lease.queue for lease in valid} == {valid_queue}
        if do == "exchange":
            self._ask("rival", "pause", valid_queue)
        good = list(zip(self._shuffled(itertools.cycle(self._verbs), len(valid)), valid, strict=True))
        self._say(kind, queue, self._batches([*batched, *good]), do, ending)
        after = self.site.look(queue, ids)
        took = time.monotonic() - looked_at
        for verb, lease in said:
            if not is_as_it_was(before[lease.id], after[lease.id], took):
                self._sums.changed += 1
                self._sums.why.append(
                    f"{kind.name}: a {verb} changed {lease}: {before[lease.id]} became {after[lease.id]}"
                )
        effects = self.site.look(valid_queue, [lease.id for lease in valid])
        for verb, lease in good:
            if effects[lease.id].state != VERBS[verb][1]:
                self._sums.without_effect += 1
                self._sums.why.append(f"{kind.name}: a valid {verb} left {lease} as {effects[lease.id]}")

    def _say(self, kind: Kind, queue: str, calls: list[list[tuple[str, Lease]]], do: str, ending: str) -> None:
        """Send these calls, and judge them. Valid verdicts are about jobs in a queue of their own."""
        for call in calls:
            verbs, its = [verb for verb, _ in call], [lease for _, lease in call]
            answer = self._ask(kind.speaker, do, queue, verbs=verbs, leases=its)
            ways = (f"ended by {ending}", "sent alone" if len(call) == 1 else "sent in a batch", f"sent by {do}")
            self._sums.taken += len(answer.leases)
            for (verb, lease), is_lost in zip(call, answer.lost, strict=True):
                if lease.queue == queue:
                    self._note(kind, verb, lease, ways, is_lost=is_lost)
                else:
                    self._sums.valid += 1
                    self._sums.valid_refused += is_lost
                    if is_lost:
                        self._sums.why.append(f"{kind.name}: a valid {verb} was refused: {lease}")

    def _shuffled(self, verbs: Iterator[str], count: int) -> list[str]:
        """*count* verbs in random order, each about as often as the others."""
        some = list(itertools.islice(verbs, count))
        self._luck.shuffle(some)
        return some

    def _batches(self, verdicts: list[tuple[str, Lease]]) -> list[list[tuple[str, Lease]]]:
        self._luck.shuffle(verdicts)
        batches = []
        while verdicts:
            count = self._luck.choice([2, 3, 5, 8, 20])
            batches.append(verdicts[:count])
            del verdicts[:count]
        return batches

    def _note(self, kind: Kind, verb: str, lease: Lease, ways: Sequence[str], *, is_lost: bool) -> None:
        sums = self._sums
        sums.said[kind.name, verb] += 1
        sums.ways.update(ways)
        if not is_lost:
            sums.accepted[kind.name, verb] += 1
            sums.why.append(f"{kind.name}, {', '.join(ways)}: a stale {verb} was accepted: {lease}")

    def _check_that_all_are_stale(self, kind: Kind, leases: list[Lease], seen: dict[str, Seen]) -> None:
        for lease in leases:
            is_newest = self._newest[lease.id] == lease.token
            if seen[lease.id].is_held and is_newest and not kind.is_live:
                self._sums.live += 1
                self._sums.why.append(f"{kind.name}: {lease} has not ended: {seen[lease.id]}")


def is_as_it_was(before: Seen, after: Seen, took: float) -> bool:
    """Whether only time has changed a job. A job whose lease has ended may have become ready."""
    if before.record == after.record:
        return after.left <= before.left
    is_over = before.state == "reserved" and before.left - took < A_WHOLE_ONE
    return is_over and after.state == "ready" and before.kept == after.kept


def _new_ids(count: int) -> list[str]:
    return [str(uuid.uuid4()) for _ in range(count)]


def soak(name: str, folder: Path, *, verdicts: int, seed: int, lanes: int = LANES, each: int = 14) -> Sums:
    """Send at least *verdicts* stale verdicts, in rounds that end leases in each way."""
    sums = [Sums() for _ in range(lanes)]
    with site_of(name, folder) as site, contextlib.ExitStack() as ends:
        all_lanes = [Lane(site, name, at, random.Random(f"{name} {seed} {at}"), sums[at]) for at in range(lanes)]
        for lane in all_lanes:
            ends.callback(lane.close)
        endings = itertools.cycle(site.endings)
        number = 0
        while sum(one.total for one in sums) < verdicts or number < len(site.endings):
            number += 1
            ending = next(endings)
            _round(site, all_lanes, ending, each)
            done = merged(sums)
            print(
                f"{name}: round {number}, leases ended by {ending}: {done.total:,} stale verdicts so far, "
                f"{done.refused:,} refused; {done.valid:,} valid ones, {done.valid_refused:,} refused",
                flush=True,
            )
            if not done.is_right:
                break
    return merged(sums)


def _round(site: Site, lanes: list[Lane], ending: str, each: int) -> None:
    """Play a round on all lanes at the same time. The store is restarted when all lanes wait for it."""
    restart = (lambda: site.restart(lanes)) if ending == "restart" else None
    barrier = threading.Barrier(len(lanes), restart, timeout=PATIENCE * 2)
    failures: list[str] = []

    def run(lane: Lane) -> None:
        def end(ending: str) -> None:
            barrier.wait()
            if ending != "time":
                lane.after_the_end(ending)

        try:
            lane.round(ending, each, end)
        except BaseException:
            failures.append(traceback.format_exc())
            barrier.abort()

    threads = [threading.Thread(target=run, args=(lane,)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise RuntimeError("\n".join(failures))


def merged(sums: Sequence[Sums]) -> Sums:
    whole = Sums()
    for one in sums:
        whole.said += one.said
        whole.accepted += one.accepted
        whole.ways += one.ways
        whole.why += one.why
        for name in ("changed", "live", "valid", "valid_refused", "without_effect", "taken", "repeated"):
            setattr(whole, name, getattr(whole, name) + getattr(one, name))
    return whole


def table(results: dict[str, Sums]) -> str:
    """A table with the results, by what happened to the job and by verb."""
    rows: list[tuple[str, list[str]]] = []

    def row(what: str, of: Callable[[Sums], int | None]) -> None:
        cells = [of(sums) for sums in results.values()]
        if any(cells) or not what.startswith("- "):
            rows.append((what.removeprefix("- "), ["-" if cell is None else f"{cell:,}" for cell in cells]))

    row("**stale verdicts**", lambda sums: sums.total)
    row("**refused with `LeaseLost`**", lambda sums: sums.refused)
    row("accepted", lambda sums: sums.accepted.total())
    row("jobs that one of them changed", lambda sums: sums.changed)
    for kind in KINDS:
        row(f"- {kind.name}", lambda sums, k=kind.name: sum(n for (w, _), n in sums.said.items() if w == k) or None)  # type: ignore[misc]
    for verb in VERBS:
        row(f"- verdict: {verb}", lambda sums, v=verb: sum(n for (_, w), n in sums.said.items() if w == v) or None)  # type: ignore[misc]
    ways = sorted({way for sums in results.values() for way in sums.ways})
    for way in ways:
        row(f"- {_WAYS.get(way, way)}", lambda sums, w=way: sums.ways[w] or None)  # type: ignore[misc]
    row("valid verdicts beside them", lambda sums: sums.valid)
    row("of these refused, or without effect", lambda sums: sums.valid_refused + sums.without_effect)
    row("calls that raised, and were made again", lambda sums: sums.repeated)
    lines = [f"|  | {' | '.join(results)} |", "| --- |" + " ---: |" * len(results)]
    return "\n".join(lines + [f"| {what} | {' | '.join(cells)} |" for what, cells in rows])


_WAYS = {
    "ended by time": "it ended by its time, or by a verdict",
    "ended by restart": "the server, or each process of SQLite, was killed in between",
    "ended by cut": "it ended with its connection",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("backends", nargs="*", metavar="BACKEND", help=f"of {', '.join(BACKENDS)}; default: all")
    parser.add_argument("--verdicts", type=int, default=VERDICTS, help=f"stale ones, for each (default: {VERDICTS:,})")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--page", action="store_true", help="renew the table of docs/reliability.md")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    results: dict[str, Sums] = {}
    for name in sorted(given.backends or BACKENDS):
        with tempfile.TemporaryDirectory() as folder:
            results[name] = soak(name, Path(folder), verdicts=given.verdicts, seed=given.seed)
        for why in results[name].why[:20]:
            print(why)
    text = table(results)
    print(text)
    whole = merged(list(results.values()))
    print(f"{whole.total:,} stale verdicts: {whole.refused:,} refused, {whole.accepted.total():,} accepted")
    if given.page:
        is_short = set(results) != set(BACKENDS) or given.verdicts < VERDICTS
        short_of = f"{VERDICTS:,} of each of the four, `tests/soak/stale.py`" if is_short else ""
        renew("stale", f"{conditions(short_of)} Seed {given.seed}.\n\n{text}")
    return 0 if all(sums.is_right for sums in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
