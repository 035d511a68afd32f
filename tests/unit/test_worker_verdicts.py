"""The verdicts and events at a job's end, and what does not count as the job's failure."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import multiq
from multiq import BuryJob, ReleaseJob, State, events
from multiq.backend import Consumer, Lease, Verdict
from multiq.control.flags import Control
from multiq.errors import BackendTimeout, BackendUnavailable, LeaseLost
from multiq.flows.record import HOME as FLOWS
from multiq.validation import REASON_MAX
from multiq.worker.execution.executors import Executor
from multiq.worker.processes.dead_children import Recovery
from multiq.worker.processes.exits import EXIT_OVERDUE
from multiq.worker.processes.inflight import DEAD, Held, InflightTable, InflightWriter
from multiq.worker.processes.orphans import OrphanedChildren
from multiq.worker.processes.reload import PreviousGeneration
from multiq.worker.processes.shared_state import SharedState
from multiq.worker.processes.sidecar import Sidecar
from multiq.worker.processes.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from multiq.backend import Backend, Note

MODES: list[dict[str, Any]] = [{}, {"threads": 2}, {"concurrency": 3}]
in_each_mode = pytest.mark.parametrize("mode", MODES, ids=["inline", "threads", "coroutines"])


@pytest.fixture
def app() -> multiq.App:
    return multiq.App("memory://")


def drain(app: multiq.App, **options: Any) -> int:
    return multiq.Worker(app, stop_when_empty=True, **options).run()


@in_each_mode
@pytest.mark.parametrize("kind", [BuryJob, ReleaseJob])
def test_events_have_the_reason_that_is_kept(
    app: multiq.App, mode: dict[str, Any], kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL + 1)  # pytest cannot encode such characters
    caplog.set_level(logging.CRITICAL + 1, "multiq")
    # Given a job that ends with a reason that is too long and cannot be encoded
    said: list[str] = []
    app.on(events.JobBuried)(lambda event: said.append(event.reason))
    app.on(events.JobRetried)(lambda event: said.append(event.reason))
    reason = "\udcff" + "x" * 10 * REASON_MAX

    @app.task(max_attempts=2)
    def end() -> None:
        raise BuryJob(reason) if kind is BuryJob else ReleaseJob(3600, reason=reason)

    handle = end.enqueue()
    assert drain(app, **mode) == 0
    assert said == [handle.peek().reason]


@in_each_mode
@pytest.mark.parametrize("is_coroutine", [False, True])
def test_the_time_of_subscribers_is_not_the_job_s(app: multiq.App, mode: dict[str, Any], is_coroutine: bool) -> None:
    app.on(events.JobStarted)(lambda _: time.sleep(0.5))
    ended: list[float] = []

    @app.task(timeout=0.4, max_attempts=1, name="plain")
    def plain() -> None:
        multiq.current_job().check()
        deadline = multiq.current_job().deadline
        assert deadline is not None
        ended.append(deadline - time.monotonic())

    @app.task(timeout=0.4, max_attempts=1, name="coroutine")
    async def coroutine() -> None:
        await asyncio.sleep(0.05)
        plain.function()

    (coroutine if is_coroutine else plain).enqueue()
    assert drain(app, **mode) == 0
    assert len(ended) == 1
    assert 0 < ended[0] <= 0.4


@in_each_mode
def test_a_job_that_cancels_itself_and_returns_has_failed(app: multiq.App, mode: dict[str, Any]) -> None:
    @app.task(max_attempts=1)
    async def cancel() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    handle = cancel.enqueue()
    assert drain(app, **mode) == 0
    assert handle.state() is State.BURIED


@in_each_mode
def test_a_generator_that_a_job_breaks_out_of_is_closed_and_none_of_its_tasks_is_left(
    app: multiq.App, mode: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    closed: list[int] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            while True:
                yield 1
        finally:
            await asyncio.sleep(0.01)
            closed.append(1)

    @app.task(max_attempts=1)
    async def take_one() -> None:
        async for _ in numbers():
            break
        await asyncio.sleep(0)

    take_one.enqueue()
    assert drain(app, **mode) == 0
    assert closed == [1]
    assert "left" not in caplog.text


@pytest.mark.skipif(not hasattr(signal, "SIGURG"), reason="POSIX only")
def test_a_job_that_takes_sigurg_disables_no_later_time_limit(app: multiq.App) -> None:
    @app.task(max_attempts=1)
    def take() -> None:
        signal.signal(signal.SIGURG, lambda *_: None)

    @app.task(max_attempts=1, timeout=0.2)
    def hang() -> None:
        until = time.monotonic() + 5
        while time.monotonic() < until:
            time.sleep(0.01)

    take.enqueue()
    handle = hang.enqueue()
    assert drain(app) == 0
    assert handle.peek().reason == "the task ran longer than its timeout of 0.2 s"


def test_a_slow_subscriber_of_worker_stopping_does_not_change_the_exit_code(app: multiq.App) -> None:
    heard: list[str] = []

    def listen(event: events.WorkerStopping) -> None:
        time.sleep(1)
        heard.append(event.reason)

    app.on(events.WorkerStopping)(listen)
    worker = multiq.Worker(app, grace=0.3)
    threading.Timer(0.5, worker.stop).start()
    assert worker.run() == 0


class Away(Consumer):
    """A consumer of a backend that does not answer for a long time."""

    queues = ("default",)

    def __init__(self, shared_state: SharedState) -> None:
        self._shared_state = shared_state
        self.beats: list[float] = []

    def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
        raise NotImplementedError

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        self.beats.append(self._shared_state.worker.sidecar_beat)
        raise BackendTimeout("no answer")

    def interrupt(self) -> None: ...
    def close(self) -> None: ...


def sidecar_of(app: multiq.App, shared_state: SharedState) -> Sidecar:
    unused: Any = None
    return Sidecar(
        app, shared_state, unused, unused, 1.0, force=False, shares_loop=False,
        schedules=True, queues=["default"], scaling=None, health=unused,
        health_file=None, server=None,
    )  # fmt: skip


def test_the_sidecar_watches_no_process_0_for_a_child_that_is_being_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a table that is assigned to another child while the sidecar reads it: at first it has no pid
    shared_state = SharedState(1, 2)
    shared_state.tables[0].assign()
    pids = iter([os.getpid(), 0, 0])
    monkeypatch.setattr(InflightTable, "pid", property(lambda _: next(pids)))
    children = OrphanedChildren(shared_state)
    # When the sidecar reads twice
    for _ in range(2):
        children.watch()
        watched = [child._pid for child in children._handles.values()]
        # Then it watches the child whose pid it has read, or no process
        assert 0 not in watched
    assert watched == []


def test_recovery_that_waits_for_the_backend_shows_progress(app: multiq.App) -> None:
    # Given three dead children, each of which held a job, and a backend that does not answer
    shared_state = SharedState(3, 2)
    for number, table in enumerate(shared_state.tables[:3]):
        table.assign()
        lease = Lease("default", str(number), "t", b"", 0, 60.0, 1, 0, 0, 0.0)
        InflightWriter(table).hold([Held(lease, None, 0.0, time.monotonic() + 60)])
        table.mark_dead(-9, time.monotonic())
    recovery = Recovery(app, shared_state, shares_loop=False)
    recovery._can_settle = True
    consumer = recovery._consumer = Away(shared_state)
    # When recovery tries to settle their jobs, then each attempt is noted as progress, and the tables are kept
    recovery.settle_dead()
    assert len(set(consumer.beats)) == 3
    assert [table.state for table in shared_state.tables[:3]] == [DEAD] * 3


def test_recovery_ends_the_flow_of_a_cancelled_job_after_an_outage(
    app: multiq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task
    def stuck() -> None: ...

    @app.task
    def caught(flow_id: str) -> None: ...

    # Given the only job of a flow, which was cancelled, and whose process has ended because the job ran on
    flow = multiq.chain(stuck.s(), catch=caught.s()).enqueue()
    (lease,) = app.backend.consumer(["default"]).reserve(1, 0)
    assert flow.last().cancel() == "requested"
    shared_state = SharedState(1, 2)
    table = shared_state.tables[0]
    table.assign()
    held = Held(lease, None, 0.0, time.monotonic() + 60, began_at=time.monotonic() - 10)
    writer = InflightWriter(table)
    writer.hold([held])
    writer.set_kill_at(held, time.monotonic() - 1)
    writer.begin(held)
    table.note_exit(EXIT_OVERDUE)
    table.mark_dead(0, time.monotonic())
    recovery = Recovery(app, shared_state, shares_loop=False)
    recovery._can_settle = True
    # And a backend that does not answer when the record of the flow is read
    note, outages = type(app.backend).note, [1]

    def failing(backend: Backend, home: str, key: str) -> Note | None:
        if home == FLOWS and outages:
            outages.pop()
            raise BackendUnavailable("away")
        return note(backend, home, key)

    monkeypatch.setattr(type(app.backend), "note", failing)
    # When recovery has judged the job twice, then the flow has ended, and nothing is left of it
    recovery.settle_dead()
    assert not outages
    recovery.settle_dead()
    assert flow.info().state == "cancelled"
    drain(app)
    assert "default" not in app.backend.queues()


def test_a_restart_requested_while_the_sidecar_is_replaced_is_obeyed_once(app: multiq.App) -> None:
    # Given a sidecar that has read the flags, and died
    shared_state = SharedState(1)
    sidecar_of(app, shared_state)._poll_control(time.monotonic())
    assert shared_state.worker.restarts == 0
    # When a restart of all workers is requested now, then the next sidecar passes the request on, once
    Control(app.backend).restart()
    sidecar = sidecar_of(app, shared_state)
    sidecar._poll_control(time.monotonic())
    assert shared_state.worker.restarts == 1
    sidecar_of(app, shared_state)._poll_control(time.monotonic())
    assert shared_state.worker.restarts == 1


def test_a_restart_requested_before_the_worker_started_is_ignored(app: multiq.App) -> None:
    Control(app.backend).restart()
    shared_state = SharedState(1)
    sidecar_of(app, shared_state)._poll_control(time.monotonic())
    assert shared_state.worker.restarts == 0


def test_a_new_supervisor_lets_the_old_sidecar_kill_the_old_children() -> None:
    # Given a supervisor after a reload, with a child and a sidecar from before the reload
    code = "import signal, time; signal.signal(signal.SIGUSR1, lambda *_: exit(7)); print(flush=True); time.sleep(60)"
    supervisor = Supervisor(lambda _: 0, lambda _, __: 0, SharedState(1), grace=1, once=False)
    with contextlib.ExitStack() as stack:
        child = stack.enter_context(subprocess.Popen(["sleep", "60"]))
        stack.callback(child.kill)
        sidecar = stack.enter_context(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE))
        stack.callback(sidecar.kill)
        assert sidecar.stdout is not None
        sidecar.stdout.readline()
        with supervisor._inbox:
            pass  # the sockets of this block are closed
        supervisor._previous = PreviousGeneration({child.pid}, {sidecar.pid})
        # When the grace is over, then the old sidecar gets a signal, because it knows that its jobs have not crashed
        supervisor._kill_at = 0.0
        supervisor._kill_overdue()
        assert sidecar.wait(20) == 7
        assert child.poll() is None
        # And if the signal has no effect, the supervisor kills the old processes
        supervisor._kill_at = 0.0
        supervisor._kill_overdue()
        assert child.wait(20) == -signal.SIGKILL


def test_a_process_that_reuses_the_pid_of_a_previous_child_is_not_killed() -> None:
    # Given a supervisor after a reload, whose earlier processes were waited for by another process
    supervisor = Supervisor(lambda _: 0, lambda _, __: 0, SharedState(1), grace=1, once=False)
    with supervisor._inbox:
        pass  # the sockets of this block are closed
    told = subprocess.run(["sh", "-c", "sleep 60 >&- & echo $!"], stdout=subprocess.PIPE, check=True)
    stranger = int(told.stdout)  # not a child of this process
    descriptor = os.pidfd_open(stranger)
    try:
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        for previous in (PreviousGeneration(set(), {stranger}), PreviousGeneration({stranger}, set())):
            supervisor._previous = previous
            supervisor._kill_at = 0.0
            supervisor._kill_overdue()
            supervisor._kill_at = 0.0
            supervisor._kill_overdue()
        assert ended.poll(300) == []
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        os.close(descriptor)


@pytest.mark.parametrize("mode", MODES[1:], ids=["threads", "coroutines"])
def test_a_job_that_is_about_to_begin_is_given_back_with_the_waiting_ones(
    app: multiq.App, mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[int] = []

    @app.task
    async def note() -> None:
        began.append(1)

    # Given a worker with a thread that was stopped after it took a job, and before it began the job
    is_there, goes_on = threading.Event(), threading.Event()
    begin = Executor._begin

    def begin_late(executor: Executor, held: Any) -> bool:
        is_there.set()
        goes_on.wait(20)
        return begin(executor, held)

    monkeypatch.setattr(Executor, "_begin", begin_late)
    note.enqueue()
    worker = multiq.Worker(app, grace=0.1, **mode)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(worker.run()), daemon=True)
    thread.start()
    assert is_there.wait(20)
    # When the worker's grace is over, and the thread continues
    worker.stop()
    until = time.monotonic() + 20
    while app.queue().stats().reserved and time.monotonic() < until:
        time.sleep(0.01)
    given_back = app.queue().stats().ready
    goes_on.set()
    thread.join(20)
    # Then the job is ready for other workers, and has not begun
    assert (given_back, codes, began) == (1, [130], [])
