"""Opening the file: checks its path, creates file and tables, and sets up each connection."""

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

from . import schema
from .errors import retry_while_locked
from .statements import script

_STATEMENTS_KEPT = 128  # prepared statements per connection
LONG_LOG = 16_000_000  # bytes of write-ahead log: four times the size at which SQLite begins to checkpoint
_JSON_PROBE = "SELECT value FROM json_each('[1]')"

create_lock = threading.Lock()
"""Held while a file is created."""


def check_path(path: str) -> None:
    """Raise ``UrlInvalid`` for paths that cannot be used whatever is there."""
    if not path or path == ":memory:":
        raise UrlInvalid(
            "SQLite's own in-memory databases are private to one connection, so no worker could see the jobs: "
            "use memory:// (or memory://name), or name a file, as in sqlite:///jobs.db"
        )
    if "\0" in path:
        raise UrlInvalid(f"a file name must not hold NUL characters, got {path!r}")


FileIdentity: TypeAlias = "tuple[int, int] | None"


def file_identity(path: str) -> FileIdentity:
    """Return device and inode of the file at *path*; None if there is none, or they cannot be read."""
    try:
        status = os.stat(path)  # noqa: PTH116 - before each call, and half the cost of Path.stat
    except OSError:
        return None
    return (status.st_dev, status.st_ino)


def open_file(
    path: str, synchronous: str, timeout: float, *, create: bool = True
) -> tuple[sqlite3.Connection, FileIdentity]:
    """Return a connection to the file, with all tables in place. Without *create*, file and tables must exist.

    Also returns the identity of the file from before it was opened, as it may be replaced meanwhile.

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
        timeout=0,  # see errors.retry_while_locked
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
    """Raise ``BackendNotInstalled`` if Python's SQLite is too old, or lacks a part that the statements need."""
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


def _create_file(path: str) -> None:
    """Create the file with mode 600: SQLite would use the umask. Its -wal and -shm files get the same mode.

    Under a lock, and only if there is no file yet, because closing a file drops all locks that the process holds on
    it, including those of other threads' connections.
    """
    with create_lock:
        if _is_there(path):
            return
        if Path(path).is_symlink():
            raise UrlInvalid(
                f"{path} is a symbolic link to {Path(path).readlink()}, which is not there, and no file is made where "
                "a link leads: make an empty file there, or name that file in the URL"
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
    if not _is_there(path):
        raise _missing(f"there is no file {path}")


def _require_tables(sqlite: sqlite3.Connection, path: str, timeout: float) -> None:
    if retry_while_locked(lambda: schema.version(sqlite, path), timeout, path) is None:
        raise _missing(f"the file {path} has no tables of multiq's")


def _missing(what: str) -> BackendUnavailable:
    return BackendUnavailable(
        f"{what}: nothing was enqueued there yet, and no worker has run; if your jobs are elsewhere, say where, with "
        "multiq -c sqlite:////folder/file.db or in MULTIQ_URL"
    )


def _is_there(path: str) -> bool:
    try:
        mode = Path(path).stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as exc:  # Path.exists raises some of them unchanged
        raise BackendUnavailable(f"{path} cannot be reached: {exc.strerror}") from exc
    if stat.S_ISDIR(mode):
        raise UrlInvalid(f"{path} is a folder: name a file in it, as in {path}/jobs.db")
    return True


def _prepare(sqlite: sqlite3.Connection, path: str, synchronous: str, timeout: float) -> None:
    # even this reads the file, which a process that is closing it may have locked
    retry_while_locked(lambda: sqlite.execute(f"PRAGMA synchronous = {synchronous}"), timeout, path)
    (mode,) = retry_while_locked(lambda: sqlite.execute("PRAGMA journal_mode = WAL").fetchone(), timeout, path)
    if mode != "wal":
        raise BackendUnavailable(
            f"{path} cannot be used: its file system does not support SQLite's write-ahead log "
            f"(the journal mode stays {mode!r}); put it on a local disk"
        )
    retry_while_locked(lambda: schema.prepare(sqlite, path), timeout, path)
    sqlite.execute(f"PRAGMA journal_size_limit = {LONG_LOG}")  # its size after a restart of the log
    sqlite.execute("PRAGMA temp_store = MEMORY")
    sqlite.execute("PRAGMA trusted_schema = OFF")  # triggers of the file call no function with side effects
    if sqlite.execute("PRAGMA secure_delete").fetchone() == (1,):  # as in Debian's build; see decision 23
        sqlite.execute("PRAGMA secure_delete = FAST")
    for text in script("moves"):
        sqlite.execute(text)
