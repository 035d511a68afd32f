"""The fork generation of this process, for what must not be shared with a parent: connections, names, counters."""

from __future__ import annotations

import os


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
