"""SQL statements, read once from ``sql/<name>.sql``. A comment at the head of each file explains its statement."""

from __future__ import annotations

import functools
import sqlite3

from multiq.driverkit import sql


@functools.cache
def statement(name: str) -> str:
    """Return the text of one statement, without its comments."""
    return sql.statement(__package__, name)


@functools.lru_cache(maxsize=64)
def qualified(name: str, schema: str) -> str:
    """Return the statement with its tables qualified by the name of an attached database."""
    return statement(name).replace("multiq_", f"{schema}.multiq_")


@functools.cache
def script(name: str) -> tuple[str, ...]:
    """Return the statements of a file that has several: the schema, its upgrades, and the moves."""
    found: list[str] = []
    text = ""
    for line in sql.file_lines(__package__, name):
        text += line + "\n"
        if sqlite3.complete_statement(text):  # This also handles the semicolons inside a trigger.
            found.append(text.strip())
            text = ""
    return tuple(found)
