"""A thread that ends its own process if the end of the process hangs."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

_LONGEST_WAIT = 3600.0  # seconds; Python limits the length of a wait, and the grace has no limit


class Watchdog:
    """Calls *action* at the deadline, even if all other threads hang. Use the watchdog in a ``with`` block.

    At first, there is no deadline. The thread starts with the block, because the system may refuse to start a thread
    later.
    """

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._deadline = float("inf")
        self._is_over = False
        self._changed = threading.Condition()

    def __enter__(self) -> Self:
        threading.Thread(target=self._run, name="multiq-watchdog", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify()

    def set_deadline(self, deadline: float) -> None:
        """Call *action* at *deadline* (``time.monotonic``), unless an earlier deadline was set. Thread-safe."""
        with self._changed:
            self._deadline = min(self._deadline, deadline)
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while (left := self._deadline - time.monotonic()) > 0 and not self._is_over:
                self._changed.wait(min(left, _LONGEST_WAIT))
            if self._is_over:
                return
        self._action()
