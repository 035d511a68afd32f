"""Unique jobs as users write them: ``Unique``, the keys of calls, and the handles."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import os
import sqlite3
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

import multiq
from multiq import JobExists, OptionInvalid, PayloadInvalid, State, Unique, Unsupported
from multiq.annotations import Codec
from multiq.backend import Bury, NewJob
from multiq.backend.capabilities import Capabilities, Gap
from multiq.backend.memory import MemoryBackend
from multiq.errors import BackendUnavailable, EnqueueUncertain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from multiq import App, Task


@dataclass
class Order:
    number: int
    lines: tuple[str, ...] = ()


@pytest.fixture
def app() -> Iterator[App]:
    with multiq.App("memory://") as app:
        yield app


def keys_of(task: Task[..., Any], *calls: tuple[tuple[Any, ...], dict[str, Any]]) -> list[bytes]:
    unique = task.default.unique
    assert unique is not None
    return [task._unique_key(unique, args, kwargs).key for args, kwargs in calls]


def call(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


# --- handles ---


def test_a_second_enqueue_returns_the_handle_of_the_first_job(app: App) -> None:
    @app.task(unique=Unique())
    def sync(customer: int) -> None: ...

    first, second, other = sync.enqueue(7), sync.enqueue(7), sync.enqueue(8)
    assert (first.was_new, second.was_new, other.was_new) == (True, False, True)
    assert second == first
    assert repr(second) == repr(first)
    assert app.queue("default").stats().ready == 2


def test_a_job_without_unique_is_new() -> None:
    with multiq.App("memory://") as app:
        assert app.queue("mail").enqueue(b"x").was_new

        @app.task
        def plain() -> None: ...

        assert plain.enqueue().was_new
        assert all(handle.was_new for handle in plain.enqueue_many([(), ()]))


def test_a_call_of_many_says_of_each_job_whether_it_is_new(app: App) -> None:
    @app.task
    def sync(customer: int) -> None: ...

    handles = sync.options(unique=Unique(by=["customer"])).enqueue_many([(1,), (2,), (1,), {"customer": 2}])
    assert [handle.was_new for handle in handles] == [True, True, False, False]
    assert handles[0] == handles[2]
    assert handles[1] == handles[3]


def test_coroutines_enqueue_unique_jobs(app: App) -> None:
    @app.task(unique=Unique())
    def sync(customer: int) -> None: ...

    async def enqueue() -> list[bool]:
        handles = [*await asyncio.gather(*(sync.aenqueue(number % 3) for number in range(9)))]
        handles += await sync.aenqueue_many([(2,), (3,)])
        return [handle.was_new for handle in handles]

    assert asyncio.run(enqueue()).count(True) == 4
    assert app.queue("default").stats().ready == 4


@pytest.mark.parametrize("how", ["enqueue", "aenqueue"])
def test_an_error_names_the_job_that_has_the_key(app: App, how: str) -> None:
    @app.task(unique=Unique(on_conflict="error"))
    def sync(customer: int) -> None: ...

    first = sync.enqueue(7)
    enqueue = sync.enqueue if how == "enqueue" else lambda number: asyncio.run(sync.aenqueue(number))
    with pytest.raises(JobExists, match="has the same unique key") as caught:
        enqueue(7)
    assert (caught.value.queue, caught.value.job_id) == (first.queue, first.id)
    assert app.queue("default").stats().ready == 1


def test_many_calls_cannot_raise_an_error_about_one(app: App) -> None:
    @app.task(unique=Unique(on_conflict="error"))
    def sync(customer: int) -> None: ...

    ways: list[Callable[[], object]] = [
        lambda: sync.enqueue_many([(1,)]),
        lambda: asyncio.run(sync.aenqueue_many([(1,)])),
    ]
    for enqueue in ways:
        with pytest.raises(OptionInvalid, match="must be 'keep', 'replace' or 'follow', got 'error'"):
            enqueue()
    assert app.queue("default").stats().ready == 0


def test_a_replaced_job_runs_with_the_newest_arguments(app: App) -> None:
    ran = []

    @app.task(unique=Unique(by=["document"], on_conflict="replace", until="reserved"))
    def index(document: int, text: str) -> None:
        ran.append((document, text))

    first = index.enqueue(1, "old")
    assert index.options(delay=60, priority=3).enqueue(1, "new") == first
    record = first.peek()
    assert (record.value["args"], record.priority, record.state) == ([1, "new"], 3, State.DELAYED)


def test_options_make_a_job_unique_and_not_unique(app: App) -> None:
    @app.task(unique=Unique())
    def sync() -> None: ...

    assert sync.enqueue().was_new
    assert not sync.enqueue().was_new
    assert sync.options(unique=False).enqueue().was_new
    assert not sync.options(priority=3).enqueue().was_new
    assert sync.options(unique=Unique(until="reserved"), queue="other").enqueue().was_new


def test_the_handle_of_a_typed_task_says_whether_it_is_new(app: App) -> None:
    @app.task(unique=Unique())
    def tomorrow(day: dt.date) -> dt.date:
        return day + dt.timedelta(1)

    day = dt.date(2026, 11, 23)
    handles = [tomorrow.enqueue(day), tomorrow.enqueue(day), tomorrow.enqueue(dt.date(2026, 11, 24))]
    assert [handle.was_new for handle in handles] == [True, False, True]


# --- keys ---


def test_equal_arguments_have_one_key_however_they_are_given(app: App) -> None:
    @app.task(unique=Unique())
    def task(a: int, b: int = 0, *, c: dict[str, int] | None = None) -> None: ...

    first, *others = keys_of(
        task, call(1), call(1, 0), call(a=1), call(b=0, a=1), call(1, c=None), call(1, b=0, c=None)
    )
    assert others == [first] * 5
    one, other = keys_of(task, call(1, c={"x": 1, "y": 2}), call(1, c={"y": 2, "x": 1}))
    assert one == other != first
    assert len(first) == 32


def test_different_arguments_have_different_keys(app: App) -> None:
    @app.task(unique=Unique())
    def task(a: Any, b: Any = None) -> None: ...

    values = [1, 1.5, True, "1", "True", None, "None", [], {}, [1], ["1"], [[1]], "", " ", "a", "A", "\0", 0, False, -1]
    keys = keys_of(task, *[call(value) for value in values], *[call(1, value) for value in values if value is not None])
    assert len({*keys}) == len(keys)


def test_by_chooses_the_arguments_that_count(app: App) -> None:
    @app.task(unique=Unique(by=["a"]))
    def task(a: int, b: int = 0) -> None: ...

    one, two, three = keys_of(task, call(1, 2), call(1, 3), call(2, 2))
    assert one == two != three


def test_an_empty_by_makes_all_jobs_of_a_task_one(app: App) -> None:
    @app.task(unique=Unique(by=[]))
    def nightly(day: int) -> None: ...

    assert [nightly.enqueue(day).was_new for day in range(3)] == [True, False, False]


def test_tasks_do_not_share_keys(app: App) -> None:
    @app.task(unique=Unique())
    def one(a: int) -> None: ...

    @app.task(unique=Unique())
    def two(a: int) -> None: ...

    assert one.enqueue(1).was_new
    assert two.enqueue(1).was_new


def test_a_key_stays_the_same_over_versions(app: App) -> None:
    @app.task(name="shop.sync", unique=Unique())
    def sync(customer: int, full: bool = False) -> None: ...

    (key,) = keys_of(sync, call(7))
    assert key.hex() == "a253e7bc79059d323bca14ccbec63638d6dfbc112e6af27d780c0a55b0dd5dc3"


def test_rich_arguments_have_the_key_of_their_encoding(app: App) -> None:
    @app.task(unique=Unique())
    def ship(order: Order, on: dt.date = dt.date(2026, 1, 1)) -> None: ...

    handles = [
        ship.enqueue(Order(7)), ship.enqueue(order=Order(7)), ship.enqueue(Order(7), dt.date(2026, 1, 1)),
        ship.enqueue(Order(8)), ship.enqueue(Order(7, ("a",))), ship.enqueue(Order(7), dt.date(2026, 1, 2)),
    ]  # fmt: skip
    assert [handle.was_new for handle in handles] == [True, False, False, True, True, True]


class Parcel(msgspec.Struct, array_like=True, tag=True):
    number: int
    marks: set[int] = set()


class Sticker(pydantic.BaseModel):
    marks: set[int] = pydantic.Field(default=set(), alias="Marks")


class Label(pydantic.BaseModel):
    stickers: list[Sticker] = []


@dataclass(frozen=True)
class Tagged:
    tags: frozenset[int]


def reordered() -> tuple[set[int], set[int]]:
    """Two equal sets that yield their members in different orders."""
    one, two = {8}, {0}
    one.add(0)
    two.add(8)
    assert [*one] != [*two]
    return one, two


@pytest.mark.parametrize(
    ("annotation", "make"),
    [
        (set[int], lambda marks: marks),
        (dict[str, list[frozenset[int]]], lambda marks: {"a": [marks, {1}]}),
        (tuple[int, set[int]], lambda marks: (1, marks)),
        (set[Tagged], lambda marks: {Tagged(frozenset(marks)), Tagged(frozenset({7}))}),
        (list[Parcel], lambda marks: [Parcel(1, marks)]),
        (Label, lambda marks: Label(stickers=[Sticker(Marks=marks)])),
    ],
)
def test_equal_sets_have_the_same_key(app: App, annotation: Any, make: Callable[[set[int]], Any]) -> None:
    def ship(what: Any) -> None: ...

    ship.__annotations__["what"] = annotation
    task = app.task(unique=Unique())(ship)
    one, two = map(make, reordered())
    assert task.enqueue(one).was_new
    assert not task.enqueue(two).was_new
    assert task.enqueue(make({0, 9})).was_new


def test_the_key_of_a_set_is_the_same_in_every_process(app: App) -> None:
    @app.task(name="mark", unique=Unique())
    def mark(colours: set[str]) -> None: ...

    (key,) = keys_of(mark, call({"red", "green", "blue", "black"}))
    assert key.hex() == "3e697aec7494ece8fdcf38288bea81bef07a3a1e7b7ad6d970a2cfee5aba9c70"


@dataclass
class Box:
    marks: frozenset[int] = frozenset()
    notes: tuple[frozenset[str], ...] = ()
    inner: dict[str, frozenset[int] | None] = field(default_factory=dict)


_MARKS = st.frozensets(st.sampled_from([0, 1, 8, 16]), max_size=3)
_BOXES = st.builds(
    Box,
    _MARKS,
    st.lists(st.frozensets(st.sampled_from("ab"), max_size=2), max_size=2).map(tuple),
    st.dictionaries(st.sampled_from("xy"), st.none() | _MARKS, max_size=2),
)


@given(one=_BOXES, two=_BOXES)
def test_keys_are_equal_if_and_only_if_python_says_that_the_arguments_are(one: Box, two: Box) -> None:
    app = multiq.App("memory://")

    @app.task(unique=Unique())
    def ship(box: Box) -> None: ...

    twin = Box(frozenset(sorted(one.marks, reverse=True)), one.notes, dict(reversed(one.inner.items())))
    of_one, of_twin, of_two = keys_of(ship, call(one), call(twin), call(two))
    assert of_twin == of_one
    assert (of_two == of_one) is (two == one)


def test_processes_with_other_hash_seeds_add_one_job_for_equal_sets(tmp_path: Path) -> None:
    # Given processes that yield the members of a set of texts in different orders
    code = (
        "import multiq; app = multiq.App('sqlite:///jobs.db')\n"
        "def ship(what: dict[str, list[set[str]]]) -> None: ...\n"
        "ship = app.task(name='ship', unique=multiq.Unique())(ship)\n"
        "for last in 'yz': ship.enqueue({'a': [{'red', 'green', 'blue', 'black'}, {'x', last}]})\n"
    )
    # When each of them enqueues two different arguments
    for seed in range(1, 5):
        subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONHASHSEED": str(seed)}, check=True
        )
    # Then the file, read without multiq, has two jobs
    with contextlib.closing(sqlite3.connect(tmp_path / "jobs.db")) as file:
        assert file.execute("SELECT count(*) FROM multiq_jobs").fetchone() == (2,)


def test_the_form_of_the_envelope_has_the_key_of_the_value(app: App) -> None:
    @app.task(unique=Unique())
    def ship(order: Order, on: dt.date, marks: set[int]) -> None: ...

    enqueue: Any = ship.enqueue  # a type checker does not allow the form of the envelope
    handles = [
        enqueue(Order(7), dt.date(2026, 1, 1), {1, 2}),
        enqueue({"lines": [], "number": 7}, "2026-01-01", [2, 1]),
        enqueue({"number": 7}, "2026-01-01", [1, 2]),
    ]
    assert [handle.was_new for handle in handles] == [True, False, False]


def test_an_argument_that_was_decoded_has_the_same_key(app: App) -> None:
    @app.task(unique=Unique())
    def ship(order: Order) -> None: ...

    decoded = Codec(Order).decode({"number": 7})  # as a task gets it, which may enqueue it again
    assert ship.enqueue(Order(7)).was_new
    assert not ship.enqueue(decoded).was_new


def test_an_argument_that_is_not_json_is_refused_as_always(app: App) -> None:
    @app.task(unique=Unique())
    def task(a: Any) -> None: ...

    for wrong in (object(), float("nan"), "\ud800", {1: 2}):
        with pytest.raises(PayloadInvalid):
            task.enqueue(wrong)
    assert app.queue("default").stats().ready == 0


def test_further_arguments_are_part_of_the_key(app: App) -> None:
    @app.task(unique=Unique())
    def task(*numbers: int, **named: int) -> None: ...

    calls = [call(), call(1), call(1, 2), call(2, 1), call(a=1), call(b=1), call(1, a=1)]
    assert len({*keys_of(task, *calls)}) == len(calls)


# --- wrong options ---


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Unique(until="done"), "until must be one of gone, buried, reserved, got 'done'"),  # type: ignore[arg-type]
        (lambda: Unique(on_conflict="drop"), "on_conflict must be one of keep, replace, follow, error, got 'drop'"),  # type: ignore[arg-type]
        (lambda: Unique(by="order"), "by must be a list with names of the task's parameters, got 'order'"),
        (lambda: Unique(by=[1]), "by must be a list with names"),  # type: ignore[list-item]
        (lambda: Unique(hold=-1), "hold must be 0 seconds or more, got -1"),
        (lambda: Unique(hold=4e9), "hold must be at most 3153600000 seconds .a century., got 4000000000.0"),
        (lambda: Unique(hold="30"), "hold must be a number of seconds, got '30'"),  # type: ignore[arg-type]
        (lambda: Unique(max_wait=5), "max_wait must be given with on_conflict='replace'"),
        (lambda: Unique(max_wait=-5, on_conflict="replace"), "max_wait must be 0 seconds or more, got -5"),
    ],
)
def test_a_wrong_option_is_refused(make: Callable[[], object], text: str) -> None:
    with pytest.raises(OptionInvalid, match=text.replace("(", r"\(")):
        make()


def test_by_must_name_parameters_of_the_task(app: App) -> None:
    text = r"by must name parameters of task sync\(customer: 'int'\) -> 'None', got 'order'"
    with pytest.raises(OptionInvalid, match=text):

        @app.task(unique=Unique(by=["order"]))
        def sync(customer: int) -> None: ...

    assert "sync" not in app.tasks

    @app.task
    def other(customer: int) -> None: ...

    with pytest.raises(OptionInvalid, match="by must name parameters of task other"):
        other.options(unique=Unique(by=["customer", "order"]))
    with pytest.raises(OptionInvalid, match=r"unique must be a multiq.Unique\(...\), or False, got True"):
        other.options(unique=True)  # type: ignore[arg-type]
    with pytest.raises(OptionInvalid, match="did you mean unique"):
        app.task(dedupe=True)  # type: ignore[call-overload]


def test_durations_may_be_timedeltas() -> None:
    unique = Unique(hold=dt.timedelta(days=1), on_conflict="replace", max_wait=dt.timedelta(minutes=1))
    with multiq.App("memory://") as app:
        task = app.task(unique=unique)(lambda_named)
        key = task._unique_key(unique, (), {})
    assert (key.hold, key.max_wait, key.on_conflict) == (86400.0, 60.0, "replace")


def lambda_named() -> None: ...


def test_a_part_of_a_flow_must_not_be_unique(app: App) -> None:
    @app.task(unique=Unique())
    def step(number: int) -> None: ...

    with pytest.raises(OptionInvalid, match="a part of a flow must not be unique"):
        multiq.chain(step.s(1)).enqueue()
    assert multiq.chain(step.options(unique=False).s(1)).enqueue()


class Lacking(MemoryBackend):
    declared: ClassVar[Capabilities] = msgspec.structs.replace(
        MemoryBackend.declared, unique=Gap("never", "it is a test")
    )


@pytest.mark.parametrize("how", ["enqueue", "enqueue_many", "aenqueue", "aenqueue_many"])
def test_a_backend_without_unique_jobs_refuses_them(how: str) -> None:
    with multiq.App(backend=Lacking()) as app:

        @app.task(unique=Unique())
        def sync() -> None: ...

        ways: dict[str, Callable[[], object]] = {
            "enqueue": sync.enqueue,
            "enqueue_many": lambda: sync.enqueue_many([()]),
            "aenqueue": lambda: asyncio.run(sync.aenqueue()),
            "aenqueue_many": lambda: asyncio.run(sync.aenqueue_many([()])),
        }
        with pytest.raises(Unsupported, match=r"never: it is a test.*"):
            ways[how]()
        assert sync.options(unique=False).enqueue().was_new


# --- lost replies ---


class Losing(MemoryBackend):
    """Carries out enqueues, and loses the replies to the first of them."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = 0

    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
        ids = super().enqueue(queue, jobs, connection=connection)
        if self.lost:
            self.lost -= 1
            raise EnqueueUncertain(queue, jobs, "the reply was lost", client_ids=True) from BackendUnavailable("lost")
        return ids


