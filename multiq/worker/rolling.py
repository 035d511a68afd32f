"""What a roll leaves to the program that follows in the same process: the children of before, and their lifeline."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

#: in the environment: the supervisor's own pid, its lifeline, whether it is paused (1), the pids of its
#: children, and those of keepers, as negative numbers
_ROLLED = "MULTIQ_ROLLED"


def rolled_environment(
    lifeline: int, children: Iterable[int], keepers: Iterable[int] = (), *, is_paused: bool = False
) -> dict[str, str]:
    """The environment of the program that follows. Until that takes over, the children do not notice."""
    pids = [*children, *(-pid for pid in keepers)]
    return {**os.environ, _ROLLED: " ".join(map(str, [os.getpid(), lifeline, int(is_paused), *pids]))}


def was_rolled() -> bool:
    """Whether this program was begun anew by a roll, and has not taken over yet."""
    return os.environ.get(_ROLLED, "").split()[:1] == [str(os.getpid())]


class Before:
    """The children and keepers of the programs that rolls have replaced, which are ours to wait for."""

    def __init__(self, children: set[int], keepers: set[int], *, is_paused: bool = False) -> None:
        self.children = children
        self.keepers = keepers
        self.codes: list[int] = []
        """Exit codes of the children that have ended, or, less than 0, the signals that killed them."""
        self.is_paused = is_paused
        """Whether that program was told to take no more jobs."""

    @classmethod
    def take(cls) -> Before:
        """What was left to this process, if anything was. Its lifeline ends here, so it stops as it should."""
        is_ours = was_rolled()
        words = [int(word) for word in os.environ.pop(_ROLLED, "").split()]
        if not is_ours:
            return cls(set(), set())
        os.close(words[1])
        pids = words[3:]
        for pid in pids:
            if pid > 0:  # by a signal, too: a process that the app has started meanwhile may hold the lifeline open
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        return cls({pid for pid in pids if pid > 0}, {-pid for pid in pids if pid < 0}, is_paused=bool(words[2]))

    @property
    def pids(self) -> set[int]:
        """Those that have not ended yet."""
        return self.children | self.keepers

    def is_gone(self) -> bool:
        """Whether all have ended. Their own keeper sees to what they held, and that they do end."""
        for pid in self.pids:
            try:
                ended, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                ended, status = pid, 0
            if ended and pid in self.children:
                self.codes.append(os.waitstatus_to_exitcode(status))
            if ended:
                self.children.discard(pid)
                self.keepers.discard(pid)
        return not self.pids
