"""Crashes of beanstalkd itself, and what its log has afterwards: ``python tests/soak/beanstalk_crashes.py --help``.

beanstalkd 1.12 (1.13 as well) damages its heap of connections' timers when two of them end in the same microsecond,
and may end with a segmentation fault later (pull request 670 of beanstalkd). Two timers are equal where several waiting
connections are handed jobs of one ttr at once: when a connection that holds many jobs ends, or a tube's pause.

In each round some connections wait, are handed a job each at once, and delete it or end. A server that ends is started
again on its log, and every job is looked at: those that were acknowledged and not deleted must be there, and no others.
The bodies are about as large as what the server keeps of a connection, so that damage shows soon.

Exits with 1 if a job was lost or came back after its deletion. Crashes are counted, but are not failures of this
script, because the installed beanstalkd causes them. To test another beanstalkd, put it first on the PATH.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

from servers.beanstalk import BareClient, BeanstalkServer

TUBE, OTHER = "default", "other"
OTHERS = 50  # jobs that are never reserved, each of them ready, delayed or buried
BODY = 670  # bytes
TTR = 1


class Jobs:
    """What the server has answered about each job; the jobs' numbers are in their bodies."""

    def __init__(self) -> None:
        self.there: set[int] = set()
        self.unsure: set[int] = set()
        """A put or a delete was sent and never answered."""
        self._last = 0

    def put(self, client: BareClient, count: int, *, tube: str = TUBE, delay: int = 0) -> None:
        for _ in range(count):
            self._last += 1
            self.unsure.add(self._last)
            client.put(b"%d " % self._last + b"x" * BODY, tube=tube, delay=delay, ttr=TTR)
            self.unsure.discard(self._last)
            self.there.add(self._last)

    def delete(self, client: BareClient, job_id: int, body: bytes) -> None:
        number = int(body.split()[0])
        self.there.discard(number)
        self.unsure.add(number)
        reply = client.ask(b"delete %d" % job_id)
        self.unsure.discard(number)
        if reply != b"DELETED":  # the lease of one second may be over
            self.there.add(number)

    def check(self, found: set[int]) -> str | None:
        """A text about the faults of the jobs that were found; None if there is no fault."""
        lost, back = self.there - found, found - self.there - self.unsure
        self.there, self.unsure = set(found), set()
        if lost or back:
            return f"{len(lost)} jobs lost, {len(back)} came back after their deletion: {sorted(lost | back)[:5]}"
        return None


def play(server: BeanstalkServer, waiting: list[BareClient], jobs: Jobs, luck: random.Random) -> None:
    """Play one round. Raises ``OSError`` if the server ends during it."""
    with server.client() as holder:
        by_pause = luck.random() < 0.5
        if by_pause:
            holder.ask(b"pause-tube default 3600")
        jobs.put(holder, len(waiting))
        if not by_pause:
            while holder.reserve() is not None:
                pass
        for client in waiting:
            client.send(b"reserve-with-timeout 30")
        time.sleep(0.002)  # so that the server has read all commands; otherwise the round cannot cause the crash
        if by_pause:
            holder.ask(b"pause-tube default 0")
    luck.shuffle(waiting)
    for client in waiting[:]:
        reply = client.reply()
        if luck.random() < 0.5:
            head, _, body = reply.partition(b"\r\n")
            jobs.delete(client, int(head.split()[1]), body)
        else:
            waiting.remove(client)
            client.close()
    with server.client() as client:
        while (job := client.reserve()) is not None:
            jobs.delete(client, *job)


def put_others(server: BeanstalkServer, jobs: Jobs) -> None:
    """Put the jobs that no round touches: a third each ready, delayed and buried."""
    with server.client() as client:
        client.watch(OTHER)
        jobs.put(client, OTHERS // 3, tube=OTHER)
        while (job := client.reserve()) is not None:
            assert client.ask(b"bury %d 1024" % job[0]) == b"BURIED"
        jobs.put(client, OTHERS // 3, tube=OTHER)
        jobs.put(client, OTHERS // 3, tube=OTHER, delay=86400)


def looked_at(server: BeanstalkServer) -> set[int]:
    """The numbers of all jobs that the server has, in any state."""
    found = set()
    with server.client() as client:
        left = sum(int(client.stats()[f"current-jobs-{state}"]) for state in ("ready", "delayed", "buried", "reserved"))
        job_id = 0
        while left:
            job_id += 1
            reply = client.ask(b"peek %d" % job_id)
            if reply.startswith(b"FOUND "):
                found.add(int(reply.partition(b"\r\n")[2].split()[0]))
                left -= 1
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--waiting", type=int, default=4, help="connections that wait in each round")
    parser.add_argument("--seed", type=int, default=20261122)
    given = parser.parse_args()
    luck = random.Random(given.seed)
    ends: Counter[str] = Counter()
    looked = 0
    faults: list[str] = []
    start = time.monotonic()
    with BeanstalkServer(binlog=True, fsync_ms=None) as server:
        jobs, waiting = Jobs(), list[BareClient]()
        put_others(server, jobs)
        for _ in range(given.rounds):
            try:
                while len(waiting) < given.waiting:
                    waiting.append(BareClient(server.address))
                play(server, waiting, jobs, luck)
            except OSError:
                for client in waiting:
                    client.close()
                waiting.clear()
                end = server.ended_by
                if end is None:
                    raise
                ends[end] += 1
                server.stop()
                server.start()
                found = looked_at(server)
                looked += len(found)
                fault = jobs.check(found)
                if fault:
                    faults.append(f"after {end}: {fault}")
        for client in waiting:
            client.close()
    shown = ", ".join(f"{count} by {end}" for end, count in ends.items()) or "none"
    print(
        f"{given.rounds} rounds with {given.waiting} waiting connections in {time.monotonic() - start:.0f} s; "
        f"crashes: {shown}; {looked} jobs read from its log after them, {len(faults)} times wrongly"
    )
    for fault in faults[:5]:
        print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