def test_a_repeated_enqueue_is_still_new() -> None:
    backend = Losing()
    with multiq.App(backend=backend) as app:

        @app.task(unique=Unique())
        def sync(customer: int) -> None: ...

        backend.lost = 1
        first = sync.enqueue(1)
        backend.lost = 1
        second = sync.enqueue(1)
        assert (first.was_new, second.was_new) == (True, False)
        backend.lost = 1000
        with pytest.raises(EnqueueUncertain) as caught:
            sync.enqueue(2)
        with pytest.raises(EnqueueUncertain) as met:
            sync.enqueue(1)
        backend.lost = 0
        again, old = caught.value.repeat(), met.value.repeat()
        assert isinstance(again, multiq.JobHandle)
        assert isinstance(old, multiq.JobHandle)
        assert (again.was_new, old.was_new, old.id) == (True, False, first.id)
        assert app.queue("default").stats().ready == 2


@pytest.mark.parametrize("way", ["enqueue", "aenqueue"])
def test_a_repeated_enqueue_refuses_another_job_s_key(way: str) -> None:
    backend = Losing()
    with multiq.App(backend=backend) as app:

        @app.task(unique=Unique(on_conflict="error"))
        def sync(customer: int) -> dt.date:
            return dt.date.min

        def enqueue(customer: int) -> None:
            asyncio.run(sync.aenqueue(customer)) if way == "aenqueue" else sync.enqueue(customer)

        first = sync.enqueue(1)
        backend.lost = 1000
        with pytest.raises(EnqueueUncertain) as taken:
            enqueue(1)
        with pytest.raises(EnqueueUncertain) as free:
            enqueue(2)
        backend.lost = 0
        with pytest.raises(JobExists) as caught:
            taken.value.repeat()
        assert caught.value.job_id == first.id
        with pytest.raises(JobExists):
            asyncio.run(taken.value.arepeat())
        assert free.value.repeat().was_new


