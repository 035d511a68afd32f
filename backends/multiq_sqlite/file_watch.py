"""Lets an idle consumer sleep in the kernel: Linux tells of each write to SQLite's log, by whatever process.

Only a hint, which comes when a commit begins to be written, a moment before anybody can see it, and which no other
system gives: a consumer looks by itself as well, often after a hint, seldom while there is none. Where hints
turn out to be missing (some overlay file systems), it stops counting on them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ctypes import CDLL
    from typing import Self

_IN_MODIFY, _IN_ATTRIB = 0x2, 0x4  # written to; deleted, among others
_CHUNK = 65_536  # bytes of events read at a time


class FileWatch:
    """Waits for the next write to a file's log, or for a notifier."""

    def __init__(self, inotify: int) -> None:
        reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._descriptors: tuple[int, ...] = (inotify, reader, self._writer)
        self._poll = select.poll()
        self._poll.register(inotify, select.POLLIN)
        self._poll.register(reader, select.POLLIN)

    @classmethod
    def of(cls, log: str) -> Self | None:
        """A watch on the log at this path; None where there is no such thing."""
        libc = _libc()
        if libc is None:
            return None
        inotify = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if inotify < 0:  # a user has 128 of them, as a rule
            return None
        if libc.inotify_add_watch(inotify, os.fsencode(log), _IN_MODIFY | _IN_ATTRIB) < 0:
            os.close(inotify)
            return None
        return cls(inotify)

    def wait(self, timeout: float) -> bool:
        """Whether anything happened within *timeout* seconds."""
        ready = self._poll.poll(timeout * 1000)
        for descriptor, _ in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(descriptor, _CHUNK)
        return bool(ready)

    def release(self) -> None:
        """What a notifier calls."""
        with contextlib.suppress(BlockingIOError):  # it is full of notifications: one is enough
            os.write(self._writer, b"!")

    def close(self) -> None:
        descriptors, self._descriptors = self._descriptors, ()
        for descriptor in descriptors:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


@functools.cache
def _libc() -> CDLL | None:
    if sys.platform != "linux":
        return None
    try:
        import ctypes

        libc = ctypes.CDLL(None)
        _ = libc.inotify_init1, libc.inotify_add_watch
    except (ImportError, OSError, AttributeError):
        return None
    return libc
