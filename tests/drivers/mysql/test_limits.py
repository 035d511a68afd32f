"""Limits on MySQL: their cost for other jobs, the rows that they leave, kills, and verdicts of older programs."""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pymysql
import pytest
from processes import until

from multiq.backend import Abandon, Ack, Bury, Gate, GiveBack, NewJob, Quota, Release, State, Terms, Touch
from multiq.backend.registry import open_backend
from multiq.driverkit.call_retry import repetitions
from multiq.errors import BackendUnavailable, EnqueueUncertain, LeaseLost, MultiqError
from multiq.ids import new_id, new_ids
from multiq_mysql import fair_search, gated_claim, parking_time, waiting
from multiq_mysql.connection import Session
from multiq_mysql.consumer import _GatedClaim
from multiq_mysql.fair_search import FairSearch
from multiq_mysql.session_settings import SESSION_SETTINGS
from multiq_mysql.statements import NOW, render
from multiq_mysql.waiting import ClaimTurns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from servers.mysql import MysqlDatabases, Place

    from multiq.backend import Backend, Lease
    from multiq_mysql.backend import MysqlBackend

QUEUE = "q"
API = Gate("api")
MOST = 100  # ready jobs of a soak


def add(backend: Backend, count: int, *gates: Gate, ttr: float = 60.0, **options: Any) -> list[str]:
    terms = Terms(gates=gates) if gates else None
    return backend.enqueue(QUEUE, [NewJob(b"x", name, ttr=ttr, terms=terms, **options) for name in new_ids(count)])


def count(server: MysqlDatabases, place: Place, table: str) -> int:
    ((number,),) = server.ask(f"SELECT COUNT(*) FROM multiq_{table}", database=place.name)  # noqa: S608 - of this page
    return int(number)


