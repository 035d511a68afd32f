"""Notices for threads that are in the middle of a call of ours: they are told on their way out.

Nothing is ever raised inside a driver, where it would leave a connection out of step, so a job that does nothing but
enqueue could not be told of its time limit at all.
"""

from __future__ import annotations

import threading


class Notice:
    """Whether one run of a job was told that its time is over, by whichever way came first."""

    __slots__ = ("is_told",)

    def __init__(self) -> None:
        self.is_told = False


#: identities of the threads that have a notice waiting; almost always empty, so asking costs next to nothing
waiting: set[int] = set()


def heed() -> None:
    """Raise ``SoftTimeout`` if this thread was to be told so. To be called where a call of the user's ends."""
    if threading.get_ident() in waiting:
        from .retry import SoftTimeout

        waiting.discard(threading.get_ident())
        raise SoftTimeout
