"""Interrupts a job that times out, or is cancelled, during a call of multiq. The timeout's or cancellation's error is
raised when the call returns.

An error that is raised inside a driver could leave a connection in the middle of a request or a reply. To protect the
connection, the worker adds the thread to ``pending``, and each call of multiq checks ``pending`` at its end.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Notice:
    """Whether ``SoftTimeout`` or ``JobCancelled`` was raised, or is about to be raised, in one run of a job."""

    __slots__ = ("is_notified",)

    def __init__(self) -> None:
        self.is_notified = False


#: Maps the identity of a thread with a pending notice to a function that makes the error to raise. The dict is almost
#: always empty, so checking the dict takes little time.
pending: dict[int, Callable[[], Exception]] = {}


def raise_if_pending() -> None:
    """If this thread has a pending notice, raise the error of the notice. Each call of multiq calls
    ``raise_if_pending`` at its end."""
    error = pending.pop(threading.get_ident(), None)
    if error is not None:
        raise error()
