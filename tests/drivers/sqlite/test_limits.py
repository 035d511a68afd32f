"""Limits in the file: what they cost jobs without limits, what is stored, and what other programs and kills leave
behind."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import time
from typing import TYPE_CHECKING, TypeAlias

import pytest

from multiq.backend import Ack, Bury, Consumer, Gate, GiveBack, NewJob, Quota, Release, State, Terms
from multiq.driverkit.clock import ManualClock
from multiq.ids import new_id, new_ids
from multiq_sqlite.backend import SqliteBackend

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    MachineSteps: TypeAlias = Callable[[Consumer], AbstractContextManager[list[int]]]
    SqliteTexts: TypeAlias = Callable[[Consumer], AbstractContextManager[list[str]]]
    Connect: TypeAlias = Callable[..., sqlite3.Connection]

API = Gate("api")


@pytest.fixture
def consumer(backend: SqliteBackend) -> Consumer:
    return backend.consumer(["q"])


def add(backend: SqliteBackend, count: int, *gates: Gate, queue: str = "q", **options: float) -> list[str]:
    terms = Terms(gates=gates) if gates else None
    ids: list[str] = []
    for first in range(0, count, 1000):
        names = new_ids(min(1000, count - first))
        jobs = [NewJob(b"x", name, terms=terms, **options) for name in names]  # type: ignore[arg-type]
        ids += backend.enqueue(queue, jobs)
    return ids


def work(backend: SqliteBackend, consumer: Consumer, clock: ManualClock) -> None:
    """Run the calls of a worker, with jobs without gates."""
    backend.enqueue("q", [NewJob(b"", str(number)) for number in range(8)])
    backend.enqueue("q", [NewJob(b"", "delayed", delay=1), NewJob(b"y" * 9000, "large")])
    consumer.settle([Bury(lease) for lease in consumer.reserve(1, 0)])
    one, two, three, four = consumer.reserve(4, 0)
    consumer.exchange([Ack(one), Release(two), Bury(three), GiveBack(four)], 2, 0)
    clock.advance(1)
    consumer.settle([Ack(lease) for lease in consumer.reserve(20, 0)])
    assert consumer.reserve(10, 0) == []


def test_a_wait_that_has_parked_a_job_ends_when_the_gate_opens(
    backend: SqliteBackend, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a rate whose next turn is in half a second, and a job that no reserve has looked at yet
    backend.limits("q", {"api": Quota(rate=2)})
    add(backend, 1, API)
    (lease,) = consumer.reserve(1, 0)
    consumer.settle([Ack(lease)])
    add(backend, 1, API)
    sleeps: list[float] = []

    def sleep(_waiter: object, _seen: object, _shortest: float, left: Callable[[], float]) -> None:
        sleeps.append(left())
        time.sleep(0.01)

    monkeypatch.setattr("multiq_sqlite.waiting.Waiter.sleep", sleep)
    # When the consumer parks the job and waits, then its wait ends at this turn
    assert len(consumer.reserve(1, 5)) == 1
    assert sleeps
    assert sleeps[0] <= 0.5


# --- what it costs others --------------------------------------------------------------------------------


def test_limits_add_nothing_to_the_cost_of_other_queues(
    tmp_path: Path, machine_steps: MachineSteps, statements: list[str]
) -> None:
    counts: list[list[int]] = []
    names: list[list[str]] = []
    for parked in (0, 500):
        clock = ManualClock()
        with (
            SqliteBackend(str(tmp_path / f"{parked}.db"), synchronous="normal", clock=clock) as backend,
            backend.consumer(["q"]) as consumer,
        ):
            if parked:
                backend.limits("other", {"api": Quota(slots=0)})
                add(backend, parked, API, queue="other")
            statements.clear()
            # When a worker takes jobs of a queue without limits
            with machine_steps(consumer) as counted:
                work(backend, consumer, clock)
            counts.append(counted)
            names.append(list(statements))
    # Then SQLite runs the same statements, in as many steps, as without limits in the file
    assert names[0] == names[1]
    assert not {"place", "quotas", "gates"} & set(names[0])
    assert counts[0] == counts[1]
    assert counts[0][0] > 100


def test_jobs_without_gates_run_the_same_statements_beside_parked_jobs(
    tmp_path: Path, machine_steps: MachineSteps, sqlite_texts: SqliteTexts
) -> None:
    steps: list[int] = []
    texts: list[list[str]] = []
    for parked in (0, 10):
        with (
            SqliteBackend(str(tmp_path / f"{parked}.db"), synchronous="normal") as backend,
            backend.consumer(["q"]) as consumer,
        ):
            if parked:
                backend.limits("q", {"api": Quota(slots=0, rate=1)})
                add(backend, parked, API)
                assert consumer.reserve(10, 0) == []
            add(backend, 30)
            # When a worker takes jobs without gates, and none of the gates can open now
            with machine_steps(consumer) as counted, sqlite_texts(consumer) as ran:
                for _ in range(5):
                    consumer.settle([Ack(lease) for lease in consumer.reserve(1, 0)])
                leases = consumer.reserve(5, 0)
                _, leases = consumer.exchange([Ack(lease) for lease in leases], 5, 0)
                consumer.settle([Ack(lease) for lease in leases])
            steps += counted
            texts.append(ran)
            assert backend.stats("q").ready == parked + 15
    # Then SQLite runs the same statements as in a queue without limits, and takes at most a tenth more steps
    assert texts[0] == texts[1]
    assert len(texts[0]) > 20
    assert steps[1] < 1.1 * steps[0]


@pytest.mark.parametrize("most", [2000, pytest.param(100_000, marks=pytest.mark.long)])
def test_the_number_of_parked_jobs_costs_other_jobs_of_the_queue_nothing(
    tmp_path: Path, machine_steps: MachineSteps, most: int
) -> None:
    counts: list[list[int]] = []
    for parked in (1, most):
        clock = ManualClock()
        with (
            SqliteBackend(str(tmp_path / f"{parked}.db"), synchronous="normal", clock=clock) as backend,
            backend.consumer(["q"]) as consumer,
        ):
            backend.limits("q", {"api": Quota(slots=0)})
            add(backend, parked, API)
            assert consumer.reserve(10, 0) == []
            with machine_steps(consumer) as counted:
                work(backend, consumer, clock)
            counts.append(counted)
            assert backend.limits("q")[0].parked == parked
    # Then jobs without gates take as many steps behind many parked jobs as behind one
    assert counts[0] == counts[1]


def test_a_job_that_is_freed_costs_the_same_behind_any_number_of_parked_jobs(
    tmp_path: Path, machine_steps: MachineSteps
) -> None:
    counts: list[list[int]] = []
    for parked in (10, 1000):
        with (
            SqliteBackend(str(tmp_path / f"{parked}.db"), synchronous="normal") as backend,
            backend.consumer(["q"]) as consumer,
        ):
            backend.limits("q", {"api": Quota(slots=1)})
            add(backend, parked, API)
            (lease,) = consumer.reserve(5, 0)
            with machine_steps(consumer) as counted:
                for _ in range(5):
                    _, (lease,) = consumer.exchange([Ack(lease)], 5, 0)
            counts.append(counted)
    assert counts[1][0] < 1.05 * counts[0][0]


def test_a_consumer_that_waits_beside_parked_jobs_does_not_write(
    backend: SqliteBackend, consumer: Consumer, statements: list[str]
) -> None:
    backend.limits("q", {"api": Quota(slots=0)})
    add(backend, 100, API)
    assert consumer.reserve(10, 0) == []
    statements.clear()
    assert consumer.reserve(10, 1.5) == []
    assert statements == []


# --- what is stored --------------------------------------------------------------------------------------


def rows(sqlite: sqlite3.Connection, *tables: str) -> dict[str, int]:
    return {
        table: sqlite.execute(f"SELECT count(*) FROM multiq_{table}").fetchone()[0]  # noqa: S608 - of this page
        for table in tables or ("gates", "turns", "bodies", "queues")
    }


@pytest.mark.parametrize("how", ["ack", "delete", "delete_many", "purge", "purge buried", "ack after lease end"])
def test_nothing_is_left_of_jobs_that_are_gone(tmp_path: Path, connect: Connect, how: str) -> None:
    clock = ManualClock()
    with SqliteBackend(str(tmp_path / "jobs.db"), clock=clock) as backend, backend.consumer(["q"]) as consumer:
        backend.limits("q", {"api": Quota(slots=2, rate=1000, burst=100), "tenant": Quota(fair=True)})
        ids = add(backend, 6, API, Gate("tenant", "a"), ttr=5)
        if how == "ack":
            while leases := consumer.reserve(10, 0):
                consumer.settle([Ack(lease) for lease in leases])
        elif how == "ack after lease end":
            consumer.reserve(10, 0)
            clock.advance(6)
            while leases := consumer.reserve(10, 0):
                consumer.settle([Ack(lease) for lease in leases])
        elif how == "delete":
            for job_id in ids:
                backend.delete("q", job_id)
        elif how == "delete_many":
            assert backend.delete_many("q", ids) == [None] * 6
        else:
            if how == "purge buried":
                while leases := consumer.reserve(10, 0):
                    consumer.settle([Bury(lease) for lease in leases])
            state = State.BURIED if how == "purge buried" else State.READY
            assert backend.purge("q", [state]) == 6
        backend.limits("q", {"api": None, "tenant": None})
        assert rows(connect(), "gates", "turns", "bodies", "queues", "limits", "jobs") == dict.fromkeys(
            ("gates", "turns", "bodies", "queues", "limits", "jobs"), 0
        )


def test_past_rates_do_not_accumulate(tmp_path: Path, connect: Connect) -> None:
    clock = ManualClock()
    with SqliteBackend(str(tmp_path / "jobs.db"), clock=clock) as backend, backend.consumer(["q"]) as consumer:
        backend.limits("q", {"api": Quota(rate=1)})
        for number in range(200):
            add(backend, 1, Gate("api", str(number)))
            consumer.settle([Ack(lease) for lease in consumer.reserve(1, 0)])
            clock.advance(0.5)
        assert rows(connect(), "rates")["rates"] < 10


# --- many keys -------------------------------------------------------------------------------------------

KEYS = 1_000


def given_many_keys(backend: SqliteBackend, consumer: Consumer) -> None:
    """Park one job of each of many keys."""
    backend.limits("q", {"api": Quota(slots=0)})
    jobs = [NewJob(b"x", new_id(), terms=Terms(gates=(Gate("api", str(key)),))) for key in range(KEYS)]
    backend.enqueue("q", jobs)
    assert consumer.reserve(10, 0) == []


@pytest.mark.one_row
@pytest.mark.parametrize("fair", [False, True])
def test_others_can_write_while_a_limit_of_many_keys_changes(
    backend: SqliteBackend, consumer: Consumer, monkeypatch: pytest.MonkeyPatch, fair: bool
) -> None:
    given_many_keys(backend, consumer)
    enqueued: list[str] = []
    # When the limit changes, then another job can be enqueued after each few hundred keys
    monkeypatch.setattr(time, "sleep", lambda _: enqueued.extend(add(backend, 1, queue="other")))
    backend.limits("q", {"api": Quota(slots=1, fair=fair)})
    assert len(enqueued) >= KEYS // 500
    # And the same is true while a reserve finds that all these gates are closed again
    backend.limits("q", {"api": Quota(slots=0, fair=fair)})
    enqueued.clear()
    assert consumer.reserve(1, 0) == []
    assert len(enqueued) >= KEYS // 500


def test_others_can_write_while_a_reserve_finds_that_many_jobs_of_a_line_have_another_closed_gate(
    backend: SqliteBackend, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.limits("q", {"api": Quota(slots=0), "smtp": Quota(slots=0)})
    add(backend, KEYS, API, Gate("smtp"))
    assert consumer.reserve(1, 0) == []
    # Given jobs that wait at the first of two gates
    backend.limits("q", {"api": Quota(slots=1)})
    enqueued: list[str] = []
    monkeypatch.setattr(time, "sleep", lambda _: enqueued.extend(add(backend, 1, queue="other")))
    # When a reserve finds their second gate closed, then another job can be enqueued after each few hundred jobs
    assert consumer.reserve(10, 0) == []
    assert len(enqueued) >= KEYS // 500


@pytest.mark.one_row
@pytest.mark.parametrize("fair", [False, True])
def test_a_job_without_gates_does_not_wait_until_all_gates_of_a_changed_limit_were_looked_at(
    backend: SqliteBackend, consumer: Consumer, sqlite_texts: SqliteTexts, fair: bool
) -> None:
    given_many_keys(backend, consumer)
    plain = add(backend, 2)
    # Given a changed limit whose gates are all still closed
    backend.limits("q", {"api": Quota(slots=0, fair=fair)})
    # When a consumer asks for two jobs
    with sqlite_texts(consumer) as ran:
        assert [lease.id for lease in consumer.reserve(2, 0)] == plain
    # Then one transaction finds them, and looks at some hundred gates at most
    assert ran.count("BEGIN IMMEDIATE") == 1
    assert sum("multiq_gates_leases" in text for text in ran) <= 500
    # And later calls look at the other gates
    assert consumer.reserve(2, 0) == []
    with sqlite_texts(consumer) as ran:
        assert consumer.reserve(2, 0) == []
    assert sum("multiq_gates" in text for text in ran) == 0


@pytest.mark.one_row
@pytest.mark.parametrize("code", [None, Quota(slots=1), Quota(slots=2)])
def test_reserves_go_on_with_a_change_of_a_limit_that_was_cut_off(
    backend: SqliteBackend, consumer: Consumer, monkeypatch: pytest.MonkeyPatch, code: Quota | None
) -> None:
    given_many_keys(backend, consumer)

    def cut_off(_: float) -> None:
        raise KeyboardInterrupt

    # Given a program that ends while it changes a limit
    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", cut_off)
        with pytest.raises(KeyboardInterrupt):
            backend.limits("q", {"api": Quota(slots=1)})
    # And a worker that starts then, and whose code has this quota or another one
    if code is not None:
        backend.limits("q", {"api": code}, pinned=False)
    # Then all jobs are handed out
    found = 0
    while leases := consumer.reserve(KEYS, 0):
        found += len(leases)
    assert found == KEYS


def test_a_job_that_is_handed_out_while_the_rate_changes_counts_fully(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    with SqliteBackend(str(tmp_path / "jobs.db"), clock=clock) as backend, backend.consumer(["q"]) as consumer:
        # Given a rate that many keys have used
        backend.limits("q", {"api": Quota(rate=1, per=1000)})
        jobs = [NewJob(b"x", new_id(), terms=Terms(gates=(Gate("api", str(key)),))) for key in range(KEYS)]
        backend.enqueue("q", jobs)
        consumer.settle([Ack(lease) for lease in consumer.reserve(KEYS, 0)])
        taken: list[str] = []

        def take(_: float) -> None:
            if not taken:
                clock.advance(9)
                add(backend, 2, Gate("api", "z"))
                taken.extend(lease.id for lease in consumer.reserve(1, 0))

        # When a job of another key is handed out some time after the rate became faster, and before all keys were done
        monkeypatch.setattr(time, "sleep", take)
        backend.limits("q", {"api": Quota(rate=1, per=10)})
        assert len(taken) == 1
        # Then the next job of this key waits for the whole time
        clock.advance(5)
        assert consumer.reserve(1, 0) == []
        clock.advance(5)
        assert len(consumer.reserve(1, 0)) == 1


def test_a_worker_that_starts_with_the_stored_numbers_looks_at_no_gate(
    backend: SqliteBackend, consumer: Consumer, connect: Connect
) -> None:
    backend.limits("q", {"api": Quota(slots=0)}, pinned=False)
    add(backend, 3, API)
    assert consumer.reserve(10, 0) == []
    before = connect().execute("SELECT state FROM multiq_jobs").fetchall()
    backend.limits("q", {"api": Quota(slots=0)}, pinned=False)
    assert connect().execute("SELECT state FROM multiq_jobs").fetchall() == before


# --- other programs, and kills ---------------------------------------------------------------------------


def test_jobs_that_another_program_deletes_free_their_slots_and_lines(
    backend: SqliteBackend, consumer: Consumer, connect: Connect
) -> None:
    backend.limits("q", {"api": Quota(slots=1)})
    ids = add(backend, 4, API)
    (lease,) = consumer.reserve(5, 0)
    sqlite = connect(isolation_level=None)
    # When the running job and the next one are deleted
    sqlite.execute("DELETE FROM multiq_jobs WHERE id IN (?, ?)", ids[:2])
    # Then the others are handed out, at the latest when a limit is looked at again
    backend.limits("q", {"api": Quota(slots=1)})
    (lease,) = consumer.reserve(5, 0)
    assert lease.id == ids[2]
    consumer.settle([Ack(lease)])
    assert [lease.id for lease in consumer.reserve(5, 0)] == ids[3:]


_LOOP = """
import sys
from multiq.backend import Ack, Bury, Gate, NewJob, Quota, Release, Terms
from multiq.ids import new_id
from multiq_sqlite.backend import SqliteBackend

