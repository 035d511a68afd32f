"""Replies are lost and idle connections are cut around leases' ends: no stale verdict may be accepted.

    python tests/soak/beanstalk_lost.py --rounds 1000

In each round a consumer takes a job through a proxy. At a random moment around the end of its lease, its connection has
a fault: the reply or the request of its verdict is cut, the idle connection is cut or frozen, perhaps with unread
replies before that, or replies come late. Meanwhile a rival, a bare socket that sends raw commands, takes the job as
soon as it is ready, and then acks, buries, delays, releases or keeps the job.

The verdicts are judged by the replies to the rival, and what the server reports in the end, by code that the driver
does not use.

- *stale*: a verdict was accepted although the rival had the job before, or the job is not as the verdict leaves it.
- *false*: a verdict was refused although its connection was intact and the answer came before the lease's end. That a
  cut connection ends its leases is a documented property of the backend.

Exits with 1 if a verdict was stale or false, and prints why.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from multiq.backend import Ack, Bury, Release, Touch
from multiq.backend.registry import open_backend
from multiq.errors import BackendError

sys.path.append(str(Path(__file__).parent.parent))

from proxy import CutReply, CutRequest, Latency, Pass, Proxy
from servers.beanstalk import BeanstalkServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiq.backend import Lease, Verdict
    from multiq.errors import LeaseLost

TTR = 3  # seconds: the shortest possible ttr
TUBE = "lost"
WORKERS = 25  # rounds at the same time, each with a consumer and a proxy of its own
FAULTS = ("whole", "reply", "request", "cut", "unread", "frozen", "late")
DEEDS = (b"delete", b"bury", b"delay", b"release", b"keep")
VERDICTS: dict[str, Callable[[Lease], Verdict]] = {
    "ack": Ack,
    "release": lambda lease: Release(lease, delay=60),
    "bury": Bury,
    "touch": Touch,
}


class Rival:
    """A bare socket that takes the job of one tube, carries out *deed* on the job, and records the time of each
    reply."""

    def __init__(self, address: tuple[str, int], tube: str, deed: bytes) -> None:
        self.taken_at: float | None = None
        self.done_at: float | None = None
        self._deed = deed
        self._socket = socket.create_connection(address)
        self._replies = self._socket.makefile("rb")
        self._say(b"watch " + tube.encode())
        self._say(b"ignore default")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop waiting for the job. If the rival has the job, it keeps the job until ``close``."""
        with contextlib.suppress(OSError):
            if self.taken_at is None:
                self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def close(self) -> None:
        self._replies.close()
        self._socket.close()

    def _say(self, words: bytes) -> bytes:
        self._socket.sendall(words + b"\r\n")
        return self._replies.readline()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            line = self._say(b"reserve-with-timeout 8")
            if not line.startswith(b"RESERVED "):
                return
            _, number, size = line.split()
            self._replies.read(int(size) + 2)
            self.taken_at = time.monotonic()
            words = {
                b"delete": b"delete %b",
                b"bury": b"bury %b 7",
                b"delay": b"release %b 7 1000",
                b"release": b"release %b 7 0",
                b"keep": b"touch %b",
            }[self._deed] % number
            if self._say(words) in {b"DELETED\r\n", b"BURIED\r\n", b"RELEASED\r\n", b"TOUCHED\r\n"}:
                self.done_at = time.monotonic()


class Outcome(NamedTuple):
    """What the script knows about one round."""

    fault: str
    what: str
    deed: bytes
    moment: float
    """Seconds after the reserve at which the verdict was given."""
    accepted: bool
    said_at: float
    heard_at: float
    begun_at: float
    taken_at: float | None
    state: str | None
    """The job's state in the end, as the server reports it; None: the job is gone."""

    @property
    def is_stale(self) -> bool:
        """Whether the verdict was accepted although the rival had the job before, or without its effect on the job."""
        if not self.accepted:
            return False
        if self.what == "touch":
            return self.taken_at is not None and self.taken_at < self.said_at
        left = {"ack": None, "release": "delayed", "bury": "buried"}[self.what]
        return self.taken_at is not None or self.state != left

    @property
    def is_false(self) -> bool:
        """Whether the verdict was refused on an intact connection, although the answer came before the lease's end."""
        return not self.accepted and self.fault in {"whole", "late"} and self.heard_at < self.begun_at + TTR - 0.02


