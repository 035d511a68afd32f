"""Tasks: functions whose calls are checked, sent as envelopes, and run later."""

from __future__ import annotations

import asyncio
import datetime as dt
import itertools
from typing import TYPE_CHECKING, Any

import pytest

import multiq
from multiq import ArgumentsInvalid, NameInvalid, OptionInvalid, PayloadInvalid, PayloadTooLarge, State
from multiq.envelope import Envelope, decode_envelope

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def app() -> Iterator[multiq.App]:
    with multiq.App("memory://") as app:
        yield app


def sent(handle: multiq.JobHandle) -> Envelope:
    return decode_envelope(handle.peek().body)


def test_calling_a_task_runs_it_here_and_now(app: multiq.App) -> None:
    @app.task
    def double(number: int) -> int:
        """Twice as much."""
        return number * 2

    assert double(21) == 42
    assert double.__doc__ == "Twice as much."
    assert repr(double) == "Task('double', queue='default')"
    assert app.queue().stats().ready == 0


def test_enqueue_sends_the_call(app: multiq.App) -> None:
    @app.task(name="mail.reset", queue="mail", priority=100, ttr=90)
    def send(address: str, name: str = "you") -> None: ...

    handle = send.enqueue("ann@example.com", name="Ann")
    info = handle.peek()
    assert sent(handle) == Envelope(1, "mail.reset", ["ann@example.com"], {"name": "Ann"})
    assert (info.queue, info.priority, info.ttr, info.state) == ("mail", 100, 90.0, State.READY)


def test_aenqueue_does_the_same_from_a_coroutine(app: multiq.App) -> None:
    @app.task
    async def fetch(url: str) -> None: ...

    async def produce() -> list[multiq.JobHandle]:
        one = await fetch.aenqueue("https://example.com")
        return [one, await fetch.options(priority=3).aenqueue(url="https://example.org")]

    first, second = asyncio.run(produce())
    assert sent(first).args == ["https://example.com"]
    assert (sent(second).kwargs, second.peek().priority) == ({"url": "https://example.org"}, 3)
    assert fetch.is_coroutine


def test_many_calls_go_in_together_positional_or_named(app: multiq.App) -> None:
    @app.task
    def send(address: str, name: str = "you") -> None: ...

    handles = send.enqueue_many([("a@x.org", "A"), ["b@x.org"], {"address": "c@x.org", "name": "C"}])
    assert [(sent(handle).args, sent(handle).kwargs) for handle in handles] == [
        (["a@x.org", "A"], {}),
        (["b@x.org"], {}),
        ([], {"address": "c@x.org", "name": "C"}),
    ]
    assert send.options(delay=5).enqueue_many([]) == []


@pytest.mark.parametrize("call", ["a@x.org", b"a@x.org", 7, None, {1, 2}])
def test_a_value_that_is_not_a_call_makes_enqueue_many_refuse_all(app: multiq.App, call: Any) -> None:
    @app.task
    def send(address: str) -> None: ...

    with pytest.raises(ArgumentsInvalid, match="enqueue_many takes tuples of arguments, or dicts of named ones, got"):
        send.enqueue_many([("fine",), call])
    assert app.queue().stats().ready == 0


# --- options ---


def test_options_hold_for_one_job_and_leave_the_task_alone(app: multiq.App) -> None:
    @app.task(queue="mail", priority=100)
    def send(address: str) -> None: ...

    handle = send.options(queue="slow", priority=9, delay=dt.timedelta(hours=1), ttr=300).enqueue("a")
    info = handle.peek()
    assert (info.queue, info.priority, info.ttr, info.state) == ("slow", 9, 300.0, State.DELAYED)
    plain = send.enqueue("a").peek()
    assert (plain.queue, plain.priority, plain.ttr, plain.state) == ("mail", 100, 60.0, State.READY)


