"""Forks the processes of the worker, and exits in processes that a job forks.

If a job's code returns in a process that the job has forked, ``ExitInForks`` ends that process. ``signal_handlers``
restores the program's signal handlers in such a process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from typing import TYPE_CHECKING

from multiq.driverkit.fork import forks

from . import signal_handlers

if TYPE_CHECKING:
    from types import TracebackType
    from typing import NoReturn


def fork_worker_process() -> int:
    """Fork a process of the worker, which keeps the worker's signal handlers."""
    with signal_handlers.kept_in_forks():
        return os.fork()


class ExitInForks:
    """Runs a job's code. If the code returns in a process that the job has forked, that process exits."""

    __slots__ = ("_generation",)

    def __enter__(self) -> None:
        self._generation = forks.generation

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if forks.generation != self._generation:
            exit_forked_copy(error)


def exit_forked_copy(error: BaseException | None) -> NoReturn:
    """Exit this forked process, in which a job's code has returned. The parent process settles the job."""
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    elif error is not None:
        code = 1
        with contextlib.suppress(Exception):
            traceback.print_exception(error)
    with contextlib.suppress(BaseException):
        logging.shutdown()
    flush_streams()
    os._exit(code & 0xFF)


def flush_streams() -> None:
    """Flush the standard streams, which may be closed or broken."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a stream is None if it was closed when Python started
            stream.flush()
