"""The adapter for ``multiq bench``. It names the file and the durability of its writes."""

from __future__ import annotations

import sqlite3
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from multiq.bench.adapter import Adapter, Bench, Durability
from multiq.settings.url import parse_url

from .backend import SqliteBackend
from .baseline import SqliteBaseline
from .doctor import survives

if TYPE_CHECKING:
    from collections.abc import Iterator

    from multiq.bench.adapter import Baseline, Profile

_SYNCHRONOUS = {"fast": "normal", "durable": "full"}


class SqliteAdapter(Adapter):
    """The adapter for a file. There is no server, so there are no counters to read."""

    def __init__(self, url: str) -> None:
        self.url = url
        parsed = parse_url(url, SqliteBackend.options)
        self._path = Path(SqliteBackend.from_url(parsed).path)
        self._synchronous = str(parsed.options["synchronous"])

    def version(self) -> str:
        return f"SQLite {sqlite3.sqlite_version}"

    def durability(self) -> Durability:
        settings = {"synchronous": self._synchronous, "journal_mode": "wal"}  # the driver requires WAL
        return Durability(survives(self._synchronous, self._path.parent), settings)

    def baseline(self, body: bytes) -> Baseline:
        """Return the baseline. Its file lies beside the measured file, on the same disk."""
        return SqliteBaseline(self._path.parent, self._synchronous, body)


class SqliteBench(Bench):
    """Files named by ``sqlite:///``."""

    @classmethod
    @contextmanager
    def throwaway(cls, folder: Path, profile: Profile) -> Iterator[Adapter]:
        yield SqliteAdapter(f"sqlite:///{folder.absolute()}/jobs.db?synchronous={_SYNCHRONOUS[profile]}")

    @classmethod
    @contextmanager
    def at(cls, url: str) -> Iterator[Adapter]:
        yield SqliteAdapter(url)
