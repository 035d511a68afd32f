"""The file watch lets an idle consumer sleep until any process writes to SQLite's log. It uses inotify on Linux.

An event is only a hint. It arrives when the writing of a commit begins, a moment before readers can see the commit.
Systems other than Linux have no such events. So a consumer also polls: often after a hint, and rarely without a hint.
On some overlay file systems, commits cause no hints. A consumer that notices this stops relying on hints.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import sys
from typing import TYPE_CHECKING

from multiq.driverkit.fork import forks

if TYPE_CHECKING:
    from ctypes import CDLL
    from typing import Self

    from .connection import Connection

_IN_MODIFY, _IN_ATTRIB = 0x2, 0x4  # The file was written to. Its attributes changed, or it was deleted.
_CHUNK = 65_536  # bytes of events read at a time


class Hints:
    """The hints about commits to the file of one connection. They are relied on until a commit causes no hint."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._are_reliable = True
        self._watch: FileWatch | None = None
        self._watch_key = (0, 0)

    def watch(self) -> FileWatch | None:
        """Return the watch on the connection's log. None if there are no hints, or they are not relied on.

        This makes a new watch after a fork, and after the connection has opened again.
        """
        key = (forks.generation, self._connection.opened)
        if self._watch_key != key:
            self.close()
            self._watch_key = key
            self._watch = FileWatch.of(self._connection.log) if self._are_reliable else None
        return self._watch if self._are_reliable else None

    def check_after_commit(self) -> None:
        """Stop relying on hints if the commit that a poll has just found has caused no hint."""
        self._are_reliable = self._watch is not None and self._watch.wait(0)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None


class FileWatch:
    """Waits for the next write to a file's log, or for a notification."""

    def __init__(self, inotify: int) -> None:
        reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._descriptors: tuple[int, ...] = (inotify, reader, self._writer)
        self._poll = select.poll()
        self._poll.register(inotify, select.POLLIN)
        self._poll.register(reader, select.POLLIN)

    @classmethod
    def of(cls, log: str) -> Self | None:
        """Return a watch on the log at this path. None if the system does not offer one."""
        libc = _libc()
        if libc is None:
            return None
        inotify = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if inotify < 0:  # By default, a user may have 128 inotify instances.
            return None
        if libc.inotify_add_watch(inotify, os.fsencode(log), _IN_MODIFY | _IN_ATTRIB) < 0:
            os.close(inotify)
            return None
        return cls(inotify)

    def wait(self, timeout: float) -> bool:
        """Wait for up to *timeout* seconds. Returns whether an event or a notification arrived."""
        ready = self._poll.poll(timeout * 1000)
        for descriptor, _ in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(descriptor, _CHUNK)
        return bool(ready)

    def release(self) -> None:
        """End the wait. The notifier of this process calls this method."""
        with contextlib.suppress(BlockingIOError):  # A full pipe already has a byte that ends the wait.
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
