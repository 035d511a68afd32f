"""A self-pipe, for drivers that wait for sockets with ``poll``. Another thread can end the wait by this pipe."""

from __future__ import annotations

import contextlib
import os
import threading

from .fork import forks


class Wakeup:
    """Opens its pipe at the first wait. A forked child opens a new pipe, because its parent still polls the old one."""

    def __init__(self) -> None:
        self._pipe: tuple[int, int] | None = None
        self._generation = -1
        # Without the lock, ``notify`` could write into a file that the process has opened after another thread has
        # closed the pipe.
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        return self._pipe is not None

    def open(self) -> int:
        """Return the file descriptor to poll for reading."""
        if self._pipe is None or self._generation != forks.generation:
            read_end, write_end = os.pipe()
            os.set_blocking(read_end, False)
            os.set_blocking(write_end, False)
            if self._generation != forks.generation:
                self._lock = threading.Lock()  # a thread of the parent may have held the old lock at the fork
            self._pipe, self._generation = (read_end, write_end), forks.generation
        return self._pipe[0]

    def notify(self) -> None:
        """End the wait, if a thread waits. Thread-safe."""
        # If the lock is taken, another thread is notifying or closing. A signal handler must not wait for the lock.
        if self._generation == forks.generation and self._lock.acquire(blocking=False):
            try:
                if self._pipe is not None:
                    with contextlib.suppress(BlockingIOError):
                        os.write(self._pipe[1], b"!")
            finally:
                self._lock.release()

    def drain(self) -> None:
        """Discard pending wake-ups."""
        if self._pipe is not None and self._generation == forks.generation:
            with contextlib.suppress(BlockingIOError):
                os.read(self._pipe[0], 4096)

    def close(self) -> None:
        """Close the pipe. The next ``open`` opens a new pipe."""
        if self._generation != forks.generation:  # the pipe is the parent's
            self._pipe = None
            return
        with self._lock:
            pipe, self._pipe = self._pipe, None
            for end in pipe or ():
                os.close(end)

    def __del__(self) -> None:
        self.close()
