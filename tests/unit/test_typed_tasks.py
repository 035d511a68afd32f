"""Arguments and results by annotation: what arrives, what is refused, and which annotations are not used."""

import asyncio
import dataclasses
import datetime as dt
import enum
import functools
import json
import typing
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple, NewType, TypedDict, TypeVar

import msgspec
import pydantic
import pytest

import multiq
from multiq import ArgumentsInvalid, PayloadInvalid, State, events
from multiq.backend import NewJob
from multiq.backend.memory import MemoryBackend
from multiq.errors import EnqueueUncertain, ResultOmitted
from multiq.task import Task
from multiq.typed_tasks import TypedTask

NOON = dt.datetime(2030, 1, 2, 12, 0, 0, 5, tzinfo=dt.UTC)
LOCAL_MEAN_TIME = dt.timezone(dt.timedelta(minutes=53, seconds=28))
ID = uuid.UUID("01a1fc0e-e192-7715-9b68-99653edca2e8")
OrderId = NewType("OrderId", uuid.UUID)
Any_ = TypeVar("Any_")


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1


class Odd(enum.Enum):
    HALF = 0.5


@dataclasses.dataclass
class Line:
    item: str
    price: Decimal


@dataclasses.dataclass
class GiftLine(Line):
    wrapped: bool = True


@dataclasses.dataclass
class Order:
    id: uuid.UUID
    placed: dt.datetime
    lines: list[Line] = dataclasses.field(default_factory=list)


class Parcel(msgspec.Struct):
    id: uuid.UUID
    colour: Colour = Colour.RED


class Customer(pydantic.BaseModel):
    name: str = pydantic.Field(alias="fullName")
    since: dt.date
    spent: Decimal = Decimal(0)


class Strict(pydantic.BaseModel, strict=True):
    since: dt.date


class Secret(pydantic.BaseModel):
    password: pydantic.SecretStr


class Point(NamedTuple):
    x: int
    at: dt.date


class Row(TypedDict):
    at: dt.datetime


class PlainRow(TypedDict):
    at: str


@dataclasses.dataclass
class Note:
    text: str
    more: Any = None


class FrozenTime(dt.datetime):
    """As libraries have, for example those that stop the time in tests."""


class Custom:
    pass


@pytest.fixture
def app() -> Iterator[multiq.App]:
    with multiq.App("memory://") as app:
        yield app


def run(app: multiq.App) -> None:
    assert multiq.Worker(app, stop_when_empty=True).run() == 0


def arrives(app: multiq.App, annotation: Any, value: Any) -> tuple[Any, Any]:
    """Enqueue a value for a parameter with an annotation. Returns the JSON in the envelope, and what the task gets."""
    got: list[Any] = []

    def take(it: Any) -> None:
        got.append(it)

    take.__annotations__["it"] = annotation
    handle = app.task(name=f"take{len(app.tasks)}", max_attempts=1)(take).enqueue(value)
    (plain,) = handle.peek().value["args"]
    run(app)
    assert handle.state() is State.GONE, handle.peek().reason
    (arrived,) = got
    return plain, arrived


CUSTOMER = Customer(fullName="Ann", since=dt.date(2030, 1, 2))

