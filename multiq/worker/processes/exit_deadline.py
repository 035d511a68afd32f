"""Exits a worker process whose end hangs, in a subscriber or a hook, before the supervisor kills it.

A separate thread does this, because every other thread may hang. Before the exit, ``ForcedSettlement`` settles the
jobs.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from multiq.worker.execution.hanging_calls import run_in_thread

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

_log = logging.getLogger("multiq.worker")

_AFTER_GRACE = 4.5  # seconds after the end of the grace; the supervisor kills the process later
_AFTER_ABORT = 4.0  # seconds after a second signal
_AFTER_JOBS = 1.0  # seconds after a second signal, if no job is left to give back

_LOG_WAIT = 0.25  # seconds; writing the log may hang, too
_LONGEST_WAIT = 3600.0  # seconds; Python limits the length of a wait, and the grace has no limit


class ExitDeadline:
    """Exits the process at the deadline. Use it in a ``with`` block. Thread-safe.

    At first, there is no deadline. The thread starts with the block, because the system may refuse to start a thread
    later.

    - *exit_process*: a function that exits the process immediately, with a code. None: the process must not exit.
    - *prepare*: a function that is called before, and returns the code. It makes no call that may hang.
    """

    def __init__(self, exit_process: Callable[[int], None] | None, prepare: Callable[[], int]) -> None:
        self._exit_process = exit_process
        self._prepare = prepare
        self._deadline = float("inf")
        self._is_over = False
        self._changed = threading.Condition()

    def __enter__(self) -> Self:
        if self._exit_process is not None:
            threading.Thread(
                target=self._run, args=(self._exit_process,), name="multiq-exit-deadline", daemon=True
            ).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify()

    def follow_grace(self, grace_ends_at: float) -> None:
        """Exit some seconds after the end of the grace, or at an earlier deadline."""
        self._set(grace_ends_at + _AFTER_GRACE)

    def follow_abort(self, *, has_jobs: bool) -> None:
        """Exit some seconds from now, or at an earlier deadline. *has_jobs*: whether jobs are left to give back."""
        self._set(time.monotonic() + (_AFTER_ABORT if has_jobs else _AFTER_JOBS))

    def _set(self, deadline: float) -> None:
        with self._changed:
            self._deadline = min(self._deadline, deadline)
            self._changed.notify()

    def _run(self, exit_process: Callable[[int], None]) -> None:
        with self._changed:
            while (left := self._deadline - time.monotonic()) > 0 and not self._is_over:
                self._changed.wait(min(left, _LONGEST_WAIT))
            if self._is_over:
                return
        text = "the worker's end hangs, in a subscriber or a hook: the process ends without waiting for it"
        run_in_thread(lambda: _log.error(text)).wait(_LOG_WAIT)
        exit_process(self._prepare())
