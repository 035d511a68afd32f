"""Databases for tests of Django's integration."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import djangos
import pytest
from django.core.management import call_command

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

djangos.configure()  # before the test modules import models

SQLITE = {"ENGINE": "django.db.backends.sqlite3", "OPTIONS": {"transaction_mode": "IMMEDIATE"}}


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite database with the tables of ``django_shop``."""
    path = tmp_path_factory.mktemp("django") / "migrated.db"
    with djangos.connected("default", **SQLITE, NAME=str(path)) as connection:
        call_command("migrate", run_syncdb=True, verbosity=0)
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA journal_mode = WAL")  # the file keeps this mode
    return path


@pytest.fixture
def database(migrated: Path, tmp_path: Path) -> Iterator[Any]:
    """A connection of Django's to a SQLite database of its own, under the alias ``default``."""
    path = shutil.copy(migrated, tmp_path / "django.db")
    with djangos.connected("default", **SQLITE, NAME=str(path)) as connection:
        yield connection
