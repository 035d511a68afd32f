"""Replies that are lost around a lease's end: no stale verdict is accepted, and no verdict that was carried out is
refused.

    python tests/soak/mysql_stale.py --rounds 1000

In each round one consumer holds a job, whose lease ends. A rival, which uses SQL of its own, may take the job over and
end it, before or after the ack. The consumer acks the job, and its connection to the server is cut: before the call, in
the request, in the reply, with a reset, by KILL; once, or also at the next attempt; perhaps with other calls of the
same consumer in between. A trigger, which shares no code with the driver, records each row that is deleted and the
session that deleted it. Exits with 1 if an answer and this record disagree.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pymysql

from multiq.backend import Ack, NewJob, Touch
from multiq.backend.registry import open_backend
from multiq.errors import BackendError
from multiq.ids import new_id

sys.path.append(str(Path(__file__).parent.parent))

from proxy import CutReply, CutRequest, Fault, Proxy
from servers.mysql import MysqlServer

if TYPE_CHECKING:
    from pymysql.connections import Connection

    from multiq.backend import Backend, Consumer, Lease
    from multiq.errors import LeaseLost

TTR = 1.0  # seconds
AROUND = (0.75, 1.25)  # when the verdict is sent, in multiples of the ttr
TAKEN_OVER = 0.6  # the share of jobs that the rival ends as soon as their leases have ended
JUDGED = 50_000  # microseconds from when a row is locked and its lease found live until it is deleted, at most
GIVE_UP = 30.0  # seconds until a verdict must have an answer

#: records each deleted row, and whether the session that deleted it is the rival's, by a variable that the rival sets
TRIGGER = """
CREATE TRIGGER deleted AFTER DELETE ON multiq_jobs FOR EACH ROW
    INSERT INTO history VALUES (OLD.id, OLD.token, IF(@who = 'other', 'other', 'ours'),
        (CAST(OLD.place AS SIGNED) - TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))) * (OLD.state = 2))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--lanes", type=int, default=8, help="rounds at a time")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    given = parser.parse_args()
    print(f"seed {given.seed}")
    return run(given.rounds, given.lanes, given.seed)


def run(rounds: int, lanes: int, seed: int) -> int:
    """Play this number of rounds. Returns the exit code; 0: the answers agree with the table."""
    with MysqlServer(innodb_flush_log_at_trx_commit=2) as server, ThreadPoolExecutor(lanes) as pool:
        shares = [len(range(lane, rounds, lanes)) for lane in range(lanes)]
        sums = list(pool.map(lambda lane: Lane(server, seed + lane).run(shares[lane]), range(lanes)))
    total = sum(sums, Counter[str]())
    print(", ".join(f"{count:,} {what}" for what, count in sorted(total.items())))
    wrong = total["stale verdicts accepted"] + total["false LeaseLost"] + total["without an answer"]
    return 0 if not wrong and total["accepted"] and total["refused"] else 1


