"""Waits for jobs. One consumer polls for all consumers of its process. It polls often at first, and then less often.

An enqueue in the same process wakes the consumers without a poll.

A poll is one short SELECT outside any transaction. A poll takes no lock, so an idle worker blocks no other statement.
It also returns the time at which the next job becomes due or the next lease ends. The consumers wake at that time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiq.driverkit.fork import PerProcess
from multiq.driverkit.polling import Found, PollPause, SharedPoller

from .records import SECOND, look
from .scan_window import POLL, ScanWindows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .pool import Pool

# seconds between two polls of an idle process. A job from another process is at most about this late.
IDLE_POLL = 0.047
_FIRST_PAUSE = 0.001  # The first pause between two polls, in seconds. Pauses grow while no job comes.
_PAUSE_GROWTH = 0.05  # the pause as a share of the time since the last job
_JITTER = 0.1  # The share by which a pause varies, so that processes do not poll together.


class Poller(SharedPoller):
    """The notifications, polls and scan windows that all consumers and producers of one database in a process share."""

    def __init__(self) -> None:
        super().__init__(
            PollPause(first=_FIRST_PAUSE, longest=IDLE_POLL, growth=_PAUSE_GROWTH, jitter=_JITTER),
        )
        self.scan_windows = ScanWindows()


pollers = PerProcess(Poller)
"""The pollers by the server's address and the database's name."""


def poll(pool: Pool, queues: Sequence[str]) -> Found:
    """Poll these queues once, for all consumers of this process."""
    with pool.borrowed() as connection:
        outlooks = look(connection, pool, queues, POLL)
    changes = (outlook.changes_in for outlook in outlooks)
    return Found(
        {outlook.queue for outlook in outlooks if outlook.has_work or outlook.has_open_gate},
        min((change / SECOND for change in changes if change is not None and change > 0), default=IDLE_POLL),
    )
