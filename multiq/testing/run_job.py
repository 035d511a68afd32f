"""Runs single jobs in the calling thread. As in a worker, a job passes through the envelope, middleware, events and
retries."""

from __future__ import annotations

import asyncio
import contextvars
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

from multiq.backend import After, Bury, GiveBack, Touch
from multiq.errors import JobFailed
from multiq.worker.execution.event_loop import JobLoop
from multiq.worker.execution.judging import Judging
from multiq.worker.execution.runner import Runner
from multiq.worker.execution.running_memos import JobMemos
from multiq.worker.execution.timeouts import Timeouts
from multiq.worker.processes.inflight import Held

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from multiq.app import App
    from multiq.backend import Consumer, Lease, Verdict
    from multiq.worker.execution.fetcher import Fetcher
    from multiq.worker.execution.task_call import TaskCall

_KILL_AFTER = 2.0  # seconds; nothing is killed here


class Ran:
    """The result of a job that ran."""

    def __init__(self, verdict: Verdict, error: BaseException | None) -> None:
        self.verdict = verdict
        self._error = error

    @property
    def is_snoozed(self) -> bool:
        return isinstance(self.verdict, GiveBack)

    @property
    def error(self) -> BaseException | None:
        """The error of a job that is buried: the error of the task, or ``JobFailed`` if the task did not run."""
        if not isinstance(self.verdict, Bury):
            return None
        lease = self.verdict.lease
        return self._error or JobFailed(lease.queue, lease.id, self.verdict.reason)


def run_here(app: App, consumer: Consumer, lease: Lease) -> Ran:
    """Run a reserved job, and settle it.

    Raises exceptions of pytest, and exceptions that are not an ``Exception``, such as ``KeyboardInterrupt``. In this
    case the job is settled as failed.
    """
    held = Held(lease, None, 0.0, time.monotonic() + lease.ttr, time.monotonic())
    memos = JobMemos(app, cast("Fetcher", _Memos(held, consumer)))
    judging = _ErrorKeeper(app, memos)
    runner = _InlineRunner(app, Timeouts(_KILL_AFTER), memos, judging=judging)
    try:
        verdict = runner.run(held)
    finally:
        runner.close_loop()
    (lost,) = consumer.settle([verdict])
    error = judging.error
    if error is not None and not isinstance(error, Exception | asyncio.CancelledError):
        raise error
    return Ran(verdict, error or lost)


class _ErrorKeeper(Judging):
    """Judges one job, and keeps its error."""

    error: BaseException | None = None

    def judge(
        self, call: TaskCall, exc: BaseException, seconds: float, stack: str | None
    ) -> tuple[Verdict, Callable[[], None]]:
        self.error = exc
        return super().judge(call, exc, seconds, stack)


class _InlineRunner(Runner):
    """A runner of one job, in any thread."""

    def _loop(self) -> JobLoop:
        loop: JobLoop | None = getattr(self._threads, "loop", None)
        if loop is None:
            loop = self._threads.loop = _NestedLoop()
        return loop


class _NestedLoop(JobLoop):
    """Runs coroutines. If an event loop is running in this thread, the coroutines run in another thread, and the
    running loop is blocked."""

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return _without_loop(lambda: super(_NestedLoop, self).run(work))

    def close(self) -> None:
        _without_loop(super().close)


def _without_loop(call: Callable[[], Any]) -> Any:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(contextvars.copy_context().run, call).result()


class _Memos:
    """Replaces the fetcher that ``JobMemos`` needs, for one job. It stores each memo immediately."""

    def __init__(self, held: Held, consumer: Consumer) -> None:
        self._held = held
        self._consumer = consumer

    def held_of(self, lease: Lease) -> Held | None:
        return self._held if lease is self._held.lease else None

    def touch_at(self, held: Held, _moment: float) -> None:
        self.store_memo(held)

    def store_memo(self, held: Held) -> None:
        if held.memo is not None:
            version, body = held.memo.take()
            (lost,) = self._consumer.settle([Touch(held.lease, After(memo=body))])
            if lost is not None:
                raise lost
            held.memo.sent(version)
