"""Interrupts a job whose timeout ends during a call of multiq, or that is cancelled during the call. The error is
raised when the call returns.

If the error were raised inside a driver, it could leave a connection in the middle of a request or a reply. So the
worker notes the thread in ``pending``, and the call checks for the notice at its end.
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


#: the identity of a thread with a pending notice -> a function that makes the error to raise. The dict is almost always
#: empty, so the check is cheap
pending: dict[int, Callable[[], Exception]] = {}


def raise_if_pending() -> None:
    """If this thread has a pending notice, raise the error of the notice. Called at the end of a user's call of
    multiq."""
    error = pending.pop(threading.get_ident(), None)
    if error is not None:
        raise error()
