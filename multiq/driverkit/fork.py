"""Forks: how an object detects that it is in a forked child. Only this module registers hooks for forks.

==============================  ========================================================================================
what a fork would break         what to use
==============================  ========================================================================================
connections, names, counters    ``forks.generation``: store it, and start over at the next use if it has changed.
                                Reading this attribute costs less than ``os.getpid``
locks that a thread may hold    ``forks.watch(thing)``: ``thing.start_over_in_child()`` creates a new lock and drops the
for long; pools of connections  parent's connections, before anything else runs in the child
sockets, even during a login    ``forks.close_in_child(sock)``: the child's copy is closed before anything else runs
                                there. ``net.connect``, ``tls.handshake`` and ``timed_socket`` call it for their sockets
a module's lock that is held    ``forks.hold(lock)``: the forking thread holds the lock during the fork, so no other
only for moments                thread holds it
Python's lock of a module       ``with forks.opening``: a fork waits while another thread imports a driver. Python does
                                not free such a lock in a child, which would wait for ever when it imports the module
an object that all users of a   ``PerProcess(make).of(key)``: one object for each key in a process. A child gets another
store share, with its locks     one
anything else                   ``forks.register(before=..., in_parent=..., in_child=...)``
==============================  ========================================================================================

After a fork has begun, another thread may import a module that registers hooks. In this case, the module's hooks for
the time before the fork run, too. Python itself would call only the module's hooks for the time after the fork.

In a child, ``generation`` has its new value before any other hook runs. On a system without fork (Windows),
``generation`` stays 0, and no hook runs. If C code forks without calling Python's hooks, nothing here notices the fork.

Use ``os.getpid`` only for names, for messages, and to send signals. A signal handler that must know its process also
uses ``os.getpid``, because a signal may arrive in a child before the hooks have run there.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Hashable

_T = TypeVar("_T")

_OPENING_PATIENCE = 10.0  # seconds that a fork waits for an import


class Lock(Protocol):
    """A ``threading.Lock`` or ``threading.RLock``."""

    def acquire(self) -> object: ...
    def release(self) -> object: ...


class StartsOver(Protocol):
    """An object for ``forks.watch``."""

    def start_over_in_child(self) -> None:
        """Create new locks, and drop everything that belongs to the parent. Called in the child, before other threads
        run.
        """


class Forks:
    """Counts the forks that led to this process, and registers hooks for forks."""

    generation = 0
    """The number of forks between the first process and this one. A parent and its child have different numbers."""

    def __init__(self) -> None:
        self.opening = threading.RLock()
        """A thread holds this lock while it imports a driver."""
        self._watched: weakref.WeakSet[StartsOver] = weakref.WeakSet()
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._hooks_before: list[Callable[[], object]] = []
        self._forking: dict[int, _Fork] = {}  # by thread
        self.register(before=lambda: None, in_parent=self._in_parent, in_child=self._in_child)

    def watch(self, thing: StartsOver) -> None:
        """Call ``thing.start_over_in_child()`` in each child. This module does not call it any more when no other code
        refers to *thing*."""
        self._watched.add(thing)

    def close_in_child(self, sock: socket.socket) -> None:
        """Close the copy of *sock* in each child, as long as other code refers to *sock*.

        While a copy is open, the connection is alive for the server, even if the parent has closed it or was killed.
        So leases that should end with the connection do not end, and the server may still hand a job to a blocking read
        of the parent.
        """
        self._sockets.add(sock)

    def hold(self, lock: Lock) -> None:
        """Hold *lock* during each fork.

        Threads must hold the lock only for a short time. If the lock is not an RLock, a thread that holds it must not
        fork.
        """
        self.register(before=lock.acquire, in_parent=lock.release, in_child=lock.release)

    def register(
        self,
        *,
        before: Callable[[], object] | None = None,
        in_parent: Callable[[], object] | None = None,
        in_child: Callable[[], object] | None = None,
    ) -> None:
        """Call these hooks at each fork, until the process ends.

        Before a fork, the hooks run in the reverse order of their registration. After a fork, they run in the order of
        registration.
        """
        if hasattr(os, "register_at_fork"):  # Windows has no fork
            hooks = {"before": before and self._noted(before), "after_in_parent": in_parent, "after_in_child": in_child}
            os.register_at_fork(**{name: hook for name, hook in hooks.items() if hook is not None})  # noqa: TID251

    def _noted(self, before: Callable[[], object]) -> Callable[[], object]:
        """Return a hook that calls *before*, and records this call. The first hook of a fork waits until no thread
        imports a driver."""
        is_last = not self._hooks_before
        self._hooks_before.append(before)

        def run() -> None:
            this = self._forking.setdefault(threading.get_ident(), _Fork())
            this.ran.append(before)
            try:  # an exception of a signal handler must not skip the hook
                if not this.has_waited:
                    this.has_waited = True
                    this.holds_opening = self.opening.acquire(timeout=_OPENING_PATIENCE)
            finally:
                before()
            if is_last:
                self._run_late(this)

        return run

    def _run_late(self, this: _Fork) -> None:
        """Run the hooks that were registered since the fork began."""
        for hook in self._hooks_before[:]:
            if hook not in this.ran:
                hook()

    def _in_parent(self) -> None:
        this = self._forking.pop(threading.get_ident(), None)
        if this is not None and this.holds_opening:
            self.opening.release()

    def _in_child(self) -> None:
        self.generation += 1
        self._forking = {}
        self.opening = threading.RLock()
        for sock in list(self._sockets):
            with contextlib.suppress(OSError):
                os.close(sock.detach())  # without a TLS shutdown, because OpenSSL locks may stay locked in the child
        for thing in list(self._watched):
            thing.start_over_in_child()


class _Fork:
    """A fork that a thread has begun."""

    def __init__(self) -> None:
        self.has_waited = False
        self.holds_opening = False
        self.ran: list[Callable[[], object]] = []


forks = Forks()


class PerProcess(Generic[_T]):
    """Stores one object for each key in this process, for as long as the object is in use.

    A forked child makes its own objects. If another thread held a lock of the parent's object at the fork, the lock
    would stay locked in the child.
    """

    def __init__(self, make: Callable[[], _T]) -> None:
        """*make* creates an object. If two threads ask for the same key at the same time, both get the same object."""
        self._make = make
        self._objects: weakref.WeakValueDictionary[tuple[int, Hashable], _T] = weakref.WeakValueDictionary()

    def of(self, *key: Hashable) -> _T:
        """Return the object for this key. Callers store it, and ask again only if ``forks.generation`` has changed."""
        return self._objects.setdefault((forks.generation, key), self._make())