# --- permits ---


@pytest.mark.parametrize("unique", [Unique(on_conflict="follow"), Unique(until="reserved")])
def test_a_key_that_ends_at_the_reservation_is_refused_beside_permits(app: App, unique: Unique) -> None:
    # Given a limit over all queues: a worker reserves each job before it asks for the job's permit
    everywhere = [multiq.Limit("api", slots=1, scope="app")]
    # When a task, or a call, has such a key and this limit, then the error names the limit and the way out
    with pytest.raises(OptionInvalid, match=r"limit api must have scope='queue' with .*, got scope='app'"):
        app.task(unique=unique, limits=everywhere, name="sync")(lambda: None)

    @app.task(limits=everywhere)
    def call_api() -> None: ...

    with pytest.raises(OptionInvalid, match="limit api must have scope='queue'"):
        call_api.options(unique=unique)
    # And a key that the job has until its end, or a limit of one queue, is taken
    call_api.options(unique=Unique())
    call_api.options(unique=unique, limits=[multiq.Limit("api", slots=1)])


# --- failed jobs ---


def test_failed_jobs_whose_key_is_taken_are_counted_and_left(app: App) -> None:
    # Given failed jobs, of which one has lost its key
    @app.task(unique=Unique(until="buried"))
    def sync(customer: int) -> None: ...

    handles = sync.enqueue_many([(1,), (2,)])
    consumer = app.backend.consumer(["default"])
    consumer.settle([Bury(lease) for lease in consumer.reserve(2, 0)])
    sync.enqueue(1)
    # When all are retried, then only the job that has its key is ready
    change = app.failed.retry()
    assert (change.matched, change.changed, change.taken, change.left) == (2, 1, 1, 0)
    assert [handle.state() for handle in handles] == [State.BURIED, State.READY]
    with pytest.raises(multiq.UniqueTaken):
        app.queue("default").kick_job(handles[0].id)
