"""Forks: how an object finds out that it is in a child, and the only place where hooks for forks are registered.

==============================  ========================================================================================
what a fork would break         what to use
==============================  ========================================================================================
connections, names, counters    ``forks.generation``: remember it, and start over at the next use if it has changed.
                                To read this attribute costs less than ``os.getpid``
locks that any thread may hold  ``forks.watch(thing)``: ``thing.start_over_in_child()`` makes a new lock before anything
for long; pools of connections  else runs in the child, and drops what belongs to the parent
sockets, also while a login     ``forks.close_in_child(sock)``: the child's copy is closed before anything else runs
is under way on them            there. ``net.connect``, ``tls.handshake`` and ``timed_socket`` call it for their sockets
a lock of a module that is      ``forks.hold(lock)``: the forking thread takes it, so no other thread has it at the fork
held for moments only
what all users of one store     ``PerProcess(make).of(key)``: one object for each key in a process, another one in a
share, locks included           child
anything else                   ``forks.register(before=..., in_parent=..., in_child=...)``
==============================  ========================================================================================

In a child, ``generation`` has its new value before any other hook runs. Where a system has no fork (Windows), the
generation stays 0 and no hook runs. A fork by C code that does not call Python's hooks goes unnoticed.

Use ``os.getpid`` only for what needs a process id: names, messages, signals to send. A signal handler that must know
its process uses it, too, because a signal may arrive in a child before the hooks have run there.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Hashable

_T = TypeVar("_T")


class Lock(Protocol):
    """A ``threading.Lock`` or ``threading.RLock``."""

    def acquire(self) -> object: ...
    def release(self) -> object: ...


class StartsOver(Protocol):
    """An object for ``forks.watch``."""

    def start_over_in_child(self) -> None:
        """Make new locks, and drop what belongs to the parent. No other thread runs."""


class Forks:
    """The number of forks that led to this process, and the hooks for forks."""

    generation = 0
    """The number of forks between the first process and this one. A parent and its child never have the same number."""

    def __init__(self) -> None:
        self._watched: weakref.WeakSet[StartsOver] = weakref.WeakSet()
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self.register(in_child=self._in_child)

    def watch(self, thing: StartsOver) -> None:
        """Have *thing* start over in each child, for as long as something else refers to it."""
        self._watched.add(thing)

    def close_in_child(self, sock: socket.socket) -> None:
        """Have each child close its copy of *sock*, for as long as something refers to *sock*.

        As long as a copy is open, the server takes the connection for alive, even if the parent has closed it or was
        killed. Leases that should end with the connection go on, and the server still hands a job to a blocking read.
        """
        self._sockets.add(sock)

    def hold(self, lock: Lock) -> None:
        """Hold *lock* during each fork.

        A thread must release the lock soon after it took it. The thread must not fork meanwhile, unless the lock is an
        RLock.
        """
        self.register(before=lock.acquire, in_parent=lock.release, in_child=lock.release)

    def register(
        self,
        *,
        before: Callable[[], object] | None = None,
        in_parent: Callable[[], object] | None = None,
        in_child: Callable[[], object] | None = None,
    ) -> None:
        """Call these at each fork, for as long as the process lives.

        Before a fork, the hooks run in the reverse order of their registration; after a fork, in the order of
        registration.
        """
        if hasattr(os, "register_at_fork"):  # Windows has no fork
            hooks = {"before": before, "after_in_parent": in_parent, "after_in_child": in_child}
            os.register_at_fork(**{name: hook for name, hook in hooks.items() if hook is not None})  # noqa: TID251

    def _in_child(self) -> None:
        self.generation += 1
        for sock in list(self._sockets):
            with contextlib.suppress(OSError):
                os.close(sock.detach())  # without touching TLS, whose locks may be held for ever
        for thing in list(self._watched):
            thing.start_over_in_child()


forks = Forks()


class PerProcess(Generic[_T]):
    """One object for each key in this process, for as long as it is in use.

    A forked child gets an object of its own: a lock of the parent's object stays locked in the child if another thread
    held it at the fork.
    """

    def __init__(self, make: Callable[[], _T]) -> None:
        """*make*: makes an object. If two threads ask for a key at the same time, one of their objects is dropped."""
        self._make = make
        self._objects: weakref.WeakValueDictionary[tuple[int, Hashable], _T] = weakref.WeakValueDictionary()

    def of(self, *key: Hashable) -> _T:
        """The object for this key. Callers keep it, and ask again only if ``forks.generation`` has changed since."""
        return self._objects.setdefault((forks.generation, key), self._make())
