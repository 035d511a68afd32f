"""Stores the limits of an app's tasks when a worker starts."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from multiq.errors import BackendError, MultiqError

if TYPE_CHECKING:
    from multiq.app import App

_log = logging.getLogger("multiq.worker")

_AGAIN = 5.0  # seconds after an error


class CodeLimits:
    """Stores the limits once. Without limits in the app's code, this makes no call and imports nothing."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._is_over = not any(task.default.has_terms for task in app.tasks.values())
        self._try_at = 0.0  # monotonic

    def store_if_due(self) -> None:
        """If this process has not stored the limits yet, store them. After an error of the backend, try again later."""
        if self._is_over or time.monotonic() < self._try_at:
            return
        from multiq.limits import store_app_limits

        try:
            store_app_limits(self._app)
        except BackendError as exc:
            self._try_at = time.monotonic() + _AGAIN
            _log.warning("the limits of the tasks are stored later: %s", exc)
        except MultiqError as exc:
            self._is_over = True
            _log.error("the limits of the tasks are not stored: %s", exc)
        else:
            self._is_over = True
