"""Keeps the app that a framework's command, like ``flask multiq``, has given to multiq's command line.

Users of a framework's command need not name the app.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from multiq.settings.loader import load_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from multiq.app import App
    from multiq.settings.model import Settings

given_apps: dict[str, App] = {}
"""The app that ``give_app`` was called with, by its path. The dict is empty if no app is given."""


@contextlib.contextmanager
def give_app(app: App, path: str) -> Iterator[None]:
    """Let the commands work with *app* while the block lasts. A command that names another app works with that app.

    The commands of frameworks, like ``flask multiq``, call ``give_app``. *path*: the text that stands for the app. The
    path begins with a module and a colon.
    """
    given_apps[path] = app
    try:
        yield
    finally:
        del given_apps[path]


def given_app() -> str | None:
    """Return the path of the app that ``give_app`` was called with. Return None if ``give_app`` was not called."""
    return next(iter(given_apps), None)


def current_settings() -> Settings:
    """Return the settings of the app that ``give_app`` was called with. Without ``give_app``, return the settings of
    ``load_settings``.

    Raises ``SettingsInvalid``.
    """
    return next((app.settings for app in given_apps.values()), None) or load_settings()
