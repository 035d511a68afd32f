"""Failed enqueues: what the error says about each job, and what a repetition sends."""

from __future__ import annotations

import asyncio
import enum
import pickle
import re
import uuid
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import multiq
from multiq import (
    BackendError,
    BackendFull,
    BackendTimeout,
    BackendUnavailable,
    EnqueueUncertain,
    OptionInvalid,
    Unsupported,
)
from multiq.backend import NewJob, State
from multiq.backend.capabilities import Gap
from multiq.backend.memory import MemoryBackend
from multiq.errors import EnqueuePartial

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from multiq.queue import Queue

LONG = 1000.0


def do(what: str) -> None:
    """A task's function."""


class Failing(MemoryBackend):
    """Stores the first *stored* jobs of a call, and raises the error that the next of *errors* returns for all jobs.

    An error that is None: the call goes well.
    """

    def __init__(self, *errors: Callable[[str, Sequence[NewJob]], Exception] | None, stored: int = 0) -> None:
        super().__init__()
        self.errors = [*errors]
        self.stored = stored
        self.calls: list[list[NewJob]] = []

    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
        self.calls.append([*jobs])
        error = self.errors.pop(0) if self.errors else None
        if error is None:
            return super().enqueue(queue, jobs)
        super().enqueue(queue, jobs[: self.stored])
        raise error(queue, jobs)


class Numbering(Failing):
    """A backend that assigns the ids itself."""

    declared = msgspec.structs.replace(MemoryBackend.declared, client_ids=Gap("never", "it numbers the jobs itself"))


def uncertain(cause: type[BackendUnavailable] = BackendTimeout, **more: Any) -> Callable[..., EnqueueUncertain]:
    def make(queue: str, jobs: Sequence[NewJob]) -> EnqueueUncertain:
        error = EnqueueUncertain(queue, jobs, "no answer", **{"client_ids": True, **more})
        error.__cause__ = cause("no answer")
        return error

    return make


def certain(kind: type[BackendError]) -> Callable[..., BackendError]:
    return lambda *_: kind("not now")


def on(backend: MemoryBackend) -> Queue:
    app = multiq.App("memory://")
    app._backend = backend
    return app.queue("q")


# --- the error ---


def test_a_lost_reply_raises_an_error_with_the_ids() -> None:
    queue = on(Failing(uncertain(), stored=2))
    with pytest.raises(EnqueueUncertain) as told:
        queue.enqueue_many([1, 2])
    assert [job.id for job in queue.jobs("ready")] == [*told.value.ids]
    assert str(told.value) == (
        "2 job(s) for queue 'q' were sent, but the reply was lost (no answer): they may or may not be there; "
        f"error.repeat() sends them again under their ids ({', '.join(told.value.ids)}), "
        "and adds none that is there already"
    )


def test_a_message_names_a_few_of_many_ids() -> None:
    with pytest.raises(EnqueueUncertain, match=r"\(\S+, \S+, \S+ and 97 more\)") as told:
        on(Failing(uncertain())).enqueue_many(range(100))
    assert len(told.value.ids) == 100


def test_an_uncertain_job_stays_uncertain_whatever_the_next_attempt_ends_with() -> None:
    for end in (BackendFull, BackendTimeout, BackendError):
        queue = on(Failing(uncertain(BackendUnavailable), certain(BackendUnavailable), certain(end), stored=1))
        with pytest.raises(EnqueueUncertain, match="not now") as told:
            queue.enqueue(1)
        assert isinstance(told.value.__cause__, end)
        assert [job.id for job in queue.jobs("ready")] == [*told.value.ids]


@pytest.mark.parametrize("error", [BackendTimeout, BackendFull, BackendError])
def test_an_error_that_stored_nothing_is_passed_on(error: type[BackendError]) -> None:
    with pytest.raises(error, match="not now") as told:
        on(Failing(certain(error))).enqueue(1)
    assert not isinstance(told.value, EnqueueUncertain)


def test_each_job_is_named_once_over_several_attempts() -> None:
    """The first attempt stores one job of four and leaves two uncertain. The second attempt stores one more job."""

    def first(queue: str, jobs: Sequence[NewJob]) -> EnqueueUncertain:
        return uncertain(BackendUnavailable, accepted={0: jobs[0].id}, unsent=jobs[3:])(queue, jobs[1:3])

    def second(_: str, jobs: Sequence[NewJob]) -> EnqueuePartial:
        error = EnqueuePartial({1: jobs[1].id}, len(jobs), "no room")
        error.__cause__ = BackendFull("no room")
        return error

    backend = Failing(first, second)
    with pytest.raises(EnqueueUncertain, match=r"\(no room\)") as told:
        on(backend).enqueue_many([0, 1, 2, 3])
    ids = [job.id for job in backend.calls[0]]
    assert [job.id for job in backend.calls[1]] == ids[1:]
    assert told.value.accepted == {0: ids[0], 2: ids[2]}
    assert told.value.ids == (ids[1],)
    assert [job.id for job in told.value.unsent] == [ids[3]]


