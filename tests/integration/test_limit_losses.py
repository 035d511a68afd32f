"""Limits under consumers that hang past their leases, end without a verdict, and race for the same slots."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import pytest
from stores import STORES

from multiq import open_backend
from multiq.backend import Ack, Gate, NewJob, Quota, Release, Terms
from multiq.ids import new_id, new_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from multiq.backend import Backend, Consumer, Lease
    from multiq.errors import LeaseLost

#: the backends with the capability ``limits``
LIMITED = ["memory", "sqlite", "redis", "mysql"]

API = Gate("api")
TTR = 1.0
PATIENCE = 60.0  # seconds after which a test fails, because something hangs
PATIENT = pytest.mark.timeout(900)  # seconds: most rounds are those of MySQL, on a busy machine
LONG = (pytest.mark.long, PATIENT)
EXHAUSTIVE = (pytest.mark.exhaustive, PATIENT)


@pytest.fixture(params=LIMITED)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Backend]]:
    """Opens backends on one empty store. They are closed at the end."""
    with contextlib.ExitStack() as stack:
        url = f"memory://{new_id()}"
        if request.param != "memory":
            url = stack.enter_context(STORES[request.param](tmp_path))
        yield lambda: stack.enter_context(open_backend(url))


@pytest.fixture
def consuming(opened: Callable[[], Backend]) -> Iterator[Callable[[], Consumer]]:
    """Makes consumers, each with a backend of its own. They are closed at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(opened().consumer(["q"]))


def add(backend: Backend, count: int, *gates: Gate, ttr: float = 600.0, body: bytes = b"x") -> list[str]:
    ids: list[str] = []
    terms = Terms(gates=gates) if gates else None
    for first in range(0, count, 1000):
        names = new_ids(min(1000, count - first))
        ids += backend.enqueue("q", [NewJob(body, name, ttr=ttr, terms=terms) for name in names])
    return ids


def run_all(functions: Sequence[Callable[[], None]]) -> None:
    """Run functions on threads of their own, and raise the error of any of them."""
    with ThreadPoolExecutor(len(functions)) as pool:
        for running in [pool.submit(function) for function in functions]:
            running.result()


# --- slots -----------------------------------------------------------------------------------------------


class Held(NamedTuple):
    """A time in which a lease was certainly live, by the process's monotonic clock."""

    began: float
    ended: float


def most_at_once(held: list[Held]) -> int:
    times = [one for one in held if one.ended > one.began]  # a process that was stopped may miss its whole lease
    changes = sorted([(one.began, 1) for one in times] + [(one.ended, -1) for one in times])
    live = most = 0
    for _, change in changes:
        live += change
        most = max(most, live)
    return most


@pytest.mark.parametrize(
    ("consumers", "seconds"), [(8, 2.0), pytest.param(32, 15.0, marks=LONG), pytest.param(32, 60.0, marks=EXHAUSTIVE)]
)
@pytest.mark.long
def test_workers_that_hang_past_their_leases_never_use_more_slots_than_there_are(
    opened: Callable[[], Backend], consuming: Callable[[], Consumer], consumers: int, seconds: float
) -> None:
    # Given a limit with three slots, and workers. Some of the workers hang past the end of their leases
    backend = opened()
    backend.limits("q", {"api": Quota(slots=3)})
    add(backend, 30_000 if seconds > 10 else 5_000, API, ttr=TTR)
    end = time.monotonic() + seconds
    held: list[Held] = []
    refused: list[LeaseLost] = []
    seen: list[int] = []

    def work(consumer: Consumer, seed: int) -> None:
        choices = random.Random(seed)
        while time.monotonic() < end:
            for lease in consumer.reserve(2, 0.2):
                began = time.monotonic()
                time.sleep(choices.choice([0.001, 0.005, 0.02, TTR * 1.3] if choices.random() < 0.2 else [0.001]))
                settled = choices.choice([Ack, Release])(lease)
                held.append(Held(began, min(time.monotonic(), consumer.asked_at + TTR)))
                refused.extend(answer for answer in consumer.settle([settled]) if answer is not None)

    def watch(watcher: Backend) -> None:
        while time.monotonic() < end:
            seen.append(watcher.stats("q").reserved or 0)
            (state,) = watcher.limits("q") if len(seen) % 50 == 0 else [None]
            seen.append(state.running if state is not None else 0)
            time.sleep(0.001)

    workers = [partial(work, consuming(), seed) for seed in range(consumers)]
    run_all([*workers, partial(watch, opened())])
    # Then at no time the store has more live leases, and the workers never hold more
    assert max(seen) == 3
    assert most_at_once(held) <= 3
    assert refused
    # When all workers are gone without a verdict, then all slots are free when the leases have ended
    idle = consuming()
    give_up_at = time.monotonic() + PATIENCE
    leases = idle.reserve(10, 1)
    while len(leases) < 3 and time.monotonic() < give_up_at:
        leases += idle.reserve(10, 1)
        idle.settle([Release(lease) for lease in leases[:-3]])
    assert len(leases[-3:]) == 3


