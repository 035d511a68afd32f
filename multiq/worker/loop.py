"""The event loop of coroutine jobs: asyncio's own, with timers that are not rounded up to milliseconds."""

from __future__ import annotations

import asyncio
import select
import selectors
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

_SELECT_TAKES = 1024  # file descriptors below this: FD_SETSIZE


def new_event_loop() -> AbstractEventLoop:
    """A loop for one thread; whoever made it closes it."""
    if sys.platform != "linux":
        return asyncio.new_event_loop()
    return asyncio.SelectorEventLoop(_PreciseSelector())


if sys.platform == "linux":

    class _PreciseSelector(selectors.EpollSelector):
        """``epoll_wait`` counts in milliseconds, so a sleep of 10 ms takes 11: of 200 slots, 20 stand idle.

        An epoll instance can itself be waited for, and select(2) counts in microseconds.
        """

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            if timeout is not None and timeout > 0 and self.fileno() < _SELECT_TAKES:
                select.select([self.fileno()], (), (), timeout)
                timeout = 0
            return super().select(timeout)