ROUND_TRIPS: list[tuple[Any, Any, Any]] = [
    (dt.datetime, NOON, "2030-01-02T12:00:00.000005Z"),
    (dt.datetime, dt.datetime(2030, 1, 2), "2030-01-02T00:00:00"),  # noqa: DTZ001 - a time without a zone stays one
    (dt.date, dt.date(2030, 1, 2), "2030-01-02"),
    (dt.time, dt.time(12, 30), "12:30:00"),
    (dt.timedelta, dt.timedelta(hours=1), "PT3600S"),
    (uuid.UUID, ID, str(ID)),
    (OrderId, ID, str(ID)),
    (Decimal, Decimal("12.50"), "12.50"),
    (Colour, Colour.BLUE, "blue"),
    (Level, Level.LOW, 1),
    (bytes, b"\x00x", "AHg="),
    (Order, Order(ID, NOON), {"id": str(ID), "placed": "2030-01-02T12:00:00.000005Z", "lines": []}),
    (Parcel, Parcel(ID), {"id": str(ID), "colour": "red"}),
    (Customer, CUSTOMER, {"fullName": "Ann", "since": "2030-01-02", "spent": "0"}),
    (Strict, Strict(since=dt.date(2030, 1, 2)), {"since": "2030-01-02"}),
    (Point, Point(1, dt.date(2030, 1, 2)), [1, "2030-01-02"]),
    (Row, {"at": NOON}, {"at": "2030-01-02T12:00:00.000005Z"}),
    (Customer | None, None, None),
    (list[Customer], [CUSTOMER], [{"fullName": "Ann", "since": "2030-01-02", "spent": "0"}]),
    (dt.datetime | None, NOON, "2030-01-02T12:00:00.000005Z"),
    (int | Decimal, Decimal("1.5"), "1.5"),
    (Annotated[dt.date, "when"], dt.date(2030, 1, 2), "2030-01-02"),
    (Sequence[dt.date], [dt.date(2030, 1, 2)], ["2030-01-02"]),
    (dict[int, dt.date], {7: dt.date(2030, 1, 2)}, {"7": "2030-01-02"}),
    (Mapping[str, Level], {"a": Level.LOW}, {"a": 1}),
    (tuple[int, ...], (1, 2), [1, 2]),
    (set[int], {3}, [3]),
    ("list[Order]", [Order(ID, NOON, [Line("cup", Decimal(3))])], None),
]  # fmt: skip


@pytest.mark.parametrize(("annotation", "value", "plain"), ROUND_TRIPS, ids=lambda value: str(value)[:40])
def test_a_value_arrives_as_its_annotation_says(app: multiq.App, annotation: Any, value: Any, plain: Any) -> None:
    encoded, arrived = arrives(app, annotation, value)
    assert (arrived, type(arrived)) == (value, type(value))
    assert plain is None or encoded == plain
    if type(value) is not tuple:
        assert arrives(app, annotation, encoded)[1] == value, "JSON is taken, too, as another program writes it"


@pytest.mark.parametrize("zone", [None, dt.UTC, dt.timezone(dt.timedelta(hours=-3, minutes=-30))])
def test_a_datetime_of_a_subclass_arrives_as_a_datetime(app: multiq.App, zone: dt.tzinfo | None) -> None:
    arrived = arrives(app, dt.datetime, FrozenTime(2030, 1, 2, 3, 4, 5, 6, zone))[1]
    assert (arrived, type(arrived)) == (dt.datetime(2030, 1, 2, 3, 4, 5, 6, zone), dt.datetime)


def test_a_field_of_any_type_has_json(app: multiq.App) -> None:
    assert arrives(app, Note, Note("a", (1, [2.5, None], {"b": True})))[1] == Note("a", [1, [2.5, None], {"b": True}])


def test_a_list_may_be_given_as_a_tuple(app: multiq.App) -> None:
    assert arrives(app, list[dt.date], (dt.date(2030, 1, 2),))[1] == [dt.date(2030, 1, 2)]


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (dt.datetime, "tomorrow"),
        (dt.datetime, 5),
        (dt.datetime, None),
        (dt.date, NOON),  # the time of day would be lost
        (dt.datetime, NOON.replace(tzinfo=LOCAL_MEAN_TIME)),  # text has no seconds in an offset
        (list[Line | dt.datetime], [NOON.replace(tzinfo=LOCAL_MEAN_TIME)]),
        (dt.time, dt.time(12, tzinfo=LOCAL_MEAN_TIME)),
        (Colour, "green"),
        (Order, {"id": str(ID)}),
        (Order, Parcel(ID)),
        (Line, GiftLine("cup", Decimal(3))),  # wrapped would be lost
        (list[Line], [GiftLine("cup", Decimal(3))]),
        (Customer, {"fullName": "Ann"}),
        (Secret, Secret(password=pydantic.SecretStr("x"))),
        (Order, Order(ID, NOON, [Line("cup", Custom())])),  # type: ignore[arg-type]
        (Line, Line("cup", float("inf"))),  # type: ignore[arg-type]
        (set[int], {1.5}),
        (Note, Note(ID)),  # type: ignore[arg-type]  # would be text
        (Note, Note("a", dt.date(2030, 1, 2))),
        (Note, Note("a", {"by": [Colour.RED]})),
        (Note, Note("a", Line("cup", Decimal(3)))),  # would be a dict
        (Note, Note("a", {7: "b"})),  # the key would be text
        (Note, Note("a", {7})),  # would be a list
        (Note, Note("a", Point(1, dt.date(2030, 1, 2)))),
        (set[str], {ID}),
        (Note, {"text": "a", "more": dt.date(2030, 1, 2)}),  # the form in the envelope, except for the date
        (Note, {"text": ID}),
        (frozenset[str], [ID]),
        (set, {(1, 2)}),  # would have a list, which no set can have
        (set, [(1, 2)]),
        (Note, Note("a", bytearray(b"b"))),  # would be text in base64
        (dict[str, Note], {"a": Note("a", b"b")}),
        (list[Note], [Note("a"), Note("a", (ID,))]),
    ],
)  # fmt: skip
def test_a_value_that_would_not_arrive_is_refused_at_the_enqueue(app: multiq.App, annotation: Any, value: Any) -> None:
    with pytest.raises(ArgumentsInvalid, match=r"^task take0 cannot be called like this: args\[0\] must be "):
        arrives(app, annotation, value)
    assert app.queue().stats().ready == 0