def play(server: BeanstalkServer, number: int, seed: int) -> Outcome:
    """Play one round."""
    luck = random.Random(seed * 1_000_003 + number)
    tube, short_tube = f"{TUBE}-{number}", f"{TUBE}-{number}-short"
    fault, what, deed = FAULTS[number % len(FAULTS)], luck.choice(list(VERDICTS)), luck.choice(DEEDS)
    moment = luck.choice([luck.uniform(0.1, 0.6), luck.uniform(TTR - 1.3, TTR + 0.4)])
    assert isinstance(server.address, tuple)
    with (
        Proxy(server.address) as proxy,
        server.client() as client,
        open_backend(f"beanstalk://127.0.0.1:{proxy.port}?timeout=2") as backend,
        backend.consumer([tube, short_tube]) as consumer,
    ):
        if fault == "unread":  # a lease that ends soon: the server announces its end, and that reply is not read
            client.put(b"short", tube=short_tube, ttr=TTR)
            assert len(consumer.reserve(1, 0)) == 1
            time.sleep(TTR - 0.4)
            moment = max(moment, 0.6)
        job_id = client.put(b"x", tube=tube, ttr=TTR)
        begun_at = time.monotonic()
        (lease,) = consumer.reserve(1, 0)
        rival = Rival(server.address, tube, deed)
        if fault in {"cut", "unread", "frozen"}:
            sleep_until(begun_at + moment - luck.choice([0, 0.001, 0.03, 0.3]))
            if fault == "frozen":
                proxy.freeze()
                if luck.random() < 0.7:
                    proxy.cut_server()
            else:
                proxy.cut(rst=fault == "cut" and luck.random() < 0.5)
        sleep_until(begun_at + moment)
        if fault in {"reply", "request"}:
            word = {"ack": b"delete"}.get(what, what.encode())
            kind = CutReply if fault == "reply" else CutRequest
            proxy.arm(kind(at=luck.randrange(4), after=word, rst=luck.random() < 0.5))
        elif fault == "late":
            proxy.mode = Latency(luck.uniform(0.0, 1.2))
        said_at = time.monotonic()
        (answer,) = insist(consumer.settle, [VERDICTS[what](lease)])
        heard_at = time.monotonic()
        proxy.mode = Pass()
        time.sleep(luck.uniform(0.05, 0.3))
        rival.stop()
        state = client.stats("job", str(job_id)).get("state")
        rival.close()
        client.ask(b"delete %d" % job_id)
    return Outcome(fault, what, deed, moment, answer is None, said_at, heard_at, begun_at, rival.taken_at, state)


def sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def insist(
    settle: Callable[[list[Verdict]], list[LeaseLost | None]], verdicts: list[Verdict]
) -> list[LeaseLost | None]:
    """Settle, and repeat a call that failed, as a worker does."""
    for _ in range(50):
        try:
            return settle(verdicts)
        except BackendError:
            time.sleep(0.05)
    raise AssertionError("a verdict got no answer")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=20261122)
    given = parser.parse_args()
    with BeanstalkServer() as server, ThreadPoolExecutor(WORKERS) as pool:
        outcomes = list(pool.map(lambda number: play(server, number, given.seed), range(given.rounds)))
    stale = [one for one in outcomes if one.is_stale]
    false = [one for one in outcomes if one.is_false]
    taken = sum(one.taken_at is not None for one in outcomes)
    print(f"{len(outcomes)} rounds, in {taken} of which the rival had the job; {len(stale)} stale, {len(false)} false")
    for fault in FAULTS:
        accepted = Counter(one.accepted for one in outcomes if one.fault == fault)
        print(f"{fault:8} {accepted[True]:4} accepted, {accepted[False]:4} refused")
    for one in [*stale, *false][:10]:
        print(one)
    return 1 if stale or false or not taken else 0


if __name__ == "__main__":
    sys.exit(main())