with SqliteBackend(sys.argv[1], synchronous="normal") as backend, backend.consumer(["q"]) as consumer:
    backend.limits("q", {"api": Quota(slots=3), "tenant": Quota(fair=True, slots=2)})
    print("begun", flush=True)
    number = 0
    while True:
        number += 1
        gates = (Gate("api"), Gate("tenant", str(number % 3)))
        backend.enqueue("q", [NewJob(b"x", new_id(), ttr=1, terms=Terms(gates=gates)) for _ in range(2)])
        leases = consumer.reserve(3, 0)
        consumer.settle([(Ack, Release, Bury)[(number + at) % 3](lease) for at, lease in enumerate(leases[:2])])
"""


@pytest.mark.parametrize(
    "kills", [3, pytest.param(15, marks=pytest.mark.long), pytest.param(60, marks=pytest.mark.exhaustive)]
)
def test_a_killed_process_leaves_no_slot_in_use(tmp_path: Path, kills: int) -> None:
    path = tmp_path / "jobs.db"
    for number in range(kills):
        # Given a limit with three slots, and a process that takes its jobs and is killed at some moment
        process = subprocess.Popen([sys.executable, "-c", _LOOP, str(path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        time.sleep(0.02 + number % 7 * 0.011)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        with SqliteBackend(str(path), synchronous="normal") as backend, backend.consumer(["q"]) as consumer:
            # Then as many slots are in use as jobs have a live lease
            api, _ = backend.limits("q")
            assert api.running <= (backend.stats("q").reserved or 0) <= 3
            # And all jobs are handed out when the leases have ended
            left = (backend.stats("q").ready or 0) + (backend.stats("q").reserved or 0)
            give_up_at = time.monotonic() + 60
            while left and time.monotonic() < give_up_at:
                leases = consumer.reserve(10, 1)
                assert len(leases) <= 3
                left -= len(leases)
                consumer.settle([Ack(lease) for lease in leases])
            assert left == 0
    sqlite = sqlite3.connect(path)
    assert sqlite.execute(
        "SELECT count(*) FROM multiq_gates JOIN multiq_jobs USING (seq) WHERE state <> 3"
    ).fetchone() == (0,)
    sqlite.close()


def test_a_job_does_not_take_over_the_gates_of_a_job_that_another_program_has_deleted(
    tmp_path: Path, backend: SqliteBackend, consumer: Consumer
) -> None:
    # Given a job with gates that a program without limits has deleted
    backend.limits("q", {"api": Quota(slots=1), "smtp": Quota(slots=0)})
    add(backend, 1, Gate("api"), Gate("smtp"))
    with sqlite3.connect(tmp_path / "jobs.db") as connection:
        connection.execute("DELETE FROM multiq_jobs")
    connection.close()
    # When SQLite gives its row number to a job with one of these gates
    (job_id,) = add(backend, 1, Gate("api"))
    # Then this job is handed out
    assert [lease.id for lease in consumer.reserve(1, 0)] == [job_id]


def test_an_id_that_is_enqueued_again_gets_no_other_gates(backend: SqliteBackend, consumer: Consumer) -> None:
    backend.limits("q", {"api": Quota(slots=0)})
    job_id = new_id()
    backend.enqueue("q", [NewJob(b"x", job_id)])
    assert backend.enqueue("q", [NewJob(b"y", job_id, terms=Terms(gates=(API,)))]) == [job_id]
    assert [lease.body for lease in consumer.reserve(1, 0)] == [b"x"]
