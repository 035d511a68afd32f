"""The pytest plugin: fixtures that give the tests' app a connection without a server. ``docs/testing.md`` lists them.

pytest loads this module in every run of an environment that has multiq. So the module imports the rest of multiq later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from multiq.app import App

    from .fakes import Fake


@pytest.fixture
def multiq_app() -> App:
    """The app under test: the app that the settings name. A project overrides this fixture to return another app."""
    from click import UsageError

    from multiq.cli.apps import default_app, load_app

    try:
        return load_app(default_app())
    except UsageError as exc:
        raise pytest.UsageError(
            "multiq does not know the app under test: set app = 'module:attribute' in multiq.toml, or override the "
            "fixture multiq_app in conftest.py"
        ) from exc


@pytest.fixture
def multiq_fake(multiq_app: App) -> Iterator[Fake]:
    """A fake connection of the app. No job runs, and a test can check the enqueued jobs."""
    from .fakes import fake

    with fake(multiq_app) as jobs:
        yield jobs


@pytest.fixture
def multiq_sync(multiq_app: App) -> Iterator[App]:
    """The app under test. Its jobs run within their enqueue."""
    from .fakes import sync

    with sync(multiq_app) as app:
        yield app
