"""The failure that is stored with a buried job: its fields, its size, and that it never prevents the bury."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

import multiq
from multiq import BuryJob, State
from multiq.backend import Bury, Consumer
from multiq.backend.memory import MemoryBackend, MemoryConsumer
from multiq.failure_record import ROOM, Failure, decode_failure, encode_failure
from multiq.worker.execution.runner import Runner
from multiq.worker.execution.timeouts import Timeouts

MODES: list[dict[str, Any]] = [{}, {"threads": 2}, {"concurrency": 3}]
in_each_mode = pytest.mark.parametrize("mode", MODES, ids=["inline", "threads", "coroutines"])


@pytest.fixture
def app() -> multiq.App:
    return multiq.App("memory://")


def drain(app: multiq.App, **options: Any) -> int:
    return multiq.Worker(app, stop_when_empty=True, **options).run()


def raised(error: BaseException, depth: int = 0) -> BaseException:
    """Return the error with a traceback of this many frames."""
    try:
        if depth:
            raised_at(error, depth)
        raise error
    except BaseException as exc:
        return exc


def raised_at(error: BaseException, depth: int) -> None:
    """Raise the error. Two functions call each other, because equal frames in a row are counted and not repeated."""
    if depth:
        raised_beyond(error, depth - 1)
    raise error


def raised_beyond(error: BaseException, depth: int) -> None:
    raised_at(error, depth)


def failure_of(error: BaseException | None = None, reason: str = "no", **options: Any) -> Failure:
    detail = encode_failure(reason, task="t", attempt=1, error=error, **options)
    assert len(detail) <= ROOM
    failure = decode_failure(detail)
    assert failure is not None
    return failure


@in_each_mode
def test_a_buried_job_has_its_failure(app: multiq.App, mode: dict[str, Any]) -> None:
    @app.task(max_attempts=2, backoff=0)
    def divide(by: int) -> float:
        return 1 / by

    # Given a job that fails for good
    handle = divide.enqueue(0)
    began = time.time()
    drain(app, **mode)
    # Then the failure has the error, the traceback, the time and the worker
    info = handle.peek()
    failure = decode_failure(info.detail)
    assert failure is not None
    assert failure == info.failure
    assert (failure.v, failure.task, failure.attempt) == (1, "divide", 2)
    assert failure.error == info.reason == "ZeroDivisionError: division by zero"
    assert began - 1 < failure.at < time.time() + 1
    assert failure.worker.rpartition(":")[2].isdigit()
    lines = failure.traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == failure.error
    assert "return 1 / by" in failure.traceback
    assert "multiq/worker" not in failure.traceback


def test_the_format_is_the_documented_one() -> None:
    document = json.loads(encode_failure("no", task=None, attempt=3))
    assert list(document) == ["v", "error", "traceback", "at", "worker", "attempt", "task", "error_class", "seconds"]
    assert (document["v"], document["traceback"], document["task"]) == (1, "", None)


@pytest.mark.parametrize(
    ("body", "part"),
    [(b"[1]", "not a task's envelope"), (b'{"multiq":1,"task":"one","args":[1,2]}', "cannot be called like this")],
)
def test_a_job_that_never_ran_has_a_failure_without_a_traceback(app: multiq.App, body: bytes, part: str) -> None:
    app.task(name="one")(lambda number: None)
    handle = app.queue().enqueue(body)
    drain(app)
    failure = handle.peek().failure
    assert failure is not None
    assert part in failure.error
    assert failure.traceback == ""


def test_a_retried_job_has_no_failure(app: multiq.App) -> None:
    @app.task(backoff=60)
    def fail() -> None:
        raise ValueError("no")

    handle = fail.enqueue()
    drain(app)
    assert (handle.state(), handle.peek().detail, handle.peek().failure) == (State.DELAYED, b"", None)


def test_a_job_killed_at_its_time_limit_has_the_stack_that_was_seen(app: multiq.App) -> None:
    app.task(name="long", timeout=5, max_attempts=1)(lambda: None).enqueue()
    (lease,) = app.backend.consumer(["default"]).reserve(1, 0)
    verdict, _ = Runner(app, Timeouts(0.0)).timed_out(lease, "the stack")
    assert isinstance(verdict, Bury)
    failure = decode_failure(verdict.after.detail if verdict.after else None)
    assert failure is not None
    assert failure.traceback == "the stack"


def test_the_innermost_frames_of_a_long_traceback_win() -> None:
    text = failure_of(raised(ValueError("x" * 5000), 200)).traceback
    assert text.startswith("[... the outermost frames were cut ...]\n")
    assert text.count("in raised_at") > 30
    assert "in raised\n" not in text
    assert text.splitlines()[-2].strip() == "raise error"
    assert text.endswith("x...\n")


@pytest.mark.parametrize("text", ["\x00" * 9000, "日" * 9000, '"' * 9000, "\udcff" * 9000, "🚲" * 9000])
def test_a_failure_has_room_for_any_text(text: str) -> None:
    failure = failure_of(raised(ValueError(text), 30), reason=text[:2000])
    assert failure.error


def test_a_failure_has_room_for_the_longest_name_of_a_task(app: multiq.App) -> None:
    # Given a job of another program, with a name that no task can have
    handle = app.queue().enqueue({"multiq": 1, "task": "x" * 100_000, "max_attempts": 1})
    drain(app)
    info = handle.peek()
    assert info.failure is not None
    assert info.failure.task == "x" * 128
    assert len(info.detail or b"") <= ROOM


def test_an_error_s_cause_is_in_its_traceback() -> None:
    try:
        try:
            raise KeyError("first")
        except KeyError as exc:
            raise ValueError("second") from exc
    except ValueError as exc:
        text = failure_of(exc).traceback
    assert text.index("KeyError: 'first'") < text.index("direct cause") < text.index("ValueError: second")


def test_a_recursion_without_end_is_cut() -> None:
    def recur() -> None:
        recur()

    with pytest.raises(RecursionError) as caught:
        recur()
    assert "RecursionError" in failure_of(caught.value).traceback


class Mute(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


def test_an_error_without_a_message_has_a_failure() -> None:
    assert failure_of(raised(Mute())).traceback.endswith("Mute: <exception str() failed>\n")


@pytest.mark.parametrize("detail", [None, b"", b"\xff", b"[]", b'{"v":1}', b'{"v":"one"}'])
def test_a_detail_that_is_not_a_failure_is_read_as_none(detail: bytes | None) -> None:
    assert decode_failure(detail) is None


def test_a_backend_without_memos_gets_no_failure() -> None:
    import msgspec

    from multiq.backend import Gap

    verdicts: list[Any] = []

    class Plain(MemoryBackend):
        declared = msgspec.structs.replace(MemoryBackend.declared, memos=Gap("never", "for this test"))

        def consumer(self, queues: Any) -> Any:
            class Seen(MemoryConsumer):
                def settle(self, given: Any) -> Any:
                    verdicts.extend(given)
                    return super().settle(given)

            return Seen(self._store, queues)

    app = multiq.App(backend=Plain())

    @app.task
    def fail() -> None:
        raise BuryJob("no")

    fail.enqueue()
    drain(app)
    (verdict,) = verdicts
    assert isinstance(verdict, Bury)
    assert verdict.after is None


def test_a_job_that_is_done_or_retried_sends_the_same_verdicts_as_before_failures(
    app: multiq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a worker whose verdicts are watched
    verdicts: list[Any] = []
    settle = MemoryConsumer.settle

    def watched(consumer: Consumer, given: Any) -> Any:
        verdicts.extend(given)
        return settle(consumer, given)  # type: ignore[arg-type]

    monkeypatch.setattr(MemoryConsumer, "settle", watched)
    app.task(name="done")(lambda: None).enqueue()

    @app.task(backoff=60)
    def fail() -> None:
        raise ValueError("no")

    fail.enqueue()
    # When jobs are done and retried, then no verdict stores an outcome, a memo or a detail
    drain(app)
    assert {type(verdict).__name__: verdict.after for verdict in verdicts} == {"Ack": None, "Release": None}


@pytest.mark.parametrize("times", [{"at": 1e300}, {"at": 1e12}, {"at": -1e11}, {"seconds": 1e300}, {"seconds": -1.0}])
def test_a_failure_with_a_time_that_no_calendar_has_is_not_read(times: dict[str, float]) -> None:
    failure = {"error": "away", "at": 1.8e9, "worker": "shop:1", "attempt": 1, "seconds": 0.5}
    assert decode_failure(json.dumps(failure).encode()) is not None
    assert decode_failure(json.dumps(failure | times).encode()) is None
