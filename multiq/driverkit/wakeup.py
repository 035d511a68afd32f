"""A pipe by which other threads end a wait, for drivers that wait on sockets."""

from __future__ import annotations

import contextlib
import os

from .fork import forks


class Ear:
    """Opens at the first wait. A forked child makes its own: the parent listens to the other one."""

    def __init__(self) -> None:
        self._pipe: tuple[int, int] | None = None
        self._generation = -1

    @property
    def is_open(self) -> bool:
        return self._pipe is not None

    def open(self) -> int:
        """The file number to wait for."""
        if self._pipe is None or self._generation != forks.generation:
            ear, mouth = os.pipe()
            os.set_blocking(ear, False)
            os.set_blocking(mouth, False)
            self._pipe, self._generation = (ear, mouth), forks.generation
        return self._pipe[0]

    def nudge(self) -> None:
        """From any thread: end the wait, if there is one."""
        if self._pipe is not None and self._generation == forks.generation:
            with contextlib.suppress(BlockingIOError):
                os.write(self._pipe[1], b"!")

    def forget(self) -> None:
        """What was heard until now is done with."""
        if self._pipe is not None and self._generation == forks.generation:
            with contextlib.suppress(BlockingIOError):
                os.read(self._pipe[0], 4096)

    def close(self) -> None:
        """It opens again when it is needed."""
        pipe, self._pipe = self._pipe, None
        if pipe is not None and self._generation == forks.generation:
            for end in pipe:
                os.close(end)

    def __del__(self) -> None:
        self.close()
