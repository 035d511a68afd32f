"""Random calls with unique keys and limits: SQLite answers as the memory backend does, and no job is left behind."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from multiq.backend import (
    Abandon,
    Ack,
    Arrive,
    Bury,
    Gate,
    GiveBack,
    NewJob,
    Quota,
    Release,
    State,
    Terms,
    Touch,
    UniqueKey,
)
from multiq.backend.memory import MemoryBackend
from multiq.driverkit.clock import ManualClock
from multiq.errors import MultiqError
from multiq_sqlite.backend import SqliteBackend

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable
    from pathlib import Path

    from multiq.backend import Backend, Lease

LIMITS = ("a", "b", "c")
QUOTAS = [None, *(Quota(slots=slots) for slots in range(4)), Quota(rate=1), Quota(rate=1, per=4, burst=3)]
FAIR = [Quota(fair=True), Quota(slots=1, fair=True), Quota(fair=True, rate=1)]
STEPS = 120


class Walk:
    """One random walk, on two backends with one clock. *is_exact*: whether all answers must be the same.

    The order of fair limits is not the same on all backends.
    """

    def __init__(self, path: str, seed: int, *, is_exact: bool) -> None:
        self.random = random.Random(seed)
        self.clock = ManualClock()
        self.backends: list[Backend] = [
            MemoryBackend(clock=self.clock),
            SqliteBackend(path, synchronous="normal", clock=self.clock),
        ]
        self.consumers = [backend.consumer(["q"]) for backend in self.backends]
        self.is_exact = is_exact
        self.quotas = QUOTAS if is_exact else [*QUOTAS, *FAIR]
        self.held: dict[str, list[Lease | None]] = {}
        self.ids: list[str] = []
        self.log: list[object] = []

    def both(self, what: object, call: Callable[[int], Any]) -> list[Any]:
        answers = []
        for number in (0, 1):
            try:
                answers.append(call(number))
            except MultiqError as exc:
                answers.append(type(exc).__name__)
        self.log.append((what, answers[0]))
        if self.is_exact:
            assert answers[0] == answers[1], self.log[-20:]
        return answers

    def step(self) -> None:
        steps = [self.enqueue] * 5 + [self.reserve] * 4 + [self.settle] * 8 + [self.advance, self.limit, self.manage]
        self.random.choice(steps)()
        self.both("stats", lambda at: self.backends[at].stats("q"))
        self.both("limits", lambda at: [(one.name, one.running) for one in self.backends[at].limits("q")])
        self.both("ready", lambda at: sorted(job.id for job in self.backends[at].jobs("q", State.READY).jobs))

    def enqueue(self) -> None:
        choose = self.random.choice
        gates = {Gate(choose(LIMITS), choose(["", "x", "y"])) for _ in range(choose([0, 1, 1, 2, 3]))}
        key = None
        if self.random.random() < 0.2:
            key = UniqueKey(choose([b"1", b"2"]), choose(["gone", "buried", "reserved"]), choose(["keep", "replace"]))
        terms = Terms(int(self.random.random() < 0.1), key, tuple(sorted(gates)))
        number = len(self.ids)
        job = NewJob(
            b"%d" % number, f"j{number:03}", choose([5, 5, 1, 9]), choose([0, 0, 0, 1, 3]), choose([2, 5, 50]), terms
        )
        self.ids.append(job.id)
        self.both(job, lambda at: self.backends[at].enqueue("q", [job]))

    def reserve(self) -> None:
        limit, most = self.random.choice([1, 2, 5, 20]), self.random.choice([None, None, 0, 1, 3])

        def reserve(at: int) -> list[Any]:
            self.consumers[at].most_gated = most
            leases = self.consumers[at].reserve(limit, 0)
            for lease in leases:
                self.held.setdefault(lease.id, [None, None])[at] = lease
            return [(lease.id, lease.attempt, lease.crashes, lease.body, lease.priority) for lease in leases]

        self.both(("reserve", limit, most), reserve)

    def settle(self) -> None:
        held = [job_id for job_id, leases in self.held.items() if None not in leases]
        chosen = self.random.sample(held, min(len(held), self.random.choice([1, 1, 3])))
        delay, priority = self.random.choice([0, 0, 2]), self.random.choice([None, 1, 9])
        verdicts: list[Callable[[Any], Any]] = [
            Ack, Ack, Ack, Bury, Abandon, Touch, lambda lease: Release(lease, delay=delay, priority=priority),
            lambda lease: GiveBack(lease, delay=delay),
        ]  # fmt: skip
        verdict = self.random.choice(verdicts)

        def settle(at: int) -> list[bool]:
            answers = self.consumers[at].settle([verdict(self.held[job_id][at]) for job_id in chosen])
            return [answer is None for answer in answers]

        if chosen:
            self.both((verdict, chosen), settle)
        for job_id in chosen if verdict is not Touch else ():
            del self.held[job_id]

    def advance(self) -> None:
        self.clock.advance(self.random.choice([0.3, 1, 2, 6]))

    def limit(self) -> None:
        change = {self.random.choice(LIMITS): self.random.choice(self.quotas)}
        self.both(change, lambda at: [(one.name, one.quota) for one in self.backends[at].limits("q", change)])

    def manage(self) -> None:
        job_id = self.random.choice([*self.ids, "none"])
        delay = self.random.choice([0, 2])
        state = self.random.choice([State.READY, State.BURIED, State.DELAYED])
        calls: list[Callable[[Any], Any]] = [
            lambda backend: backend.kick("q", 1), lambda backend: backend.delete("q", job_id),
            lambda backend: backend.reschedule("q", job_id, delay), lambda backend: backend.kick_job("q", job_id),
            lambda backend: backend.carry_out([Arrive("q", job_id, "member")]), lambda backend: backend.pause("q", 1),
            lambda backend: backend.resume("q"), lambda backend: backend.purge("q", [state]),
        ]  # fmt: skip
        at = self.random.randrange(len(calls))
        self.both((at, job_id, delay, state), lambda number: calls[at](self.backends[number]))

    def drain(self) -> None:
        """Reserve and ack all jobs that are neither held nor buried."""
        for backend, consumer in zip(self.backends, self.consumers, strict=True):
            backend.resume("q")
            backend.limits("q", {one.name: None for one in backend.limits("q") if one.quota.slots == 0})
            consumer.most_gated = None
        for _ in range(400):
            self.clock.advance(1)
            for at in (0, 1):
                leases = self.consumers[at].reserve(3, 0)
                self.consumers[at].settle([Ack(lease) for lease in leases])
            left = [backend.stats("q") for backend in self.backends]
            if not any(one.ready or one.reserved or one.delayed for one in left):
                return
        pytest.fail(f"jobs are left: {left}, after {self.log[-20:]}")


@pytest.mark.one_row
@pytest.mark.parametrize("is_exact", [True, False], ids=["exact", "fair"])
@pytest.mark.parametrize(
    "seeds",
    [
        range(10),
        pytest.param(range(10, 40), marks=pytest.mark.long),
        pytest.param(range(40, 120), marks=pytest.mark.exhaustive),
    ],
    ids=["few", "some", "many"],
)
def test_random_calls_have_the_answers_of_memory_and_leave_no_job_behind(
    tmp_path: Path, connect: Callable[..., sqlite3.Connection], seeds: range, is_exact: bool
) -> None:
    for seed in seeds:
        path = tmp_path / f"{seed}.db"
        walk = Walk(str(path), seed, is_exact=is_exact)
        for _ in range(STEPS):
            walk.step()
        walk.drain()
        # Then no row says that a job waits or holds a slot
        for condition in ("priority IS NOT NULL", "token IS NOT NULL", "seq NOT IN (SELECT seq FROM multiq_jobs)"):
            query = f"SELECT count(*) FROM multiq_gates WHERE {condition}"  # noqa: S608 - of this page
            assert connect(path).execute(query).fetchone() == (0,)
        assert connect(path).execute("SELECT count(*) FROM multiq_turns").fetchone() == (0,)
        for consumer in walk.consumers:
            consumer.close()
        for backend in walk.backends:
            backend.close()
