"""Lost replies and cut idle connections around a lease's end: no stale verdict is accepted, and no verdict that was
carried out is lost.

    python tests/soak/redis_lost_replies.py --cases 1000 --threads 16

Each case has a queue of its own with one job, a consumer behind a proxy, and another one without a proxy. The first
consumer holds the job and settles it at some moment around its lease's end. The proxy cuts its idle connection before
that, or cuts requests and replies at some byte, once or several times. The other consumer may have taken the job by
then, or acked it, or takes it between two repetitions; and the first consumer may make other calls in between.

After each attempt the job's state is read from the server over a separate socket, by a few lines of RESP that share no
code with the driver: whether the job is gone, buried, or held, and under which token. In the end the answer to the
verdict must agree with what was read. Exits with 1 and prints why if it does not.
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

sys.path.append(str(Path(__file__).parent.parent))

from proxy import CutReply, CutRequest, Proxy
from servers.process import HOST
from servers.redis import RedisServer

from multiq.backend import Ack, Bury, NewJob, Release, Touch, Verdict
from multiq.backend.registry import open_backend
from multiq.errors import BackendUnavailable, LeaseLost
from multiq.ids import new_id

if TYPE_CHECKING:
    from multiq.backend import Consumer, Lease

TTR = 1.0  # seconds: the shortest possible ttr
PATIENCE = 60.0  # seconds that one case may take, as a guard against a hang
HELD = "held by us"


class Raw:
    """A minimal client. Its only sources for the keys and the record's layout are docs/redis.md and record.lua."""

    def __init__(self, port: int) -> None:
        self._sock = socket.create_connection((HOST, port))
        self._file = self._sock.makefile("rb")

    def ask(self, *words: str | bytes) -> Any:
        out = b"*%d\r\n" % len(words)
        for word in words:
            data = word.encode() if isinstance(word, str) else word
            out += b"$%d\r\n%b\r\n" % (len(data), data)
        self._sock.sendall(out)
        return self._reply()

    def close(self) -> None:
        self._file.close()
        self._sock.close()

    def _reply(self) -> Any:
        line = self._file.readline()[:-2]
        kind, rest = line[:1], line[1:]
        if kind == b"-":
            raise RuntimeError(rest.decode())
        if kind == b":":
            return int(rest)
        if kind == b"$":
            return None if rest == b"-1" else self._file.read(int(rest) + 2)[:-2]
        if kind == b"*":
            return [self._reply() for _ in range(int(rest))]
        return rest

    def state(self, queue: str, job_id: str, token: str) -> str:
        """Where a job is: ``gone``, ``buried``, ``held by us``, ``held by another``, or ``ready``."""
        packed = bytes.fromhex(job_id.replace("-", ""))
        base = f"multiq:{{{queue}}}"
        record = self.ask("HGET", f"{base}:jobs", packed)
        if record is None:
            return "gone"
        place = record[:8] + record[16:20] + packed
        if self.ask("ZSCORE", f"{base}:buried", place) is not None:
            return "buried"
        if self.ask("ZSCORE", f"{base}:ready", place) is not None:
            return "ready"
        if record[41:53] == bytes.fromhex(token.partition(".")[0]):
            return HELD  # the job's lease may have ended: the job stays reserved until some call looks for ended leases
        return "held by another"


EFFECTS = {Ack: "gone", Bury: "buried", Release: "ready"}


