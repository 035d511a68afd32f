"""The bell: wakes this process's consumers of a file at once. Those of other processes look for themselves."""

from __future__ import annotations

import os
import threading
import weakref


class Bell:
    """Counts rings, so that one between looking and sleeping is not missed."""

    def __init__(self) -> None:
        self.rings = 0
        self._changed = threading.Condition()

    def ring(self) -> None:
        with self._changed:
            self.rings += 1
            self._changed.notify_all()

    def wait(self, heard: int, timeout: float) -> None:
        """Sleep for *timeout* seconds, or until there were more rings than *heard*."""
        with self._changed:
            if self.rings == heard:
                self._changed.wait(timeout)


def bell_of(real_path: str) -> Bell:
    """The one bell of a file in this process: a lock that another thread held at a fork stays locked in the child."""
    return _bells.setdefault((os.getpid(), real_path), Bell())


_bells: weakref.WeakValueDictionary[tuple[int, str], Bell] = weakref.WeakValueDictionary()