def test_options_that_the_worker_needs_travel_in_the_envelope(app: multiq.App) -> None:
    @app.task(loosen=True)
    def send(address: str) -> None: ...

    headers = {"trace": "00-4bf9"}
    call = send.options(max_attempts=0, max_crashes=1, retry_for=60, timeout=5, headers=headers)
    headers["trace"] = "changed later"
    envelope = sent(call.enqueue("a"))
    assert (envelope.max_attempts, envelope.max_crashes, envelope.retry_for, envelope.timeout) == (0, 1, 60.0, 5.0)
    assert envelope.headers == {"trace": "00-4bf9"}


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"delay": -1}, OptionInvalid),
        ({"delay": 1, "at": dt.datetime.now(dt.UTC)}, OptionInvalid),
        ({"at": dt.datetime(2035, 1, 1)}, OptionInvalid),  # noqa: DTZ001 - the point of it
        ({"priority": -1}, OptionInvalid),
        ({"ttr": 0.5}, OptionInvalid),
        ({"max_attempts": -1}, OptionInvalid),
        ({"max_attempts": 2**31}, OptionInvalid),
        ({"max_crashes": 1.5}, OptionInvalid),
        ({"retry_for": -1}, OptionInvalid),
        ({"timeout": "5"}, OptionInvalid),
        ({"queue": "a b"}, NameInvalid),
        ({"headers": {"a": 1}}, ArgumentsInvalid),
        ({"headers": {1: "a"}}, ArgumentsInvalid),
    ],
)
def test_a_wrong_option_is_refused_when_it_is_given(app: multiq.App, wrong: Any, error: type[Exception]) -> None:
    @app.task
    def send(address: str) -> None: ...

    with pytest.raises(error):
        send.options(**wrong)


def test_a_jobs_limit_wins_where_its_task_allows_it(app: multiq.App) -> None:
    @app.task(loosen=True, max_attempts=7, max_crashes=2, retry_for=60, backoff=9)
    def send(address: str) -> None: ...

    own = send.policy_of(Envelope(1, "send"))
    assert own is send.policy
    assert (own.max_attempts, own.max_crashes, own.retry_for) == (7, 2, 60.0)
    job = send.policy_of(Envelope(1, "send", max_attempts=0, retry_for=5.0))
    assert (job.max_attempts, job.max_crashes, job.retry_for, job.backoff(1)) == (0, 2, 5.0, 9)


# --- run by a worker ---


def work_off(app: multiq.App) -> None:
    assert multiq.Worker(app, stop_when_empty=True).run() == 0


def test_a_coroutine_behind_a_decorator_is_awaited_all_the_same(app: multiq.App) -> None:
    ran: list[int] = []

    def traced(function: Any) -> Any:
        def call(*args: Any) -> Any:
            return function(*args)

        return call

    @app.task(name="hidden", timeout=30)
    @traced
    async def hidden(number: int) -> None:
        await asyncio.sleep(0)
        ran.append(number)

    assert not hidden.is_coroutine
    hidden.enqueue(7)
    work_off(app)
    assert ran == [7]


def test_a_timeout_of_zero_means_no_limit(app: multiq.App) -> None:
    ran: list[str] = []

    @app.task(timeout=0.001, max_attempts=1, loosen=True)
    async def nap(name: str) -> None:
        await asyncio.sleep(0.05)
        ran.append(name)

    nap.enqueue("too long")
    nap.options(timeout=0).enqueue("as long as it takes")
    work_off(app)
    assert ran == ["as long as it takes"]
    (buried,) = app.queue().jobs("buried")
    assert buried.reason == "the task ran longer than its timeout of 0.001 s"


def test_middleware_that_exits_changes_nothing(app: multiq.App, caplog: pytest.LogCaptureFixture) -> None:
    class Leave(multiq.Middleware):
        def ended(self, job: object, ending: object) -> None:
            raise SystemExit(3)

    @app.task(middleware=[Leave()], max_attempts=1)
    def divide(number: int) -> float:
        return 1 / number

    divide.enqueue_many([(1,), (0,)])
    work_off(app)
    assert app.queue().stats().buried == 1
    assert app.queue().stats().ready == 0
    assert (
        caplog.messages.count("middleware failed in ended() of task divide; the outcome of the job is not affected")
        == 2
    )


# --- arguments ---


