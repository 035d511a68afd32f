"""Stores the limits of an app's tasks when a worker starts, and again after the store has lost its data.

Beside the limits, the worker keeps a note, the *mark*. If a limit is missing, the mark tells why: if the mark is still
there, an operator has removed the limit. If the mark is gone, too, the store has lost its data, and the worker stores
the limits again. The mark is written before the limits. If the store loses its data between the two, the mark is
missing, and the next look stores the limits once more.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from multiq.backend import Put
from multiq.errors import BackendError
from multiq.validation import APP_SCOPE

if TYPE_CHECKING:
    from multiq.app import App

_log = logging.getLogger("multiq.worker")

_AGAIN = 5.0  # seconds after an error
_LOOK_EVERY = 20.0  # seconds between two looks for the marks: one round trip for each queue with limits
_MARK = "limits"


class StoredLimits:
    """Stores the limits. Without limits in the app's code, this makes no call and imports nothing."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._is_over = not any(task.default.has_terms for task in app.tasks.values())
        self._are_stored = False
        self._try_at = 0.0  # monotonic
        self._logged: set[str] = set()  # errors

    def store_if_due(self) -> None:
        """Store the limits if this process has not stored them yet, or if their marks are gone. After an error of the
        backend, try again later."""
        if self._is_over or time.monotonic() < self._try_at:
            return
        try:
            if not self._are_stored:
                self._store()
            elif lost := self._without_mark():
                self._store_again(lost)
        except BackendError as exc:
            self._try_at = time.monotonic() + _AGAIN
            if not self._are_stored:
                _log.warning("the limits of the tasks are stored later: %s", exc)
        else:
            self._try_at = time.monotonic() + _LOOK_EVERY
            self._is_over = not self._app.backend.declared.notes

    def _store(self) -> None:
        from multiq.limits import store_app_limits

        for home in self._without_mark():
            self._app.backend.carry_out([Put(home, _MARK, b"1")])
        for error in store_app_limits(self._app):
            if str(error) not in self._logged:
                self._logged.add(str(error))
                _log.error("a limit of the tasks is not stored: %s", error)
        self._are_stored = True

    def _store_again(self, lost: dict[str, set[str]]) -> None:
        from multiq.limits import forget_stored

        places = {place for own in lost.values() for place in own}
        forget_stored(self._app.backend, places)
        self._store()
        _log.warning(
            "the backend has lost the limits of %s, so this worker has stored the numbers of its code again: if an "
            "operator had set other numbers, set them again with multiq limits set",
            ", ".join(sorted(places)),
        )

    def _without_mark(self) -> dict[str, set[str]]:
        """Return the homes whose mark is missing, each with the places of its limits."""
        from multiq.limits import places_in_code
        from multiq.permit_notes import HOME

        backend = self._app.backend
        if not backend.declared.notes:
            return {}
        places: dict[str, set[str]] = {}
        for place in places_in_code(self._app):
            is_kept_by_reserve = place != APP_SCOPE and backend.declared.limits
            places.setdefault(place if is_kept_by_reserve else HOME, set()).add(place)
        return {home: own for home, own in sorted(places.items()) if backend.note(home, _MARK) is None}
