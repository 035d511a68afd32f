"""Chains, groups, batches and flows on the memory backend and on SQLite, with a real worker in this process."""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import multiq
from multiq.backend import MAX_STEPS, Ack, After, Arrive, Gap, GiveBack, NewJob, Put, State
from multiq.backend.memory import MemoryBackend
from multiq.envelope import FLOW_VERSION, Envelope, FlowPart, Input, Tell, encode_envelope
from multiq.errors import (
    ArgumentsInvalid,
    BackendUnavailable,
    EnqueuePartial,
    EnqueueUncertain,
    FlowFinished,
    FlowInvalid,
    FlowNotFound,
    JobAwaited,
    JobReserved,
    OptionInvalid,
    PayloadInvalid,
    PayloadTooLarge,
    Unsupported,
)
from multiq.flows.graph import NODES_MAX
from multiq.flows.record import HOME
from multiq.flows.retention import AT_ONCE, delete_leftovers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from multiq.backend import Backend


class Shop:
    """An app, and records of what its tasks did."""

    def __init__(self, url: str = "memory://", backend: MemoryBackend | None = None) -> None:
        self.app = multiq.App(url) if backend is None else multiq.App(backend=backend)
        self.ran: list[Any] = []
        self.failing: set[Any] = set()
        task = self.app.task

        @task(max_attempts=1)
        def note(value: Any) -> Any:
            if value in self.failing:
                raise ValueError(f"{value} fails")
            self.ran.append(value)
            return value

        @task(queue="other")
        def double(value: int, times: int = 2) -> int:
            self.ran.append(f"double {value}")
            return value * times

        @task
        def total(values: list[int]) -> int:
            return sum(values)

        @task
        def after_all(flow_id: str) -> str:
            self.ran.append("after all")
            return flow_id

        @task
        def caught(flow_id: str) -> None:
            self.ran.append(f"caught {flow_id}")

        @task
        async def later(value: int) -> int:
            self.ran.append(f"later {value}")
            return value + 1

        @task(keep=60)
        def unserializable() -> object:
            return object()

        self.note, self.double, self.total, self.after_all, self.caught = note, double, total, after_all, caught
        self.later, self.unserializable = later, unserializable

    def work(self, **options: Any) -> None:
        multiq.Worker(self.app, queues=["default", "other"], stop_when_empty=True, **options).run()

    def states(self, flow: multiq.flows.FlowHandle) -> list[str]:
        return [job.status() for job in flow.jobs()]


