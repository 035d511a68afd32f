"""The frames that Python's threads execute now, without the deadlock of ``sys._current_frames``.

In Python 3.11, ``sys._current_frames`` holds a lock of the interpreter, and may collect garbage under it. If a
finalizer then lets another thread run, and this thread starts a thread, the process hangs for ever
(https://github.com/python/cpython/issues/106883). So no garbage is collected meanwhile.
"""

from __future__ import annotations

import gc
import sys
import threading
from typing import TYPE_CHECKING

from .fork import forks

if TYPE_CHECKING:
    from types import FrameType

_lock = threading.RLock()  # reentrant, because a signal handler may read the frames while its thread reads them
forks.hold(_lock)


def thread_frames() -> dict[int, FrameType]:
    """Return the frame of each thread that has run Python code, by the thread's identity (``threading.get_ident``)."""
    with _lock:
        if sys.version_info >= (3, 12) or not gc.isenabled():
            return sys._current_frames()  # noqa: SLF001 - Python has no public way
        gc.disable()
        try:
            return sys._current_frames()  # noqa: SLF001
        finally:
            gc.enable()
