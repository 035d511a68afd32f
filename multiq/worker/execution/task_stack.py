"""The stack of a task's call, as text for the log and the failure. The runner, and what is below it, are left out."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

from multiq.driverkit.thread_frames import thread_frames

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

RUNNER = "multiq.worker.execution.runner"


def stack_of(frame: FrameType | None) -> str | None:
    """Return the frames of the task's call, formatted as in a traceback."""
    if frame is None:
        return None
    frames = sum(each is not None for each in down_to_the_runner(frame))
    return "".join(traceback.format_stack(frame, limit=frames or None))


def frame_of(thread: int | None) -> FrameType | None:
    """Return the frame that a thread executes now. None: there is no such thread."""
    return thread_frames().get(thread or 0)


def down_to_the_runner(frame: FrameType | None) -> Iterator[FrameType | None]:
    """Yield the frames of the task's call, innermost first. If the runner is not below these frames, yield None at the
    end."""
    while frame is not None:
        if frame.f_globals.get("__name__") == RUNNER:
            return
        yield frame
        frame = frame.f_back
    yield None
