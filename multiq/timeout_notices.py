"""Timeout notices for threads that are inside a call of multiq. ``SoftTimeout`` is raised when the call returns.

Raising it inside a driver could leave a connection in the middle of a request or a reply. Without notices, a job that
only enqueues could not be interrupted.
"""

from __future__ import annotations

import threading


class Notice:
    """Tells whether a run of a job was notified, in any way, that its timeout is over."""

    __slots__ = ("is_notified",)

    def __init__(self) -> None:
        self.is_notified = False


#: identities of the threads with a pending notice; almost always empty, so that the check is cheap
pending: set[int] = set()


def raise_if_pending() -> None:
    """Raise ``SoftTimeout`` if this thread has a pending notice. Called at the end of a user's call of multiq."""
    if threading.get_ident() in pending:
        from .retry import SoftTimeout

        pending.discard(threading.get_ident())
        raise SoftTimeout