def test_arguments_are_checked_against_the_signature_before_anything_is_sent(app: multiq.App) -> None:
    @app.task
    def send(address: str, name: str = "you", *, urgent: bool = False) -> None: ...

    for args, kwargs, complaint in [
        ((), {}, "missing a required argument: 'address'"),
        (("a", "b", "c"), {}, "too many positional arguments"),
        (("a",), {"nme": "Ann"}, "got an unexpected keyword argument 'nme'"),
        (("a",), {"address": "b"}, "multiple values for argument 'address'"),
    ]:
        with pytest.raises(ArgumentsInvalid, match=f"task send cannot be called like this: {complaint}; it is send"):
            send.enqueue(*args, **kwargs)  # type: ignore[arg-type]  # wrong on purpose
    assert app.queue().stats().ready == 0


def test_every_kind_of_parameter_is_understood(app: multiq.App) -> None:
    @app.task
    def anything(first: int, /, *rest: int, flag: bool = False, **others: int) -> None: ...

    calls: list[Any] = [((1,), {}), ((1, 2, 3), {}), ((1,), {"flag": True}), ((1,), {"first": 2, "x": 3})]
    for args, kwargs in calls:
        envelope = sent(anything.enqueue(*args, **kwargs))
        assert (envelope.args, envelope.kwargs) == (list(args), kwargs)
    with pytest.raises(ArgumentsInvalid):
        anything.enqueue(flag=True)  # type: ignore[call-arg]  # wrong on purpose


def test_a_parameter_may_be_called_self(app: multiq.App) -> None:
    @app.task
    def compare(self: str, other: str) -> str:
        return self + other

    assert sent(compare.enqueue(self="a", other="b")).kwargs == {"self": "a", "other": "b"}
    assert compare(self="a", other="b") == "ab"


@pytest.mark.parametrize(
    ("args", "kwargs", "complaint"),
    [
        (({1, 2},), {}, r"args\[0\] is of type set"),
        ((1, [{"a": float("nan")}]), {}, r"args\[1\]\[0\]\.a is nan"),
        ((1,), {"when": dt.datetime.now(dt.UTC)}, "when is of type datetime"),
        ((1,), {"when": {1: 2}}, "when has the key 1"),
        (("\ud800",), {}, r"args\[0\] cannot be written as JSON"),
    ],
)
def test_an_argument_that_is_not_json_is_named(app: multiq.App, args: Any, kwargs: Any, complaint: str) -> None:
    @app.task
    def f(a: object, when: object = None) -> None: ...

    with pytest.raises(PayloadInvalid, match=complaint):
        f.enqueue(*args, **kwargs)
    assert app.queue().stats().ready == 0


def test_a_large_argument_is_refused_with_both_sizes(app: multiq.App) -> None:
    @app.task
    def f(a: str) -> None: ...

    with pytest.raises(PayloadTooLarge, match="over the limit of 262,144 bytes: store the data elsewhere") as refused:
        f.enqueue("x" * 300_000)
    assert refused.value.size_bytes > 300_000 > refused.value.limit_bytes


def test_the_job_is_a_copy(app: multiq.App) -> None:
    @app.task
    def f(a: list[int]) -> None: ...

    numbers = [1]
    handle = f.enqueue(numbers)
    numbers.append(2)
    assert sent(handle).args == [[1]]


@pytest.mark.parametrize(
    "declared",
    ["", "a", "a, b=0", "a=0, b=0", "a, /, b", "a, b=0, /, c=0", "a, *, b", "*, a, b=0", "a, /, *, b=0", "*a, b",
     "a, **b", "a, /, **b", "a, *b, c, **d"],
)  # fmt: skip
def test_the_same_arguments_are_taken_as_by_the_function_itself(declared: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"def declared({declared}): pass", scope)  # noqa: S102 - a function with any signature
    function = scope["declared"]
    with multiq.App("memory://") as app:
        task = app.task(name="any")(function)
    for count, names in itertools.product(range(4), subsets("abcx")):
        args, kwargs = (0,) * count, dict.fromkeys(names, 0)
        try:
            function(*args, **kwargs)
        except TypeError:
            with pytest.raises(ArgumentsInvalid):
                task.check_arguments(args, kwargs)
        else:
            task.check_arguments(args, kwargs)


def subsets(names: str) -> list[tuple[str, ...]]:
    return [some for count in range(len(names) + 1) for some in itertools.combinations(names, count)]
