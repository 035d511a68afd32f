"""Whether each job is notified once at the end of its time, and gets its grace."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from multiq import timeout_notices
from multiq.backend import Lease
from multiq.cancellation import CancelRequest
from multiq.errors import JobCancelled
from multiq.job import JobContext
from multiq.retry import SoftTimeout
from multiq.timeout_notices import Notice
from multiq.worker.execution.cancels import Cancel
from multiq.worker.execution.timeouts import Timeouts


def test_a_coroutine_that_is_notified_late_keeps_its_grace() -> None:
    # In a process that was suspended, the loop cancels the job long after its deadline, and the heartbeat checks it.
    now = time.monotonic()
    call: Any = SimpleNamespace(deadline=now - 10, timeout=1.0, job=SimpleNamespace(notice=Notice()))
    held: Any = SimpleNamespace()
    timeouts = Timeouts(kill_after=5.0)
    timed = timeouts.begin(call, held, thread=None)
    heartbeats = HeartbeatAfterEachLock(timeouts)
    timeouts.mark_notified(timed)
    assert heartbeats.overdue == [[]]
    assert timed.kill_at > now + 4


@pytest.mark.parametrize("thread", [threading.get_ident(), None], ids=["thread", "shared loop"])
def test_a_job_that_raises_its_timeout_itself_after_a_suspension_keeps_its_grace(thread: int | None) -> None:
    # In a process that was suspended, the job calls ``check`` long after its deadline, before the next heartbeat.
    now = time.monotonic()
    notice = Notice()
    call: Any = SimpleNamespace(deadline=now - 10, timeout=1.0, job=SimpleNamespace(notice=notice))
    timeouts = Timeouts(kill_after=5.0)
    timed = timeouts.begin(call, SimpleNamespace(), thread=thread)  # type: ignore[arg-type]
    notice.is_notified = True
    assert timeouts.check() == []
    kill_at = timed.kill_at
    assert kill_at > now + 4
    assert timeouts.check() == []
    assert timed.kill_at == kill_at
    assert timeout_notices.pending == {}


def test_a_coroutine_whose_code_ran_during_a_suspension_gets_time_for_its_notice_once() -> None:
    # Given a coroutine whose code blocks the loop, and whose time ended during a suspension
    held: Any = SimpleNamespace()
    loop: Any = SimpleNamespace(is_closed=lambda: False, call_soon_threadsafe=lambda _: None)
    shared: Any = SimpleNamespace(holder=lambda: held, is_held_by_leftover=lambda: False)
    call: Any = SimpleNamespace(deadline=time.monotonic() - 10, timeout=1.0, job=SimpleNamespace(notice=Notice()))
    timeouts = Timeouts(kill_after=0.3)
    timeouts.blocked_loop.watch(loop, shared)
    timed = timeouts.begin(call, held, thread=None)
    # When the process continues, and the code still blocks the loop
    timeouts._checked_at = time.monotonic() - 10
    resumed_at = time.monotonic()
    assert timeouts.check() == []
    # Then its process ends kill_after seconds later
    overdue: list[object] = []
    while not overdue:
        assert time.monotonic() < resumed_at + 60
        time.sleep(0.01)
        overdue = [*timeouts.check()]
    assert overdue == [timed]
    assert time.monotonic() >= resumed_at + 0.3
    # When the process stands still again, then the job gets no more time
    timed.kill_at = time.monotonic() - 1
    timeouts._checked_at = time.monotonic() - 10
    timeouts.check()
    assert timed.kill_at < time.monotonic()


def test_a_job_that_has_ended_writes_nothing_to_a_slot_that_may_be_another_lease_s() -> None:
    # Given a coroutine that ends while the heartbeat checks the running jobs
    written: list[float] = []
    inflight: Any = SimpleNamespace(set_kill_at=lambda _, kill_at: written.append(kill_at))
    call: Any = SimpleNamespace(deadline=time.monotonic() - 1, timeout=1.0, job=SimpleNamespace(notice=Notice()))
    timeouts = Timeouts(kill_after=5.0, inflight=inflight)
    for thread in (None, threading.get_ident()):
        timed = timeouts.begin(call, SimpleNamespace(), thread=thread)  # type: ignore[arg-type]
        assert written.pop() == timed.kill_at
        timeouts.end(timed)
        # When the heartbeat, or its loop, gives it more time
        timeouts.postpone(timed, 3.0)
        timeouts.mark_notified(timed)
        timeouts._is_overdue(timed, time.monotonic(), None)
        # Then nothing is written to the slot
        assert written == []


def test_a_coroutine_on_a_thread_is_not_cancelled_after_a_call_of_multiq_has_raised_its_timeout() -> None:
    # Given a coroutine whose code blocks its own loop at the end of its time
    notice = Notice()
    call: Any = SimpleNamespace(deadline=time.monotonic() - 1, timeout=1.0, job=SimpleNamespace(notice=notice))
    timeouts = Timeouts(kill_after=5.0)
    timeouts.begin(call, SimpleNamespace(), thread=threading.get_ident())  # type: ignore[arg-type]
    timeouts.check()
    # When a call of multiq raises the timeout
    with pytest.raises(SoftTimeout):
        timeout_notices.raise_if_pending()
    # Then the timer of its loop, which runs next, sees this
    assert notice.is_notified


@pytest.mark.parametrize(
    ("thread", "is_raised_by_check"),
    [(None, True), (threading.get_ident(), True), (threading.get_ident(), False)],
    ids=["shared loop", "own loop", "call of multiq"],
)
def test_a_coroutine_that_has_raised_its_cancellation_is_not_cancelled_again(
    thread: int | None, is_raised_by_check: bool
) -> None:
    stored: Any = SimpleNamespace(request=CancelRequest("default", "1", 0.0, ""), version=b"")
    cancel = Cancel(stored)
    job: Any = SimpleNamespace(notice=None)
    call: Any = SimpleNamespace(task=SimpleNamespace(is_coroutine=True), thread=thread, timeout=None, job=job)
    held: Any = SimpleNamespace(call=call, task=None, cancel=cancel)
    timeouts = Timeouts(kill_after=5.0)

    async def run() -> str:
        # Given a coroutine whose code runs while the heartbeat asks its loop to cancel it
        held.task = asyncio.current_task()
        assert timeouts.cancel(held, cancel)
        (timed,) = timeouts._running
        timed.notify_at = 0.0
        # When this code raises JobCancelled itself, and tidies up
        try:
            if is_raised_by_check:
                raise cancel.error()
            timeouts.check()
            timeout_notices.raise_if_pending()
        except JobCancelled:
            await asyncio.sleep(0.01)
        # Then the tidying is not interrupted, and the job must end after its grace
        assert timeout_notices.pending == {}
        assert timeouts.check() == []
        timed.kill_at = 0.0
        assert timeouts.check() == [timed]
        return "tidied up"

    assert asyncio.run(run()) == "tidied up"


def test_a_cancellation_that_the_job_raises_during_its_notification_is_not_raised_again() -> None:
    # Given a heartbeat that adds the notice while the job calls ``check_cancelled``
    thread = threading.get_ident()

    def error() -> JobCancelled:
        timeout_notices.pending[thread] = error
        return JobCancelled("default", "1", "")

    memos: Any = SimpleNamespace(cancel_of=lambda _: SimpleNamespace(error=error))
    job = JobContext(task="t", lease=Lease("default", "1", "t", b"", 0, 60.0, 1, 0, 0, 0.0), envelope=None, memos=memos)
    # When the call raises the error
    with pytest.raises(JobCancelled):
        job.check_cancelled()
    # Then the calls of multiq in the cleanup do not raise it
    timeout_notices.raise_if_pending()


class HeartbeatAfterEachLock:
    """A lock that lets the heartbeat check the timeouts after each release."""

    def __init__(self, timeouts: Timeouts) -> None:
        self.overdue: list[object] = []
        self._check = timeouts.check
        self._lock = threading.RLock()
        self._is_checking = False
        timeouts._lock = self  # type: ignore[assignment]

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if not self._is_checking:
            self._is_checking = True
            self.overdue.append(self._check())
            self._is_checking = False
