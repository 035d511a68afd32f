"""Opens the file: checks Python's SQLite, makes the tables, and sets the write-ahead log and the other settings."""

from __future__ import annotations

import contextlib
import functools
import sqlite3
from typing import TYPE_CHECKING

from multiq.errors import BackendNotInstalled, BackendUnavailable

from . import schema, write_ahead_log
from .file import create_file, file_identity, missing, require_file
from .statements import script
from .write_lock import retry_while_locked

if TYPE_CHECKING:
    from .file import FileIdentity

_STATEMENTS_KEPT = 128  # prepared statements per connection
_JSON_PROBE = "SELECT value FROM json_each('[1]')"


def open_file(
    path: str, synchronous: str, timeout: float, *, create: bool = True
) -> tuple[sqlite3.Connection, FileIdentity]:
    """Open the file and ensure that it has all tables. Returns the connection and the file's identity.

    Without *create*, the file and the tables must exist. The identity is read before the file is opened. Another file
    may replace the file between these two steps.

    Raises ``UrlInvalid``, ``BackendNotInstalled``, ``BackendUnavailable``, ``BackendCorrupt``, ``sqlite3.Error``.
    """
    require_library()
    if create:
        create_file(path)
    else:
        require_file(path)
    file = file_identity(path)
    sqlite = sqlite3.connect(
        path,
        timeout=0,  # see retry_while_locked
        isolation_level=None,
        check_same_thread=False,
        cached_statements=_STATEMENTS_KEPT,
    )
    try:
        if not create:
            _require_tables(sqlite, path, timeout)
        _prepare(sqlite, path, synchronous, timeout)
    except BaseException:
        sqlite.close()
        raise
    return sqlite, file


@functools.cache
def require_library() -> None:
    """Raise ``BackendNotInstalled`` if Python's SQLite is too old, or was built without the JSON functions."""
    if sqlite3.sqlite_version_info < (3, 35):
        raise BackendNotInstalled(
            f"the sqlite backend needs SQLite 3.35 or newer, but this Python has {sqlite3.sqlite_version}"
        )
    with contextlib.closing(sqlite3.connect(":memory:")) as probe:
        try:
            probe.execute(_JSON_PROBE)
        except sqlite3.OperationalError as exc:
            raise BackendNotInstalled(
                "the sqlite backend needs SQLite's JSON functions, which this Python's SQLite "
                f"{sqlite3.sqlite_version} was built without"
            ) from exc


def _require_tables(sqlite: sqlite3.Connection, path: str, timeout: float) -> None:
    if retry_while_locked(lambda: schema.version(sqlite, path), timeout, path) is None:
        raise missing(f"the file {path} has no tables of multiq's")


def _prepare(sqlite: sqlite3.Connection, path: str, synchronous: str, timeout: float) -> None:
    # Even this statement reads the file, which another process locks while it closes the file.
    retry_while_locked(lambda: sqlite.execute(f"PRAGMA synchronous = {synchronous}"), timeout, path)
    (mode,) = retry_while_locked(lambda: sqlite.execute("PRAGMA journal_mode = WAL").fetchone(), timeout, path)
    if mode != "wal":
        raise BackendUnavailable(
            f"{path} cannot be used: its file system does not support SQLite's write-ahead log "
            f"(the journal mode stays {mode!r}); put it on a local disk"
        )
    retry_while_locked(lambda: schema.prepare(sqlite, path), timeout, path)
    sqlite.execute(f"PRAGMA journal_size_limit = {write_ahead_log.LONG}")  # the log's size after a restart
    sqlite.execute("PRAGMA temp_store = MEMORY")
    sqlite.execute("PRAGMA trusted_schema = OFF")  # Then triggers cannot call functions with side effects.
    # Debian builds SQLite with secure_delete on. Decision 23 explains FAST.
    if sqlite.execute("PRAGMA secure_delete").fetchone() == (1,):
        sqlite.execute("PRAGMA secure_delete = FAST")
    for text in script("moves"):
        sqlite.execute(text)