@pytest.fixture(params=["memory://", "sqlite:///jobs.db?synchronous=normal"], ids=["memory", "sqlite"])
def shop(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    monkeypatch.chdir(tmp_path)
    shop = Shop(request.param)
    with shop.app:
        yield shop


# --- chains and groups ---


def test_each_step_of_a_chain_gets_the_result_of_the_step_before_it(shop: Shop) -> None:
    # Given a chain over two queues
    flow = multiq.chain(shop.note.s(5), shop.double.s(), shop.double.s(times=10), shop.note.s()).enqueue()
    # When a worker has run
    shop.work()
    # Then each step has got its predecessor's result, and the flow is finished
    assert shop.ran == [5, "double 5", "double 10", 100]
    assert flow.last().result(timeout=0) == 100
    assert flow.info().state == "finished"
    assert flow.progress() == (4, 4)


def test_a_step_that_has_all_its_arguments_gets_no_result(shop: Shop) -> None:
    multiq.chain(shop.note.s(1), shop.note.s(2)).enqueue()
    shop.work()
    assert shop.ran == [1, 2]


def test_a_coroutine_gets_the_result_of_the_step_before_it(shop: Shop) -> None:
    flow = multiq.chain(shop.note.s(1), shop.later.s(), shop.later.s()).enqueue()
    shop.work(concurrency=4)
    assert flow.last().result(timeout=0) == 3


def test_a_step_after_a_group_gets_the_list_of_its_results(shop: Shop) -> None:
    flow = multiq.chain(
        shop.note.s(3), multiq.group(shop.double.s(), shop.double.s(times=3), shop.note.s(1)), shop.total.s()
    ).enqueue()
    shop.work()
    assert flow.last().result(timeout=0) == 6 + 9 + 1


def test_a_group_of_its_own_keeps_the_results_of_its_parts(shop: Shop) -> None:
    flow = multiq.group(shop.note.s(1), multiq.chain(shop.note.s(2), shop.double.s())).enqueue()
    shop.work()
    assert [job.result(timeout=0) for job in list(flow.jobs())[:3] if job.outcome() is not None] == [1, 2, 4]
    assert flow.info().state == "finished"


def test_the_result_of_a_chain_is_that_of_its_last_call(shop: Shop) -> None:
    flow = multiq.chain(shop.note.s(5), shop.double.s()).enqueue()
    with pytest.raises(multiq.ResultTimeout):
        flow.result(timeout=0)
    shop.work()
    assert flow.result() == 10
    assert asyncio.run(flow.aresult(timeout=0)) == 10
    assert shop.app.flows.get(flow.id).result(timeout=0) == 10


@pytest.mark.parametrize("count", [1, 3])
def test_the_result_of_a_group_is_the_list_of_its_parts_results(shop: Shop, count: int) -> None:
    flow = multiq.group(
        *(multiq.chain(shop.note.s(number), shop.double.s()) for number in range(count - 1)), shop.note.s(7)
    ).enqueue()
    with pytest.raises(multiq.ResultTimeout):
        flow.result(timeout=0)
    shop.work()
    expected = [*(2 * number for number in range(count - 1)), 7]
    assert flow.result() == expected
    assert asyncio.run(flow.aresult(timeout=0)) == expected


def test_the_last_call_of_a_batch_in_a_flow_gets_the_flows_id_and_the_result_of_a_node(shop: Shop) -> None:
    @shop.app.task
    def summary(flow_id: str, first: int, second: int) -> list[Any]:
        return [flow_id, first, second]

    flow = multiq.Flow()
    node = flow.add(shop.note.s(5))
    flow.add(multiq.batch([shop.note.s(1)], then=summary.s(node, second=node)))
    handle = flow.enqueue()
    shop.work()
    assert handle.result(timeout=0) == [handle.id, 5, 5]


def test_a_flow_that_ends_with_several_calls_has_no_result(shop: Shop) -> None:
    for flow in (
        multiq.batch([shop.note.s(1)]),
        multiq.chain(shop.note.s(1), multiq.group(shop.note.s(), shop.note.s())),
    ):
        with pytest.raises(multiq.FlowInvalid, match="does not end with one call: give a batch a then="):
            flow.enqueue().result()


def test_a_failed_step_holds_the_chain_until_it_is_kicked(shop: Shop) -> None:
    # Given a chain whose second step fails
    shop.failing.add(2)
    flow = multiq.chain(shop.note.s(1), shop.note.s(2), shop.note.s(3)).enqueue()
    shop.work()
    # Then the third step waits, and the flow is open
    assert shop.states(flow) == ["unknown", "failed", "held"]
    assert flow.info().state == "open"
    # When the step is kicked, and succeeds, then the chain continues
    shop.failing.clear()
    shop.app.queue().kick()
    shop.work()
    assert shop.ran == [1, 2, 3]
    assert flow.info().state == "finished"


def test_a_result_that_cannot_be_kept_buries_the_step_that_needs_it(shop: Shop) -> None:
    flow = multiq.chain(shop.unserializable.s(), shop.note.s()).enqueue()
    shop.work()
    step = list(flow.jobs())[1]
    assert step.state() is State.BURIED
    assert "was not kept" in str(step.peek().reason)


# --- batches ---


def test_the_call_after_a_batch_runs_once_after_all_members(shop: Shop) -> None:
    flow = multiq.batch([shop.note.s(n) for n in range(20)], then=shop.after_all.s(), name="import 7").enqueue()
    assert flow.progress() == (0, 20)
    shop.work()
    assert shop.ran == [*range(20), "after all"]
    assert flow.last().result(timeout=0) == flow.id
    assert (flow.info().name, flow.info().state, flow.progress()) == ("import 7", "finished", (20, 20))


def test_a_batch_without_a_call_after_it_is_finished_after_its_last_member(shop: Shop) -> None:
    flow = multiq.batch([shop.note.s(n) for n in range(3)]).enqueue()
    shop.work()
    assert flow.info().state == "finished"
    assert shop.app.queue().stats().held == 0


def test_the_catch_of_a_batch_runs_once_for_several_failures(shop: Shop) -> None:
    # Given a batch with two members that fail
    shop.failing |= {1, 3}
    flow = multiq.batch([shop.note.s(n) for n in range(5)], then=shop.after_all.s(), catch=shop.caught.s()).enqueue()
    shop.work()
    # Then the catch has run once, and the call after the batch waits
    assert sorted(map(str, shop.ran)) == ["0", "2", "4", f"caught {flow.id}"]
    assert flow.progress() == (3, 5)
    # When the members are kicked, and succeed, then the call runs
    shop.failing.clear()
    shop.app.queue().kick(10)
    shop.work()
    assert shop.ran[-1] == "after all"
    assert flow.info().state == "finished"


def test_the_catch_of_a_batch_without_failures_never_runs(shop: Shop) -> None:
    flow = multiq.batch([shop.note.s(1)], then=shop.after_all.s(), catch=shop.caught.s()).enqueue()
    shop.work()
    assert shop.ran == [1, "after all"]
    assert flow.info().state == "finished"
    assert shop.app.queue().stats().held == 0


def test_a_batch_grows_while_it_is_open(shop: Shop) -> None:
    flow = multiq.batch([shop.note.s(1)], then=shop.after_all.s()).enqueue()
    flow.add([shop.note.s(2), shop.double.s(3)])
    assert flow.progress() == (0, 3)
    shop.work()
    assert shop.ran[-1] == "after all"
    assert sorted(map(str, shop.ran[:-1])) == ["1", "2", "double 3"]


def test_a_batch_that_is_done_does_not_grow(shop: Shop) -> None:
    flow = multiq.batch([shop.note.s(1)], then=shop.after_all.s()).enqueue()
    shop.work()
    with pytest.raises(FlowFinished, match="enqueue another batch"):
        flow.add([shop.note.s(2)])
    assert shop.app.queue().stats().ready == 0


def test_a_batch_of_more_calls_than_one_step_takes_is_enqueued(shop: Shop) -> None:
    flow = multiq.batch([shop.note.s(n) for n in range(2_500)], then=shop.after_all.s()).enqueue()
    shop.work()
    assert len(shop.ran) == 2_501
    assert flow.progress() == (2_500, 2_500)


def test_a_batch_whose_producer_dies_never_runs_the_call_after_it(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a producer that dies before it seals the batch
    backend = shop.app.backend
    carry_out = backend.carry_out
    calls: list[Any] = []

    def dies_at_the_second(steps: Any, **options: Any) -> bool:
        calls.append(steps)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return carry_out(steps, **options)

    monkeypatch.setattr(backend, "carry_out", dies_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        multiq.batch([shop.note.s(n) for n in range(3)], then=shop.after_all.s()).enqueue()
    monkeypatch.undo()
    # When all members have run
    shop.work()
    # Then the call after them has not run, and the flow is shown as being enqueued
    assert shop.ran == [0, 1, 2]
    (info,) = shop.app.flows.list()
    assert info.state == "enqueuing"
    assert shop.app.flows.get(info.id).cancel() == 1


def test_a_wrong_call_that_is_added_changes_nothing(shop: Shop) -> None:
    flow = multiq.batch([shop.note.s(1)], then=shop.after_all.s()).enqueue()
    other = Shop()
    for wrong, error in [
        (shop.note.s(object()), PayloadInvalid),
        (shop.note.s(), ArgumentsInvalid),
        (other.note.s(2), FlowInvalid),
    ]:
        with pytest.raises(error):
            flow.add([shop.note.s(7), wrong])
    shop.work()
    assert shop.ran == [1, "after all"]
    assert flow.info().state == "finished"


@pytest.mark.parametrize("dies_at", [0, 1, 2])
def test_a_member_that_dies_while_it_adds_does_not_leave_the_batch_waiting(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, dies_at: int
) -> None:
    # Given a member that adds calls, and dies at one of its calls of the backend in its first attempt
    backend = shop.app.backend
    real: dict[str, Any] = {"carry_out": backend.carry_out, "enqueue": backend.enqueue}

    @shop.app.task(backoff=0)
    def grow() -> None:
        job = multiq.current_job()
        calls = itertools.count()

        def dying(name: str) -> Any:
            def call(*args: Any, **options: Any) -> Any:
                if job.attempt == 1 and next(calls) == dies_at:
                    raise KeyboardInterrupt
                return real[name](*args, **options)

            return call

        for name in real:
            monkeypatch.setattr(backend, name, dying(name))
        assert job.envelope is not None
        assert job.envelope.flow is not None
        shop.app.flows.get(job.envelope.flow.id).add([shop.note.s(n) for n in range(3)])

    flow = multiq.batch([grow.s()], then=shop.after_all.s()).enqueue()
    # When it has run again
    shop.work()
    # Then the batch is done, and its last call has run after all others
    assert shop.ran[-1] == "after all"
    assert {0, 1, 2} <= set(shop.ran)
    assert flow.info().state == "finished"


@pytest.mark.parametrize("dies_at", [0, 1, 2, 3])
def test_a_program_that_dies_while_it_adds_does_not_leave_the_batch_waiting(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, dies_at: int
) -> None:
    # Given a program that is no member, and dies at one of its calls of the backend
    monkeypatch.setattr("multiq.flows.job_plans._ADDING_TAKES", 0.05)
    backend = shop.app.backend
    flow = multiq.batch([shop.note.s(1)], then=shop.after_all.s()).enqueue()
    calls = itertools.count()

    def dying(call: Any) -> Any:
        def called(*args: Any, **options: Any) -> Any:
            if next(calls) >= dies_at:
                raise KeyboardInterrupt
            return call(*args, **options)

        return called

    with monkeypatch.context() as patched:
        patched.setattr(backend, "carry_out", dying(backend.carry_out))
        patched.setattr(backend, "delete", dying(backend.delete))
        with pytest.raises(KeyboardInterrupt):
            flow.add([shop.note.s(2)])
    # When the time for it is over
    shop.work()
    time.sleep(0.06)
    shop.work()
    # Then the batch is done with the calls that it has, and nothing is left
    assert shop.ran == ([1, 2, "after all"] if dies_at > 1 else [1, "after all"])
    assert flow.info().state == "finished"
    assert backend.queues() == []


def test_members_that_are_added_while_the_batch_is_enqueued_belong_to_it(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a batch to which others add before its producer has sealed it
    backend = shop.app.backend
    enqueue = backend.enqueue

    def adding(queue: str, jobs: Any, **options: Any) -> list[str]:
        ids = enqueue(queue, jobs, **options)
        if len(jobs) == 3:
            (info,) = shop.app.flows.list()
            shop.app.flows.get(info.id).add([shop.note.s(10), shop.double.s(11)])
        return ids

    monkeypatch.setattr(backend, "enqueue", adding)
    flow = multiq.batch([shop.note.s(n) for n in range(3)], then=shop.after_all.s()).enqueue()
    # Then its record has these calls, and calls that are added later have other ids
    assert flow.info().jobs == 6
    assert flow.info().state == "open"
    flow.add([shop.note.s(12)])
    assert flow.progress() == (0, 6)
    shop.work()
    assert shop.ran == [0, 1, 2, 10, 12, "double 11", "after all"]
    assert flow.progress() == (6, 6)


@pytest.mark.parametrize("when", [1, 3])
def test_a_batch_that_is_cancelled_while_it_is_enqueued_stays_cancelled(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, when: int
) -> None:
    backend = shop.app.backend
    enqueue = backend.enqueue

    def cancelling(queue: str, jobs: Any, **options: Any) -> list[str]:
        ids = enqueue(queue, jobs, **options)
        if len(jobs) == when:
            (info,) = shop.app.flows.list()
            shop.app.flows.get(info.id).cancel()
        return ids

    monkeypatch.setattr(backend, "enqueue", cancelling)
    flow = multiq.batch([shop.note.s(n) for n in range(3)], then=shop.after_all.s()).enqueue()
    assert flow.info().state == "cancelled"
    shop.work()
    assert shop.ran == []
    assert shop.app.backend.queues() == []


def test_many_add_to_a_batch_at_once(shop: Shop) -> None:
    @shop.app.task
    def grow(number: int) -> None:
        flow = multiq.current_job().envelope.flow  # type: ignore[union-attr]
        assert flow is not None
        shop.app.flows.get(flow.id).add([shop.note.s(number), shop.double.s(number)])

    flow = multiq.batch([grow.s(n) for n in range(100)], then=shop.after_all.s()).enqueue()
    shop.work(threads=16)
    assert len(shop.ran) == 201
    assert shop.ran[-1] == "after all"
    assert flow.progress() == (300, 300)


def test_a_batch_over_two_queues_needs_one_call_for_each(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    enqueue = shop.app.backend.enqueue

    def noting(queue: str, jobs: Any) -> list[str]:
        calls.append(queue)
        return enqueue(queue, jobs)

    monkeypatch.setattr(shop.app.backend, "enqueue", noting)
    multiq.batch([(shop.note, shop.double)[n % 2].s(n) for n in range(1000)], then=shop.after_all.s()).enqueue()
    assert calls == ["default", "default", "other"]


def test_the_record_of_a_batch_of_mixed_calls_is_short(shop: Shop) -> None:
    flow = multiq.batch([(shop.note, shop.double)[n % 2].s(n) for n in range(10)]).enqueue()
    flow.add([(shop.note, shop.double)[n % 2].s(n) for n in range(10, 16)])
    (note,) = shop.app.backend.notes(HOME).notes
    assert len(msgspec.json.decode(note.value)["runs"]) == 5
    # each number is that of one job, and the jobs of a queue run in the order of the calls
    assert [job.status() for job in flow.jobs()] == ["held"] + ["queued"] * 16
    shop.work()
    assert shop.ran == [*range(0, 16, 2), *(f"double {n}" for n in range(1, 16, 2))]


def test_a_flow_is_cancelled_from_its_end(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    deleted: list[str] = []
    delete = shop.app.backend.delete_many

    def noting(queue: str, ids: Any, **options: Any) -> Any:
        deleted.extend(own_id.rpartition(".")[2] for own_id in ids)
        return delete(queue, ids, **options)

    monkeypatch.setattr(shop.app.backend, "delete_many", noting)
    flow = multiq.batch([shop.note.s(n) for n in range(3)], then=shop.after_all.s(), catch=shop.caught.s()).enqueue()
    assert flow.cancel() == 5
    assert deleted[:5] == ["0", "1", "4", "3", "2"]


# --- a backend that carries out steps of several queues one after the other ---


@pytest.fixture
def stepwise(monkeypatch: pytest.MonkeyPatch) -> Shop:
    shop = Shop()
    declared = msgspec.structs.replace(MemoryBackend.declared, one_step_everywhere=Gap("never", "a test"))
    monkeypatch.setattr(MemoryBackend, "declared", declared)
    return shop


def test_a_flow_that_has_ended_before_its_producer_is_finished(stepwise: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a producer that is slow after it has enqueued the last job
    backend = stepwise.app.backend
    enqueue = backend.enqueue

    def slow(queue: str, jobs: Any, **options: Any) -> list[str]:
        ids = enqueue(queue, jobs, **options)
        stepwise.work()
        return ids

    monkeypatch.setattr(backend, "enqueue", slow)
    flow = multiq.chain(stepwise.note.s(1), stepwise.double.s()).enqueue()
    # Then the flow stays finished, and is forgotten some time
    assert stepwise.ran == [1, "double 1"]
    assert flow.info().state == "finished"
    (note,) = backend.notes(HOME, "flow/").notes
    assert note.expires_in is not None


def test_a_chain_is_open_when_it_is_enqueued(stepwise: Shop) -> None:
    assert multiq.chain(stepwise.note.s(1), stepwise.double.s()).enqueue().info().state == "open"


def test_a_job_with_a_limit_is_enqueued_after_the_jobs_that_wait_for_it(
    stepwise: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a chain that begins with a job that has a limit, and a worker that runs each job at once
    @stepwise.app.task(limits=[multiq.Limit("one", slots=1)])
    def limited(value: int) -> int:
        stepwise.ran.append(value)
        return value

    backend = stepwise.app.backend
    enqueue = backend.enqueue

    def quick(queue: str, jobs: Any, **options: Any) -> list[str]:
        ids = enqueue(queue, jobs, **options)
        stepwise.work()
        return ids

    monkeypatch.setattr(backend, "enqueue", quick)
    # When the chain is enqueued
    flow = multiq.chain(limited.s(1), stepwise.double.s()).enqueue()
    # Then its last job has run
    assert stepwise.ran == [1, "double 1"]
    assert flow.info().state == "finished"


def test_a_lost_reply_to_the_enqueue_of_a_flow_that_begins_with_a_limit_can_be_repeated(
    stepwise: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    @stepwise.app.task(limits=[multiq.Limit("one", slots=1)])
    def limited(value: int) -> None:
        stepwise.ran.append(value)

    cut = Cut(stepwise.app.backend, monkeypatch, 1, is_done=True)
    with pytest.raises(EnqueueUncertain) as told:
        multiq.group(limited.s(1), limited.s(2)).enqueue()
    cut.mend()
    told.value.repeat()
    stepwise.work()
    assert stepwise.ran == [1, 2]


class Cut:
    """Ends the connection to a backend at one of its calls, before or after the call is carried out, until ``mend``."""

    def __init__(self, backend: Backend, monkeypatch: pytest.MonkeyPatch, at: int, *, is_done: bool) -> None:
        self._left = at
        self._is_done = is_done
        self.is_down = False
        for name in ("enqueue", "carry_out", "note"):
            monkeypatch.setattr(backend, name, functools.partial(self._call, getattr(backend, name)))
        monkeypatch.setattr("multiq.uncertain_enqueue.PATIENCE", 0.0)

    def mend(self) -> None:
        assert self.is_down
        self.is_down, self._left = False, 1_000

    def _call(self, function: Any, *args: Any, **options: Any) -> Any:
        self._left -= 1
        is_lost = self._left < 0 and not self.is_down and self._is_done
        if self._left >= 0 or is_lost:
            found = function(*args, **options)
            if not is_lost:
                return found
        self.is_down = True
        if is_lost and function.__name__ == "enqueue":
            raise EnqueueUncertain(args[0], args[1], "cut", client_ids=True)
        error = BackendUnavailable("cut")
        error.may_be_done = is_lost
        raise error


@pytest.mark.parametrize("is_stepwise", [False, True], ids=["in one step", "in several steps"])
@pytest.mark.parametrize("is_done", [False, True], ids=["a lost request", "a lost reply"])
@pytest.mark.parametrize("kind", ["chain", "batch", "two queues"])
def test_an_enqueue_of_a_flow_that_may_be_stored_is_repeated_to_its_end(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: str, is_done: bool, is_stepwise: bool
) -> None:
    calls = uncertain = 0
    while True:
        # Given a connection that ends at any call of the enqueue
        shop = request.getfixturevalue("stepwise") if is_stepwise and not calls else Shop()
        flow: Any
        if kind == "chain":
            flow = multiq.chain(shop.note.s(1), shop.double.s())
        elif kind == "batch":
            flow = multiq.batch([shop.note.s(1), shop.double.s(1)], then=shop.after_all.s(), catch=shop.caught.s())
        else:
            flow = multiq.group(shop.note.s(1), shop.double.s(1))
        with monkeypatch.context() as patch:
            cut = Cut(shop.app.backend, patch, calls, is_done=is_done)
            try:
                handle = flow.enqueue()
            except EnqueueUncertain as exc:
                # Then either the error goes on where the enqueue has ended
                uncertain += 1
                cut.mend()
                handle = exc.repeat()
            except BackendUnavailable:
                # Or no job runs, and the flow can be enqueued again
                cut.mend()
                shop.work()
                assert shop.ran == []
                handle = flow.enqueue()
            is_whole = not cut.is_down and cut._left < 900
        assert handle.info().state == "open"
        shop.work()
        assert shop.ran == [1, "double 1", *(["after all"] if kind == "batch" else [])]
        assert handle.info().state == "finished"
        if is_whole:
            break
        calls += 1
    assert uncertain or not (is_done or is_stepwise)


@pytest.mark.parametrize("is_stepwise", [False, True], ids=["in one step", "in several steps"])
def test_a_repeat_of_an_enqueue_keeps_the_due_times(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, *, is_stepwise: bool
) -> None:
    # Given a flow with delays whose request may be lost
    shop: Shop = request.getfixturevalue("stepwise") if is_stepwise else Shop()
    cut = Cut(shop.app.backend, monkeypatch, 2 if is_stepwise else 0, is_done=False)
    lost = shop.app.backend.carry_out if not is_stepwise else shop.app.backend.enqueue

    def uncertain(*args: Any, **options: Any) -> Any:
        try:
            return lost(*args, **options)
        except BackendUnavailable as exc:
            exc.may_be_done = True
            raise

    monkeypatch.setattr(shop.app.backend, "enqueue" if is_stepwise else "carry_out", uncertain)
    began = time.monotonic()
    with pytest.raises(EnqueueUncertain) as told:
        multiq.chain(shop.note.options(delay=100).s(1), shop.double.options(delay=50).s()).enqueue()
    cut.mend()
    # When the enqueue is repeated a minute later
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: began + 60)
        handle = told.value.repeat()
    # Then its first job is due when it would have been, and the delay of the next one has not begun
    first, second = handle.jobs()
    assert first.peek().due_in == pytest.approx(40, abs=5)
    first.reschedule(0)
    shop.work()
    assert second.peek().due_in == pytest.approx(50, abs=5)


def test_a_repeat_by_two_threads_leaves_out_no_call(stepwise: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given an enqueue of a batch whose first call with members has lost its reply
    backend = stepwise.app.backend
    enqueue, carry_out = backend.enqueue, backend.carry_out
    cut = Cut(backend, monkeypatch, 2, is_done=True)
    with pytest.raises(EnqueueUncertain) as told:
        multiq.batch([stepwise.note.s(1)], then=stepwise.after_all.s()).enqueue()
    cut.mend()
    # And two threads that repeat it: the second one makes the same call as the first one, and ends it later
    is_begun, may_end, has_gone_on = threading.Event(), threading.Event(), threading.Event()
    slow = threading.current_thread()

    def slow_enqueue(queue: str, jobs: Any, **options: Any) -> list[str]:
        if threading.current_thread() is slow:
            is_begun.set()
            assert may_end.wait(20)
        return enqueue(queue, jobs, **options)

    def failing_carry_out(steps: Any, **options: Any) -> bool:
        if threading.current_thread() is not slow:
            may_end.set()
            assert has_gone_on.wait(20)
            raise BackendUnavailable("cut")
        has_gone_on.set()
        return carry_out(steps, **options)

    monkeypatch.setattr(backend, "enqueue", slow_enqueue)
    monkeypatch.setattr(backend, "carry_out", failing_carry_out)

    def fails() -> None:
        assert is_begun.wait(20)
        with pytest.raises(EnqueueUncertain):
            told.value.repeat()

    # When the next call of the first thread fails while the second thread continues
    first = threading.Thread(target=fails)
    first.start()
    handle = told.value.repeat()
    first.join(20)
    # Then the second thread has made that call, too
    stepwise.work()
    assert stepwise.ran == [1, "after all"]
    assert handle.info().state == "finished"


def test_an_enqueue_of_a_flow_that_a_part_of_the_servers_has_stored_can_be_repeated(
    stepwise: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a backend of several servers, one of which does not answer
    backend = stepwise.app.backend
    enqueue = backend.enqueue

    def part(queue: str, jobs: Any, **options: Any) -> list[str]:
        enqueue(queue, jobs[:1], **options)
        raise EnqueuePartial({0: jobs[0].id}, len(jobs), "cut") from BackendUnavailable("cut")

    monkeypatch.setattr("multiq.uncertain_enqueue.PATIENCE", 0.0)
    # When a batch is enqueued whose members are on all of the servers
    with monkeypatch.context() as patch:
        patch.setattr(backend, "enqueue", lambda queue, jobs: (part if len(jobs) > 1 else enqueue)(queue, jobs))
        with pytest.raises(EnqueueUncertain) as told:
            multiq.batch([stepwise.note.s(1), stepwise.note.s(2)], then=stepwise.after_all.s()).enqueue()
    # Then a member may run, and the rest can be enqueued later
    stepwise.work()
    assert stepwise.ran == [1]
    handle = told.value.repeat()
    stepwise.work()
    assert set(stepwise.ran) == {1, 2, "after all"}
    assert handle.info().state == "finished"


# --- graphs ---


def test_a_node_gets_the_results_of_the_nodes_that_are_its_arguments(shop: Shop) -> None:
    flow = multiq.Flow("sum")
    one, two = flow.add(shop.note.s(1)), flow.add(shop.note.s(2))
    flow.add(shop.total.s([one, two]), after=[flow.add(shop.double.s(one))])
    handle = flow.enqueue()
    shop.work()
    assert handle.last().result(timeout=0) == 3
    assert handle.info().state == "finished"


@pytest.mark.parametrize(
    ("on_failure", "ran", "state"), [("wait", [], "open"), ("go", ["b"], "finished"), ("stop", [], "cancelled")]
)
def test_a_node_after_a_failed_one_waits_goes_on_or_is_stopped(
    shop: Shop, on_failure: Any, ran: list[str], state: str
) -> None:
    shop.failing.add("a")
    flow = multiq.Flow()
    flow.add(shop.note.s("b"), after=[flow.add(shop.note.s("a"))], on_failure=on_failure)
    handle = flow.enqueue()
    shop.work()
    assert shop.ran == ran
    assert handle.info().state == state


def test_a_stop_reaches_all_that_comes_after(shop: Shop) -> None:
    shop.failing.add("a")
    flow = multiq.Flow()
    first = flow.add(shop.note.s("a"))
    second = flow.add(shop.note.s("b"), after=[first], on_failure="stop")
    third = flow.add(shop.note.s("c"), after=[second])
    flow.add(shop.note.s("d"), after={third: "wait", first: "go"})
    handle = flow.enqueue()
    shop.work()
    assert shop.ran == []
    assert shop.app.queue().stats().held == 0
    assert handle.last().status() == "cancelled"


def test_a_flow_with_several_last_jobs_is_finished_after_all_of_them(shop: Shop) -> None:
    flow = multiq.Flow()
    first = flow.add(shop.note.s("a"))
    for value in ("b", "c", "d"):
        flow.add(shop.note.s(value), after=[first])
    handle = flow.enqueue()
    shop.work()
    assert shop.ran == ["a", "b", "c", "d"]
    assert handle.info().state == "finished"


def test_the_record_of_an_ended_flow_expires(shop: Shop) -> None:
    handle = multiq.chain(shop.note.s(1), keep=3600).enqueue()
    assert shop.app.backend.notes(HOME).notes[0].expires_in is None
    shop.work()
    note = shop.app.backend.notes(HOME).notes[0]
    assert note.expires_in is not None
    assert 0 < note.expires_in <= 3600
    assert handle.info().finished is not None


@pytest.mark.parametrize("is_coroutine", [False, True])
@pytest.mark.parametrize("is_failing", [False, True])
def test_a_flow_that_is_cancelled_while_its_last_job_runs_stays_cancelled(
    shop: Shop, is_coroutine: bool, is_failing: bool
) -> None:
    # Given a chain whose last job cancels its flow while it runs
    infos = []

    def end(value: int) -> None:
        flow = shop.app.flows.get(multiq.current_job().id.rpartition(".")[0])
        flow.cancel(running=is_failing)
        infos.append((flow.info(), flow.progress()))
        while is_failing:
            time.sleep(0.01)
            multiq.current_job().check_cancelled()

    @shop.app.task
    async def aend(value: int) -> None:
        await asyncio.to_thread(end, value)

    flow = multiq.chain(shop.note.s(1), (aend if is_coroutine else shop.app.task(end)).s(), name="x").enqueue()
    # When the job ends
    shop.work(concurrency=2)
    # Then the flow is as it was cancelled
    assert infos == [(flow.info(), flow.progress())]
    assert flow.info().state == "cancelled"
    assert flow.progress() == (1, 2)


def test_a_flow_that_is_cancelled_before_the_ack_of_its_last_job_stays_cancelled(shop: Shop) -> None:
    # Given a chain that is cancelled when the worker has prepared the ack of its last job
    flow = multiq.chain(shop.note.s(1), shop.later.s()).enqueue()
    infos = []

    @shop.app.on(multiq.events.JobDone)
    def cancel(event: multiq.events.JobDone) -> None:
        if event.job.task == "later":
            flow.cancel()
            infos.append((flow.info(), flow.progress()))

    # When the worker acks the job
    shop.work()
    # Then the flow is as it was cancelled, its result is kept, and it can be forgotten
    assert infos[0][0].state == "cancelled"
    assert infos == [(flow.info(), flow.progress())]
    assert list(shop.app.flows.list()) == [flow.info()]
    assert flow.cancel() == 0
    assert infos == [(flow.info(), flow.progress())]
    assert flow.result(timeout=0) == 2
    flow.forget()
    assert shop.app.backend.notes(HOME, "flow/").notes == shop.app.backend.notes(HOME, "cancelled/").notes == []


def test_a_cancelled_flow_starts_no_further_job(shop: Shop) -> None:
    flow = multiq.chain(shop.note.s(1), shop.note.s(2)).enqueue()
    assert flow.cancel() == 2
    shop.work()
    assert shop.ran == []
    assert flow.info().state == "cancelled"
    assert flow.cancel() == 0


# --- deleting a single job ---


def test_a_job_for_which_others_wait_is_not_deleted_by_accident(shop: Shop) -> None:
    flow = multiq.chain(shop.note.s(1), shop.note.s(2)).enqueue()
    first, second = flow.jobs()
    with pytest.raises(JobAwaited, match="followers='go'"):
        first.cancel()
    with pytest.raises(JobAwaited):
        shop.app.queue().delete(first.id)
    assert (first.status(), second.status()) == ("queued", "held")
    second.cancel()  # no job waits for it
    first.cancel(followers="stop")
    shop.work()
    assert shop.ran == []


@pytest.mark.parametrize(("followers", "ran", "state"), [("go", [2], "finished"), ("stop", [], "cancelled")])
def test_the_jobs_after_a_deleted_one_run_or_are_cancelled(
    shop: Shop, followers: Any, ran: list[int], state: str
) -> None:
    flow = multiq.chain(shop.note.s(1), shop.note.s(2)).enqueue()
    next(iter(flow.jobs())).cancel(followers=followers)
    shop.work()
    assert shop.ran == ran
    assert flow.info().state == state


def test_a_flow_whose_last_job_is_deleted_is_cancelled(shop: Shop) -> None:
    flow = multiq.chain(shop.note.s(1), shop.note.s(2)).enqueue()
    flow.last().cancel()
    assert flow.info().state == "cancelled"


def test_a_deleted_member_counts_as_ended_for_the_call_after_the_batch(shop: Shop) -> None:
    shop.failing.add(1)
    flow = multiq.batch([shop.note.s(n) for n in range(3)], then=shop.after_all.s()).enqueue()
    shop.work()
    (failed,) = shop.app.failed.list()
    assert shop.app.failed.forget().awaited == 1
    shop.app.job(failed.queue, failed.id).cancel(followers="go")
    shop.work()
    assert shop.ran == [0, 2, "after all"]
    assert flow.info().state == "finished"


@pytest.mark.parametrize("how", ["cancel", "delete", "forget"])
def test_a_job_that_waits_for_the_result_of_a_deleted_one_runs(shop: Shop, how: str) -> None:
    # Given a chain whose second job gets the result of the first one, which is buried
    shop.failing.add(1)
    flow = multiq.chain(shop.note.s(1), shop.note.s()).enqueue()
    shop.work()
    first = next(iter(flow.jobs()))
    # When the first job is deleted, and the second one must run
    if how == "cancel":
        first.cancel(followers="go")
    elif how == "delete":
        shop.app.queue().delete(first.id, followers="go")
    else:
        assert shop.app.failed.forget(followers="go").changed == 1
    shop.work()
    # Then it runs without a result
    assert shop.ran == [None]
    assert flow.info().state == "finished"
    assert list(shop.app.failed.list()) == []


def test_the_jobs_after_a_running_one_are_told_nothing_when_it_cannot_be_deleted(shop: Shop) -> None:
    # Given a chain whose first job runs
    flow = multiq.chain(shop.note.s(1), shop.note.s(2)).enqueue()
    first, second = flow.jobs()
    consumer = shop.app.backend.consumer(["default"])
    (lease,) = consumer.reserve(1, 0)
    # When another program deletes it, then the job after it still waits
    for followers in ("go", "stop"):
        with pytest.raises(JobReserved):
            shop.app.queue().delete(first.id, followers=followers)
    assert second.status() == "held"
    consumer.settle([GiveBack(lease)])
    shop.work()
    assert shop.ran == [1, 2]


# --- a worker and a backend in trouble ---


@pytest.mark.parametrize("call", ["outcomes", "note"])
def test_a_job_whose_flow_cannot_be_read_is_given_back(shop: Shop, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    # Given steps that may be tried once, and a backend that is unreachable for a moment
    real = getattr(shop.app.backend, call)
    failures = iter([1, 2])

    def away(*args: Any) -> Any:
        if next(failures, None) is not None:
            raise BackendUnavailable("away")
        return real(*args)

    monkeypatch.setattr(shop.app.backend, call, away)
    monkeypatch.setattr("multiq.worker.execution.start_checks._READ_AGAIN", 0.0)
    flow = multiq.chain(shop.note.s(1), shop.note.s(), multiq.group(shop.note.s(), shop.double.s())).enqueue()
    # When a worker has run, then no attempt was lost
    shop.work()
    assert shop.ran == [1, 1, 1, "double 1"]
    assert flow.info().state == "finished"


@pytest.mark.parametrize(
    "part",
    [
        {"tells": [Tell("other", f"a.{n}") for n in range(1_000)]},
        {"tells": [Tell("a queue", "a.1")]},
        {"tells": [Tell("other", "")]},
        {"tells": [Tell("other", "a" * 300)]},
        {"inputs": [Input(0, [])]},
        {"inputs": [Input(9, [("other", "a.1")])]},
        {"inputs": [Input(0, [("other", "a\n")])]},
    ],
)
def test_a_body_of_another_program_that_a_store_could_not_carry_out_is_buried(shop: Shop, part: dict[str, Any]) -> None:
    body = encode_envelope(Envelope(FLOW_VERSION, "note", [1], flow=FlowPart("flow", **part)))
    shop.app.backend.enqueue("default", [NewJob(body, "flow.0", 1024, 0.0, 60.0)])
    shop.work()
    job = shop.app.backend.peek("default", "flow.0")
    assert job.state is State.BURIED
    assert shop.ran == []


def test_a_record_that_cannot_be_read_buries_the_job_that_ends_the_flow(shop: Shop) -> None:
    flow = multiq.chain(shop.note.s(1)).enqueue()
    shop.app.backend.carry_out([Put(HOME, f"flow/{flow.id}", b"\xff")])
    shop.work()
    (failed,) = shop.app.failed.list()
    assert "cannot be read" in str(failed.reason)
    with pytest.raises(PayloadInvalid, match=flow.id):
        flow.info()


def test_a_record_that_cannot_be_read_is_deleted_by_forget(shop: Shop) -> None:
    # Given two flows, and a record of another program, which no method can read
    flow, other = multiq.chain(shop.note.s(1)).enqueue(), multiq.chain(shop.note.s(2)).enqueue()
    shop.app.backend.carry_out([Put(HOME, f"flow/{flow.id}", b"\xff")])
    shop.work()
    with pytest.raises(PayloadInvalid, match=f"multiq flows forget {flow.id}"):
        list(shop.app.flows.list())
    # When it is forgotten
    flow.forget()
    # Then the other flow is listed, and the job that was buried can end
    assert [info.id for info in shop.app.flows.list()] == [other.id]
    with pytest.raises(FlowNotFound):
        flow.forget()
    assert shop.app.failed.retry(limit=1)
    shop.work()
    assert list(shop.app.failed.list()) == []


def test_only_the_record_of_a_flow_that_has_ended_is_forgotten(shop: Shop) -> None:
    # Given a flow that has not ended
    flow = multiq.chain(shop.note.s(1)).enqueue()
    # When it is to be forgotten, then this is refused until it has ended
    with pytest.raises(FlowInvalid, match=f"flow {flow.id} is open"):
        flow.forget()
    shop.work()
    assert flow.info().state == "finished"
    flow.forget()
    assert list(shop.app.flows.list()) == []


# --- jobs that the store has lost ---


def lose(job: multiq.JobHandle) -> None:
    """Delete a job behind the back of its flow, like a server that has lost its data."""
    job._backend.delete(job.queue, job.id)


def work_once(shop: Shop) -> None:
    shop.work(max_jobs=1)


def test_a_lost_job_of_a_chain_does_not_count_as_done(shop: Shop) -> None:
    # Given a chain of which the first job is done, and the second one is lost
    flow = multiq.chain(shop.note.s(1), shop.note.s(2), shop.note.s(3), shop.note.s(4)).enqueue()
    work_once(shop)
    assert flow.progress() == (1, 4)
    lose(list(flow.jobs())[1])
    # Then only one job is done
    assert flow.progress() == (1, 4)
    # When the flow is cancelled, then this stays so
    flow.cancel()
    assert flow.progress() == (1, 4)


def test_a_lost_first_job_and_a_lost_last_job_do_not_count_as_done(shop: Shop) -> None:
    flow = multiq.chain(shop.note.s(1), shop.note.s(2)).enqueue()
    first, last = flow.jobs()
    lose(first)
    assert flow.progress() == (0, 2)
    lose(last)
    assert flow.progress() == (1, 2)  # one of the two is certainly lost


def test_a_job_that_was_done_counts_beside_a_lost_one_that_several_jobs_wait_for(shop: Shop) -> None:
    # Given a chain with a group, in which results are passed on
    flow = multiq.chain(shop.note.s(1), shop.note.s(), multiq.group(*[shop.double.s() for _ in range(3)])).enqueue()
    work_once(shop)
    done, total = flow.progress()
    # When the job before the group is lost, then the first job still counts as done
    lose(list(flow.jobs())[1])
    assert flow.progress() == (done, total) == (1, total)


def test_a_lost_member_of_a_group_does_not_count_as_done(shop: Shop) -> None:
    flow = multiq.group(shop.note.s(1), shop.note.s(2), shop.note.s(3)).enqueue()
    work_once(shop)
    total = flow.progress().total
    assert flow.progress() == (1, total)
    lose(list(flow.jobs())[2])
    shop.work()
    assert flow.progress() == (2, total)


def test_a_job_that_was_deleted_for_its_followers_counts_as_done(shop: Shop) -> None:
    flow = multiq.chain(shop.note.s(1), shop.note.s(2)).enqueue()
    first, _ = flow.jobs()
    first.cancel(followers="go")
    assert flow.progress() == (1, 2)
    shop.work()
    assert flow.progress() == (2, 2)


# --- errors ---


def test_an_unknown_flow_is_not_found(shop: Shop) -> None:
    with pytest.raises(FlowNotFound, match="never enqueued, or it has ended"):
        shop.app.flows.get("nothing").info()


def test_a_call_with_wrong_arguments_is_refused_before_anything_is_enqueued(shop: Shop) -> None:
    with pytest.raises(ArgumentsInvalid):
        multiq.chain(shop.note.s(1), shop.note.s(1, 2)).enqueue()
    with pytest.raises(ArgumentsInvalid):
        multiq.chain(shop.note.s()).enqueue()
    assert shop.app.backend.queues() == []
    assert list(shop.app.flows.list()) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda shop: multiq.chain(),
        lambda shop: multiq.chain([shop.note.s(1)]),  # type: ignore[arg-type]
        lambda shop: multiq.chain(shop.note).enqueue(),
        lambda shop: multiq.batch([]),
        lambda shop: multiq.batch([shop.note]),
        lambda shop: multiq.group(multiq.group(shop.note.s(1))).enqueue(),
        lambda shop: multiq.Flow("x" * 300),
        lambda shop: multiq.Flow().enqueue(),
        lambda shop: multiq.Flow().add(shop.note.s(1), after=["a"]),  # type: ignore[list-item]
        lambda shop: multiq.Flow().add(shop.note.s(1), after=[multiq.Flow().add(shop.note.s(2))]),
        lambda shop: multiq.Flow().add(shop.note.s(1), on_failure="ignore"),  # type: ignore[arg-type]
        lambda shop: multiq.chain(shop.note.s(1), Shop().note.s(2)).enqueue(),
        lambda shop: multiq.chain(shop.note.s(1), catch=Shop().caught.s()).enqueue(),
        lambda shop: multiq.chain(shop.note.s(1), multiq.chain(shop.note.s(2), catch=shop.caught.s())).enqueue(),
        lambda shop: multiq.chain(shop.note.s(1), multiq.group(shop.note.s(2), catch=shop.caught.s())).enqueue(),
        lambda shop: multiq.chain(shop.note.s(1), multiq.batch([shop.note.s(2)], catch=shop.caught.s())).enqueue(),
        lambda shop: multiq.chain(shop.note.s(1), name="\ud800").enqueue(),
        lambda shop: multiq.batch(shop.note.s(1)),
        lambda shop: multiq.batch([shop.note.s(1)], then=shop.after_all),
        lambda shop: multiq.batch([shop.note.s(1)]).enqueue().add(shop.note.s(1)),
        lambda shop: multiq.Flow().add(shop.note.s(1), after=[[1]]),  # type: ignore[list-item]
    ],
)
def test_a_flow_that_makes_no_sense_is_refused_with_the_way_out(shop: Shop, make: Any) -> None:
    with pytest.raises(FlowInvalid, match="must"):
        make(shop)


@pytest.mark.parametrize("make", [multiq.chain, multiq.group])
@pytest.mark.parametrize("kind", [list, tuple, iter])
def test_parts_in_one_iterable_are_refused_with_the_way_out(shop: Shop, make: Any, kind: Any) -> None:
    with pytest.raises(FlowInvalid, match=r"as arguments, got .+: write \*parts"):
        make(kind([shop.note.s(1), shop.note.s(2)]))


def test_a_part_that_is_refused_leaves_no_job_in_its_flow(shop: Shop) -> None:
    flow = multiq.Flow("x")
    first = flow.add(shop.note.s(1))
    for part in (multiq.group(shop.note.s(2), shop.note.s(3)), multiq.chain(shop.note.s(4), "no call")):  # type: ignore[arg-type]
        with pytest.raises(FlowInvalid):
            flow.add(part, after=[first])
    handle = flow.enqueue()
    shop.work()
    assert shop.ran == [1]
    assert handle.result(timeout=0) == 1


def test_a_flow_that_would_not_keep_the_results_of_its_steps_is_refused(shop: Shop) -> None:
    with pytest.raises(OptionInvalid, match="more than 0 seconds"):
        multiq.chain(shop.note.s(1), shop.note.s(), keep=0).enqueue()


def test_the_largest_flow_is_enqueued_in_the_steps_that_a_backend_takes(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    carry_out = shop.app.backend.carry_out

    def noting(steps: Any) -> bool:
        counts.append(len(steps))
        return carry_out(steps)

    monkeypatch.setattr(shop.app.backend, "carry_out", noting)
    multiq.group(*(shop.note.s(n) for n in range(NODES_MAX)), catch=shop.caught.s()).enqueue()
    assert counts == [MAX_STEPS]
    with pytest.raises(FlowInvalid, match="at most 997 jobs"):
        multiq.group(*(shop.note.s(n) for n in range(NODES_MAX + 1))).enqueue()


class _Small(MemoryBackend):
    """A backend that takes small bodies, and enqueues a flow in several calls."""

    declared = msgspec.structs.replace(
        MemoryBackend.declared, max_body=1000, one_step_everywhere=Gap("never", "for the test")
    )

    def enqueue(self, queue: str, jobs: Any, **options: Any) -> list[str]:
        for job in jobs:
            if len(job.body) > 1000:
                raise PayloadTooLarge(len(job.body), 1000, "store it elsewhere")
        return super().enqueue(queue, jobs, **options)

    def carry_out(self, steps: Any, **options: Any) -> bool:
        for step in steps:
            if isinstance(step, Put) and len(step.value) > 1000:
                raise PayloadTooLarge(len(step.value), 1000, "store it elsewhere")
        return super().carry_out(steps, **options)


def test_a_batch_that_has_grown_as_far_as_its_record_can_is_cancelled() -> None:
    # Given a batch to which members are added until its record is too large
    shop = Shop(backend=_Small())
    flow = multiq.batch([shop.note.s(0)]).enqueue()

    def grow() -> None:
        for n in range(100):
            flow.add([shop.double.s(n) if n % 2 else shop.note.s(n)])

    with pytest.raises(PayloadTooLarge):
        grow()
    # Then the larger record of the cancelled flow can be stored
    assert flow.cancel() == flow.info().jobs
    assert flow.info().state == "cancelled"


@pytest.mark.parametrize("make", [multiq.chain, lambda *parts: multiq.batch(parts)])
def test_a_flow_with_a_body_that_is_too_large_leaves_nothing_behind(make: Any) -> None:
    shop = Shop(backend=_Small())
    with pytest.raises(PayloadTooLarge, match="the limit of 1,000 bytes: it is the call of task note"):
        make(shop.note.s("x" * 1000), shop.note.s(2)).enqueue()
    assert list(shop.app.flows.list()) == []
    assert shop.app.backend.queues() == []


@pytest.mark.parametrize("option", [{"id": "mine"}, {"connection": object()}])
def test_the_call_of_a_flow_or_schedule_takes_no_id_and_no_connection(shop: Shop, option: dict[str, Any]) -> None:
    with pytest.raises(OptionInvalid, match="the call of a flow or schedule must have no"):
        shop.note.options(**option).s(1)


def test_a_backend_that_holds_no_jobs_refuses_a_flow_and_gets_nothing(tmp_path: Any) -> None:
    app = multiq.App("beanstalk://127.0.0.1:1")

    @app.task
    def work() -> None: ...

    with pytest.raises(Unsupported, match="holds"):
        multiq.chain(work.s(), work.s()).enqueue()


# --- members that expire ---


class ClockedShop(Shop):
    """A shop with a store whose clock moves only when a test moves it."""

    def __init__(self) -> None:
        self.now = time.monotonic_ns()
        super().__init__(backend=MemoryBackend(clock=lambda: self.now))


@pytest.fixture
def clocked() -> ClockedShop:
    return ClockedShop()


def test_a_member_that_expires_releases_the_catch_and_cancels_then(clocked: ClockedShop) -> None:
    # Given a batch with a member that must start within a second
    late = clocked.note.options(expires=1).s(2)
    flow = multiq.batch([clocked.note.s(1), late], then=clocked.after_all.s(), catch=clocked.caught.s()).enqueue()
    # When the worker comes later
    clocked.now += 2 * 10**9
    clocked.work()
    # Then the member is not done: the catch has run, and then has not
    assert clocked.ran == [1, f"caught {flow.id}"]
    assert flow.info().state == "cancelled"
    done, total = flow.progress()
    assert (done, total) == (1, 2)


def test_the_catch_of_a_chain_runs_when_its_last_step_expires(clocked: ClockedShop) -> None:
    flow = multiq.chain(clocked.note.options(expires=1).s(1), catch=clocked.caught.s()).enqueue()
    clocked.now += 2 * 10**9
    clocked.work()
    assert clocked.ran == [f"caught {flow.id}"]


def test_a_cancelled_batch_shows_what_was_done_before(shop: Shop) -> None:
    flow = multiq.batch([shop.note.s(1), *[shop.note.options(delay=60).s(n) for n in range(4)]]).enqueue()
    shop.work()
    assert flow.progress() == (1, 5)
    flow.cancel()
    assert flow.progress() == (1, 5)


# --- results of flows that are open ---


def test_results_are_there_for_their_dependents_though_the_flow_takes_longer_than_its_keep(
    clocked: ClockedShop,
) -> None:
    # Given a chain that is kept for a second, whose second step is delayed
    step = clocked.double.options(delay=10).s()
    flow = multiq.chain(clocked.note.s(4), step, clocked.note.s(), keep=1).enqueue()
    clocked.work()
    assert clocked.ran == [4]
    # When the delay is over
    clocked.now += 11 * 10**9
    clocked.work()
    # Then the second step has got the first step's result, and the last result is kept for a second
    assert clocked.ran == [4, "double 4", 8]
    last = flow.last()
    assert last.result(timeout=0) == 8
    clocked.now += 2 * 10**9
    assert last.status() == "unknown"


def test_the_results_that_were_passed_on_are_deleted_when_the_flow_has_ended(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a chain that is kept for a minute, and has ended
    flow = multiq.chain(shop.note.s(4), shop.double.s(), shop.note.s(), keep=60).enqueue()
    shop.work()
    first, second, last = flow.jobs()
    # Then no result is deleted before the minute is over
    assert delete_leftovers(shop.app.backend) == 0
    assert [job.status() for job in (first, second, last)] == ["done"] * 3
    # When the time is over, then the results are deleted, and no data of them is left
    now = time.time() + 61
    monkeypatch.setattr(time, "time", lambda: now)
    assert delete_leftovers(shop.app.backend) == 1
    assert [job.status() for job in (first, second)] == ["unknown"] * 2
    assert [note.key for note in shop.app.backend.notes(HOME).notes] == [f"flow/{flow.id}"]
    assert delete_leftovers(shop.app.backend) == 0


def test_a_result_is_kept_for_the_keep_of_its_task_if_this_is_longer_than_that_of_the_flow(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a chain that is kept for a minute, whose first task is kept for an hour
    flow = multiq.chain(shop.note.options(keep=3600).s(4), shop.double.s(), keep=60).enqueue()
    shop.work()
    first = next(iter(flow.jobs()))
    # When the flow is no longer kept, then this task's result still is
    now = [time.time() + 61]
    monkeypatch.setattr(time, "time", lambda: now[0])
    assert delete_leftovers(shop.app.backend) == 0
    assert first.result(timeout=0) == 4
    # When the hour is over, then this result is deleted
    now[0] += 3600
    assert delete_leftovers(shop.app.backend) == 1
    assert first.status() == "unknown"


def test_results_are_deleted_without_being_read(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    multiq.chain(multiq.group(*[shop.note.s(n) for n in range(5)]), shop.total.s(), keep=60).enqueue()
    shop.work()
    now = time.time() + 61
    monkeypatch.setattr(time, "time", lambda: now)
    for name in ("outcomes", "peek"):
        monkeypatch.setattr(shop.app.backend, name, None)
    assert delete_leftovers(shop.app.backend) == 1


def test_the_result_of_a_job_that_outlives_its_cancelled_flow_is_deleted_later(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a chain that is cancelled while its first job runs
    flow = multiq.chain(shop.note.s(4), shop.double.s(), keep=60).enqueue()
    first = next(iter(flow.jobs()))
    consumer = shop.app.backend.consumer(["default"])
    (lease,) = consumer.reserve(1, 0)
    assert flow.cancel() == 1
    # When the flow is no longer kept, and the job ends after that
    now = [time.time() + 61]
    monkeypatch.setattr(time, "time", lambda: now[0])
    assert delete_leftovers(shop.app.backend) == 1
    consumer.settle([GiveBack(lease)])
    shop.work()
    assert first.status() == "done"
    # Then its result is deleted another time
    now[0] += 3601
    assert delete_leftovers(shop.app.backend) == 1
    assert first.status() == "unknown"
    assert shop.app.backend.notes(HOME, "ended/").notes == []


def test_notes_that_cannot_be_read_do_not_keep_the_results_of_ended_flows(shop: Shop) -> None:
    # Given as many notes of another version of multiq as a worker handles at once
    backend = shop.app.backend
    backend.carry_out([Put(HOME, f"ended/0000000000001.000/{n}", b"?") for n in range(AT_ONCE)])
    flow = multiq.chain(shop.note.s(1), shop.note.s(), keep=0.001).enqueue()
    shop.work()
    time.sleep(0.01)
    # When a worker deletes the results of ended flows, then it finds the flow behind these notes
    assert delete_leftovers(backend) == 1
    assert next(iter(backend.outcomes("default", [f"{flow.id}.0"]))) is None


# --- deleting a job that a worker wants ---


@pytest.mark.parametrize("followers", ["go", "stop"])
@pytest.mark.parametrize("number", [0, 1], ids=["ready", "held"])
def test_a_job_that_is_deleted_does_not_run_when_its_followers_have_been_told(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, number: int, followers: Any
) -> None:
    # Given a chain of three
    flow = multiq.chain(shop.note.s(1), shop.note.s(2), shop.note.s(3)).enqueue()
    jobs = list(flow.jobs())
    backend = shop.app.backend
    # When one of the first two is deleted, and workers work between the two calls of the deletion
    with monkeypatch.context() as patch:
        carry_out = backend.carry_out

        def working(steps: Any, **options: Any) -> bool:
            done = carry_out(steps, **options)
            if any(getattr(step, "id", None) == jobs[number + 1].id for step in steps):
                patch.setattr(backend, "carry_out", carry_out)
                shop.work()
            return done

        patch.setattr(backend, "carry_out", working)
        jobs[number].cancel(followers=followers)
    shop.work()
    # Then the deleted job has not run, and its followers have run or were cancelled
    expected = [value for at, value in enumerate([1, 2, 3]) if at < number or (at > number and followers == "go")]
    assert shop.ran == expected
    assert flow.info().state == ("finished" if followers == "go" else "cancelled")
    assert shop.app.queue().stats().held == 0
    assert shop.app.queue().stats().delayed == 0


def test_a_follower_that_takes_a_result_waits_until_the_job_before_it_is_deleted(
    clocked: ClockedShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a chain whose second job takes the result of the first
    shop = clocked
    flow = multiq.chain(shop.note.s(1), shop.note.s()).enqueue()
    first, second = flow.jobs()
    # When the first job is cancelled, and a worker gets the second before the first is deleted
    delete = shop.app.backend.delete_many

    def working(*args: Any, **options: Any) -> Any:
        shop.work()
        return delete(*args, **options)

    monkeypatch.setattr(shop.app.backend, "delete_many", working)
    assert first.cancel(followers="go") == "deleted"
    # Then the second job has not failed, and runs later without the first job's result
    assert second.status() == "delayed"
    clocked.now += 2 * 10**9
    shop.work()
    assert shop.ran == [None]
    assert flow.info().state == "finished"


# --- producers that die ---


class Dies(Exception):
    """The producer's process is gone."""


def enqueue_and_die(shop: Shop, monkeypatch: pytest.MonkeyPatch, call: int, make: Any) -> bool:
    """Enqueue a flow with a producer that dies after so many calls. Returns whether it has died."""
    backend, calls = shop.app.backend, itertools.count(1)
    with monkeypatch.context() as patch:
        for name in ("enqueue", "carry_out"):
            real = getattr(backend, name)

            def dying(*args: Any, _real: Any = real, **options: Any) -> Any:
                answer = _real(*args, **options)
                if next(calls) == call:
                    raise Dies
                return answer

            patch.setattr(backend, name, dying)
        try:
            make()
        except Dies:
            return True
    return False


def test_a_batch_whose_producer_dies_is_finished_or_dropped(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a producer that dies after each of its calls in turn
    actions = []
    for call in itertools.count(1):
        shop.ran.clear()
        members = [shop.note.s(1), shop.double.s(2)]
        make = multiq.batch(members, then=shop.after_all.s(), catch=shop.caught.s(), name=str(call)).enqueue
        if not enqueue_and_die(shop, monkeypatch, call, make):
            break
        (info,) = [info for info in shop.app.flows.list() if info.name == str(call)]
        flow = shop.app.flows.get(info.id)
        # Then nothing is swept before its time, and a job that can still run is left
        assert shop.app.flows.sweep() == []
        shop.work()
        assert "after all" not in shop.ran or len(shop.ran) == 3
        # When the flow is swept, then a dry run says the same and changes nothing
        planned = shop.app.flows.sweep(0, dry_run=True)
        swept = shop.app.flows.sweep(0)
        assert swept == planned
        actions.append([each.action for each in swept])
        shop.work()
        is_complete = len(shop.ran) == 3
        assert flow.info().state == ("finished" if is_complete else "cancelled")
        assert shop.app.flows.sweep(0) == []
        assert shop.app.queue().stats().held == 0
    # Then the sweep has finished the batch that lacked only its seal, and batches with a seal had ended by themselves
    assert actions == [["dropped"]] * 3 + [["finished"], [], []]


def test_a_batch_whose_last_members_end_during_the_sweep_is_not_dropped(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a batch whose producer has died before the seal, when all members were enqueued
    make = multiq.batch([shop.note.s(1), shop.note.s(2)], then=shop.after_all.s()).enqueue
    assert enqueue_and_die(shop, monkeypatch, 3, make)
    (info,) = shop.app.flows.list()
    backend = shop.app.backend
    # When a worker ends the members while the sweep looks at the jobs
    with monkeypatch.context() as patch:
        peek = backend.peek

        def working(queue: str, own_id: str) -> Any:
            patch.setattr(backend, "peek", peek)
            found = peek(queue, own_id)
            shop.work()
            return found

        patch.setattr(backend, "peek", working)
        (swept,) = shop.app.flows.sweep(0)
    # Then the batch continues
    assert swept.action == "finished"
    shop.work()
    assert shop.ran == [1, 2, "after all"]
    assert shop.app.flows.get(info.id).info().state == "finished"


def test_a_flow_whose_steps_wait_in_an_outbox_is_not_dropped(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a chain whose producer has died at its end, and whose first job's worker died before the steps were relayed
    flow = multiq.chain(shop.note.s(1), shop.double.s()).enqueue()
    backend = shop.app.backend
    flow._change(lambda record: msgspec.structs.replace(record, state="enqueuing"))
    lease = backend.consumer(["default"]).reserve(1, 0)[0]
    second = list(flow.jobs())[1]
    value = b'{"v":1,"value":1,"started":0,"finished":0,"worker":"w","attempt":1}'
    backend.consumer(["default"]).settle([Ack(lease, After(keep=60, outcome=value))])

    def relay(queues: Any) -> int:
        assert set(queues) >= {"default", "other", HOME}
        backend.carry_out([Arrive(second.queue, second.id, lease.id)])
        return 0

    monkeypatch.setattr(backend, "relay", relay)
    # When the chain is swept, then it continues
    (swept,) = shop.app.flows.sweep(0)
    assert swept.action == "left"
    shop.work()
    assert shop.ran == ["double 1"]
    assert flow.info().state == "finished"


def test_a_chain_whose_producer_dies_is_dropped_if_jobs_are_missing(
    stepwise: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    actions = []
    for call in itertools.count(1):
        make = multiq.chain(stepwise.note.s(1), stepwise.double.s(), name=str(call)).enqueue
        if not enqueue_and_die(stepwise, monkeypatch, call, make):
            break
        (info,) = [info for info in stepwise.app.flows.list() if info.name == str(call)]
        swept = [each.action for each in stepwise.app.flows.sweep(0)]
        stepwise.work()
        actions.append([*swept, stepwise.app.flows.get(info.id).info().state])
    assert actions == [["dropped", "cancelled"]] * 2 + [["left", "finished"], ["finished"]]


def test_a_large_flow_is_cancelled_with_few_calls(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    flow = multiq.batch([shop.note.s(n) for n in range(2500)]).enqueue()
    calls = []
    delete = shop.app.backend.delete_many

    def counting(queue: str, ids: Any, **options: Any) -> Any:
        calls.append(len(ids))
        return delete(queue, ids, **options)

    monkeypatch.setattr(shop.app.backend, "delete_many", counting)
    assert flow.cancel() == 2501
    assert calls == [1, 1000, 1000, 500]