def test_jobs_that_an_earlier_attempt_stored_are_in_the_error() -> None:
    def first(_: str, jobs: Sequence[NewJob]) -> EnqueuePartial:
        error = EnqueuePartial({0: jobs[0].id}, len(jobs), "gone")
        error.__cause__ = BackendUnavailable("gone")
        return error

    backend = Failing(first, certain(BackendFull))
    with pytest.raises(EnqueuePartial, match="1 of 3 jobs were accepted, the rest was not: not now") as told:
        on(backend).enqueue_many([0, 1, 2])
    assert told.value.accepted == {0: backend.calls[0][0].id}


# --- repeating ---


@pytest.mark.parametrize("stored", [0, 1, 2])
def test_a_repetition_adds_what_is_missing_and_returns_what_the_call_would_have_returned(stored: int) -> None:
    queue = on(Failing(uncertain(), uncertain(), stored=stored))
    with pytest.raises(EnqueueUncertain) as told:
        queue.enqueue_many([1, 2])
    with pytest.raises(EnqueueUncertain) as told_again:
        told.value.repeat()
    assert told_again.value.ids == told.value.ids
    for _ in range(2):
        handles = told_again.value.repeat()
        assert [handle.id for handle in handles] == [*told.value.ids]
        assert [(job.id, job.value) for job in queue.jobs("ready")] == [*zip(told.value.ids, (1, 2), strict=True)]


def test_one_job_s_repetition_returns_one_handle() -> None:
    queue = on(Failing(uncertain(), stored=1))
    with pytest.raises(EnqueueUncertain) as told:
        queue.enqueue("one")
    handle = told.value.repeat()
    assert (handle.id, handle.state()) == (told.value.ids[0], State.READY)
    assert queue.stats().ready == 1


def test_a_task_s_repetition_can_be_awaited() -> None:
    app = multiq.App("memory://")
    backend = app._backend = Failing(uncertain(), stored=1)
    task = app.task(do)

    async def main() -> Any:
        with pytest.raises(EnqueueUncertain) as told:
            await task.options(queue="q").aenqueue("x")
        return await told.value.arepeat()

    assert asyncio.run(main()).peek().task == "do"
    assert backend.stats("q").ready == 1


def test_a_repetition_after_a_successful_one_sends_nothing() -> None:
    queue = on(Failing(uncertain(), stored=1))
    with pytest.raises(EnqueueUncertain) as told:
        queue.enqueue("one")
    handle = told.value.repeat()
    queue.reserve().ack()
    assert told.value.repeat() == handle
    assert queue.stats().ready == 0


@pytest.mark.parametrize(("passed", "due_in"), [(LONG / 4, 3 * LONG / 4), (2 * LONG, 0)])
def test_a_delayed_job_becomes_due_when_it_was_to_be_due(passed: float, due_in: float) -> None:
    backend = Failing(uncertain())
    with pytest.raises(EnqueueUncertain) as told:
        on(backend).enqueue(1, delay=LONG)
    again: Any = told.value._again
    again.__self__._began -= passed  # as if this time had passed
    told.value.repeat()
    (sent,) = backend.calls[-1]
    assert sent.delay == pytest.approx(due_in, abs=5)


def test_where_the_backend_assigns_ids_a_repetition_is_refused_with_the_reason() -> None:
    backend = Numbering(uncertain(client_ids=False))
    with pytest.raises(EnqueueUncertain, match="only if running one twice does no harm") as told:
        on(backend).enqueue(1)
    assert told.value.ids == ()
    with pytest.raises(Unsupported, match=r"client_ids .*it numbers the jobs itself"):
        told.value.repeat()
    assert len(backend.calls) == 1


def test_the_error_of_a_backend_s_own_enqueue_says_how_it_can_be_repeated() -> None:
    with pytest.raises(EnqueueUncertain) as told:
        Failing(uncertain()).enqueue("q", [NewJob(b"x", "1")])
    with pytest.raises(BackendError, match=r"pass error\.jobs to the backend's enqueue"):
        told.value.repeat()


def test_an_error_that_is_sent_to_another_process_keeps_its_fields() -> None:
    error = EnqueueUncertain(
        "q", [NewJob(b"x", "1")], "cut", accepted={1: "2"}, unsent=[NewJob(b"y", "3")], client_ids=True
    )
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert str(copy) == str(error)
    assert (copy.ids, copy.accepted, copy.unsent) == (("1",), {1: "2"}, error.unsent)


