"""What a roll leaves to the program that follows in the same process: the children of before, and their lifeline."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

#: in the environment: the supervisor's own pid, its lifeline, whether it is paused (1), and the pids of its children
_ROLLED = "MULTIQ_ROLLED"


def rolled_environment(lifeline: int, pids: Sequence[int], *, is_paused: bool = False) -> dict[str, str]:
    """The environment of the program that follows. Until that takes over, the children do not notice."""
    return {**os.environ, _ROLLED: " ".join(map(str, [os.getpid(), lifeline, int(is_paused), *pids]))}


def was_rolled() -> bool:
    """Whether this program was begun anew by a roll, and has not taken over yet."""
    return os.environ.get(_ROLLED, "").split()[:1] == [str(os.getpid())]


class Before:
    """The children of the program that a roll has replaced, which are ours to wait for."""

    def __init__(self, pids: set[int], *, is_paused: bool = False) -> None:
        self.pids = pids
        self.is_paused = is_paused
        """Whether that program was told to take no more jobs."""

    @classmethod
    def take(cls) -> Before:
        """What was left to this process, if anything was. Its lifeline ends here, so it stops as it should."""
        is_ours = was_rolled()
        words = [int(word) for word in os.environ.pop(_ROLLED, "").split()]
        if not is_ours:
            return cls(set())
        os.close(words[1])
        return cls(set(words[3:]), is_paused=bool(words[2]))

    def is_gone(self) -> bool:
        """Whether all have ended. Their own keeper sees to what they held, and that they do end."""
        for pid in list(self.pids):
            try:
                ended, _ = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                ended = pid
            if ended:
                self.pids.discard(pid)
        return not self.pids