@pytest.mark.parametrize("annotation", [dt.datetime, "dt.datetime", Order, "Colour"])
def test_a_parameter_with_the_default_none_takes_none(app: multiq.App, annotation: Any) -> None:
    # given a function that has such a default without saying so in its annotation, and a job of an older program
    got: list[Any] = []

    def take(it: Any = None) -> None:
        got.append(it)

    take.__annotations__["it"] = annotation
    task = app.task(max_attempts=1)(take)
    old = app.queue().enqueue({"multiq": 1, "task": "take", "args": [None]})
    # when None is given
    task.enqueue(None)
    task.enqueue(it=None)
    run(app)
    # then it arrives
    assert (got, old.state()) == ([None] * 3, State.GONE)


def test_a_refusal_names_the_argument_the_rule_and_the_value(app: multiq.App) -> None:
    @app.task
    def remind(name: str, *, at: dt.datetime) -> None: ...

    with pytest.raises(ArgumentsInvalid) as caught:
        remind.enqueue("Ann", at="tomorrow")  # type: ignore[arg-type]
    assert str(caught.value) == (
        "task remind cannot be called like this: at must be datetime.datetime, got 'tomorrow': "
        "Invalid RFC3339 encoded datetime"
    )


@pytest.mark.parametrize(
    "annotation", [None, Any, object, "dt.datetime", Custom, Odd, Iterable[dt.date], str | dt.date]
)
def test_without_a_usable_annotation_a_value_is_refused_as_ever(app: multiq.App, annotation: Any) -> None:
    def take(it: Any) -> None: ...

    if annotation is None:
        del take.__annotations__["it"]
    else:
        take.__annotations__["it"] = "missing.datetime" if annotation == "dt.datetime" else annotation
    task = app.task(take)
    for value in (NOON, [NOON], Custom()):
        with pytest.raises(PayloadInvalid, match=r"args\[0\].* is of type \w+, which is not JSON"):
            task.enqueue(value)
    task.enqueue("text")
    run(app)


def test_a_refusal_has_the_reason_why_an_annotation_is_not_used(app: multiq.App) -> None:
    def take(it: "missing.datetime") -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(PayloadInvalid) as caught:
        app.task(take).enqueue(NOON)
    assert caught.value.__notes__ == ["the annotation of it is not used: name 'missing' is not defined"]


# --- jobs from elsewhere ---


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["soon"], "args[0] must be datetime.datetime, got 'soon': Invalid RFC3339 encoded datetime"),
        ([5], "args[0] must be datetime.datetime, got 5: Expected `datetime`, got `int`"),
    ],
)
def test_a_wrong_value_of_another_program_buries_the_job(app: multiq.App, args: list[Any], reason: str) -> None:
    # given
    ran: list[Any] = []
    app.on(events.JobStarted)(ran.append)

    @app.task
    def remind(at: dt.datetime) -> None: ...

    handle = app.queue().enqueue({"multiq": 1, "task": "remind", "args": args})

    # when
    run(app)

    # then
    assert handle.peek().reason == f"task remind cannot be called like this: {reason}"
    assert ran == []


