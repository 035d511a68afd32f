"""Notices for threads that are in the middle of a call of ours: they are told on their way out.

Nothing is ever raised inside a driver, where it would leave a connection out of step, so a job that does nothing but
enqueue could not be told of its time limit at all.
"""

from __future__ import annotations

import threading


class Notice:
    """Whether one run of a job was told that its time is over, by whichever way came first."""

    __slots__ = ("is_notified",)

    def __init__(self) -> None:
        self.is_notified = False


#: identities of the threads that have a notice waiting; almost always empty, so asking costs next to nothing
pending: set[int] = set()


def raise_if_pending() -> None:
    """Raise ``SoftTimeout`` if this thread was to be told so. To be called where a call of the user's ends."""
    if threading.get_ident() in pending:
        from .retry import SoftTimeout

        pending.discard(threading.get_ident())
        raise SoftTimeout
