"""SIGTERM and Ctrl-C for commands that run until they are stopped."""

from __future__ import annotations

import itertools
import os
import select
import signal
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType
    from typing import Self

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class EndSignals:
    """Waits for SIGTERM or SIGINT, within a ``with`` block.

    The second signal raises ``KeyboardInterrupt``, because an import or a call of the backend may take long.

    A handler runs between any two bytecodes of the main thread, also within another handler. So the handler takes no
    lock: ``threading.Event.set`` would wait forever for the lock of an ``Event.wait`` that the handler interrupts. A
    signal just before a system call does not interrupt the call. So ``wait`` waits for a pipe, to which the C part of
    Python's handler writes the signal at once (``signal.set_wakeup_fd``).
    """

    def __init__(self) -> None:
        self._calls = itertools.count()
        self._has_ended = False
        self._reader = self._writer = self._fd_before = -1
        self._handlers_before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._fd_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in _SIGNALS:
            self._handlers_before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not installed by Python
        signal.set_wakeup_fd(self._fd_before)
        os.close(self._writer)
        os.close(self._reader)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for a signal, for at most *seconds*. Return whether one has arrived, now or before."""
        until = None if seconds is None else time.monotonic() + seconds
        while not self._has_ended:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([self._reader], [], [], left)[0]:
                return False
            # the code of an app may handle further signals, which are written to the pipe, too
            self._has_ended = not set(_SIGNALS).isdisjoint(os.read(self._reader, 512))
        return True

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if next(self._calls):  # one call in C, so two handlers never get the same number
            raise KeyboardInterrupt
        self._has_ended = True  # also if an app has replaced the wake-up pipe
