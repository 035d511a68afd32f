"""Regular work on flows: carries out the steps that dead processes have left behind, and deletes old outcomes."""

from __future__ import annotations

import logging
import random
import time
from typing import TYPE_CHECKING

from multiq.errors import MultiqError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.app import App

_log = logging.getLogger("multiq.worker")

EVERY = 5.0  # seconds
# the shortest time, in seconds, between two searches for the outcomes of ended flows. The longest time is twice this
# time
TIDY_EVERY = 60.0
TIDY_AGAIN = 0.2  # seconds between two searches if the first one found more outcomes than it could delete


class FlowUpkeep:
    """Calls ``Backend.relay`` for a worker's queues and for the home of flows. Producers leave steps in that home.

    Does nothing on a backend without the capability ``holds``, or with ``one_step_everywhere``.
    """

    def __init__(self, app: App, queues: Sequence[str]) -> None:
        self._backend = app.backend
        self._queues: list[str] = []
        if app.backend.declared.holds and not app.backend.declared.one_step_everywhere:
            from multiq.flows.record import HOME

            self._queues += [*queues, HOME]
        self._relay_at = 0.0  # monotonic
        self._error = ""
        declared = app.backend.declared
        self._has_flows = bool(declared.holds and declared.notes and declared.outcomes)
        self._tidy_at = _next_tidying()

    def tidy_if_due(self) -> None:
        """Delete outcomes of flows that have ended, if such a deletion is due."""
        if not self._has_flows or time.monotonic() < self._tidy_at:
            return
        self._tidy_at = _next_tidying()
        from multiq.flows.retention import AT_ONCE, delete_leftovers

        try:
            if delete_leftovers(self._backend) == AT_ONCE:
                self._tidy_at = time.monotonic() + TIDY_AGAIN
        except MultiqError as exc:
            _log.warning("the outcomes of flows that have ended are deleted later: %s", exc)

    def relay_if_due(self) -> None:
        """Relay, if the last relay was ``EVERY`` seconds ago. An error is logged, unless it is the same as the previous
        error."""
        now = time.monotonic()
        if not self._queues or now < self._relay_at:
            return
        self._relay_at = now + EVERY
        try:
            self._backend.relay(self._queues)
        except MultiqError as exc:
            if str(exc) != self._error:
                _log.warning("steps in other queues wait, and are tried again: %s", exc)
            self._error = str(exc)
        else:
            self._error = ""


def _next_tidying() -> float:
    return time.monotonic() + TIDY_EVERY * (1 + random.random())  # noqa: S311 - so that workers do not go in step
