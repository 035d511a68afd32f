"""The bell: wakes this process's consumers of a file at once. Those of other processes look for themselves."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator


class Ear(Protocol):
    """Whoever waits: a locked lock, or what behaves like one."""

    def release(self) -> None: ...


class Bell:
    """Counts rings, so that one between looking and sleeping is not missed."""

    def __init__(self) -> None:
        self.rings = 0
        self._guard = threading.Lock()
        self._ears: list[Ear] = []

    def ring(self) -> None:
        """Release all ears, before any can leave: one that left may be closed, and its file number another file's."""
        with self._guard:
            self.rings += 1
            ears, self._ears = self._ears, []
            for ear in ears:
                ear.release()

    @contextlib.contextmanager
    def listening(self, ear: Ear) -> Iterator[None]:
        """The next ring releases *ear*, once."""
        with self._guard:
            self._ears.append(ear)
        try:
            yield
        finally:
            with self._guard, contextlib.suppress(ValueError):
                self._ears.remove(ear)


def bell_of(real_path: str) -> Bell:
    """The one bell of a file in this process: a lock that another thread held at a fork stays locked in the child."""
    return _bells.setdefault((os.getpid(), real_path), Bell())


_bells: weakref.WeakValueDictionary[tuple[int, str], Bell] = weakref.WeakValueDictionary()