class Lane:
    """One consumer, its proxy and its database."""

    def __init__(self, server: MysqlServer, seed: int) -> None:
        self.server = server
        self.luck = random.Random(seed)
        self.sums: Counter[str] = Counter()
        self.proxy: Proxy
        self.backend: Backend
        self.consumer: Consumer
        self.other: Connection[Any]

    def run(self, rounds: int) -> Counter[str]:
        server = self.server
        with (
            server.database() as place,
            Proxy((server.host, server.port)) as self.proxy,
            open_backend(server.url(place.name, "timeout=5", port=self.proxy.port)) as self.backend,
            self.backend.consumer(["q"]) as self.consumer,
            server.client(place.name) as self.other,
        ):
            self.backend.stats("q")
            self.ask("CREATE TABLE history (id VARBINARY(255), token BIGINT UNSIGNED, who VARCHAR(9), left_ BIGINT)")
            self.ask(TRIGGER)
            self.ask("SET @who = 'other'")
            for _ in range(rounds):
                self.round()
        return self.sums

    def ask(self, text: str, *values: object) -> tuple[tuple[Any, ...], ...]:
        """The rows of one statement, on a connection that is not the driver's."""
        with self.other.cursor() as cursor:
            cursor.execute(text, values or None)
            return tuple(cursor.fetchall())

    def round(self) -> None:
        """Play the round of one job."""
        luck, job_id = self.luck, new_id()
        self.backend.enqueue("q", [NewJob(b"x", job_id, ttr=TTR), NewJob(b"x", new_id(), ttr=3600)])
        began = time.monotonic()
        leases = self._reserve()
        (lease,) = [lease for lease in leases if lease.id == job_id]
        held = [lease for lease in leases if lease.id != job_id]
        ends_at = began + TTR
        send_at = began + TTR * luck.uniform(*AROUND)
        if luck.random() < TAKEN_OVER:
            self._sleep_until(max(send_at, ends_at + 0.05) if luck.random() < 0.8 else send_at)
            self._take_over(job_id)
        else:
            self._sleep_until(send_at)
        answer = self._ack(lease, held)
        self.proxy.disarm()
        self._judge(lease, answer)
        for rest in held:
            self._settle([Ack(rest)])
        self.ask("DELETE FROM multiq_jobs")
        self.ask("DELETE FROM history")

    def _ack(self, lease: Lease, held: list[Lease]) -> LeaseLost | bool | None:
        """Ack until there is an answer, and return it; False: there was no answer in time."""
        self._cut()
        give_up_at = time.monotonic() + GIVE_UP
        tries = 0
        while time.monotonic() < give_up_at:
            tries += 1
            try:
                if self.luck.random() < 0.5:
                    return self.consumer.settle([Ack(lease)])[0]
                return self.consumer.exchange([Ack(lease)], 1, 0)[0][0]
            except BackendError:
                self.sums["calls without an answer"] += 1
                if tries > 3:
                    self.proxy.disarm()
                if held and self.luck.random() < 0.7:
                    self._settle([Touch(rest) for rest in held])
        return False

    def _settle(self, verdicts: list[Ack | Touch]) -> None:
        """Settle other verdicts between two attempts, as a heartbeat does."""
        try:
            self.consumer.settle(verdicts)
        except BackendError:
            self.sums["heartbeats without an answer"] += 1

    def _reserve(self) -> list[Lease]:
        leases: list[Lease] = []
        while len(leases) < 2:
            leases += self.consumer.reserve(2, 5)
        return leases

    def _cut(self) -> None:
        """Make one of the faults in which an answer is lost."""
        luck, proxy = self.luck, self.proxy
        way = luck.choice(["idle", "rst", "kill", "reply", "replies", "request", "commit"])
        self.sums["cut"] += 1
        if way in {"idle", "rst"}:
            proxy.cut(rst=way == "rst")
        elif way == "kill":
            here = "db = DATABASE() AND id <> CONNECTION_ID()"
            for (number,) in self.ask(f"SELECT id FROM information_schema.processlist WHERE {here}"):  # noqa: S608
                with contextlib.suppress(pymysql.MySQLError):  # the session may have ended already
                    self.ask(f"KILL {number}")
        else:
            faults: dict[str, Fault] = {
                "reply": CutReply(at=luck.randrange(12), rst=luck.random() < 0.5),
                "replies": CutReply(after=luck.choice([b"COMMIT", b"DELETE job"]), times=luck.choice([1, 2, 2, 3])),
                "request": CutRequest(at=luck.randrange(60)),
                "commit": luck.choice([CutRequest(after=b"COMMIT"), CutReply(after=b"DELETE job")]),
            }
            proxy.arm(faults[way])

    def _take_over(self, job_id: str) -> None:
        """What another consumer does once the lease has ended: set its own token, then delete; in this script's SQL."""
        packed = bytes.fromhex(job_id.replace("-", ""))
        self.ask(
            "UPDATE multiq_jobs SET token = 7, place = place + 60000000 WHERE id = %s AND state = 2 "
            "AND place <= TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))",
            packed,
        )
        self.ask("DELETE FROM multiq_jobs WHERE id = %s AND token = 7", packed)

    def _judge(self, lease: Lease, answer: LeaseLost | bool | None) -> None:
        token = int(lease.token.split(":")[1])
        packed = bytes.fromhex(lease.id.replace("-", ""))
        rows = self.ask("SELECT who, left_, token = %s FROM history WHERE id = %s", token, packed)
        counted = any(who == "ours" and left > -JUDGED and is_token for who, left, is_token in rows)
        if answer is None and not counted:
            print(f"accepted, though it deleted nothing in time: {lease.token}, {rows}")
        if answer is False:
            self.sums["without an answer"] += 1
        elif answer is None:
            self.sums["accepted" if counted else "stale verdicts accepted"] += 1
        else:
            self.sums["false LeaseLost" if counted else "refused"] += 1

    def _sleep_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - time.monotonic()))


if __name__ == "__main__":
    sys.exit(main())
