"""Signals, read from a socket: a Python handler would run in the middle of whatever the main thread does.

The C-level handler writes the signal's number to a socket (``signal.set_wakeup_fd``), and a thread that reads it acts.
So no signal interrupts a driver in the middle of a call, and no signal waits until a job's C code returns.

A job may take the wake-up socket, or a signal, for itself (``loop.add_signal_handler`` does). While the job has the
socket, the Python handler forwards the signal to the inbox. ``reclaim_signals`` takes back socket and signals when the
job is over.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import threading
from typing import TYPE_CHECKING, Any

from . import fork

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import TracebackType
    from typing import Self


class SignalInbox:
    """While the ``with`` block lasts, these signals arrive here instead of interrupting.

    Outside of the main thread Python installs no handlers: then ``installed`` is False, and only ``put`` adds signals.
    *lifeline* is a pipe that the supervisor holds open as long as it lives; when it closes, a SIGTERM arrives here.
    """

    def __init__(self, numbers: Iterable[signal.Signals], lifeline: int | None = None) -> None:
        self._numbers = tuple(numbers)
        self._lifeline = lifeline
        self.installed = threading.current_thread() is threading.main_thread()
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self._handler = self._handle  # one object: a bound method is another one each time
        self._pid = os.getpid()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._wakeup = self._writer.fileno()
        self._has_thread = False  # whether ``serve`` has started a thread, which then closes the reader

    def __enter__(self) -> Self:
        if self.installed:
            self._fd_before = self._take_wakeups()
            for number in self._numbers:
                self._previous_handlers[number] = fork.take_signal(number, self._handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self._numbers)  # a supervisor forks with them blocked
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, token in self._previous_handlers.items():
            fork.restore_signal(number, token)
        if self.installed:
            signal.set_wakeup_fd(self._fd_before)
        self._writer.close()  # the reader sees the end
        if not self._has_thread:
            self._reader.close()

    def wait(self, timeout: float | None) -> list[signal.Signals]:
        """The signals that have arrived. Waits up to *timeout* seconds (None: for ever) for the first.

        Returns an empty list after the timeout. Raises ``EOFError`` when the block is left.
        """
        poll = select.poll()  # and not select, which takes no file descriptors above 1,023
        poll.register(self._reader, select.POLLIN)
        if self._lifeline is not None:
            poll.register(self._lifeline, select.POLLIN)
        ready = [descriptor for descriptor, _ in poll.poll(None if timeout is None else math.ceil(timeout * 1000))]
        if self._lifeline in ready:  # nothing is ever written to it
            self._lifeline = None
            return [signal.SIGTERM]
        if not ready:
            return []
        received = self._reader.recv(64)
        if not received:
            raise EOFError
        # the socket also gets signals for which a job has installed handlers; of these, real-time signals have no name
        return [signal.Signals(number) for number in received if number in self._numbers]

    def reclaim_signals(self, *, also_wakeups: bool = False) -> None:
        """Take back the handlers and the wake-up socket that a job may have taken. Call it in the main thread.

        Without *also_wakeups*, only the handlers are taken back. Then signals arrive here, but not while C code runs.
        """
        if not self.installed:
            return
        handler = self._handler
        for number in self._numbers:
            if fork.handler_of(number) is not handler:
                signal.signal(number, handler)
        if also_wakeups:
            self._take_wakeups()

    def put(self, number: signal.Signals) -> None:
        """Add a signal, as if it had arrived."""
        with contextlib.suppress(OSError):  # the block was left meanwhile
            self._writer.send(bytes([number]))

    def serve(self, actions: Mapping[signal.Signals, Callable[[], None]]) -> None:
        """Start a thread that calls the action of each signal that arrives, until the block is left."""
        self._has_thread = True
        threading.Thread(target=self._serve, args=(actions,), name="multiq-signals", daemon=True).start()

    def _serve(self, actions: Mapping[signal.Signals, Callable[[], None]]) -> None:
        with self._reader, contextlib.suppress(EOFError):
            while True:
                for number in self.wait(None):
                    if number in actions:
                        actions[number]()

    def _take_wakeups(self) -> int:
        """Have signals written to the inbox's socket. Returns the descriptor that they were written to before."""
        return signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)

    def _handle(self, number: int, _frame: object) -> None:
        """Forward a signal while a job has the wake-up socket.

        The inbox needs this handler in any case: only signals that have a Python handler are written to the wake-up
        socket.
        """
        if os.getpid() != self._pid:
            return  # in a child of the supervisor that has no inbox of its own yet; forks.generation may not know yet
        current = self._take_wakeups()
        if current != self._wakeup:
            self.put(signal.Signals(number))
            if current >= 0:
                signal.set_wakeup_fd(current)  # a job's event loop, which still runs
