"""The notifier: wakes this process's consumers of a file at once. Those of other processes look for themselves."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator


class Listener(Protocol):
    """Whoever waits: a locked lock, or what behaves like one."""

    def release(self) -> None: ...


class Notifier:
    """Counts notifications, so that one between looking and sleeping is not missed."""

    def __init__(self) -> None:
        self.notifications = 0
        self._guard = threading.Lock()
        self._listeners: list[Listener] = []

    def notify(self) -> None:
        """Release all listeners, before any can leave: one that left may be closed, and its file number another's."""
        with self._guard:
            self.notifications += 1
            listeners, self._listeners = self._listeners, []
            for listener in listeners:
                listener.release()

    @contextlib.contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """The next notify releases *listener*, once."""
        with self._guard:
            self._listeners.append(listener)
        try:
            yield
        finally:
            with self._guard, contextlib.suppress(ValueError):
                self._listeners.remove(listener)


def notifier_of(real_path: str) -> Notifier:
    """Return the one notifier of a file in this process.

    Keyed by process id: a lock that another thread held at a fork stays locked in the child.
    """
    return _notifiers.setdefault((os.getpid(), real_path), Notifier())


_notifiers: weakref.WeakValueDictionary[tuple[int, str], Notifier] = weakref.WeakValueDictionary()
