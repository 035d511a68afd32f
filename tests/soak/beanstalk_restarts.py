"""Restarts of a server without a log, in the middle of purge, kick and reschedule: no job of another queue may change.

    python tests/soak/beanstalk_restarts.py --rounds 1000

In each round a server has jobs of one queue, and a call works on them through a proxy. During the call, before one of
its requests or with one of its replies, the server is killed and started again, and gets jobs of another queue, which
have the same ids. Then the call continues. A bare socket reads every job of the other queue before and after the call.

Exits with 1 and prints why if any of them has changed, or if the restart came during too few of the calls.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import socket
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multiq.backend import State
from multiq.backend.registry import open_backend
from multiq.errors import MultiqError

sys.path.append(str(Path(__file__).parent.parent))

from proxy import Proxy, _Ended
from servers.beanstalk import BareClient, BeanstalkServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiq.backend import Backend

OURS, THEIRS = "ours", "theirs"
# the other server has more jobs, so that it also has the ids of the jobs that a reschedule makes
OUR_JOBS, THEIR_JOBS = 6, 14
TOMORROW = 86400

STATES = ("ready", "delayed", "buried")
VERBS: dict[str, Callable[[Backend, str], object]] = {
    "purge": lambda backend, _: backend.purge(OURS, [State.READY, State.DELAYED, State.BURIED]),
    "kick": lambda backend, _: backend.kick(OURS, 100),
    "reschedule now": lambda backend, job_id: backend.reschedule(OURS, job_id, 0),
    "reschedule": lambda backend, job_id: backend.reschedule(OURS, job_id, 100),
    "kick_job": lambda backend, job_id: backend.kick_job(OURS, job_id),
    "delete": lambda backend, job_id: backend.delete(OURS, job_id),
}
MOMENTS: dict[str, tuple[tuple[str, bytes], ...]] = {
    "purge": (("reply", b"FOUND "), ("request", b"delete "), ("request", b"peek-")),
    "kick": (("reply", b"FOUND "), ("request", b"kick-job ")),
    "reschedule now": (
        ("request", b"peek "), ("request", b"put "), ("request", b"delete "), ("request", b"kick-job "),
        ("reply", b"FOUND "), ("reply", b"INSERTED "), ("reply", b"DELETED"),
    ),
    "reschedule": (
        ("request", b"peek "), ("request", b"put "), ("request", b"delete "), ("reply", b"FOUND "),
        ("reply", b"INSERTED "),
    ),
    "kick_job": (("request", b"kick-job "), ("reply", b"OK ")),
    "delete": (("request", b"delete "), ("reply", b"OK ")),
}  # fmt: skip


class Restarting(Proxy):
    """A proxy that restarts the server before the nth request, or with the nth reply, that contains some bytes."""

    def __init__(self, server: BeanstalkServer) -> None:
        self.left = 0
        self._side, self._bytes = "", b""
        self._server = server
        self.restarting = threading.RLock()
        self.before: list[dict[str, str]] = []
        self.luck = random.Random(0)
        super().__init__(server.address)

    def at(self, side: str, what: bytes, nth: int) -> None:
        self._side, self._bytes, self.left = side, what, nth

    def _is_now(self, side: str, data: bytes) -> bool:
        if not self.left or side != self._side or self._bytes not in data:
            return False
        self.left -= 1
        return not self.left

    def _connect(self) -> socket.socket:
        with self.restarting:
            return super()._connect()

    def _restart(self) -> None:
        self._server.kill()
        self._server.start()
        with contextlib.closing(BareClient(self._server.address)) as client:
            put(client, THEIRS, THEIR_JOBS, self.luck)
            self.before = looked_at(client)

    def _of_request(self, data: bytes) -> Any:
        with self.restarting:
            if self._is_now("request", data):
                self._restart()
                self.cut()
                raise _Ended
        return super()._of_request(data)

    def _deliver(self, client: socket.socket, data: bytes) -> None:
        with self.restarting:
            is_now = self._is_now("reply", data)
            if is_now:
                self._restart()
        if not is_now:
            super()._deliver(client, data)
            return
        client.sendall(data, socket.MSG_MORE)  # so that the data and the connection's end arrive together
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_WR)
        raise _Ended


def put(client: BareClient, tube: str, count: int, luck: random.Random) -> None:
    """Put *count* jobs, each in a random state."""
    client.watch(tube)
    for _ in range(count):
        state = luck.choice(STATES)
        job_id = client.put(
            b"x", tube=tube, priority=0 if state == "buried" else 9, delay=TOMORROW * (state == "delayed")
        )
        if state == "buried":
            assert client.reserve() == (job_id, b"x")
            client.ask(b"bury %d 9" % job_id)
    client.watch("default")
    client.ask(b"ignore " + tube.encode())


def looked_at(client: BareClient) -> list[dict[str, str]]:
    """All that the server reports about the other queue's jobs, except values that change with time."""
    jobs = [client.stats("job", str(job_id)) for job_id in range(1, THEIR_JOBS + 1)]
    return [{name: value for name, value in job.items() if name not in {"age", "time-left"}} for job in jobs]


def play(server: BeanstalkServer, backend: Backend, proxy: Restarting, luck: random.Random) -> tuple[str, bool, bool]:
    """Play one round. Returns the call, whether the server restarted during it, and whether another job was touched."""
    with server.client() as client:
        put(client, OURS, OUR_JOBS, luck)
        with contextlib.suppress(MultiqError):  # the connection may be from before the last restart
            backend.stats(OURS)
        newest = max(job_id for job_id in range(1, 200) if client.stats("job", str(job_id)).get("tube") == OURS)
    verb = luck.choice(list(VERBS))
    side, what = luck.choice(MOMENTS[verb])
    proxy.luck = luck
    proxy.at(side, what, luck.randint(1, 4) if verb in {"purge", "kick"} else 1)
    with contextlib.suppress(MultiqError):
        VERBS[verb](backend, str(luck.randint(newest - OUR_JOBS + 1, newest)))
    with proxy.restarting:
        was_met = not proxy.left
        proxy.left = 0
    with server.client() as client:
        is_touched = was_met and looked_at(client) != proxy.before
    return f"{verb}, {side} {what.decode().strip()}", was_met, is_touched


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1000, help="calls that are met in their middle")
    parser.add_argument("--seed", type=int, default=20261122)
    given = parser.parse_args()
    luck = random.Random(given.seed)
    met: Counter[str] = Counter()
    touched: Counter[str] = Counter()
    calls = 0
    start = time.monotonic()
    with BeanstalkServer() as server, Restarting(server) as proxy:
        while met.total() < given.rounds and calls < 5 * given.rounds:
            # a new server counts ids from 1 in each round, so that the other queue's jobs get the same ids as this
            # queue's jobs
            server.kill()
            server.start()
            with open_backend(f"beanstalk://127.0.0.1:{proxy.port}") as backend:
                what, was_met, is_touched = play(server, backend, proxy, luck)
            calls += 1
            met[what] += was_met
            touched[what] += is_touched
    print(
        f"{met.total()} restarts in the middle of {calls} calls, {touched.total()} of which touched "
        f"another queue's job, in {time.monotonic() - start:.0f} s"
    )
    for what, count in sorted(met.items()):
        print(f"{what:34} {count:4} met, {touched[what]:4} touched")
    return 1 if touched.total() or met.total() < given.rounds else 0


if __name__ == "__main__":
    sys.exit(main())
