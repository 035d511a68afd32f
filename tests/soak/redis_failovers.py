"""Failovers under load, planned and not, with Sentinel and in a cluster: what is lost, and how long it takes.

    python tests/soak/redis_failovers.py sentinel --planned 25 --behind-a-pause 25 --unplanned 50
    python tests/soak/redis_failovers.py cluster --planned 50 --unplanned 50

Two producers and three consumers of several queues run all the time; one of the consumers is idle and is interrupted
again and again. In the end each acknowledged job must have been done, except those that docs/durability.md allows to be
lost: jobs that a replica had not received when the primary died, and jobs that an old primary accepted in a planned
Sentinel failover without a pause of its writes.
Exits with 1 if a server ended by itself, or if a job was lost or done twice that must not be.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.append(str(Path(__file__).parent.parent))

import redis
from servers.process import HOST, until
from servers.redis import SERVICE, RedisCluster, RedisServer, SentinelTrio

from multiq.backend import Ack, NewJob
from multiq.backend.registry import open_backend
from multiq.errors import BackendUnavailable, EnqueueUncertain
from multiq.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

QUEUES = [f"queue-{number}" for number in range(6)]
IDLE = ["idle-1", "idle-2", "idle-3"]
BETWEEN = 0.5  # seconds from the recovery of one failover until the next failover
PAUSED = 20_000  # ms that writes are paused: longer than the demotion of an old primary takes
DRAINED = 60.0  # seconds that the last jobs may take to be done


class Load:
    """The producers and consumers, and the answers that each of them got, with their times."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.acknowledged: dict[str, float] = {}
        self.done: list[tuple[str, float]] = []
        self.errors: list[BaseException] = []
        self.ended = threading.Event()
        self.drained = threading.Event()
        works: list[Callable[[], None]] = [self._produce, self._produce, self._consume, self._consume, self._idle]
        self.threads = [threading.Thread(target=self._guarded, args=(work,)) for work in works]

    def __enter__(self) -> Self:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        for thread in self.threads:
            thread.join()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as exc:
            self.errors.append(exc)

    def _produce(self) -> None:
        number = 0
        with open_backend(self.url) as backend:
            while not self.ended.is_set():
                job = NewJob(b"x" * 20, new_id(), ttr=5)
                queue = QUEUES[number % len(QUEUES)]
                while not self.ended.is_set():
                    with contextlib.suppress(BackendUnavailable, EnqueueUncertain):
                        backend.enqueue(queue, [job])
                        self.acknowledged[job.id] = time.monotonic()
                        break
                    time.sleep(0.02)
                number += 1
                time.sleep(0.004)

    def _consume(self) -> None:
        with open_backend(self.url) as backend, backend.consumer(QUEUES) as consumer:
            owed: list[Any] = []
            give_up_at = float("inf")
            while time.monotonic() < give_up_at:
                if self.ended.is_set() and give_up_at == float("inf"):
                    give_up_at = time.monotonic() + DRAINED
                verdicts = [Ack(lease) for lease in owed]
                leases: list[Any] = []
                try:
                    lost, leases = consumer.exchange(verdicts, 10, 0.2)
                except BackendUnavailable as exc:
                    if exc.is_partial:
                        with contextlib.suppress(BackendUnavailable):
                            leases = consumer.reserve(10, 0)
                    owed += leases
                    time.sleep(0.02)
                    continue
                now = time.monotonic()
                self.done += [(v.lease.id, now) for v, error in zip(verdicts, lost, strict=True) if error is None]
                owed = leases
                if self.ended.is_set() and not leases and self._all_done():
                    return

    def _all_done(self) -> bool:
        return self.acknowledged.keys() <= {job_id for job_id, _ in self.done}

    def _idle(self) -> None:
        """Wait like a worker without jobs, which is interrupted when one of its own tasks ends."""
        with open_backend(self.url) as backend, backend.consumer(IDLE) as consumer:
            while not self.ended.is_set():
                timer = threading.Timer(0.15, consumer.interrupt)
                timer.start()
                with contextlib.suppress(BackendUnavailable):
                    consumer.reserve(1, 0.25)
                timer.join()