@pytest.mark.one_row
@pytest.mark.parametrize("rounds", [30, pytest.param(1_000, marks=LONG), pytest.param(10_000, marks=EXHAUSTIVE)])
def test_a_slot_that_is_freed_while_a_job_is_parked_is_used(
    opened: Callable[[], Backend], consuming: Callable[[], Consumer], rounds: int
) -> None:
    backend = opened()
    backend.limits("q", {"api": Quota(slots=1)})
    first, second = consuming(), consuming()
    start = threading.Barrier(2)
    got: list[int] = []
    leases: list[Lease] = []

    def finish() -> None:
        for _ in range(rounds):
            start.wait(PATIENCE)
            first.settle([Ack(lease) for lease in leases])
            start.wait(PATIENCE)

    def take() -> None:
        nonlocal leases
        for _ in range(rounds):
            # Given a running job, and a job that waits for its slot
            add(backend, 2, API)
            leases = first.reserve(1, 0)
            assert len(leases) == 1
            start.wait(PATIENCE)
            # When the running job ends while a consumer looks at the waiting job
            found = second.reserve(1, PATIENCE)
            got.append(len(found))
            start.wait(PATIENCE)
            # Then the waiting job is handed out
            assert len(found) == 1
            second.settle([Ack(lease) for lease in found])

    run_all([finish, take])
    assert got == [1] * rounds


# --- rates -----------------------------------------------------------------------------------------------