def test_a_value_on_which_a_validator_fails_in_any_way_buries_the_job(app: multiq.App) -> None:
    class Bad(pydantic.BaseModel):
        it: int

        @pydantic.field_validator("it")
        @classmethod
        def check(cls, value: int) -> int:
            raise ZeroDivisionError

    def take(it: Any) -> None: ...

    take.__annotations__["it"] = Bad
    app.task(take)
    handle = app.queue().enqueue({"multiq": 1, "task": "take", "args": [{"it": 1}]})
    run(app)
    assert "args[0] must be" in (handle.peek().reason or "")


# --- functions ---


def test_each_kind_of_parameter_has_its_annotation(app: multiq.App) -> None:
    got: list[Any] = []

    @app.task
    def take(a: dt.date, /, b: str, *more: Colour, c: Decimal = Decimal(1), **named: uuid.UUID) -> None:
        got.append((a, b, more, c, named))

    take.enqueue(dt.date(2030, 1, 2), "2030-01-02", Colour.RED, Colour.BLUE, c=Decimal(2), a=ID, d=ID)
    take.enqueue(dt.date(2030, 1, 2), b="b")
    take.enqueue_many([(dt.date(2030, 1, 2), "b")])
    run(app)
    assert got == [
        (dt.date(2030, 1, 2), "2030-01-02", (Colour.RED, Colour.BLUE), Decimal(2), {"a": ID, "d": ID}),
        *[(dt.date(2030, 1, 2), "b", (), Decimal(1), {})] * 2,
    ]


def test_coroutines_partials_and_objects_have_their_annotations(app: multiq.App) -> None:
    got: list[Any] = []

    async def wait(at: dt.datetime) -> None:
        got.append(at)

    class Caller:
        def __call__(self, at: dt.datetime) -> None:
            got.append(at)

    def two(_first: int, at: "dt.datetime") -> None:
        got.append(at)

    functions: list[Callable[..., Any]] = [wait, Caller(), functools.partial(two, 1)]
    for number, function in enumerate(functions):
        app.task(name=f"task{number}")(function).enqueue(at=NOON)
    run(app)
    assert got == [NOON] * 3


def test_a_retried_job_decodes_its_arguments_each_time(app: multiq.App) -> None:
    got: list[Any] = []

    @app.task(max_attempts=3, backoff=0)
    def fail(lines: list[Line]) -> None:
        got.append([*lines])
        lines.clear()
        raise ValueError

    fail.enqueue([Line("cup", Decimal(3))])
    run(app)
    assert got == [[Line("cup", Decimal(3))]] * 3


def test_a_class_may_be_defined_after_the_function(app: multiq.App) -> None:
    names: dict[str, Any] = {"app": app, "got": []}
    exec("@app.task\ndef take(it: 'Later') -> None: got.append(it)\n", names)  # noqa: S102
    exec("import dataclasses\n@dataclasses.dataclass\nclass Later:\n    x: int\n", names)  # noqa: S102
    names["take"].enqueue(names["Later"](3))
    run(app)
    assert names["got"] == [names["Later"](3)]


@pytest.mark.parametrize(
    ("annotation", "kind"),
    [
        (str, Task), (None, Task), (list[str], Task), (dict[str, list[int]] | None, Task), (Any, Task), ("int", Task),
        ("dict[str, Any] | None", Task), ("typing.Optional[str]", Task), (Any_, Task), (PlainRow, Task),
        (Literal["a", 1], Task), (typing.List[int], Task), (Annotated[int, "x"], Task), ("Sequence[str]", Task),  # noqa: UP006
        (dt.date, TypedTask), ("dt.date", TypedTask), (list["Order"], TypedTask), (Row, TypedTask),
    ],
)  # fmt: skip
def test_only_other_annotations_than_json_s_own_are_looked_at(app: multiq.App, annotation: Any, kind: Any) -> None:
    def take(it: Any) -> None: ...

    take.__annotations__["it"] = annotation
    assert type(app.task(take)) is kind


# --- results ---


