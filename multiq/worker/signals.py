"""Signals, taken from a socket: a handler of Python's would run in the middle of whatever the main thread does.

The C-level handler writes the signal's number to a socket (``signal.set_wakeup_fd``); whoever reads it acts. So no
signal ever interrupts a driver in mid-call, and none waits until a job's C code returns to the interpreter.
"""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import TracebackType
    from typing import Self


class SignalInbox:
    """While the ``with`` block lasts, these signals arrive here instead of interrupting.

    Outside of the main thread Python takes no handlers: then ``installed`` is False and only ``put`` brings any.
    *lifeline* is a pipe whose other end somebody holds open as long as he lives; his end counts as SIGTERM.
    """

    def __init__(self, numbers: Iterable[signal.Signals], lifeline: int | None = None) -> None:
        self._numbers = tuple(numbers)
        self._lifeline = lifeline
        self.installed = threading.current_thread() is threading.main_thread()
        self._before: dict[signal.Signals, object] = {}
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._is_served = False  # by a thread of its own, which then closes the reader

    def __enter__(self) -> Self:
        if self.installed:
            self._fd_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            for number in self._numbers:
                self._before[number] = signal.signal(number, _leave_it_to_the_reader)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self._numbers)  # a supervisor forks with them blocked
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal() gave us, it takes back
        if self.installed:
            signal.set_wakeup_fd(self._fd_before)
        self._writer.close()  # the reader sees the end
        if not self._is_served:
            self._reader.close()

    def wait(self, timeout: float | None) -> list[signal.Signals]:
        """The signals that have arrived, waiting up to *timeout* seconds (None: for ever) for the first.

        An empty list after the timeout; ``EOFError`` once the block is left.
        """
        watched: list[Any] = [self._reader] if self._lifeline is None else [self._reader, self._lifeline]
        ready, _, _ = select.select(watched, [], [], timeout)
        if self._lifeline in ready:  # nothing is ever written to it
            self._lifeline = None
            return [signal.SIGTERM]
        if not ready:
            return []
        received = self._reader.recv(64)
        if not received:
            raise EOFError
        return [signal.Signals(number) for number in received]

    def put(self, number: signal.Signals) -> None:
        """As if this signal had arrived."""
        with contextlib.suppress(OSError):  # the block was left meanwhile
            self._writer.send(bytes([number]))

    def serve(self, actions: Mapping[signal.Signals, Callable[[], None]]) -> None:
        """Call each signal's action in a thread of its own until the block is left."""
        self._is_served = True
        threading.Thread(target=self._serve, args=(actions,), name="multiq-signals", daemon=True).start()

    def _serve(self, actions: Mapping[signal.Signals, Callable[[], None]]) -> None:
        with self._reader, contextlib.suppress(EOFError):
            while True:
                for number in self.wait(None):
                    if number in actions:
                        actions[number]()


def _leave_it_to_the_reader(_number: int, _frame: object) -> None:
    """Only signals that have a handler of Python's are written to the wakeup socket."""
