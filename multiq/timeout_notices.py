"""Timeout notices for threads that are inside a call of multiq: ``SoftTimeout`` is raised when the call returns.

Nothing is raised inside a driver, because that would leave a connection in the middle of a request or a reply. Without
notices, a job that does nothing but enqueue could not be interrupted at all.
"""

from __future__ import annotations

import threading


class Notice:
    """Whether one run of a job was notified, in any way, that its time is over."""

    __slots__ = ("is_notified",)

    def __init__(self) -> None:
        self.is_notified = False


#: identities of the threads that have a pending notice; almost always empty, so that the check is cheap
pending: set[int] = set()


def raise_if_pending() -> None:
    """Raise ``SoftTimeout`` if this thread has a pending notice. Called where a user's call of multiq ends."""
    if threading.get_ident() in pending:
        from .retry import SoftTimeout

        pending.discard(threading.get_ident())
        raise SoftTimeout
