"""Limits of tasks: options, keys, what is stored when, and workers that keep to them."""

from __future__ import annotations

import asyncio
import datetime as dt
import enum
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import pytest

import multiq
from multiq.backend import Ack, Gate, NewJob, Quota, Terms, UniqueKey
from multiq.backend.memory import MemoryBackend
from multiq.envelope import decode_envelope
from multiq.errors import ArgumentsInvalid, NameInvalid, OptionInvalid, ScheduleInvalid, Unsupported
from multiq.ids import new_id
from multiq.limits import store_app_limits

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from multiq.backend import Lease, LimitState


class Noting(MemoryBackend):
    """A memory backend that records the jobs and the changes of limits that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs_sent: list[NewJob] = []
        self.changes: list[tuple[str, dict[str, Quota | None], bool]] = []

    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
        self.jobs_sent += jobs
        return super().enqueue(queue, jobs)

    def limits(
        self, queue: str, change: Mapping[str, Quota | None] | None = None, *, pinned: bool = True
    ) -> list[LimitState]:
        if change:
            self.changes.append((queue, dict(change), pinned))
        return super().limits(queue, change, pinned=pinned)

    def gates(self) -> list[tuple[Gate, ...]]:
        return [job.terms.gates if job.terms is not None else () for job in self.jobs_sent]


@pytest.fixture
def backend() -> Noting:
    return Noting()


@pytest.fixture
def app(backend: Noting) -> multiq.App:
    return multiq.App(backend=backend)


# --- options ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"name": "a b", "slots": 1}, NameInvalid, "a limit name must have"),
        ({"name": "api"}, OptionInvalid, "must have slots, a rate or fair=True"),
        ({"name": "api", "slots": -1}, OptionInvalid, "slots of limit api must be a whole number from 0"),
        ({"name": "api", "slots": 1.5}, OptionInvalid, "slots of limit api"),
        ({"name": "api", "rate": 0}, OptionInvalid, "must be more than 0 jobs, got 0"),
        ({"name": "api", "rate": float("nan")}, OptionInvalid, "must be more than 0 jobs"),
        ({"name": "api", "rate": True}, OptionInvalid, "must be more than 0 jobs"),
        ({"name": "api", "rate": 2e6}, OptionInvalid, "to 1000000 jobs in a second"),
        ({"name": "api", "rate": 1000001}, OptionInvalid, "got 1000001 in 1 s"),
        ({"name": "api", "rate": 1, "per": 0}, OptionInvalid, "per of limit api must be more than 0"),
        ({"name": "api", "rate": 1, "burst": 0}, OptionInvalid, "burst of limit api must be a whole number from 1"),
        ({"name": "api", "slots": 1, "fair": 1}, OptionInvalid, "fair of limit api must be True or False, got 1"),
        ({"name": "api", "slots": 1, "key": 7}, OptionInvalid, "must be text like '{customer}', got 7"),
        ({"name": "api", "slots": 1, "key": "{"}, OptionInvalid, "must be text like '{customer}'"),
        ({"name": "api", "slots": 1, "key": "{}"}, OptionInvalid, "must name its arguments"),
        ({"name": "api", "slots": 1, "key": "{0}"}, OptionInvalid, "must name its arguments"),
    ],
)  # fmt: skip
def test_a_limit_is_checked_when_it_is_made(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text.replace("{", "\\{")):
        multiq.Limit(**options)


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (7, "limits must be a list of multiq.Limit, got 7"),
        (["api"], "limits must be a list of multiq.Limit, got 'api'"),
        ([multiq.Limit("follow", slots=1)], "must have another name than 'follow'"),
        ([multiq.Limit("a", slots=1), multiq.Limit("a", slots=1)], "must have different names, got a, a"),
        ([multiq.Limit(f"l{number}", slots=1) for number in range(5)], "at most 4 limits, got 5"),
        ([multiq.Limit("a", slots=1, key="{shop}")], r"made of the task's arguments \(customer\), got shop"),
    ],
)  # fmt: skip
def test_the_limits_of_a_task_are_checked(app: multiq.App, limits: Any, text: str) -> None:
    def task(customer: str) -> None: ...

    with pytest.raises(OptionInvalid, match=text):
        app.task(limits=limits)(task)
    plain = app.task(task)
    with pytest.raises(OptionInvalid, match=text):
        plain.options(limits=limits)


# --- keys ------------------------------------------------------------------------------------------------


def test_a_key_is_made_of_the_calls_arguments(app: multiq.App, backend: Noting) -> None:
    # Given a task with several keys
    @app.task(
        limits=[
            multiq.Limit("all", slots=9),
            multiq.Limit("customer", key="{customer}", slots=1),
            multiq.Limit("order", key="{order[shop]}-{page}", rate=1),
        ]
    )
    def task(customer: str, order: dict[str, str], page: int = 1) -> None: ...

    # When it is called with positional, named and missing arguments
    task.enqueue("acme", {"shop": "7"})
    task.enqueue(customer="b/c", order={"shop": "8"}, page=2)
    task.options(limits=[]).enqueue("acme", {})
    # Then each value is a key
    assert backend.gates() == [
        (Gate("all"), Gate("customer", "acme"), Gate("order", "7-1")),
        (Gate("all"), Gate("customer", "b/c"), Gate("order", "8-2")),
        (),
    ]


def test_any_named_argument_can_be_a_key(app: multiq.App, backend: Noting) -> None:
    @app.task(limits=multiq.Limit("api", key="{extra}", slots=1))
    def task(**options: str) -> None: ...

    task.enqueue(extra="x")
    assert backend.gates() == [(Gate("api", "x"),)]


def test_a_call_without_the_keys_argument_is_refused(app: multiq.App, backend: Noting) -> None:
    @app.task(limits=multiq.Limit("api", key="{order[shop]}", slots=1))
    def task(order: dict[str, str]) -> None: ...

    with pytest.raises(ArgumentsInvalid, match="of limit api cannot be made of these arguments: KeyError: 'shop'"):
        task.enqueue({})
    assert backend.jobs_sent == []


def test_a_long_key_is_shortened_and_stays_different(app: multiq.App, backend: Noting) -> None:
    @app.task(limits=multiq.Limit("api", key="{url}", slots=1))
    def task(url: str) -> None: ...

    task.enqueue("x" * 1000 + "a")
    task.enqueue("x" * 1000 + "b")
    (first,), (second,) = backend.gates()
    assert first != second
    assert {len(first.key), len(second.key)} == {200}


class Color(enum.Enum):
    RED = "r"


@pytest.mark.parametrize("scope", ["queue", "app"])
def test_an_argument_and_its_form_in_the_envelope_have_the_same_key(
    app: multiq.App, backend: Noting, scope: Literal["queue", "app"]
) -> None:
    limits = [
        multiq.Limit("color", key="{color.value}", slots=1, scope=scope),
        multiq.Limit("day", key="{day:%Y-%m}", slots=1, scope=scope),
    ]

    @app.task(limits=limits, name="typed")
    def task(color: Color, day: dt.date, found: Color | None = None) -> None: ...

    first = dt.date(2026, 11, 28)
    task.enqueue(Color.RED, first)
    task.enqueue("r", "2026-11-28")  # type: ignore[arg-type]  # as an envelope of another program has them
    keys = [("color", "r"), ("day", "2026-11")]
    if scope == "queue":
        assert backend.gates() == [tuple(Gate(name, key) for name, key in keys)] * 2
    else:
        envelopes = [decode_envelope(job.body) for job in backend.jobs_sent]
        assert [[(gate.limit, gate.key) for gate in envelope.permits] for envelope in envelopes] == [keys] * 2


def test_a_result_that_is_not_there_yet_does_not_fail_the_other_keys(app: multiq.App, backend: Noting) -> None:
    @app.task(name="color")
    def color() -> Color:
        return Color.RED

    @app.task(limits=multiq.Limit("day", key="{day:%Y-%m}", slots=1), name="typed")
    def task(color: Color, day: dt.date) -> None:
        days.append(day)
        (state,) = backend.limits("default")
        assert [key for key, *_ in state.top] == ["2026-11"]

    days: list[dt.date] = []
    multiq.chain(color.s(), task.s(day=dt.date(2026, 11, 28))).enqueue()
    multiq.Worker(app, processes=0, stop_when_empty=True).run()
    assert days == [dt.date(2026, 11, 28)]


@pytest.mark.parametrize("scope", ["queue", "app"])
@pytest.mark.parametrize("key", ["{customer}", "{customer[id]}", "{rest}", "{more[where]}", "{where}"])
def test_a_key_of_a_result_is_refused(
    app: multiq.App, backend: Noting, key: str, scope: Literal["queue", "app"]
) -> None:
    limit = multiq.Limit("api", key=key, slots=1, scope=scope)
    name = key.strip("{}").split("[")[0]

    @app.task
    def find() -> None: ...

    @app.task(name="one", limits=[limit] if name == "customer" else None)
    def one(customer: Any, page: int = 0) -> None: ...

    @app.task(name="any", limits=[limit] if name == "rest" else None)
    def some(page: int, *rest: Any) -> None: ...

    @app.task(name="more", limits=[limit] if name in {"more", "where"} else None)
    def more(page: int, **more: Any) -> None: ...

    flow = multiq.Flow("orders")
    found = flow.add(find.s())
    call = {"customer": one.s(found), "rest": some.s(1, found)}.get(name) or more.s(1, where=found)
    flow.add(call, after=[found])
    # When a limit's key would be made of a result that is not there yet, then the flow is refused
    with pytest.raises(ArgumentsInvalid, match=f"got {name}, which is the result of an earlier job"):
        flow.enqueue()
    assert backend.jobs_sent == []


# --- enqueuing -------------------------------------------------------------------------------------------


def test_every_way_to_enqueue_has_the_limits(app: multiq.App, backend: Noting) -> None:
    @app.task(limits=multiq.Limit("api", key="{n}", slots=1))
    def task(n: int) -> None: ...

    async def enqueue() -> None:
        await task.aenqueue(2)
        await task.aenqueue_many([(3,)])

    task.enqueue(0)
    task.enqueue_many([(1,)], ids=["own"])
    asyncio.run(enqueue())
    assert task.options(id="mine").enqueue(4).id == "mine"
    assert backend.gates() == [(Gate("api", str(number)),) for number in range(5)]
    assert "own" in {job.id for job in backend.jobs_sent}


def test_the_jobs_of_flows_and_schedules_have_the_limits(app: multiq.App, backend: Noting) -> None:
    @app.task(limits=multiq.Limit("api", key="{n}", slots=1), name="limited")
    def task(n: int) -> int:
        return n

    flow = multiq.group(task.s(1), task.s(1)).enqueue()
    leases = backend.consumer(["default"]).reserve(10, 0)
    assert [lease.id for lease in leases if backend.peek("default", lease.id).body] != []
    (state,) = backend.limits("default")
    assert (state.running, state.parked) == (1, 1)
    app.schedules.add("often", task.s(5), every=60)
    handle = app.schedules.run("often")
    assert handle.state() is multiq.State.READY
    assert {key for key, *_ in backend.limits("default")[0].top} == {"1", "5"}
    with pytest.raises(ScheduleInvalid, match="must have its task's limits"):
        app.schedules.add("other", task.options(limits=[]).s(5), every=60)
    assert flow.id


def test_a_job_without_limits_is_sent_as_before(app: multiq.App, backend: Noting) -> None:
    @app.task
    def task() -> None: ...

    task.enqueue()
    assert [job.terms for job in backend.jobs_sent] == [None]
    assert backend.changes == []


def test_a_backend_without_limits_refuses_and_stores_nothing() -> None:
    # Given a server that is unreachable, so that each call to it would fail
    with multiq.App("beanstalk://127.0.0.1:1") as app:

        @app.task(limits=multiq.Limit("api", slots=1))
        def task() -> None: ...

        with pytest.raises(Unsupported, match="limits"):
            task.enqueue()
        with pytest.raises(Unsupported):
            app.limits.list("default")


# --- what is stored --------------------------------------------------------------------------------------


def test_a_process_stores_a_limit_once_and_before_its_first_job(app: multiq.App, backend: Noting) -> None:
    @app.task(limits=multiq.Limit("api", slots=2))
    def task() -> None: ...

    for _ in range(3):
        task.enqueue()
    task.options(queue="other").enqueue()
    assert backend.changes == [
        ("default", {"api": Quota(slots=2)}, False),
        ("other", {"api": Quota(slots=2)}, False),
    ]


def test_two_quotas_of_one_name_are_refused(app: multiq.App) -> None:
    @app.task(limits=multiq.Limit("api", slots=2))
    def task() -> None: ...

    task.enqueue()
    with pytest.raises(OptionInvalid, match="limit api must have the same numbers everywhere in queue default"):
        task.options(limits=[multiq.Limit("api", slots=3)]).enqueue()
    task.options(limits=[multiq.Limit("api", slots=3)], queue="other").enqueue()


def test_a_deploy_changes_a_limit_and_older_code_goes_on(backend: Noting) -> None:
    # Given an older program, and a newer one with another number
    def program(slots: int) -> multiq.App:
        app = multiq.App(backend=Other(backend))

        @app.task(name="task", limits=multiq.Limit("api", slots=slots))
        def task() -> None: ...

        return app

    old, new = program(1), program(5)
    old.find_task("task").enqueue()
    # When the newer program starts, then its number applies, and the older one can still enqueue
    store_app_limits(new)
    old.find_task("task").enqueue()
    assert backend.limits("default")[0].quota == Quota(slots=5)
    # When an operator sets the limit, then no program changes it
    assert old.limits.set("default", "api", slots=9).is_pinned
    store_app_limits(program(7))
    assert backend.limits("default")[0].quota == Quota(slots=9)
    # And when the limit is removed, then the next program stores its number
    assert old.limits.remove("default", "api")
    assert not old.limits.remove("default", "api")
    store_app_limits(program(7))
    assert backend.limits("default")[0].quota == Quota(slots=7)


class Other(MemoryBackend):
    """The connection of another process to the same store."""

    def __init__(self, first: MemoryBackend) -> None:
        super().__init__()
        self._store = first._store


def test_the_limit_of_jobs_that_follow_cannot_be_changed(app: multiq.App) -> None:
    @app.task(unique=multiq.Unique(by=[], on_conflict="follow"))
    def sync() -> None: ...

    sync.enqueue()
    with pytest.raises(OptionInvalid, match="must have another name than 'follow'"):
        app.limits.set("default", "follow", slots=2)
    with pytest.raises(OptionInvalid, match="must have another name than 'follow'"):
        app.limits.remove("default", "follow")
    assert [state.quota.slots for state in app.limits.list()["default"]] == [1]


def test_set_leaves_options_that_are_not_given(app: multiq.App) -> None:
    app.limits.set("default", "api", rate=5, per=60, burst=3)
    app.limits.set("default", "api", slots=2)
    assert app.limits.list("default")["default"][0].quota == Quota(slots=2, rate=5, per=60, burst=3)
    app.limits.set("default", "api", rate=None)
    assert app.limits.list("default")["default"][0].quota == Quota(slots=2, per=60, burst=3)
    with pytest.raises(OptionInvalid, match="must have slots, a rate or fair"):
        app.limits.set("default", "api", slots=None)
    assert app.limits.list("empty") == {}


# --- workers ---------------------------------------------------------------------------------------------


def test_a_worker_keeps_to_the_slots_and_takes_no_more_than_it_can_start(app: multiq.App, backend: Noting) -> None:
    # Given short jobs with two slots, and a worker that prefetches
    lock, live, most = threading.Lock(), 0, 0
    held: list[int] = []

    @app.task(limits=multiq.Limit("api", slots=2))
    def task() -> None:
        nonlocal live, most
        with lock:
            live += 1
            most = max(most, live)
            held.append(backend.limits("default")[0].running)
        time.sleep(0.001)
        with lock:
            live -= 1

    for _ in range(50):
        task.enqueue()
    # When it runs them
    multiq.Worker(app, processes=0, threads=4, prefetch=16, stop_when_empty=True).run()
    # Then never more than two run at a time, and all of them run
    assert most == 2
    assert max(held) <= 2
    assert len(held) == 50


def test_a_worker_with_one_thread_leaves_the_other_slots_to_others(app: multiq.App, backend: Noting) -> None:
    running: list[int] = []

    @app.task(limits=multiq.Limit("api", slots=100))
    def task() -> None:
        running.append(backend.limits("default")[0].running)

    for _ in range(100):
        task.enqueue()
    multiq.Worker(app, processes=0, threads=1, prefetch=64, stop_when_empty=True).run()
    # The verdict on the previous job may not be sent yet.
    assert max(running) <= 2
    assert len(running) == 100


def test_a_worker_stores_the_limits_of_its_tasks(app: multiq.App, backend: Noting) -> None:
    @app.task(limits=multiq.Limit("api", slots=2))
    def task() -> None: ...

    multiq.Worker(app, processes=0, stop_when_empty=True).run()
    assert backend.changes == [("default", {"api": Quota(slots=2)}, False)]


# --- under faults ----------------------------------------------------------------------------------------


def _gated(key: str = "", ttr: float = 60.0) -> NewJob:
    return NewJob(b"", new_id(), ttr=ttr, terms=Terms(gates=(Gate("api", key),)))


@pytest.mark.long
def test_consumers_that_hang_past_their_leases_never_hold_more_slots_than_there_are(backend: Noting) -> None:
    # Given 32 consumers that reserve and hang past their leases, in a second of real time each
    backend.limits("q", {"api": Quota(slots=3)})
    backend.enqueue("q", [_gated(ttr=1.0) for _ in range(200)])
    most: list[int] = []
    over = threading.Event()

    def hang() -> None:
        consumer = backend.consumer(["q"])
        while not over.is_set():
            for lease in consumer.reserve(2, 0.2):
                over.wait(1.2)
                consumer.settle([Ack(lease)])

    def watch() -> None:
        while not over.is_set():
            most.append(backend.limits("q")[0].running)
            time.sleep(0.001)

    threads = [threading.Thread(target=work) for work in [watch, *[hang] * 32]]
    for thread in threads:
        thread.start()
    time.sleep(6)
    over.set()
    for thread in threads:
        thread.join()
    # Then at most three leases are live at a time, and when all consumers have hung, three jobs can be reserved again
    assert max(most) == 3
    consumer, leases, give_up_at = backend.consumer(["q"]), list[Any](), time.monotonic() + 10
    while len(leases) < 3 and time.monotonic() < give_up_at:
        leases += consumer.reserve(3 - len(leases), 0.5)
    assert len(leases) == 3


@pytest.mark.long
def test_a_slot_that_is_free_while_a_job_is_parked_is_not_lost(backend: Noting) -> None:
    # Given one slot, when a slot is freed while another consumer looks, in 10,000 rounds
    backend.limits("q", {"api": Quota(slots=1)})
    first, second = backend.consumer(["q"]), backend.consumer(["q"])
    for _ in range(10_000):
        backend.enqueue("q", [_gated(), _gated()])
        (lease,) = first.reserve(1, 1)
        found: list[Lease] = []
        looking = threading.Thread(target=lambda found=found: found.extend(second.reserve(1, 1)))
        looking.start()
        first.settle([Ack(lease)])
        looking.join()
        # Then the parked job is handed out
        assert len(found) == 1
        second.settle([Ack(found[0])])


def test_small_tenants_do_not_wait_for_a_busy_one(backend: Noting) -> None:
    # Given tenants with 10,000, 10 and 1 jobs, who share four slots
    backend.limits("q", {"all": Quota(slots=4), "tenant": Quota(fair=True)})
    jobs = [
        NewJob(tenant.encode(), new_id(), terms=Terms(gates=(Gate("all"), Gate("tenant", tenant))))
        for tenant, count in (("a", 10_000), ("b", 10), ("c", 1))
        for _ in range(count)
    ]
    for at in range(0, len(jobs), 1000):
        backend.enqueue("q", jobs[at : at + 1000])
    # When the four jobs that run end together, round by round
    consumer, rounds = backend.consumer(["q"]), list[Counter[bytes]]()
    for _ in range(12):
        leases = consumer.reserve(4, 0)
        rounds.append(Counter(lease.body for lease in leases))
        consumer.settle([Ack(lease) for lease in leases])
    # Then the only job of one tenant runs in the first rounds, and the ten jobs of the other tenant get a turn in each
    # round
    assert any(b"c" in round_ for round_ in rounds[:5])
    assert sum(round_[b"b"] for round_ in rounds[:10]) == 10
    assert all(round_.total() == 4 for round_ in rounds)


# --- unique keys and limits together ---------------------------------------------------------------------


def test_a_job_with_terms_is_the_same_after_json() -> None:
    """Outboxes store jobs as JSON."""
    job = NewJob(
        b"body", "id", terms=Terms(2, UniqueKey(b"\xff" * 32, "reserved", "replace", 5.0, 9.0), (Gate("api", "7"),))
    )
    assert msgspec.json.decode(msgspec.json.encode(job), type=NewJob) == job


def test_a_task_can_be_unique_and_limited(app: multiq.App, backend: Noting) -> None:
    @app.task(unique=multiq.Unique(by=["customer"]), limits=multiq.Limit("api", key="{region}", slots=1))
    def sync(customer: int, region: str) -> None: ...

    first, again = sync.enqueue(7, "eu"), sync.enqueue(7, "us")
    assert (first.was_new, again.was_new, again.id) == (True, False, first.id)
    assert all(handle.was_new for handle in sync.enqueue_many([(8, "eu"), (9, "us")]))
    asyncio.run(sync.aenqueue(10, "eu"))
    asyncio.run(sync.aenqueue_many([(11, "eu"), (7, "eu")]))
    # The limit is stored once, and a job has both
    assert [change for _, change, _ in backend.changes] == [{"api": Quota(slots=1)}]
    terms = [job.terms for job in backend.jobs_sent]
    assert [one.gates for one in terms if one is not None][:2] == [(Gate("api", "eu"),), (Gate("api", "us"),)]
    assert all(one is not None and one.unique is not None for one in terms)
    with backend.consumer(["default"]) as consumer:
        leases = consumer.reserve(10, 0)
    assert len(leases) == 2  # one job of each region


def test_a_replaced_job_has_the_limits_of_its_new_arguments(app: multiq.App, backend: Noting) -> None:
    @app.task(
        unique=multiq.Unique(by=["customer"], on_conflict="replace"),
        limits=multiq.Limit("api", key="{region}", slots=0),
    )
    def sync(customer: int, region: str) -> None: ...

    sync.enqueue(7, "eu")
    sync.enqueue(7, "us")
    app.limits.set("default", "api", slots=1)
    with backend.consumer(["default"]) as consumer:
        consumer.reserve(1, 0)
        (state,) = backend.limits("default")
    assert state.top == [("us", 1, 0)]


def test_one_job_that_follows_runs_and_one_waits_with_the_newest_arguments(app: multiq.App, backend: Noting) -> None:
    @app.task(unique=multiq.Unique(by=["customer"], on_conflict="follow"))
    def sync(customer: int, version: int) -> None: ...

    # Given a running job of one customer, and a job of another customer
    first, other = sync.enqueue(7, 1), sync.enqueue(8, 1)
    consumer = backend.consumer(["default"])
    running = consumer.reserve(1, 0)
    assert [lease.id for lease in running] == [first.id]
    # When more jobs are enqueued meanwhile, then one of them waits, with the newest arguments
    waiting = [sync.enqueue(7, version) for version in (2, 3, 4)]
    assert [handle.was_new for handle in waiting] == [True, False, False]
    assert len({handle.id for handle in waiting}) == 1
    assert [lease.id for lease in consumer.reserve(9, 0)] == [other.id]
    assert backend.peek("default", waiting[0].id).held_by is not None
    # When the running job is done, then the waiting job runs
    consumer.settle([Ack(running[0])])
    (lease,) = consumer.reserve(9, 0)
    assert lease.id == waiting[0].id
    assert waiting[0].peek().value["args"] == [7, 4]
    assert sync.enqueue(7, 5).was_new


@pytest.mark.parametrize("options", [{"until": "reserved"}, {"hold": 5}])
def test_follow_takes_neither_until_nor_hold(options: dict[str, Any]) -> None:
    with pytest.raises(OptionInvalid, match="without until and hold"):
        multiq.Unique(on_conflict="follow", **options)


def test_a_schedule_can_follow(app: multiq.App) -> None:
    @app.task(unique=multiq.Unique(on_conflict="follow"))
    def sync() -> None: ...

    app.schedules.add("often", sync.s(), every=60)
    assert app.schedules.run("often").was_new
    with app.queue().reserve(timeout=0):
        assert app.schedules.run("often").was_new
        assert not app.schedules.run("often").was_new
        (state,) = app.limits.list("default")["default"]
        assert (state.name, state.running, state.parked) == ("follow", 1, 1)


def test_middleware_can_change_the_key_and_the_limits(app: multiq.App, backend: Noting) -> None:
    class Tenants(multiq.Middleware):
        def enqueue(self, sending: multiq.Sending) -> Iterator[None]:
            for job in sending.jobs:
                job.set(limits=multiq.Limit("tenant", key="{customer}", slots=1), unique=multiq.Unique())
            yield

    app.middleware(Tenants())

    @app.task
    def sync(customer: int) -> None: ...

    assert [sync.enqueue(7).was_new, sync.enqueue(7).was_new, sync.enqueue(8).was_new] == [True, False, True]
    assert [job.terms.gates for job in backend.jobs_sent if job.terms] == [
        (Gate("tenant", "7"),),
        (Gate("tenant", "7"),),
        (Gate("tenant", "8"),),
    ]
    with pytest.raises(OptionInvalid, match="a part of a flow must not be unique"):
        multiq.chain(sync.s(1), sync.s(2)).enqueue()


@pytest.mark.parametrize("value", [{"a", "b"}, frozenset("ab")])
def test_a_key_must_not_be_made_of_a_set(app: multiq.App, value: set[str] | frozenset[str]) -> None:
    @app.task(limits=multiq.Limit("api", key="{tags}", slots=1))
    def call(tags: set[str]) -> None: ...

    with pytest.raises(ArgumentsInvalid, match="must not be made of a set, got one as tags"):
        call.enqueue(value)  # type: ignore[arg-type]


def test_a_key_that_cannot_be_formatted_is_refused(app: multiq.App) -> None:
    @app.task(limits=multiq.Limit("api", key="{number:c}", slots=1))
    def call(number: int) -> None: ...

    with pytest.raises(ArgumentsInvalid, match="cannot be made of these arguments: OverflowError"):
        call.enqueue(-1)