class Servers:
    """Servers that can fail over."""

    url: str
    servers: Sequence[RedisServer]

    def primaries(self) -> list[RedisServer]:
        return [one for one in self.servers if one.is_running and role(one) == "master"]

    def is_well(self) -> bool:
        raise NotImplementedError

    def planned(self, turn: int, *, behind_a_pause: bool) -> None:
        raise NotImplementedError

    def victim(self, turn: int) -> RedisServer:
        primaries = sorted(self.primaries(), key=lambda one: one.port)
        return primaries[turn % len(primaries)]


def role(server: RedisServer) -> str:
    with contextlib.suppress(redis.RedisError):
        return str(server.ask("INFO", "replication")["role"])
    return "unknown"


def is_synced(replica: RedisServer) -> bool:
    with contextlib.suppress(redis.RedisError):
        info = replica.ask("INFO", "replication")
        return bool(info["role"] == "slave" and info["master_link_status"] == "up")
    return False


class Sentinels(Servers):
    def __init__(self, trio: SentinelTrio) -> None:
        self.trio = trio
        self.url = trio.url
        self.servers = [trio.primary, *trio.replicas]

    def is_well(self) -> bool:
        primaries = self.primaries()
        if len(primaries) != 1 or not all(is_synced(one) for one in self.servers if one is not primaries[0]):
            return False
        return all(self._agrees(sentinel, primaries[0]) for sentinel in self.trio.sentinels)

    def planned(self, turn: int, *, behind_a_pause: bool) -> None:
        (old,) = self.primaries()
        if behind_a_pause:
            old.ask("CLIENT", "PAUSE", PAUSED, "WRITE")
            offset = old.ask("INFO", "replication")["master_repl_offset"]
            others = [one for one in self.servers if one is not old]
            until(lambda: all(_offset(one) >= offset for one in others), "the replicas have it all")
        self.trio.sentinels[turn % 3].ask("SENTINEL", "FAILOVER", SERVICE)
        until(lambda: any(one is not old and role(one) == "master" for one in self.servers), "a replica is promoted")

    def _agrees(self, sentinel: RedisServer, primary: RedisServer) -> bool:
        flat = [word.decode() for word in sentinel.ask("SENTINEL", "MASTER", SERVICE, raw=True)]
        told = dict(zip(flat[::2], flat[1::2], strict=True))
        return (int(told["port"]), told["flags"]) == (primary.port, "master")


class Cluster(Servers):
    def __init__(self, cluster: RedisCluster) -> None:
        self.cluster = cluster
        self.url = cluster.url
        self.replicas = [
            RedisServer(cluster_enabled="yes", cluster_node_timeout="1000", cluster_require_full_coverage="no",
                        repl_diskless_sync_delay="0", appendonly="yes").start()
            for _ in range(3)
        ]  # fmt: skip
        self.servers = [*cluster.nodes, *self.replicas]
        for replica in self.replicas:
            cluster.nodes[0].ask("CLUSTER", "MEET", HOST, replica.port)
        until(lambda: all(_knows(one, 6) for one in self.servers), "all nodes know each other")
        for primary, replica in zip(cluster.nodes, self.replicas, strict=True):
            replica.ask("CLUSTER", "REPLICATE", primary.ask("CLUSTER", "MYID").decode())

    def is_well(self) -> bool:
        primaries = self.primaries()
        replicas = [one for one in self.servers if one not in primaries]
        if len(primaries) != 3 or len(replicas) != 3 or not all(map(is_synced, replicas)):
            return False
        return all(one.ask("INFO", "replication")["connected_slaves"] == 1 for one in primaries)

    def planned(self, turn: int, *, behind_a_pause: bool) -> None:  # a cluster's failover pauses writes by itself
        old = self.victim(turn)
        port = old.port
        replica = next(one for one in self.servers if one is not old and _primary_of(one) == port)
        replica.ask("CLUSTER", "FAILOVER")
        until(lambda: role(replica) == "master", "the replica is promoted")

    def close(self) -> None:
        for replica in self.replicas:
            replica.close()


def _offset(replica: RedisServer) -> int:
    return int(replica.ask("INFO", "replication")["slave_repl_offset"])


def _knows(node: RedisServer, count: int) -> bool:
    return f"cluster_known_nodes:{count}" in node.ask("CLUSTER", "INFO", raw=True).decode()


