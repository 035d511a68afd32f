"""The stack of a task's call, as text for the log and the failure. The runner, and what is below it, are left out."""

from __future__ import annotations

import gc
import sys
import threading
import traceback
from typing import TYPE_CHECKING

from multiq.driverkit.fork import forks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

RUNNER = "multiq.worker.execution.runner"

_lock = threading.RLock()  # reentrant, because a signal handler may read a frame while its thread reads one
forks.hold(_lock)


def stack_of(frame: FrameType | None) -> str | None:
    """Return the frames of the task's call, formatted as in a traceback."""
    if frame is None:
        return None
    frames = sum(each is not None for each in down_to_the_runner(frame))
    return "".join(traceback.format_stack(frame, limit=frames or None))


def frame_of(thread: int | None) -> FrameType | None:
    """Return the frame that a thread executes now.

    Garbage is not collected meanwhile. In Python 3.11, ``sys._current_frames`` holds a lock of the interpreter, and may
    collect garbage under it. If an object's finalizer then lets another thread run, and this thread starts a thread,
    the process hangs for ever (https://github.com/python/cpython/issues/106883).
    """
    with _lock:
        if sys.version_info >= (3, 12) or not gc.isenabled():
            return sys._current_frames().get(thread or 0)  # noqa: SLF001 - Python has no public way
        gc.disable()
        try:
            return sys._current_frames().get(thread or 0)  # noqa: SLF001
        finally:
            gc.enable()


def down_to_the_runner(frame: FrameType | None) -> Iterator[FrameType | None]:
    """Yield the frames of the task's call, innermost first. If the runner is not below these frames, yield None at the
    end."""
    while frame is not None:
        if frame.f_globals.get("__name__") == RUNNER:
            return
        yield frame
        frame = frame.f_back
    yield None
