"""Safe points: positions in a job's own code where an exception may be raised, found by tracing.

A signal handler mostly runs when a thread returns from waiting. In a job that often logs or waits for a
``queue.Queue``, the handler may always find the thread inside the library ``logging`` or ``queue``, and must not
interrupt this library. Without tracing, the handler could then never interrupt the job. Tracing calls this module as
soon as the job is back in its own code.

Safe points are backward jumps and function calls. The interpreter itself handles signals at these points, so an
exception cannot come between a lock and its ``with`` block. Tracing slows down a job, so only jobs that must end are
traced.
"""

from __future__ import annotations

import opcode
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import CodeType, FrameType

_TURNS = frozenset(
    number for name, number in opcode.opmap.items() if "JUMP_BACKWARD" in name and "NO_INTERRUPT" not in name
)


class Steps:
    """Calls *look* with the frame at each safe point of the traced thread. If *look* raises an exception, it is raised
    at the safe point."""

    def __init__(self, look: Callable[[FrameType], None]) -> None:
        self._look = look
        self._codes: dict[CodeType, bytes] = {}
        self._is_on = False

    def begin(self, frames: Iterable[FrameType]) -> None:
        """Trace these frames, and all later calls. Does nothing if a debugger already traces."""
        if self._is_on or sys.gettrace() is not None:
            return
        self._is_on = True
        for frame in frames:
            frame.f_trace, frame.f_trace_lines, frame.f_trace_opcodes = self._stepped, False, True
        sys.settrace(self._called)

    def end(self) -> None:
        """Stop tracing. Call it in the same thread."""
        if self._is_on:
            self._is_on = False
            self._codes.clear()
            if sys.gettrace() == self._called:
                sys.settrace(None)

    def _called(self, frame: FrameType, _event: str, _what: Any) -> None:
        self._look(frame)

    def _stepped(self, frame: FrameType, event: str, _what: Any) -> Any:
        code = self._codes.get(frame.f_code)
        if code is None:
            code = self._codes[frame.f_code] = frame.f_code.co_code
        if event == "opcode" and code[frame.f_lasti] in _TURNS:
            self._look(frame)
        return self._stepped