class Case:
    """One job, one verdict, and the faults on its way to the server."""

    def __init__(self, server: RedisServer, seed: int) -> None:
        self.luck = random.Random(seed)
        self.seed = seed
        self.queue = f"case-{seed}"
        self.server = server
        self.story: list[str] = []

    def run(self) -> tuple[str, str | None]:
        """Play the case. Returns the kind of outcome, and the reason if it is wrong; None if it is right."""
        luck = self.luck
        raw = Raw(self.server.port)
        with (
            Proxy((HOST, self.server.port)) as proxy,
            open_backend(self.server.url) as beside,
            open_backend(f"redis://{HOST}:{proxy.port}?timeout=2") as through,
            through.consumer([self.queue, f"{self.queue}-2"]) as ours,
            beside.consumer([self.queue]) as other,
        ):
            job_id = new_id()
            beside.enqueue(self.queue, [NewJob(b"x" * luck.choice([1, 3000]), job_id, ttr=TTR)])
            beside.enqueue(f"{self.queue}-2", [NewJob(b"y", new_id(), ttr=600)])
            leases = ours.reserve(2, 0)
            started = time.monotonic()
            (lease,) = [one for one in leases if one.id == job_id]
            second = next((one for one in leases if one.id != job_id), None)
            verdict = luck.choice([Ack, Ack, Ack, Bury, Release])(lease)
            time.sleep(max(0.0, started + TTR * luck.choice([0.1, 0.5, 0.97, 1.0, 1.03, 1.3]) - time.monotonic()))
            taken_before = self._rival(other, raw, lease) if luck.random() < 0.5 else False
            self._break(proxy)
            try:
                answer, took_effect = self._settle(
                    ours, other, raw, verdict, second, proxy=proxy, is_taken=taken_before
                )
            finally:
                raw.close()
        what = f"{type(verdict).__name__} {'accepted' if answer is None else 'refused'}"
        if (answer is None) == took_effect:
            return what, None
        wrong = "a stale verdict was accepted" if answer is None else "LeaseLost for a verdict that counted"
        return what, f"case {self.seed}: {wrong}: {'; '.join(self.story)}"

    def _settle(
        self,
        ours: Consumer,
        other: Consumer,
        raw: Raw,
        verdict: Verdict,
        second: Lease | None,
        *,
        proxy: Proxy,
        is_taken: bool,
    ) -> tuple[object, bool]:
        lease, luck = verdict.lease, self.luck
        took_effect = False
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            answers: list[LeaseLost | None] = []
            with contextlib.suppress(BackendUnavailable):
                answers = ours.settle([verdict])
            # no other client has made a call since the last look, so that a change is the effect of our verdict
            state = raw.state(self.queue, lease.id, lease.token)
            self.story.append(f"{type(verdict).__name__} -> {answers or 'no answer'}, {state}")
            if not is_taken and not took_effect and state == EFFECTS[type(verdict)]:
                took_effect = True
            if answers:
                return answers[0], took_effect
            if luck.random() < 0.5:
                proxy.disarm()
            for _ in range(luck.randrange(3)):
                self._call(ours, second)
                state = raw.state(self.queue, lease.id, lease.token)
                # a verdict that is still on its way may be carried out together with another call
                if not is_taken and not took_effect and state == EFFECTS[type(verdict)]:
                    took_effect = True
                    self.story.append("counted along with another call")
            if luck.random() < 0.5:
                time.sleep(luck.choice([0.05, 0.3, TTR]))
            if not took_effect and luck.random() < 0.4:
                is_taken = self._rival(other, raw, lease) or is_taken
        raise AssertionError(f"case {self.seed}: no answer within {PATIENCE:g} s: {self.story}")

    def _rival(self, other: Consumer, raw: Raw, lease: Lease) -> bool:
        """The other consumer reserves, and may settle the job. Returns whether it got the job."""
        found = other.reserve(1, 0)
        if not found:
            # this reserve has made the job of an ended lease ready, after it had found no ready job
            return raw.state(self.queue, lease.id, lease.token) == "ready"
        does = self.luck.choice([Ack, Bury, None])
        if does is not None:
            assert other.settle([does(found[0])]) == [None]
        self.story.append(f"another one took it, and then {does.__name__ if does else 'kept it'}")
        return True

    def _call(self, ours: Consumer, second: Lease | None) -> None:
        """Make another call of the same consumer, as a heartbeat or a worker with free room does."""
        try:
            if second is not None and self.luck.random() < 0.6:
                ours.settle([Touch(second)])
                self.story.append("touched another")
            else:
                ours.settle([])
                self.story.append("settled nothing")
        except BackendUnavailable:
            self.story.append("another call failed")

    def _break(self, proxy: Proxy) -> None:
        luck = self.luck
        kind = luck.choice(["idle", "idle", "reply", "reply", "reply", "request", "none"])
        self.story.append(f"fault: {kind}")
        if kind == "idle":
            proxy.cut(rst=luck.random() < 0.5)
            if luck.random() < 0.5:
                kind = "reply"
        times = luck.choice([1, 2, 3, 4, 6])
        if kind == "reply":
            proxy.arm(CutReply(at=luck.choice([0, 0, 1, 20]), after=b"EVALSHA", times=times, rst=luck.random() < 0.5))
        if kind == "request":
            proxy.arm(CutRequest(at=luck.choice([0, 10, 100]), after=b"EVALSHA", times=times))


def soak(cases: int, threads: int, seed: int) -> int:
    """Play the cases. Returns the number of wrong answers."""
    kinds: Counter[str] = Counter()
    wrong: list[str] = []
    numbers = iter(range(seed, seed + cases))
    lock = threading.Lock()

    def work(server: RedisServer) -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            try:
                what, why = Case(server, number).run()
            except Exception as exc:  # a case that raises counts as wrong
                what, why = "broken", f"case {number}: {exc!r}"
            with lock:
                kinds[what] += 1
                if why is not None:
                    wrong.append(why)

    with RedisServer() as server:
        workers = [threading.Thread(target=work, args=(server,)) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    for why in wrong:
        print(why)
    print(
        f"{cases} cases, {len(wrong)} of them wrong: " + ", ".join(f"{n} {what}" for what, n in sorted(kinds.items()))
    )
    return len(wrong)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    sys.exit(1 if soak(given.cases, given.threads, given.seed) else 0)
