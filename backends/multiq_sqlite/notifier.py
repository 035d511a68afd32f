"""The notifier: wakes waiting consumers of a file in this process at once. Other processes find changes by polling."""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import TYPE_CHECKING, Protocol

from multiq.driverkit.fork import forks

if TYPE_CHECKING:
    from collections.abc import Iterator


class Listener(Protocol):
    """A waiting consumer's lock, or an object with the same ``release``."""

    def release(self) -> None: ...


class Notifier:
    """Counts notifications, so that one between a read of the queues and the wait is not missed."""

    def __init__(self) -> None:
        self.notifications = 0
        self._guard = threading.Lock()
        self._listeners: list[Listener] = []

    def notify(self) -> None:
        """Release all listeners.

        Under the lock, so that no listener leaves meanwhile: it may be closed then, and its file number reused.
        """
        with self._guard:
            self.notifications += 1
            listeners, self._listeners = self._listeners, []
            for listener in listeners:
                listener.release()

    @contextlib.contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Register *listener* for the duration of the block: the next notification releases it, once."""
        with self._guard:
            self._listeners.append(listener)
        try:
            yield
        finally:
            with self._guard, contextlib.suppress(ValueError):
                self._listeners.remove(listener)


def notifier_of(real_path: str) -> Notifier:
    """Return the one notifier of a file in this process.

    Keyed by fork generation: a lock that another thread held at a fork stays locked in the child.
    """
    return _notifiers.setdefault((forks.generation, real_path), Notifier())


_notifiers: weakref.WeakValueDictionary[tuple[int, str], Notifier] = weakref.WeakValueDictionary()
