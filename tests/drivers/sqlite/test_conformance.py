"""The SQLite backend against the contract, on a file per test, with a manual clock."""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from multiq.conformance import ManualHarness, suite
from multiq_sqlite.backend import SqliteBackend

if TYPE_CHECKING:
    from collections.abc import Iterator


class SqliteHarness(ManualHarness):
    """Backends on one file, which is deleted after the test."""

    walks = 8  # of 50 with ``make test-long``

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory(prefix="multiq-")
        self.path = str(Path(self._folder.name, "jobs.db"))

    def open(self) -> SqliteBackend:
        # without a sync at each commit, which would take most of the time
        return SqliteBackend(self.path, synchronous="normal", clock=self.clock)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        with contextlib.closing(sqlite3.connect(self.path, check_same_thread=False)) as connection:
            yield connection

    def close(self) -> None:
        self._folder.cleanup()


globals().update(suite(SqliteHarness))


class AllWalks(SqliteHarness):
    walks = 50


TestAllWalks = pytest.mark.long(suite(AllWalks)["TestWalk"])