# --- ids of the caller's own ---


def test_an_id_chosen_by_the_caller_makes_a_second_enqueue_harmless() -> None:
    app = multiq.App("memory://")
    queue, task = app.queue("q"), app.task(queue="q")(do)
    for body in ("first", "second"):
        assert queue.enqueue(body, id="order-1").id == "order-1"
    for _ in range(2):
        assert task.options(id="mail-1").enqueue("x").id == "mail-1"
        assert [job.id for job in task.enqueue_many([("a",), ("b",)], ids=["a", "b"])] == ["a", "b"]
        assert [job.id for job in task.options(priority=0).enqueue_many([("c",)], ids=iter("c"))] == ["c"]
        assert [job.id for job in queue.enqueue_many(["d", "e"], ids=("d", "e"))] == ["d", "e"]
    assert sorted(job.id for job in queue.jobs("ready")) == ["a", "b", "c", "d", "e", "mail-1", "order-1"]
    assert queue.peek("order-1").value == "first"


def test_the_id_of_a_done_job_can_be_enqueued_again() -> None:
    queue = multiq.App("memory://").queue("q")
    for _ in range(2):
        queue.enqueue("x", id="again")
        job = queue.reserve()
        assert (job.id, job.attempt) == ("again", 1)
        job.ack()


class Kind(enum.StrEnum):
    MAIL = "mail"


def test_a_text_of_another_class_is_taken_as_plain_text() -> None:
    queue = multiq.App("memory://").queue("q")
    assert type(queue.enqueue("x", id=Kind.MAIL).id) is str
    assert queue.peek("mail").id == "mail"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (7, "id=7 must be text, got int: pass str"),
        (b"x", "id=b'x' must be text, got bytes"),
        (uuid.UUID(int=0), "must be text, got UUID"),
        ("", "id='' must be one word of ASCII, of 1 to 200 characters, got 0 characters: pass a hash of it"),
        ("x" * 201, "must be one word of ASCII, of 1 to 200 characters, got 201"),
        ("two words", "id='two words' must be one word of ASCII"),
        ("\u00e4", "must be one word of ASCII"),
        ("a\nb", "must be one word of ASCII"),
        ("a\0", "must be one word of ASCII"),
        ("\x7f", "must be one word of ASCII"),
        ("\udc80", "must be one word of ASCII"),
    ],
)
def test_an_id_that_some_backend_could_not_keep_is_refused_everywhere(wrong: Any, says: str) -> None:
    app = multiq.App("memory://")
    queue, task = app.queue("q"), app.task(queue="q")(do)
    with pytest.raises(OptionInvalid, match=re.escape(says)):
        queue.enqueue("x", id=wrong)
    with pytest.raises(OptionInvalid, match=re.escape(says)):
        task.options(id=wrong)
    for many in (queue.enqueue_many, task.enqueue_many):
        with pytest.raises(OptionInvalid, match=re.escape(says.replace("id=", "ids[1]="))):
            many([("a",), ("b",)], ids=["a", wrong])
    assert queue.stats().ready == 0


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ("ab", "ids must be a list with one id for each job, got 'ab'"),
        (["a"], "ids must have one id for each job, got 1 for 2 jobs"),
        (["a", "b", "c"], "got 3 for 2 jobs"),
        (["a", "a"], "ids must name each job once, got 'a' twice"),
    ],
)
def test_ids_that_do_not_fit_the_jobs_are_refused(ids: Any, says: str) -> None:
    queue = multiq.App("memory://").queue("q")
    with pytest.raises(OptionInvalid, match=re.escape(says)):
        queue.enqueue_many([1, 2], ids=ids)
    assert queue.stats().ready == 0


def test_one_id_for_many_jobs_is_refused() -> None:
    task = multiq.App("memory://").task(do)
    with pytest.raises(OptionInvalid, match=r"enqueue_many must have ids=, one for each call, got id='a'"):
        task.options(id="a").enqueue_many([("a",), ("b",)])


def test_where_the_backend_assigns_ids_the_callers_ids_are_refused() -> None:
    backend = Numbering()
    for call in (lambda: on(backend).enqueue(1, id="a"), lambda: on(backend).enqueue_many([1], ids=["a"])):
        with pytest.raises(Unsupported, match=r"client_ids .*it numbers the jobs itself"):
            call()
    assert backend.calls == []


def test_an_id_passed_to_the_decorator_is_refused_with_the_right_place() -> None:
    options: dict[str, Any] = {"id": "a"}
    with pytest.raises(OptionInvalid, match=r"did you mean options\(id=...\) of the task"):
        multiq.App("memory://").task(**options)
