"""The baseline of ``multiq bench``: the fastest loops over Python's own ``sqlite3``."""

from __future__ import annotations

import json
import sqlite3
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from multiq.bench.adapter import PUT_BATCH, TAKE_BATCH, Baseline

if TYPE_CHECKING:
    from os import PathLike


class SqliteBaseline(Baseline):
    """One table in WAL mode, in a new file in *folder*. *synchronous* is ``full`` or ``normal``."""

    def __init__(self, folder: PathLike[str] | str, synchronous: str, body: bytes) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="multiq-bench-", dir=folder)
        self._body = body
        self._db = sqlite3.connect(Path(self._folder.name) / "limit.db", isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute(f"PRAGMA synchronous={synchronous}")
        self._db.execute("CREATE TABLE jobs (id INTEGER PRIMARY KEY, taken INTEGER DEFAULT 0, body BLOB)")
        self._db.execute("CREATE INDEX ready ON jobs (id) WHERE taken = 0")

    def put_one_by_one(self, count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            self._db.execute("INSERT INTO jobs (body) VALUES (?)", (self._body,))
        return count / (time.perf_counter() - start)

    def put_in_batches(self, count: int) -> float:
        start = time.perf_counter()
        for at in range(0, count, PUT_BATCH):
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("INSERT INTO jobs (body) VALUES (?)", [(self._body,)] * min(PUT_BATCH, count - at))
            self._db.execute("COMMIT")
        return count / (time.perf_counter() - start)

    def take_in_batches(self) -> float:
        """Delete the rows taken last, and mark the next rows as taken. Each batch is one transaction."""
        start, count, held = time.perf_counter(), 0, "[]"
        while True:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("DELETE FROM jobs WHERE id IN (SELECT value FROM json_each(?))", (held,))
            taken = self._db.execute(
                "UPDATE jobs SET taken = 1 WHERE id IN (SELECT id FROM jobs WHERE taken = 0 ORDER BY id LIMIT ?)"
                " RETURNING id, body",
                (TAKE_BATCH,),
            ).fetchall()
            self._db.execute("COMMIT")
            if not taken:
                return count / (time.perf_counter() - start)
            held = json.dumps([row[0] for row in taken])
            count += len(taken)

    def close(self) -> None:
        self._db.close()
        self._folder.cleanup()
