"""Receives signals through a socket, because a Python handler could interrupt the main thread's code at any point.

The C-level handler writes the signal's number to a socket (``signal.set_wakeup_fd``). A thread reads the number and
acts on it. Thus no signal interrupts a driver during a call, and no signal waits for a job's C code to return.

A job may replace the wake-up socket or a handler (``loop.add_signal_handler`` does). While a job has replaced the
wake-up socket, the Python handler forwards signals to the inbox. ``reclaim_signals`` restores the socket and the
handlers when the job is over.
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

from . import signal_handlers
from .lifeline import CUT_COUNTS_AS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import TracebackType
    from typing import Self

    from .lifeline import Lifeline


class SignalInbox:
    """Receives signals while the ``with`` block lasts.

    Python installs handlers only in the main thread. In other threads ``installed`` is False, and only ``put`` adds
    signals. When *lifeline* is cut, because the supervisor has ended, the inbox receives ``CUT_COUNTS_AS``.
    """

    def __init__(self, numbers: Iterable[signal.Signals], lifeline: Lifeline | None = None) -> None:
        self._numbers = tuple(numbers)
        self._lifeline = lifeline
        self.installed = threading.current_thread() is threading.main_thread()
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self._handler = self._handle  # stored, because each access to a bound method creates a new object
        self._pid = os.getpid()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._wakeup = self._writer.fileno()
        self._has_thread = False  # whether ``serve`` has started a thread, which closes the reader

    def __enter__(self) -> Self:
        if self.installed:
            self._fd_before = self._take_wakeups()
            for number in self._numbers:
                self._previous_handlers[number] = signal_handlers.take_signal(number, self._handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self._numbers)  # a supervisor blocks the signals before it forks
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, token in self._previous_handlers.items():
            signal_handlers.restore_signal(number, token)
        if self.installed:
            signal.set_wakeup_fd(self._fd_before)
        self._writer.close()  # the reader gets the end of the stream
        if not self._has_thread:
            self._reader.close()

    def wait(self, timeout: float | None) -> list[signal.Signals]:
        """Return the signals that have arrived. Waits up to *timeout* seconds for the first signal. None: waits
        forever.

        Returns an empty list after the timeout. Raises ``EOFError`` after the end of the block.
        """
        poll = select.poll()  # select() accepts no file descriptor above 1,023
        poll.register(self._reader, select.POLLIN)
        if self._lifeline is not None:
            poll.register(self._lifeline, select.POLLIN)
        ready = [descriptor for descriptor, _ in poll.poll(None if timeout is None else math.ceil(timeout * 1000))]
        if self._lifeline is not None and self._lifeline.fileno() in ready:
            self._lifeline = None
            return [CUT_COUNTS_AS]
        if not ready:
            return []
        received = self._reader.recv(64)
        if not received:
            raise EOFError
        # The socket also gets signals that a job handles. Some of them are real-time signals, which have no name.
        return [signal.Signals(number) for number in received if number in self._numbers]

    def reclaim_signals(self, *, also_wakeups: bool = False) -> None:
        """Restore the handlers, and with *also_wakeups* the wake-up socket. Call it in the main thread.

        If the wake-up socket is not restored, signals still arrive, but not while C code runs.
        """
        if not self.installed:
            return
        handler = self._handler
        for number in self._numbers:
            if signal_handlers.handler_of(number) is not handler:
                signal.signal(number, handler)
        if also_wakeups:
            self._take_wakeups()

    def put(self, number: signal.Signals) -> None:
        with contextlib.suppress(OSError):  # the block has ended
            self._writer.send(bytes([number]))

    def serve(self, actions: Mapping[signal.Signals, Callable[[], None]]) -> None:
        """Start a thread that calls the action of each signal, until the block ends."""
        self._has_thread = True
        threading.Thread(target=self._serve, args=(actions,), name="multiq-signals", daemon=True).start()

    def _serve(self, actions: Mapping[signal.Signals, Callable[[], None]]) -> None:
        with self._reader, contextlib.suppress(EOFError):
            while True:
                for number in self.wait(None):
                    if number in actions:
                        actions[number]()

    def _take_wakeups(self) -> int:
        """Make Python write each signal to the inbox's socket. Returns the descriptor to which Python wrote before."""
        return signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)

    def _handle(self, number: int, _frame: object) -> None:
        """Forward a signal if a job has replaced the wake-up socket.

        Without a Python handler, a signal is not written to the wake-up socket at all.
        """
        if os.getpid() != self._pid:
            return  # a forked child, which has no inbox of its own yet
        current = self._take_wakeups()
        if current != self._wakeup:
            self.put(signal.Signals(number))
            if current >= 0:
                signal.set_wakeup_fd(current)  # the socket belongs to the event loop of a running job