@pytest.mark.one_row
@pytest.mark.parametrize(
    ("rate", "seconds"), [(100, 1), pytest.param(100, 15, marks=LONG), pytest.param(100, 60, marks=EXHAUSTIVE)]
)
def test_no_window_has_more_starts_than_the_burst_and_its_share(
    opened: Callable[[], Backend], consuming: Callable[[], Consumer], rate: int, seconds: int
) -> None:
    # Given ten workers that take jobs as fast as they can
    burst = 10
    backend = opened()
    backend.limits("q", {"api": Quota(rate=rate, burst=burst)})
    add(backend, rate * seconds, API)
    starts: list[tuple[float, float]] = []  # the times before and after each call
    give_up_at = time.monotonic() + PATIENCE + 3 * seconds

    def work(consumer: Consumer) -> None:
        while len(starts) < rate * seconds and time.monotonic() < give_up_at:
            leases = consumer.reserve(3, 0.2)
            after = time.monotonic()
            starts.extend([(consumer.asked_at, after)] * len(leases))
            consumer.settle([Ack(lease) for lease in leases])

    run_all([partial(work, consuming()) for _ in range(10)])
    # Then all jobs start, and no window has more of them than the rate and the burst allow
    assert len(starts) == rate * seconds
    starts.sort()
    for first in range(0, len(starts), max(1, len(starts) // 300)):
        began = starts[first][0]
        inside = sorted(after for before, after in starts[first:] if before >= began)
        for count, ended in enumerate(inside, start=1):
            assert count <= burst + rate * (ended - began) + 1e-3


# --- fairness and parked jobs ----------------------------------------------------------------------------


@pytest.mark.one_row
@pytest.mark.parametrize("busy", [150, pytest.param(1_000, marks=LONG), pytest.param(10_000, marks=EXHAUSTIVE)])
def test_small_tenants_do_not_wait_for_a_busy_one(
    opened: Callable[[], Backend], consuming: Callable[[], Consumer], busy: int
) -> None:
    # Given four slots, which a tenant with many jobs uses
    backend = opened()
    backend.limits("q", {"all": Quota(slots=4), "tenant": Quota(fair=True)})

    def add_of(tenant: str, count: int) -> list[str]:
        return add(backend, count, Gate("all"), Gate("tenant", tenant), body=tenant.encode())

    add_of("busy", busy)
    consumer = consuming()
    arrivals = {50 + 9 * number: ("ten", 1) for number in range(10)} | {75: ("one", 1)}
    began: dict[str, int] = {}
    waited: dict[str, int] = {}
    running = consumer.reserve(4, 0)
    done: Counter[bytes] = Counter()
    # When two small tenants get jobs, while one job ends at a time
    step = 0
    while running:
        if step in arrivals:
            began.update(dict.fromkeys(add_of(*arrivals[step]), step))
        ended, *running = running
        _, leases = consumer.exchange([Ack(ended)], 4 - len(running), 0)
        waited.update({lease.id: step - began[lease.id] for lease in leases if lease.id in began})
        running += leases
        done[ended.body] += 1
        assert len(running) <= 4
        step += 1
    # Then each of their jobs starts before five further jobs of the busy tenant have run
    assert done == {b"busy": busy, b"ten": 10, b"one": 1}
    assert len(waited) == 11
    assert max(waited.values()) < 5


@pytest.mark.one_row
@pytest.mark.parametrize("arrival", [0, 41])
@pytest.mark.parametrize("busy", [150, pytest.param(1_000, marks=LONG), pytest.param(10_000, marks=EXHAUSTIVE)])
def test_the_jobs_that_small_tenants_enqueue_together_wait_for_less_than_five_job_times(
    opened: Callable[[], Backend],
    consuming: Callable[[], Consumer],
    busy: int,
    arrival: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given servers that park all jobs in the time that a call has for this, as they do if they are not busy
    for module, name in (
        ("multiq_mysql.parking_time", "PARKING_TIME"),
        ("multiq_mysql.parking_time", "LOOKING_TIME"),
        ("multiq_redis.exchange", "_PARKING_TIME"),
        ("multiq_redis.exchange", "_ONLY_PARKING_TIME"),
    ):
        monkeypatch.setattr(f"{module}.{name}", 60.0)
    # Given four slots, and a tenant with many jobs, which begins at the same time as two small tenants, or before them
    backend = opened()
    backend.limits("q", {"all": Quota(slots=4), "tenant": Quota(fair=True)})
    consumer = consuming()
    tenants = {"busy": busy, "ten": 10, "one": 1}
    small: list[str] = []

    def arrive(tenant: str) -> list[str]:
        return add(backend, tenants[tenant], Gate("all"), Gate("tenant", tenant), body=tenant.encode())

    arrive("busy")
    if arrival == 0:
        small = arrive("ten") + arrive("one")
    running = consumer.reserve(4, 0)
    waited = dict.fromkeys([lease.id for lease in running if lease.id in small], 0)
    done: Counter[bytes] = Counter()
    # When all jobs take the same time, and one of the four ends at each step
    step = 0
    while running:
        if step == arrival and not small:
            small = arrive("ten") + arrive("one")
        ended, *running = running
        _, leases = consumer.exchange([Ack(ended)], 4 - len(running), 0)
        waited.update({lease.id: step + 1 - arrival for lease in leases if lease.id in small})
        running += leases
        done[ended.body] += 1
        assert len(running) <= 4
        step += 1
    # Then the last job of the small tenants starts in less than five job times, which are 20 steps
    assert done == {b"busy": busy, b"ten": 10, b"one": 1}
    assert waited.keys() == set(small)
    assert max(waited.values()) < 20


@pytest.mark.one_row
def test_the_long_jobs_of_a_busy_tenant_leave_half_of_the_slots(
    opened: Callable[[], Backend], consuming: Callable[[], Consumer]
) -> None:
    # Given four slots, a tenant whose jobs do not end, and another tenant whose jobs end at once
    backend = opened()
    backend.limits("q", {"all": Quota(slots=4), "tenant": Quota(fair=True)})
    add(backend, 50, Gate("all"), Gate("tenant", "busy"), body=b"long")
    add(backend, 40, Gate("all"), Gate("tenant", "quick"), body=b"short")
    consumer = consuming()
    running: list[Lease] = []
    leases = consumer.reserve(4, 0)
    done = 0
    # When the short jobs run
    while leases:
        running += [lease for lease in leases if lease.body == b"long"]
        short = [lease for lease in leases if lease.body == b"short"]
        # Then the long jobs never use more than two slots
        assert done + len(short) == 40 or len(running) <= 2
        _, leases = consumer.exchange([Ack(lease) for lease in short], len(short), 0)
        done += len(short)
        if done == 40:
            break
    assert done == 40


@pytest.mark.one_row
def test_a_tenant_without_a_running_job_is_next_beside_tenants_with_other_limits(
    opened: Callable[[], Backend], consuming: Callable[[], Consumer]
) -> None:
    # Given slots that the long jobs of a tenant use, and then a small tenant that waits for these slots, too
    backend = opened()
    backend.limits("q", {"all": Quota(slots=3), "tenant": Quota(fair=True)})
    consumer = consuming()
    add(backend, 15, Gate("tenant", "quick"), body=b"quick")
    quick = consumer.reserve(15, 0)
    add(backend, 10, Gate("all"), Gate("tenant", "busy"), body=b"long")
    running = consumer.reserve(3, 0)
    assert consumer.reserve(1, 0) == []
    add(backend, 1, Gate("all"), Gate("tenant", "small"), body=b"small")
    assert consumer.reserve(1, 0) == []
    # When a slot is free, and another tenant has older jobs that need no slot
    consumer.settle([Release(lease, 0.0) for lease in quick])
    consumer.settle([Ack(running[0])])
    # Then the small tenant is next, and does not wait for the older jobs
    assert [lease.body for lease in consumer.reserve(1, 0)] == [b"small"]


@pytest.mark.one_row
@pytest.mark.parametrize("parked", [3000, pytest.param(100_000, marks=LONG)])
def test_jobs_behind_a_closed_gate_delay_no_others(
    opened: Callable[[], Backend], consuming: Callable[[], Consumer], parked: int
) -> None:
    # Given many jobs behind a closed gate, and others after them
    backend = opened()
    backend.limits("q", {"api": Quota(slots=0)})
    behind = add(backend, parked, API)
    consumer = consuming()
    assert consumer.reserve(10, 0) == []
    while not consumer.sees_all:  # a call parks jobs for some seconds only
        assert consumer.reserve(10, 0) == []
    others = add(backend, 50)
    other_gate = add(backend, 50, Gate("smtp"))
    # Then the others are handed out in their order
    leases = consumer.reserve(100, 0)
    assert [lease.id for lease in leases] == [*others, *other_gate]
    assert consumer.settle([Ack(lease) for lease in leases]) == [None] * 100
    assert consumer.reserve(10, 0) == []
    stats = backend.stats("q")
    assert (stats.ready, stats.reserved) == (parked, 0)
    # When the gate opens, then the jobs come in their order
    backend.limits("q", {"api": Quota(slots=70)})
    assert [lease.id for lease in consumer.reserve(100, 0)] == behind[:70]
