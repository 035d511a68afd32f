"""Creates the tables in a new file, checks their version, and upgrades earlier versions."""

from __future__ import annotations

import re
import sqlite3

from multiq.errors import BackendCorrupt

from .statements import qualified, script

VERSION = 4

_HAS_STRICT = sqlite3.sqlite_version_info >= (3, 37)
_STRICT = re.compile(r",? STRICT;")


def prepare(sqlite: sqlite3.Connection, path: str) -> None:
    """Create or upgrade the tables if necessary.

    Many processes may open the same new file at the same time. The process that gets the write lock first creates the
    tables, and the others find them. Raises ``sqlite3.Error``. Raises ``BackendCorrupt`` if the tables have a newer
    version.
    """
    if version(sqlite, path) == VERSION:
        return
    sqlite.execute("BEGIN IMMEDIATE")
    try:
        upgrade(sqlite, path)
        sqlite.execute("COMMIT")
    except BaseException:
        if sqlite.in_transaction:
            sqlite.execute("ROLLBACK")
        raise


def upgrade(sqlite: sqlite3.Connection | sqlite3.Cursor, path: str) -> None:
    """Create or upgrade the tables inside the open transaction."""
    found = version(sqlite, path)
    scripts = ["schema"] if found is None else [f"upgrade_{step}" for step in range(found + 1, VERSION + 1)]
    for name in scripts:
        for text in script(name):
            sqlite.execute(text if _HAS_STRICT else _STRICT.sub(";", text))


def version(sqlite: sqlite3.Connection | sqlite3.Cursor, path: str, name: str = "main") -> int | None:
    """Return the version of the tables. None if there are no tables. Raises ``BackendCorrupt`` for an unsupported
    version.
    """
    try:
        (found,) = sqlite.execute(qualified("version", name)).fetchone()
    except sqlite3.OperationalError as exc:
        if "no such table" in str(exc):
            return None
        raise
    if not isinstance(found, int) or found < 1:
        raise BackendCorrupt(
            f"{path} has a table multiq_schema whose version must be a positive integer, got {found!r}"
        )
    if found > VERSION:
        raise BackendCorrupt(
            f"{path} was made by a newer multiq (version {found} of its tables; this one supports {VERSION}): "
            "upgrade multiq here, or use another file"
        )
    return found