def test_a_result_is_decoded_by_the_annotation(app: multiq.App) -> None:
    @app.task(keep=60)
    def place(item: str) -> Order:
        return Order(ID, NOON, [Line(item, Decimal(3))])

    handle = place.enqueue("cup")
    (second,) = place.enqueue_many([("cup",)])
    run(app)
    order = Order(ID, NOON, [Line("cup", Decimal(3))])
    assert handle.result(timeout=5) == second.result(timeout=0) == asyncio.run(handle.aresult(timeout=5)) == order
    outcome = handle.outcome()
    assert outcome is not None
    assert outcome.value == order
    plain = app.job(handle.ref).result(timeout=0)
    assert plain["lines"] == [{"item": "cup", "price": "3"}]
    assert handle == app.job(handle.ref)


def test_a_result_that_the_annotation_does_not_allow(app: multiq.App) -> None:
    @app.task(keep=60)
    def place(what: str) -> Order:
        return {"json": None, "other": NOON}[what]  # type: ignore[return-value]

    plain, other = place.enqueue("json"), place.enqueue("other")
    run(app)
    with pytest.raises(PayloadInvalid, match=r"the result of job .* must be .*Order, got None: .*plain JSON"):
        plain.result(timeout=0)
    assert app.job(plain.ref).result(timeout=0) is None
    with pytest.raises(ResultOmitted, match=r"the value must be .*Order, got datetime.datetime\("):
        other.result(timeout=0)


def test_a_result_is_kept_although_a_value_within_it_loses_its_type(app: multiq.App) -> None:
    @app.task(keep=60)
    def look() -> Note:
        return Note(ID, dt.date(2030, 1, 2))  # type: ignore[arg-type]

    handle = look.enqueue()
    run(app)
    assert handle.result() == Note(str(ID), "2030-01-02")


def test_results_reach_later_jobs_of_a_flow_by_annotation(app: multiq.App) -> None:
    got: list[Any] = []

    @app.task
    def place(item: str) -> Order:
        return Order(ID, NOON, [Line(item, Decimal(3))])

    @app.task
    def ship(order: Order, by: dt.date) -> dt.date:
        got.append((order, by))
        return by

    @app.task
    def note(day: dt.date) -> None:
        got.append(day)

    multiq.chain(place.s("cup"), ship.s(by=dt.date(2030, 1, 2)), note.s()).enqueue()
    run(app)
    day = dt.date(2030, 1, 2)
    assert got == [(Order(ID, NOON, [Line("cup", Decimal(3))]), day), day]


def test_a_wrong_result_buries_the_later_job_of_a_flow(app: multiq.App) -> None:
    @app.task
    def place() -> str:
        return "soon"

    @app.task
    def ship(at: dt.datetime) -> None: ...

    multiq.chain(place.s(), ship.s()).enqueue()
    run(app)
    (job,) = app.queue().jobs("buried")
    assert job.reason == (
        "task ship cannot be called like this: args[0] must be datetime.datetime, got 'soon': "
        "Invalid RFC3339 encoded datetime"
    )


class Deaf(MemoryBackend):
    """Loses the reply to the first enqueues."""

    losses = 2

    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
        ids = super().enqueue(queue, jobs, connection=connection)
        if self.losses:
            self.losses -= 1
            raise EnqueueUncertain(queue, jobs, "lost", client_ids=True)
        return ids


def test_a_repeated_enqueue_returns_a_handle_that_decodes() -> None:
    with multiq.App(backend=Deaf()) as app:

        @app.task(keep=60)
        def day() -> dt.date:
            return dt.date(2030, 1, 2)

        handle = None
        with pytest.raises(EnqueueUncertain) as caught:
            day.options(connection=None).enqueue()
        while handle is None:
            try:
                handle = caught.value.repeat()
            except EnqueueUncertain as again:
                caught.value.repeat_by(again.repeat)
        run(app)
        assert handle.result(timeout=0) == dt.date(2030, 1, 2)


def test_the_body_is_json_that_other_programs_can_write(app: multiq.App) -> None:
    @app.task
    def place(order: Order, colour: Colour) -> None: ...

    handle = place.enqueue(Order(ID, NOON, [Line("cup", Decimal("3.10"))]), colour=Colour.RED)
    assert json.loads(handle.peek().body) == {
        "multiq": 1,
        "task": "place",
        "args": [
            {
                "id": str(ID),
                "placed": "2030-01-02T12:00:00.000005Z",
                "lines": [{"item": "cup", "price": "3.10"}],
            }
        ],
        "kwargs": {"colour": "red"},
    }