@pytest.fixture
def packets(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The statements of each packet that is sent."""
    sent: list[tuple[str, ...]] = []
    original = Session.execute

    def noted(self: Session, *texts: str) -> Any:
        sent.append(texts)
        return original(self, *texts)

    monkeypatch.setattr(Session, "execute", noted)
    return sent


# --- what it costs others --------------------------------------------------------------------------------


def work(backend: Backend) -> None:
    """Run the calls of a worker, with jobs without gates."""
    backend.enqueue(QUEUE, [NewJob(b"", str(number)) for number in range(8)])
    with backend.consumer([QUEUE]) as consumer:
        consumer.settle([Bury(lease) for lease in consumer.reserve(1, 0)])
        one, two, three, four = consumer.reserve(4, 0)
        consumer.exchange([Ack(one), Release(two), Bury(three), GiveBack(four)], 2, 0)
        consumer.settle([Ack(lease) for lease in consumer.reserve(20, 0)])
        assert consumer.reserve(10, 0) == []


def parked(server: MysqlDatabases, place: Place) -> int:
    ((number,),) = server.ask("SELECT COUNT(*) FROM multiq_jobs WHERE state = 6", database=place.name)
    return int(number)


def test_a_reserve_that_has_jobs_does_not_go_on_parking(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place
) -> None:
    # Given some jobs without gates before many jobs behind a closed gate
    backend.limits(QUEUE, {"api": Quota(slots=0)})
    first = add(backend, 5, priority=0)
    add(backend, 3000, API)
    # When they are reserved, then the call does not hold their leases while it parks all others
    with backend.consumer([QUEUE]) as consumer:
        assert [lease.id for lease in consumer.reserve(100, 0)] == first
        assert 0 < parked(mysql_server, place) < 3000


def test_a_reserve_ends_in_time_while_jobs_are_parked_and_the_next_one_goes_on(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a call that may look for jobs only for a moment, and many jobs behind a closed gate
    monkeypatch.setattr(parking_time, "LOOKING_TIME", 0.0)
    backend.limits(QUEUE, {"api": Quota(slots=0)})
    add(backend, 3000, API)
    (last,) = add(backend, 1)
    with backend.consumer([QUEUE]) as consumer:
        # When a call does not wait, then it ends with a part of the jobs parked, and tells that there may be due jobs
        assert (consumer.reserve(10, 0), consumer.sees_all) == ([], False)
        before = parked(mysql_server, place)
        assert 0 < before < 3000
        # And an interrupted one, too
        consumer.interrupt()
        assert (consumer.reserve(10, 60), consumer.sees_all) == ([], False)
        assert before < parked(mysql_server, place) < 3000
        # And a call that waits gets the job behind them
        (lease,) = consumer.reserve(10, 60)
        assert lease.id == last
        # And a call that has looked at all jobs tells so
        assert consumer.exchange([Ack(lease)], 10, 0) == ([None], [])
        assert consumer.sees_all


def test_reserves_that_find_nothing_do_not_begin_to_park_jobs_first_again(
    backend: MysqlBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given calls that end after one transaction, as they do if other consumers have locked the gates
    monkeypatch.setattr(parking_time, "LOOKING_TIME", 0.0)
    monkeypatch.setattr(parking_time, "PARKING_PAUSE", 60.0)
    monkeypatch.setattr(parking_time, "PARKING_TIME", 0.2)
    backend.limits(QUEUE, {"tenant": Quota(fair=True)})
    first, *_ = add(backend, 1000, Gate("tenant", "a"))
    with backend.consumer([QUEUE]) as consumer:
        # When a call has only parked jobs, and the time for this is over
        assert consumer.reserve(1, 0) == []
        time.sleep(0.3)
        # Then the next call hands out a job, although most jobs are not parked yet
        assert [lease.id for lease in consumer.reserve(1, 0)] == [first]
        # And after a pause another call may park jobs first, because jobs of other keys may follow
        assert len(consumer.reserve(1, 0)) == 1
        monkeypatch.setattr(parking_time, "PARKING_PAUSE", 0.0)
        assert consumer.reserve(1, 0) == []


def test_due_jobs_of_a_queue_after_one_with_limits_keep_their_order(place: Place) -> None:
    # Given a queue with a limit, and another queue with a job that becomes due and a younger job
    with open_backend(place.url) as backend, backend.consumer([QUEUE, "later"]) as consumer:
        backend.limits(QUEUE, {"api": Quota(slots=2)})
        (gated,) = add(backend, 1, API)
        older, younger = backend.enqueue("later", [NewJob(b"x", new_id(), delay=delay) for delay in (0.1, 0.0)])
        until(lambda: backend.stats("later").delayed == 0)
        # When a consumer reserves from both, then the jobs come in their order
        assert [lease.id for lease in consumer.reserve(3, 0)] == [gated, older, younger]


def test_limits_of_another_queue_add_no_packet_and_no_statement(
    backend: MysqlBackend, packets: list[tuple[str, ...]]
) -> None:
    # Given a queue with limits
    backend.limits("other", {"api": Quota(slots=0)})
    backend.enqueue("other", [NewJob(b"x", name, terms=Terms(gates=(API,))) for name in new_ids(20)])
    backend.consumer(["other"]).reserve(10, 0)
    packets.clear()
    # When a worker takes jobs of a queue without limits
    work(backend)
    # Then no statement names a table of limits, except for the polls, a few times in a second
    named = [text for packet in packets for text in packet if any(f"multiq_{name}" in text for name in TABLES)]
    assert all("multiq_gates_look" in text and text.startswith("SELECT CONCAT_WS(' ', 0,") for text in named)
    assert len(named) <= 1 + 4 * 2
    assert [text for packet in packets for text in packet if "gates" in text and "CONCAT_WS" not in text] == []


TABLES = ("limits", "gates", "lines", "leases")


def test_a_consumer_that_waits_beside_parked_jobs_only_polls(
    backend: MysqlBackend, packets: list[tuple[str, ...]]
) -> None:
    backend.limits(QUEUE, {"api": Quota(slots=0)})
    add(backend, 100, API)
    with backend.consumer([QUEUE]) as consumer:
        assert consumer.reserve(10, 0) == []
        packets.clear()
        assert consumer.reserve(10, 1.0) == []
    assert {text.split("(")[0] for packet in packets for text in packet} == {"SELECT CONCAT_WS"}


def test_consumers_of_one_process_do_not_ask_for_the_gate_that_one_of_them_has_locked(
    mysql_server: MysqlDatabases, place: Place, backend: MysqlBackend
) -> None:
    # Given a limit of three slots, many consumers, and counts of the transactions that find nothing
    jobs, done = 48, list[str]()
    backend.limits(QUEUE, {"api": Quota(slots=3)})
    add(backend, jobs, API)

    def rollbacks() -> int:
        ((_, number),) = mysql_server.ask("SHOW GLOBAL STATUS LIKE 'Com_rollback'")
        return int(number)

    def drain() -> None:
        with open_backend(place.url) as own, own.consumer([QUEUE]) as consumer:
            while len(done) < jobs:
                for lease in consumer.reserve(2, 1.0):
                    consumer.settle([Ack(lease)])
                    done.append(lease.id)

    # When the consumers run all jobs
    before = rollbacks()
    with ThreadPoolExecutor(16) as threads:
        for thread in [threads.submit(drain) for _ in range(16)]:
            thread.result()
    # Then there are few such transactions: without turns, there were 18 for each job
    assert len(set(done)) == jobs
    assert rollbacks() - before <= 5 * jobs


def test_a_consumer_claims_itself_after_claims_that_met_the_locks_of_another_session(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an open gate with parked jobs, which a session of another program has locked
    backend.limits(QUEUE, {"api": Quota(slots=1)})
    add(backend, 3, API)
    with backend.consumer([QUEUE]) as consumer:
        (lease,) = consumer.reserve(1, 0)
        assert consumer.reserve(1, 0) == []
        consumer.settle([Ack(lease)])
    begun, ended = [threading.Event() for _ in range(3)], [threading.Event() for _ in range(3)]
    run, numbers = _GatedClaim.run, itertools.count()

    def held(self: _GatedClaim, session: Session) -> Any:
        number, found = next(numbers), run(self, session)
        begun[number].set()
        assert ended[number].wait(60)
        return found

    def reserve() -> list[Lease]:
        with open_backend(place.url) as own, own.consumer([QUEUE]) as consumer:
            return consumer.reserve(1, 0)

    monkeypatch.setattr(_GatedClaim, "run", held)
    with ThreadPoolExecutor(3) as threads, mysql_server.client(place.name) as other:
        other.begin()
        with other.cursor() as cursor:
            assert cursor.execute("SELECT 1 FROM multiq_gates WHERE name = 'api' FOR UPDATE") == 1
        # When three consumers of one process reserve, and the locks end after the second consumer's claim
        calls = [threads.submit(reserve)]
        assert begun[0].wait(60)
        calls += [threads.submit(reserve) for _ in range(2)]
        until(lambda: len(backend._pool.poller.claim_turns(QUEUE)._waiters) == 2)
        ended[0].set()
        assert begun[1].wait(60)
        other.rollback()
        ended[1].set()
        ended[2].set()
        # Then the third consumer gets the job
        assert sum(len(call.result()) for call in calls) == 1


def never() -> bool:
    return False


def test_a_consumer_does_not_claim_after_a_claim_that_left_nothing() -> None:
    turns, forever = ClaimTurns(), time.monotonic() + 60
    seen = turns.begun
    with turns.next(seen, forever, never) as first:
        assert first is not None
        # A consumer that gets no turn in time claims without it
        with turns.next(seen, time.monotonic(), never) as late:
            assert late is not None
        turns.found_all(first)
    # Then a consumer that looked before this claim began need not claim, and a consumer that looked later claims
    with turns.next(seen, forever, never) as number:
        assert number is None
    with turns.next(turns.begun, forever, never) as number:
        assert number is not None


def test_a_turn_that_does_not_end_holds_up_the_other_consumers_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a turn that does not end, because its consumer waits for the server, or because of an exception
    monkeypatch.setattr(waiting, "_LONGEST_TURN", 0.2)
    turns, forever = ClaimTurns(), time.monotonic() + 60
    with turns.next(0, forever, never):
        # When other consumers claim
        with turns.next(turns.begun, forever, never) as second:
            # Then they take turns again
            third = threading.Thread(target=lambda: turns.next(turns.begun, forever, never).__enter__())
            third.start()
            until(lambda: turns.is_awaited)
        third.join(60)
        assert (second, turns.begun) == (2, 3)
    assert time.monotonic() < forever


def test_a_gate_that_could_not_be_opened_after_a_verdict_is_opened_by_the_next_call(
    backend: MysqlBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a job that waits for the slot of another one
    backend.limits("q", {"api": Quota(slots=1)})
    first, second = add(backend, 2, Gate("api"))
    with backend.consumer(["q"]) as consumer:
        (lease,) = consumer.reserve(5, 0)
        assert lease.id == first
        assert consumer.reserve(5, 0) == []

        # When the server is away after the commit of the verdict
        def fail(*_: object) -> None:
            raise BackendUnavailable("the server does not answer")

        with monkeypatch.context() as patched:
            patched.setattr("multiq_mysql.consumer.open_gates", fail)
            assert consumer.settle([Ack(lease)]) == [None]
            assert consumer.reserve(5, 0) == []
        # Then the next call hands out the job
        assert [one.id for one in consumer.reserve(5, 0)] == [second]


def test_an_interrupt_ends_the_wait_for_a_turn(backend: MysqlBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a queue whose jobs wait for an open gate, and another consumer of the process whose turn does not end
    monkeypatch.setattr(waiting, "_LONGEST_TURN", 60.0)
    backend.limits(QUEUE, {"api": Quota(slots=1)})
    add(backend, 1, API)
    turns = backend._pool.poller.claim_turns(QUEUE)
    turn = turns.next(0, time.monotonic() + 60, never)
    with backend.consumer([QUEUE]) as consumer, ThreadPoolExecutor(1) as threads, turn:
        # When a consumer waits for its turn, and is interrupted
        call = threads.submit(consumer.reserve, 1, 60)
        until(lambda: turns.is_awaited)
        consumer.interrupt()
        # Then its call looks at the jobs once, and ends
        assert len(call.result(5)) == 1


def test_jobs_without_gates_take_no_more_packets_behind_parked_ones(
    backend: MysqlBackend, packets: list[tuple[str, ...]]
) -> None:
    taken: list[int] = []
    with backend.consumer([QUEUE]) as consumer:
        for parked in (0, 100):
            # Given parked jobs, and others
            backend.limits(QUEUE, {"api": Quota(slots=0)})
            add(backend, parked, API)
            assert consumer.reserve(10, 0) == []
            add(backend, 10)
            packets.clear()
            # When the others are reserved
            assert len(consumer.reserve(10, 0)) == 10
            taken.append(len(packets))
    # Then the reserve takes as many packets as without parked jobs
    assert taken[0] == taken[1]


def test_a_key_behind_a_large_backlog_of_another_key_has_its_turn(
    backend: MysqlBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given many jobs of one key of a fair limit, of which some run, and a server that parks them in time
    monkeypatch.setattr(parking_time, "PARKING_TIME", 60.0)
    monkeypatch.setattr(parking_time, "LOOKING_TIME", 60.0)
    backend.limits(QUEUE, {"all": Quota(slots=4), "tenant": Quota(fair=True)})
    add(backend, 4_000, Gate("all"), Gate("tenant", "busy"))
    with backend.consumer([QUEUE]) as consumer:
        running = consumer.reserve(4, 0)
        assert len(running) == 4
        # When a job of another key comes
        (small,) = add(backend, 1, Gate("all"), Gate("tenant", "small"))
        # Then it starts before five more jobs have ended
        started: list[str] = []
        for _ in range(5):
            ended, *running = running
            _, leases = consumer.exchange([Ack(ended)], 1, 0)
            started += [lease.id for lease in leases]
            running += leases
        assert small in started


def test_a_key_behind_a_backlog_is_found_before_the_backlog_is_parked(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given many jobs of one key of a fair limit, and then jobs of two other keys, on a server that is not too busy
    monkeypatch.setattr(fair_search, "SEARCH_TIME", 60.0)
    backend.limits(QUEUE, {"all": Quota(slots=4), "tenant": Quota(fair=True)})
    add(backend, 3_000, Gate("all"), Gate("tenant", "busy"))
    small = {
        *add(backend, 10, Gate("all"), Gate("tenant", "ten")),
        *add(backend, 1, Gate("all"), Gate("tenant", "one")),
    }
    with backend.consumer([QUEUE]) as consumer:
        # When jobs are reserved, then the slots are shared, although few jobs of the backlog are parked
        running = consumer.reserve(4, 0)
        assert sum(lease.id in small for lease in running) in (2, 3)
        assert count(mysql_server, place, "lines") < 300
        # And the other keys keep their share while jobs end
        for _ in range(18):
            ended, *running = running
            _, leases = consumer.exchange([Ack(ended)], 1, 0)
            small -= {ended.id}
            running += leases
        assert small <= {lease.id for lease in running}


def test_a_search_that_does_not_reach_the_last_job_is_not_repeated_at_once(
    backend: MysqlBackend, packets: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given backlogs that are too long for a search, on a server that parks them in time
    monkeypatch.setattr(fair_search, "SEARCH_TIME", 0.0)
    for name in ("SEARCH_PAUSE", "PARKING_TIME", "LOOKING_TIME"):
        monkeypatch.setattr(parking_time, name, 60.0)
    backend.limits(QUEUE, {"tenant": Quota(fair=True)})

    def searches() -> int:
        add(backend, 1_000, Gate("tenant", "busy"))
        packets.clear()
        assert len(consumer.reserve(1, 0)) == 1
        return sum(any("NOT IN" in text for text in packet) for packet in packets)

    with backend.consumer([QUEUE]) as consumer:
        # When jobs are reserved, then the first call searches, and the next one does not
        assert [searches(), searches()] == [1, 0]
        # And without a pause, each call searches
        monkeypatch.setattr(parking_time, "SEARCH_PAUSE", 0.0)
        consumer._parking._no_search_until.clear()
        assert [searches(), searches()] == [1, 1]


def test_a_due_job_behind_a_backlog_hides_no_earlier_job_of_its_key(
    backend: MysqlBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a backlog of one key, with jobs of another key among it, and a due job of this key that is newer than all
    monkeypatch.setattr(fair_search, "SEARCH_TIME", 60.0)
    backend.limits(QUEUE, {"all": Quota(slots=1), "tenant": Quota(fair=True)})
    busy, small = (Gate("all"), Gate("tenant", "busy")), (Gate("all"), Gate("tenant", "small"))
    add(backend, 400, *busy)
    early = set(add(backend, 2, *small))
    add(backend, 1_500, *busy)
    (late,) = add(backend, 1, *small, delay=0.01)
    until(lambda: backend.stats(QUEUE).delayed == 0)
    # When jobs are worked off one by one, then the keys take turns, and the due job is the last one of its key
    started: list[str] = []
    with backend.consumer([QUEUE]) as consumer:
        for _ in range(7):
            (lease,) = consumer.reserve(1, 0)
            started.append(lease.id)
            assert consumer.settle([Ack(lease)]) == [None]
    assert early <= set(started[:4])
    assert late in started[4:]


SHAPES = (
    (Gate("tenant", "a"), Gate("all")), (Gate("tenant", "a"),),
    (Gate("tenant", "b"),), (Gate("tenant", "c"), Gate("all")),
    (Gate("team", "x"),), (Gate("team", "x"), Gate("tenant", "b")), (Gate("team", "x"), Gate("tenant", "a")),
    (Gate("all"),), (Gate("api"),), (),
)  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 60))])
def test_a_search_for_other_keys_changes_no_order(
    backend: MysqlBackend, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given transactions that read few jobs, so that most calls search for keys behind them
    rng = random.Random(seed)
    monkeypatch.setattr(gated_claim, "_FEWEST_READ", 2)
    monkeypatch.setattr(gated_claim, "_MOST_READ", rng.choice([3, 8]))
    monkeypatch.setattr(fair_search, "_SOUGHT_FIRST", rng.choice([4, 30, 250]))
    monkeypatch.setattr(fair_search, "SEARCH_TIME", rng.choice([0.0, 60.0]))
    searches: list[int] = []
    original = FairSearch.run

    def noted(search: FairSearch, *args: Any) -> None:
        original(search, *args)
        searches.append(len(search.jobs))

    monkeypatch.setattr(FairSearch, "run", noted)
    backend.limits(QUEUE, {"tenant": Quota(fair=True), "team": Quota(fair=True), "all": Quota(slots=1)})
    # Given jobs of a busy key, and jobs with all kinds of gates among and behind them
    busy = rng.choice([0.3, 0.6, 0.9])
    shapes: dict[str, tuple[Gate, ...]] = {}
    priorities: dict[str, int] = {}
    for _ in range(80):
        gates = SHAPES[0] if rng.random() < busy else rng.choice(SHAPES)
        priority = rng.choice([1024, 1024, 1024, 7])
        (job_id,) = add(backend, 1, *gates, priority=priority)
        shapes[job_id], priorities[job_id] = gates, priority
    ages = {job_id: number for number, job_id in enumerate(shapes)}
    started: list[str] = []
    running: list[Lease] = []
    with backend.consumer([QUEUE]) as consumer:
        # When they are worked off, a few at a time
        give_up_at = time.monotonic() + 60
        while len(started) < len(shapes):
            assert time.monotonic() < give_up_at, f"{len(shapes) - len(started)} jobs were not handed out"
            leases = consumer.reserve(rng.randint(1, 4), 0)
            started += [lease.id for lease in leases]
            running += leases
            rng.shuffle(running)
            ended, running = running[:2], running[2:]
            assert consumer.settle([Ack(lease) for lease in ended]) == [None] * len(ended)
    # Then jobs with the same gates start in their order, and so do jobs without closed gates
    assert searches
    alike: list[tuple[tuple[Gate, ...], ...]] = [((), (Gate("api"),)), SHAPES[:2], SHAPES[4:7]]
    for shapes_in_order in (*((gates,) for gates in SHAPES), *alike):
        own = [job_id for job_id in started if shapes[job_id] in shapes_in_order]
        assert own == sorted(own, key=lambda job_id: (priorities[job_id], ages[job_id])), shapes_in_order


def test_a_busy_server_hands_out_a_job_before_all_jobs_of_a_fair_limit_are_parked(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a server on which a call cannot park a large backlog of a fair limit in time
    monkeypatch.setattr(parking_time, "PARKING_TIME", 0.0)
    backend.limits(QUEUE, {"tenant": Quota(fair=True)})
    for number in range(3):
        add(backend, 500, Gate("tenant", str(number)))
    # Then a call hands out a job, although most jobs are not parked yet
    with backend.consumer([QUEUE]) as consumer:
        assert len(consumer.reserve(1, 0)) == 1
        assert count(mysql_server, place, "lines") < 1_000


def test_a_call_that_has_ended_early_lets_the_next_one_read_more_jobs_at_once(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given calls that end after one transaction, as on a slow server, and many jobs behind a closed gate
    monkeypatch.setattr(parking_time, "LOOKING_TIME", 0.0)
    backend.limits(QUEUE, {"api": Quota(slots=0)})
    add(backend, 2_000, API)
    with backend.consumer([QUEUE]) as consumer:
        for _ in range(5):
            assert (consumer.reserve(1, 0), consumer.sees_all) == ([], False)
        # Then they read more jobs each, up to the most that one transaction may read
        assert parked(mysql_server, place) > 1_000


def test_a_parking_that_has_ended_in_time_starts_no_pause(
    backend: MysqlBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a call that has parked all jobs of a fair limit first, on a server that parks them in time
    monkeypatch.setattr(parking_time, "PARKING_TIME", 60.0)
    monkeypatch.setattr(parking_time, "PARKING_PAUSE", 60.0)
    backend.limits(QUEUE, {"tenant": Quota(fair=True)})
    add(backend, 100, Gate("tenant", "a"))
    with backend.consumer([QUEUE]) as consumer:
        assert len(consumer.reserve(1, 0)) == 1
        assert len(consumer.reserve(100, 0)) == 99
        # When many jobs of one key come, and then a job of another one
        add(backend, 400, Gate("tenant", "b"))
        (last,) = add(backend, 1, Gate("tenant", "c"))
        # Then this job is among the first two
        assert last in {lease.id for lease in consumer.reserve(2, 0)}


def test_the_leases_count_from_the_transaction_that_began_them(
    backend: MysqlBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    # When a reserve parks many jobs before it hands out one of them, as it does if a search does not reach all jobs
    monkeypatch.setattr(parking_time, "PARKING_TIME", 60.0)
    monkeypatch.setattr(parking_time, "LOOKING_TIME", 60.0)
    monkeypatch.setattr(fair_search, "SEARCH_TIME", 0.0)
    backend.limits(QUEUE, {"tenant": Quota(fair=True)})
    add(backend, 2_000, Gate("tenant", "a"))
    began: list[float] = []

    class Claim(gated_claim.Claim):
        def read(self, session: Session) -> None:
            began.append(time.monotonic())
            super().read(session)

    monkeypatch.setattr("multiq_mysql.consumer.Claim", Claim)
    with backend.consumer([QUEUE]) as consumer:
        assert len(consumer.reserve(1, 0)) == 1
        # Then the time before the parking is not a part of the lease
        assert len(began) > 2
        assert began[-2] < consumer.asked_at <= began[-1]


@pytest.mark.long
def test_all_of_many_keys_of_a_fair_limit_take_turns(backend: MysqlBackend) -> None:
    # Given more keys than a reserve looks at
    backend.limits(QUEUE, {"tenant": Quota(fair=True)})
    keys = [str(key) for key in range(60)]
    for key in keys:
        gates = (Gate("tenant", key),)
        backend.enqueue(QUEUE, [NewJob(key.encode(), name, terms=Terms(gates=gates)) for name in new_ids(2)])
    # When as many jobs are reserved as there are keys
    taken: list[bytes] = []
    with backend.consumer([QUEUE]) as consumer:
        for _ in keys:
            (lease,) = consumer.reserve(1, 5)
            consumer.settle([Ack(lease)])
            taken.append(lease.body)
    # Then each key has had one turn
    assert sorted(taken) == sorted(key.encode() for key in keys)


@pytest.mark.long
def test_an_urgent_job_goes_first_among_many_keys_of_a_fair_limit(backend: MysqlBackend) -> None:
    # Given more keys than a reserve looks at
    backend.limits(QUEUE, {"tenant": Quota(fair=True)})
    for key in range(60):
        add(backend, 2, Gate("tenant", str(key)))
    with backend.consumer([QUEUE]) as consumer:
        assert len(consumer.reserve(1, 0)) == 1
        # When an urgent job of the key with the last turn comes, and another urgent job behind it
        jobs = [
            NewJob(b"x", new_id(), priority=priority, terms=Terms(gates=(Gate("tenant", "59"),)))
            for priority in (5, 900)
        ]
        urgent = backend.enqueue(QUEUE, jobs)
        # Then both go before the jobs of other keys
        assert [lease.id for _ in range(2) for lease in consumer.reserve(1, 0)] == urgent
        # And then the other keys have their turns
        waiting = {lease.id for _ in range(59) for lease in consumer.reserve(1, 0)}
        assert len(waiting) == 59


@pytest.mark.parametrize(("locked", "is_parked"), [("gate", True), ("gate", False), ("job", True)])
def test_a_key_keeps_its_order_while_another_session_has_locked_its_first_job(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place, locked: str, is_parked: bool
) -> None:
    # Given two jobs of a key of a fair limit. The first job has another gate, too
    backend.limits(QUEUE, {"api": Quota(slots=0), "tenant": Quota(fair=True)})
    tenant = Gate("tenant", "a")
    with backend.consumer([QUEUE]) as consumer, contextlib.ExitStack() as locks:
        if not is_parked:
            add(backend, 1, API)
            assert consumer.reserve(5, 0) == []
        (first,) = add(backend, 1, API, tenant)
        if is_parked:
            assert consumer.reserve(5, 0) == []
        backend.limits(QUEUE, {"api": Quota(slots=5)})
        (second,) = add(backend, 1, tenant)
        # When another session has locked this gate or this job
        if locked == "job":
            session = _locked(locks, mysql_server, place, first)
        else:
            session = locks.enter_context(mysql_server.client(place.name, autocommit=False))
            assert session.cursor().execute(render("gate", queue=QUEUE.encode(), name=b"api", key=b""))
        # Then the second job waits
        assert {lease.id for lease in consumer.reserve(5, 0)}.isdisjoint({first, second})
        session.rollback()
        assert [lease.id for lease in consumer.reserve(5, 5) if lease.id in {first, second}] == [first, second]


# --- many keys -------------------------------------------------------------------------------------------

KEYS = 1_000


def given_many_keys(backend: Backend) -> None:
    """Park one job of each of many keys."""
    backend.limits(QUEUE, {"api": Quota(slots=0)})
    jobs = [NewJob(b"x", name, terms=Terms(gates=(Gate("api", name),))) for name in new_ids(KEYS)]
    backend.enqueue(QUEUE, jobs)
    with backend.consumer([QUEUE]) as consumer:
        assert consumer.reserve(10, 0) == []
        while not consumer.sees_all:  # on a busy machine, a call may end before it has parked all jobs
            assert consumer.reserve(10, 0) == []


@pytest.mark.parametrize("changed", [Quota(slots=1), Quota(slots=1, rate=5), Quota(slots=1, fair=True), None])
@pytest.mark.long
def test_a_change_of_a_limit_with_many_keys_locks_a_few_hundred_gates_at_a_time(
    backend: MysqlBackend, place: Place, monkeypatch: pytest.MonkeyPatch, changed: Quota | None
) -> None:
    given_many_keys(backend)
    opened: list[int] = []
    taken: list[str] = []
    original = Session.execute
    with open_backend(place.url) as other, other.consumer([QUEUE]) as consumer:

        def noted(self: Session, *texts: str) -> Any:
            replies = original(self, *texts)
            if thread == threading.get_ident() and "COMMIT" in texts:
                opened.append(sum(reply.affected for text, reply in zip(texts, replies, strict=False) if OPENS in text))
                if opened[-1]:
                    monkeypatch.setattr(Session, "execute", original)
                    # Then another consumer can reserve between two of these transactions
                    ids.extend(add(other, 1))
                    taken.extend(lease.id for lease in consumer.reserve(KEYS, 0))
                    while not consumer.sees_all:  # on a busy machine, a call may end before it has looked at all jobs
                        taken.extend(lease.id for lease in consumer.reserve(KEYS, 0))
                    monkeypatch.setattr(Session, "execute", noted)
            return replies

        # When the limit changes
        ids: list[str] = []
        thread = threading.get_ident()
        monkeypatch.setattr(Session, "execute", noted)
        backend.limits(QUEUE, {"api": changed})
        monkeypatch.setattr(Session, "execute", original)
        # Then each of its transactions changes a few hundred gates at most
        assert max(opened) <= KEYS // 4
        assert set(ids) <= set(taken)
        # And no gate is missing
        deadline = time.monotonic() + 60
        while len(taken) < KEYS + len(ids) and time.monotonic() < deadline:
            taken += [lease.id for lease in consumer.reserve(KEYS, 0.1)]
        assert len(set(taken)) == len(taken) == KEYS + len(ids)


OPENS = "SET due = LEAST(due"


@pytest.mark.parametrize("transactions", [1, 2])
@pytest.mark.long
def test_reserves_go_on_with_a_change_of_a_limit_that_was_cut_off(
    backend: MysqlBackend, place: Place, monkeypatch: pytest.MonkeyPatch, transactions: int
) -> None:
    given_many_keys(backend)
    original = Session.commit

    def cut_off(self: Session, *texts: str, **options: Any) -> Any:
        nonlocal transactions
        if not transactions:
            raise KeyboardInterrupt
        transactions -= 1
        return original(self, *texts, **options)

    # Given a program that ends while it changes a limit
    with monkeypatch.context() as patch:
        patch.setattr(Session, "commit", cut_off)
        with pytest.raises(KeyboardInterrupt):
            backend.limits(QUEUE, {"api": Quota(slots=1)})
    # Then the reserves of another program hand out all jobs, also if its code has another quota
    with open_backend(place.url) as other, other.consumer([QUEUE]) as consumer:
        other.limits(QUEUE, {"api": Quota(slots=2)}, pinned=False)
        found = 0
        while leases := consumer.reserve(KEYS, 0):
            found += len(leases)
        assert found == KEYS


@pytest.mark.long
def test_a_reserve_reads_a_few_of_the_gates_that_must_be_looked_at(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place
) -> None:
    # Given many gates that must be looked at, because their limit has changed
    given_many_keys(backend)
    backend.limits(QUEUE, {"api": Quota(slots=1)})
    with mysql_server.client(place.name) as own, own.cursor() as cursor:
        for verb in ("gates_to_look_at", "lines_to_look_at"):
            cursor.execute("FLUSH STATUS")
            # When a reserve asks for some of them
            cursor.execute(render(verb, queue=QUEUE.encode(), now=NOW, limit=50, examined=250))
            cursor.execute("SHOW SESSION STATUS LIKE 'Handler_read%'")
            # Then the server does not read all of them
            assert sum(int(number) for _, number in cursor.fetchall()) < 4 * 250


def test_a_limit_that_changes_while_a_reserve_meets_a_new_key_is_seen(
    backend: MysqlBackend, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.limits(QUEUE, {"api": Quota(slots=0)})
    (job_id,) = add(backend, 1, API)
    original = Session.execute
    with open_backend(place.url) as other, backend.consumer([QUEUE]) as consumer:

        def changed_before(self: Session, *texts: str) -> Any:
            if any(text.startswith("INSERT INTO multiq_gates") for text in texts):
                monkeypatch.setattr(Session, "execute", original)
                other.limits(QUEUE, {"api": Quota(slots=1)})
            return original(self, *texts)

        # When a limit changes after a reserve has read the quotas, and before it stores the gate of a new key
        monkeypatch.setattr(Session, "execute", changed_before)
        found = consumer.reserve(1, 2)
        # Then the job does not wait for the old quota
        assert [lease.id for lease in found] == [job_id]


# --- what is left ----------------------------------------------------------------------------------------


@pytest.mark.one_row
@pytest.mark.parametrize("how", ["ack", "delete", "purge", "lease end"])
def test_nothing_is_left_of_jobs_that_are_gone(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place, how: str
) -> None:
    # Given jobs of several keys, some running and others parked
    backend.limits(QUEUE, {"api": Quota(slots=2), "tenant": Quota(fair=True)})
    ids = [job_id for key in "abc" for job_id in add(backend, 3, API, Gate("tenant", key), ttr=1)]
    with backend.consumer([QUEUE]) as consumer:
        leases = consumer.reserve(10, 0)
        assert len(leases) == 2
        if how == "delete":
            for job_id in set(ids) - {lease.id for lease in leases}:
                backend.delete(QUEUE, job_id)
        elif how == "purge":
            assert backend.purge(QUEUE, [State.READY]) == 7
        if how != "lease end":
            consumer.settle([Ack(lease) for lease in leases])
        give_up_at = time.monotonic() + 60
        while sum(number or 0 for number in _counts(backend)) and time.monotonic() < give_up_at:
            leases = consumer.reserve(10, 0.1)
            assert len(leases) <= 2
            consumer.settle([Ack(lease) for lease in leases])
        # When all of them have ended, and other jobs have come and gone
        for _ in range(10):
            add(backend, 1, API, Gate("tenant", new_id()))
            consumer.settle([Ack(lease) for lease in consumer.reserve(1, 10)])
    # Then no row of a limit is left, except for a few gates
    assert {name: count(mysql_server, place, name) for name in ("jobs", "lines", "leases")} == {
        "jobs": 0, "lines": 0, "leases": 0,
    }  # fmt: skip
    assert count(mysql_server, place, "gates") < 8


def _counts(backend: Backend) -> tuple[int | None, ...]:
    stats = backend.stats(QUEUE)
    return stats.ready, stats.reserved, stats.delayed


def test_gates_that_nothing_waits_for_do_not_accumulate(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place
) -> None:
    backend.limits(QUEUE, {"api": Quota(rate=1000)})
    with backend.consumer([QUEUE]) as consumer:
        for number in range(60):
            add(backend, 1, Gate("api", str(number)), Gate("unknown", str(number)))
            consumer.settle([Ack(lease) for lease in consumer.reserve(1, 10)])
    assert count(mysql_server, place, "gates") < 10
    assert count(mysql_server, place, "leases") == 0


# --- other programs, and kills ---------------------------------------------------------------------------


def test_a_gate_that_was_locked_for_long_opens_after_a_verdict(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a job that runs, and a parked job behind it
    settings = SESSION_SETTINGS.replace("lock_wait_timeout = 2,", "lock_wait_timeout = 1,")
    monkeypatch.setattr("multiq_mysql.pool.SESSION_SETTINGS", settings)
    backend.limits(QUEUE, {"api": Quota(slots=1)})
    add(backend, 2, API)
    with (
        backend.consumer([QUEUE]) as consumer,
        mysql_server.client(place.name) as other,
        ThreadPoolExecutor() as threads,
    ):
        (lease,) = consumer.reserve(2, 0)
        assert consumer.reserve(1, 1.5) == []  # a reserve finds out when the lease ends
        # And a session that has locked the gate, for example a reserve on a slow machine
        with other.cursor() as cursor:
            cursor.execute("BEGIN")
            cursor.execute("SELECT due FROM multiq_gates WHERE name = 'api' FOR UPDATE")
        # When a verdict's wait for the gate ends with an error, and the lock ends later
        before = sum(repetitions.values())
        settled = threads.submit(consumer.settle, [Ack(lease)])
        until(lambda: settled.done() or sum(repetitions.values()) > before)
        other.rollback()
        assert settled.result() == [None]
        # Then the parked job is handed out
        assert len(consumer.reserve(1, 5)) == 1


def test_a_slot_that_an_older_program_frees_is_used_when_the_lease_would_have_ended(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place
) -> None:
    # Given a job that runs, and a parked one
    backend.limits(QUEUE, {"api": Quota(slots=1)})
    running, parked = add(backend, 2, API, ttr=2)
    with backend.consumer([QUEUE]) as consumer:
        (lease,) = consumer.reserve(5, 0)
        assert lease.id == running
        # When a program that does not know of limits acks the first one
        mysql_server.ask("DELETE FROM multiq_jobs WHERE state = 2", database=place.name)
        # Then the other one is handed out
        assert [lease.id for lease in consumer.reserve(1, 30)] == [parked]


def test_jobs_that_an_older_program_has_released_meet_their_gates(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place
) -> None:
    backend.limits(QUEUE, {"api": Quota(slots=1)})
    ids = add(backend, 3, API)
    with backend.consumer([QUEUE]) as consumer:
        (lease,) = consumer.reserve(5, 0)
        # When a program that does not know of limits releases the running job
        mysql_server.ask("UPDATE multiq_jobs SET state = 4, place = priority WHERE state = 2", database=place.name)
        # Then one of the jobs is handed out, and no second one
        (again,) = consumer.reserve(5, 10)
        assert again.id == ids[0]
        assert consumer.reserve(5, 0) == []
        assert consumer.settle([Ack(lease)]) != [None]


def test_a_touch_that_waited_past_the_end_of_its_lease_takes_no_slot_that_is_in_use(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place
) -> None:
    # Given a worker that runs two jobs, one of them at a limit, and a parked job
    backend.limits(QUEUE, {"api": Quota(slots=1)})
    (plain,) = add(backend, 1, ttr=1)
    limited, parked = add(backend, 2, API, ttr=1)
    with backend.consumer([QUEUE]) as consumer, open_backend(place.url) as other, ThreadPoolExecutor(1) as pool:
        leases = consumer.reserve(2, 10)
        assert [lease.id for lease in leases] == [plain, limited]
        with contextlib.ExitStack() as locks:
            first, second = (_locked(locks, mysql_server, place, job_id) for job_id in (plain, limited))
            # When its touch waits for the first job's row, which another session has locked
            touching = pool.submit(consumer.settle, [Touch(lease) for lease in leases])
            # And the lease of the second job ends, and another worker gets its slot
            with other.consumer([QUEUE]) as waiting:
                assert waiting.reserve(5, 0.0) == []
                until(lambda: _live(mysql_server, place) == 0)
                assert waiting.reserve(5, 0.0) == []
                second.rollback()
                # The parked job, or the limited one again if the server has unlocked its row by now
                (found,) = waiting.reserve(1, 10)
                assert found.id in {limited, parked}
                first.rollback()
                # Then the touch is refused
                answers = touching.result()
                assert isinstance(answers[1], LeaseLost)
        assert [state.running for state in other.limits(QUEUE)] == [1]


def _locked(locks: contextlib.ExitStack, server: MysqlDatabases, place: Place, job_id: str) -> Any:
    """Lock a job's row in a session of its own. Returns the session."""
    session = locks.enter_context(server.client(place.name, autocommit=False))
    with session.cursor() as cursor:
        found = "SELECT 1 FROM multiq_jobs FORCE INDEX (multiq_jobs_id) WHERE queue = %s AND id = %s FOR UPDATE"
        assert cursor.execute(found, (QUEUE.encode(), bytes.fromhex(job_id.replace("-", "")))) == 1
    return session


def _live(server: MysqlDatabases, place: Place) -> int:
    now = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
    ((number,),) = server.ask(
        f"SELECT COUNT(*) FROM multiq_jobs WHERE state = 2 AND place > {now}",  # noqa: S608 - of this page
        database=place.name,
    )
    return int(number)


_LOOP = """
import sys
from multiq.backend import Ack, Bury, Gate, NewJob, Quota, Release, Terms
from multiq.backend.registry import open_backend
from multiq.ids import new_id

with open_backend(sys.argv[1]) as backend, backend.consumer(["q"]) as consumer:
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


@pytest.mark.long
@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.long)])
def test_a_killed_process_leaves_no_slot_in_use(place: Place, kills: int) -> None:
    with open_backend(place.url) as backend, backend.consumer([QUEUE]) as consumer:
        for number in range(kills):
            # Given a limit with three slots, and a process that takes its jobs and is killed at some moment
            with subprocess.Popen([sys.executable, "-c", _LOOP, place.url], stdout=subprocess.PIPE) as process:
                assert process.stdout is not None
                assert process.stdout.readline() == b"begun\n"
                time.sleep(0.05 + number % 7 * 0.03)
                process.send_signal(signal.SIGKILL)
            # Then as many slots are in use as jobs have a live lease
            api, _ = backend.limits(QUEUE)
            assert api.running <= (backend.stats(QUEUE).reserved or 0) <= 3
            # And all jobs are handed out when the leases have ended
            give_up_at = time.monotonic() + 60
            while any(_counts(backend)) and time.monotonic() < give_up_at:
                leases = consumer.reserve(10, 0.5)
                assert len(leases) <= 3
                consumer.settle([Ack(lease) for lease in leases])
            assert not any(_counts(backend))


class Soak:
    """Consumers that reserve and settle jobs of several limits, with all verbs, while the server kills sessions."""

    def __init__(self, place: Place, server: MysqlDatabases, seconds: float) -> None:
        self._place = place
        self._server = server
        self._end = time.monotonic() + seconds
        self.most: dict[str, int] = {"api": 0, "smtp": 0}
        self.errors: list[BaseException] = []

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._end

    def work(self, seed: int) -> None:
        choices = random.Random(seed)
        with open_backend(self._place.url) as backend, backend.consumer([QUEUE]) as consumer:
            while not self.is_over:
                try:
                    self._turn(backend, consumer, choices)
                except (EnqueueUncertain, BackendUnavailable):
                    pass  # the session was killed too often
                except MultiqError as exc:
                    self.errors.append(exc)

    def _turn(self, backend: Backend, consumer: Any, choices: random.Random) -> None:
        gates = (API, Gate("smtp"), Gate("tenant", str(choices.randrange(3))), Gate("free"))
        some = tuple(choices.sample(gates, choices.randrange(4)))
        if (backend.stats(QUEUE).ready or 0) < MOST:
            add(backend, choices.randrange(4), *some, ttr=1, delay=choices.choice([0, 0, 0, 0.05]))
        for lease in consumer.reserve(choices.randrange(1, 5), 0.02):
            verdict = choices.choice([Ack, Ack, Ack, Release, GiveBack, Abandon, Bury, Touch, None])
            if verdict is not None:
                consumer.settle([verdict(lease)])
        way = choices.randrange(30)
        if way == 0:
            backend.kick(QUEUE, 5)
        elif way == 1:
            backend.limits(QUEUE, {"api": Quota(slots=choices.choice([1, 2, 3]))})
        elif way == 2:
            for record in backend.jobs(QUEUE, State.READY, limit=3).jobs:
                with contextlib.suppress(MultiqError):
                    if choices.random() < 0.5:
                        backend.delete(QUEUE, record.id)
                    else:
                        backend.reschedule(QUEUE, record.id, 0)

    def watch(self) -> None:
        """Compare the live leases with the limits. The number of slots of ``api`` changes up to three."""
        live = (
            "SELECT leased.name, COUNT(*) FROM multiq_jobs AS job JOIN multiq_leases AS leased "
            "ON leased.job = job.seq AND leased.token = job.token WHERE job.state = 2 AND job.place > "
            "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) GROUP BY leased.name"
        )
        with self._server.client(self._place.name) as own, own.cursor() as cursor:
            while not self.is_over:
                # The time is read after the snapshot: a lease that ends in between does not count beside its successor.
                cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
                cursor.execute(live)
                rows = cursor.fetchall()
                cursor.execute("COMMIT")
                for name, number in rows:
                    if name.decode() in self.most:
                        self.most[name.decode()] = max(self.most[name.decode()], number)

    @contextlib.contextmanager
    def kills(self) -> Iterator[list[int]]:
        killed: list[int] = []
        choices = random.Random(0)

        def kill() -> None:
            while not self.is_over:
                rows = self._server.ask(
                    "SELECT ID FROM information_schema.PROCESSLIST WHERE DB = %s AND USER = 'root' AND INFO LIKE %s",
                    self._place.name, "%multiq_gates%",
                )  # fmt: skip
                for (thread,) in choices.sample(rows, min(1, len(rows))):
                    with contextlib.suppress(pymysql.MySQLError):
                        self._server.ask(f"KILL {thread:d}")
                        killed.append(thread)
                time.sleep(0.05)

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            yield killed
        finally:
            killer.join()


@pytest.mark.long
@pytest.mark.parametrize(
    "seconds",
    [
        3.0,
        pytest.param(30.0, marks=pytest.mark.long),
        pytest.param(120.0, marks=(pytest.mark.exhaustive, pytest.mark.timeout(600))),
    ],
)
def test_slots_do_not_drift_under_all_verbs_and_kills(
    mysql_server: MysqlDatabases, place: Place, seconds: float
) -> None:
    with open_backend(place.url) as backend, backend.consumer([QUEUE]) as consumer:
        backend.limits(
            QUEUE, {"api": Quota(slots=3), "smtp": Quota(slots=2), "tenant": Quota(slots=2, fair=True, rate=500)}
        )
        soak = Soak(place, mysql_server, seconds)
        with soak.kills(), ThreadPoolExecutor(9) as pool:
            list(pool.map(lambda seed: soak.watch() if seed == 8 else soak.work(seed), range(9)))
        # Then there were never more live leases than slots, and no other errors
        assert soak.most["api"] <= 3
        assert soak.most["smtp"] <= 2
        assert soak.errors == []
        # And when the leases have ended, all jobs are handed out, and the store counts none
        backend.kick(QUEUE, 100_000)
        give_up_at = time.monotonic() + 60
        while any(_counts(backend)) and time.monotonic() < give_up_at:
            if leases := consumer.reserve(20, 0.5):
                give_up_at = time.monotonic() + 60
            consumer.settle([Ack(lease) for lease in leases])
        assert not any(_counts(backend))
        until(lambda: all((state.running, state.parked) == (0, 0) for state in backend.limits(QUEUE)))