def _primary_of(node: RedisServer) -> int:
    return int(node.ask("INFO", "replication").get("master_port", 0))


def soak(servers: Servers, planned: int, behind_a_pause: int, unplanned: int) -> int:
    """Run all failovers under load. Returns how many faults were found."""
    wrong = 0
    kinds = {"planned": planned, "behind a pause": behind_a_pause, "unplanned": unplanned}
    strict = {"behind a pause", *(["planned"] if isinstance(servers, Cluster) else [])}
    for kind, count in kinds.items():
        if count:
            wrong += phase(servers, kind, count, is_strict=kind in strict)
    return wrong


def phase(servers: Servers, kind: str, count: int, *, is_strict: bool) -> int:
    """Make *count* failovers of one kind. Returns how many faults were found."""
    wrong = 0
    began: list[float] = []
    until(servers.is_well, "all is well before")
    with Load(servers.url) as load:
        until(lambda: len(load.done) > 50 or load.errors, "jobs are done")
        for turn in range(count):
            until(servers.is_well, f"all is well before failover {turn} ({kind})")
            time.sleep(BETWEEN)
            began.append(time.monotonic())
            fail_over(servers, kind, turn, load)
            dead = [one.port for one in servers.servers if not one.is_running]
            if dead:
                print(f"{kind} {turn}: servers that ended by themselves: {dead}")
                return wrong + 1
            if load.errors:
                print(f"{kind} {turn}: {load.errors!r}")
                return wrong + 1
        until(servers.is_well, "all is well after")
    if load.errors:
        print(f"{kind}: {load.errors!r}")
        wrong += 1
    finished = Counter(job_id for job_id, _ in load.done)
    lost = load.acknowledged.keys() - finished.keys()
    twice = sum(number - 1 for number in finished.values())
    pauses = sorted(recoveries(load, began))
    print(
        f"{kind}: {count} failovers, no server ended by itself; {len(load.acknowledged)} jobs acknowledged, "
        f"{len(lost)} lost, {twice} done twice; nothing was done for {statistics.median(pauses):.2f} s (median), "
        f"{pauses[-1]:.2f} s (most)",
        flush=True,
    )
    if is_strict and (lost or twice):
        print(f"{kind}: nothing may be lost or done twice here")
        wrong += 1
    return wrong


def fail_over(servers: Servers, kind: str, turn: int, load: Load) -> None:
    """Make one failover, and wait until work continues."""
    known = len(load.done)
    if kind == "unplanned":
        victim = servers.victim(turn)
        victim.kill()
        others = set(servers.primaries())
        until(lambda: set(servers.primaries()) - others, "a replica is promoted")
        victim.start()
    else:
        servers.planned(turn, behind_a_pause=kind == "behind a pause")
    until(lambda: len(load.done) > known + 100 or load.errors, "work goes on")


def recoveries(load: Load, began: Sequence[float]) -> list[float]:
    """The longest time without a finished job for each failover, from the beginning of the failover to that of the next
    one."""
    moments = sorted(at for _, at in load.done)
    found = []
    for start, end in zip(began, [*began[1:], load.done[-1][1]], strict=True):
        inside = [start, *(at for at in moments if start <= at <= end)]
        found.append(max((after - before for before, after in itertools.pairwise(inside)), default=0.0))
    return found


def main(kind: str, planned: int, behind_a_pause: int, unplanned: int) -> int:
    if kind == "sentinel":
        with SentinelTrio(appendonly="yes") as trio:
            return soak(Sentinels(trio), planned, behind_a_pause, unplanned)
    with (
        RedisCluster(appendonly="yes", repl_diskless_sync_delay="0") as cluster,
        contextlib.closing(Cluster(cluster)) as servers,
    ):
        return soak(servers, planned, behind_a_pause, unplanned)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=["sentinel", "cluster"])
    parser.add_argument("--planned", type=int, default=0)
    parser.add_argument("--behind-a-pause", type=int, default=0)
    parser.add_argument("--unplanned", type=int, default=0)
    given = parser.parse_args()
    sys.exit(1 if main(given.kind, given.planned, given.behind_a_pause, given.unplanned) else 0)
