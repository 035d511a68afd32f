"""The SQL of each verb, read once from ``sql/<verb>.sql``. Each file opens with why it reads as it does."""

from __future__ import annotations

import functools
import pkgutil
import sqlite3


@functools.cache
def statement(verb: str) -> str:
    """The text of one statement, without its comments."""
    return "\n".join(_lines(verb)).strip().removesuffix(";")


@functools.lru_cache(maxsize=64)
def qualified(verb: str, schema: str) -> str:
    """The same for the tables of one of the databases that a connection has open."""
    return statement(verb).replace("multiq_", f"{schema}.multiq_")


@functools.cache
def script(name: str) -> tuple[str, ...]:
    """The statements of a file that holds several: the schema and its upgrades."""
    found: list[str] = []
    text = ""
    for line in _lines(name):
        text += line + "\n"
        if sqlite3.complete_statement(text):  # knows that a trigger holds semicolons of its own
            found.append(text.strip())
            text = ""
    return tuple(found)


def _lines(name: str) -> list[str]:
    data = pkgutil.get_data(__package__, f"sql/{name}.sql")
    assert data is not None  # noqa: S101 - the files are part of this package
    return [line for line in data.decode().splitlines() if line and not line.lstrip().startswith("--")]
