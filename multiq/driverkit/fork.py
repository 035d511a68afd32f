"""The fork generation of this process, for what must not be shared with a parent: connections, names, locks."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

_T = TypeVar("_T")


class _Forks:
    """Counts the forks between the first process and this one.

    An object that remembers the generation in which it was made finds out by it that it is in a forked child.
    """

    generation = 0

    def __init__(self) -> None:
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._in_child)

    def _in_child(self) -> None:
        self.generation += 1


forks = _Forks()


class PerProcess(Generic[_T]):
    """One object for each key in this process, for as long as it is in use.

    A forked child gets an object of its own: a lock that another thread held at the fork stays locked in the child.
    """

    def __init__(self, make: Callable[[], _T]) -> None:
        """*make* makes an object. It may be called in vain if two threads ask for the same key at the same time."""
        self._make = make
        self._objects: weakref.WeakValueDictionary[tuple[int, Hashable], _T] = weakref.WeakValueDictionary()

    def of(self, *key: Hashable) -> _T:
        """The object for this key. Keep it, and ask again only if ``forks.generation`` has changed since."""
        return self._objects.setdefault((forks.generation, key), self._make())
