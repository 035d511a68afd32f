"""Opens the file: checks its path and SQLite, creates the file and its tables, and sets the write-ahead log."""

from __future__ import annotations

import contextlib
import functools
import os
import sqlite3
import stat
import threading
from pathlib import Path
from typing import TypeAlias

from multiq.errors import BackendNotInstalled, BackendUnavailable, UrlInvalid

from . import schema, write_ahead_log
from .statements import script
from .write_lock import retry_while_locked

FileIdentity: TypeAlias = "tuple[int, int] | None"

create_lock = threading.Lock()
"""Held while a file is created."""

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
        _create_file(path)
    else:
        _require_file(path)
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


def check_path(path: str) -> None:
    """Raise ``UrlInvalid`` for a path that can never be used. The file need not exist."""
    if not path or path == ":memory:":
        raise UrlInvalid(
            "SQLite's own in-memory databases are private to one connection, so no worker could see the jobs: "
            "use memory:// (or memory://name), or name a file, as in sqlite:///jobs.db"
        )
    if "\0" in path:
        raise UrlInvalid(f"a file name must not hold NUL characters, got {path!r}")


def file_identity(path: str) -> FileIdentity:
    """Return the device and the inode of the file at *path*. None if there is no file, or if it cannot be read."""
    try:
        status = os.stat(path)  # noqa: PTH116 - as in connection.py
    except OSError:
        return None
    return (status.st_dev, status.st_ino)


def _create_file(path: str) -> None:
    """Create the file with mode 600. SQLite itself would use the umask. The -wal and -shm files get the mode of the
    file.

    The file is created under a lock, and only if it does not exist. If this function opened and closed a file that is
    in use, the process would lose all its locks on the file, including those of other threads' connections.
    """
    with create_lock:
        if _is_there(path):
            return
        if Path(path).is_symlink():
            raise UrlInvalid(
                f"{path} is a symbolic link to {Path(path).readlink()}, which does not exist, and multiq makes no file "
                "through a link: make an empty file there, or name that file in the URL"
            )
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return
        except (FileNotFoundError, NotADirectoryError) as exc:
            folder = Path(path).parent
            raise UrlInvalid(f"{path} cannot be made: there is no folder {folder} (make it first)") from exc
        except OSError as exc:
            raise BackendUnavailable(f"{path} cannot be made: {exc.strerror}") from exc


def _require_file(path: str) -> None:
    """Raise ``BackendUnavailable`` if there is no file."""
    if not _is_there(path):
        raise _missing(f"there is no file {path}")


def _require_tables(sqlite: sqlite3.Connection, path: str, timeout: float) -> None:
    if retry_while_locked(lambda: schema.version(sqlite, path), timeout, path) is None:
        raise _missing(f"the file {path} has no tables of multiq's")


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


def _missing(what: str) -> BackendUnavailable:
    """Return the error for a missing file or missing tables that must not be created."""
    return BackendUnavailable(
        f"{what}: nothing was enqueued there yet, and no worker has run; if your jobs are elsewhere, say where, with "
        "multiq -c sqlite:////folder/file.db or in MULTIQ_URL"
    )


def _is_there(path: str) -> bool:
    try:
        mode = Path(path).stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as exc:  # Path.exists raises some of these errors unchanged.
        raise BackendUnavailable(f"{path} cannot be reached: {exc.strerror}") from exc
    if stat.S_ISDIR(mode):
        raise UrlInvalid(f"{path} is a folder: name a file in it, as in {path}/jobs.db")
    return True
