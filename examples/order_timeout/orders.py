"""The shop's own table. It lives in the same SQLite file as the queue, so one transaction can write both."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

DATABASE = os.environ.get("SHOP_DATABASE", "shop.db")

SCHEMA = """
    CREATE TABLE IF NOT EXISTS orders (
        id          INTEGER PRIMARY KEY,
        item        TEXT NOT NULL,
        state       TEXT NOT NULL DEFAULT 'open',  -- open, paid, cancelled
        timeout_job TEXT                           -- the id of the job that will cancel it
    )
"""


@contextlib.contextmanager
def transaction() -> Iterator[sqlite3.Connection]:
    """A connection in a transaction: committed when the block ends, rolled back when it raises."""
    with contextlib.closing(sqlite3.connect(DATABASE, timeout=10, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield connection
        except BaseException:
            connection.rollback()
            raise
        connection.commit()


def create_table() -> None:
    with transaction() as connection:
        connection.execute(SCHEMA)


def insert(connection: sqlite3.Connection, item: str) -> int:
    order_id = connection.execute("INSERT INTO orders (item) VALUES (?)", (item,)).lastrowid
    assert order_id is not None  # noqa: S101 - an INSERT has one
    return order_id


def note_timeout(connection: sqlite3.Connection, order_id: int, job_id: str) -> None:
    connection.execute("UPDATE orders SET timeout_job = ? WHERE id = ?", (job_id, order_id))


def close(connection: sqlite3.Connection, order_id: int, state: str) -> str | None:
    """Mark an open order as paid or cancelled. Returns the id of its timeout job, or None if the order was not open."""
    changed = connection.execute("UPDATE orders SET state = ? WHERE id = ? AND state = 'open'", (state, order_id))
    if not changed.rowcount:
        return None
    job_id: str = connection.execute("SELECT timeout_job FROM orders WHERE id = ?", (order_id,)).fetchone()[0]
    return job_id


def states() -> dict[int, str]:
    with transaction() as connection:
        return dict(connection.execute("SELECT id, state FROM orders"))
