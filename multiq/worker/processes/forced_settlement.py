"""Settles the jobs of a worker process that must end immediately, after a second signal or because of an overdue
job."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from multiq.backend import GiveBack
from multiq.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from multiq.worker.execution.executors import Executor
    from multiq.worker.execution.fetcher import Fetcher
    from multiq.worker.execution.runner import Runner
    from multiq.worker.execution.timeouts import TimedJob

    from .inflight import Held

_WAIT = 2.0  # maximum number of seconds to wait for the backend


class ForcedSettlement:
    """Settles jobs that have ended, jobs that have not begun, and overdue jobs.

    - *take_back* takes the jobs that have not begun. These jobs are given back.
    - *has_sidecar*: whether the sidecar gives back the running jobs after this process has ended. If this class gave
      back the running jobs earlier, they could run in two processes at a time. Without a sidecar, this class gives back
      the running jobs, and their results are ignored.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        executor: Executor,
        runner: Runner,
        take_back: Callable[[], Sequence[Held]],
        *,
        has_sidecar: bool,
    ) -> None:
        self._fetcher = fetcher
        self._executor = executor
        self._runner = runner
        self._take_back = take_back
        self._has_sidecar = has_sidecar
        self._is_done = threading.Event()

    @property
    def is_done(self) -> bool:
        """Whether a settlement has ended, successfully or not."""
        return self._is_done.is_set()

    def settle(self, overdue: Sequence[TimedJob] = ()) -> None:
        """Settle all jobs in a new thread, and wait a short time. The fetcher may hang in a call without a reply."""
        stacks = [(timed.held, self._executor.stack_of(timed)) for timed in overdue]
        threading.Thread(target=self._settle, args=(stacks,), name="multiq-settlement", daemon=True).start()
        self.wait()

    def wait(self) -> None:
        """Wait a short time for a settlement that another thread has begun."""
        self._is_done.wait(_WAIT)

    def _settle(self, overdue: Sequence[tuple[Held, str | None]]) -> None:
        executor = self._executor
        executor.is_aborted = True
        self._fetcher.interrupt()
        try:
            settled = [*self._take_back(), *executor.take_finished()]
            emitters = []
            for held, stack in overdue:
                if held.verdict is None:  # if there is a verdict, the job has just ended
                    held.is_aborted = True
                    try:
                        held.verdict, emit = self._runner.overdue(held, stack)
                    except BackendError:  # the sidecar judges the job when the backend answers
                        continue
                    settled.append(held)
                    emitters.append((held, held.verdict, emit))
            if not self._has_sidecar:  # all held jobs, including those that a thread has taken but not begun
                settled = self._fetcher.held()
                for held in settled:
                    if held.verdict is None:
                        held.is_aborted = True
                        held.verdict = GiveBack(held.lease)
            if self._fetcher.settle(settled):
                for held, verdict, emit in emitters:
                    if not held.is_lost and held.verdict is verdict:
                        emit()
        finally:
            self._is_done.set()
