"""Classifies SQLite's errors, and translates them into multiq's exceptions."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

from multiq.driverkit.call_retry import Failure
from multiq.errors import BackendCorrupt, BackendError, BackendFull, BackendUnavailable

if TYPE_CHECKING:
    from multiq.errors import MultiqError


_BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL})

_ERRORS: dict[int, tuple[type[BackendError], str]] = {
    sqlite3.SQLITE_FULL: (BackendFull, "has no room to grow: the disk or the quota is full, and nothing was stored"),
    sqlite3.SQLITE_NOTADB: (BackendCorrupt, "is not an SQLite database, or is encrypted: name another file"),
    sqlite3.SQLITE_CORRUPT: (BackendCorrupt, "is damaged: keep a copy, then try `sqlite3 FILE .recover`"),
    sqlite3.SQLITE_CANTOPEN: (
        BackendUnavailable,
        "cannot be opened: this user needs to read and write the file and its folder, where SQLite keeps its log",
    ),
    sqlite3.SQLITE_READONLY: (
        BackendUnavailable,
        "cannot be written: this user needs to write the file and its folder, and the disk must not be read-only",
    ),
    sqlite3.SQLITE_PERM: (BackendUnavailable, "cannot be used: this user lacks the permission"),
    sqlite3.SQLITE_AUTH: (BackendUnavailable, "cannot be used: an authorizer forbids it"),
    sqlite3.SQLITE_IOERR: (BackendUnavailable, "cannot be read or written: look at the disk and the system's log"),
    sqlite3.SQLITE_NOLFS: (BackendUnavailable, "cannot grow: its file system takes no large files"),
    sqlite3.SQLITE_NOMEM: (BackendUnavailable, "cannot be used: the process ran out of memory"),
}

_UNREADABLE = ("JSON cannot hold BLOB values", "Could not decode to UTF-8", "cannot store ", "integer overflow")
_TABLES_GONE = ("no such table", "no such column", "no such index", "no query solution", "already exists")


class MalformedRecord(BackendCorrupt):
    """A record in the file has values that multiq does not write."""

    def __init__(self, why: object) -> None:
        super().__init__(f"the file holds a record that another program wrote and multiq cannot read ({why})")


def is_busy(exc: sqlite3.Error) -> bool:
    """Whether another connection holds a lock that this call needs."""
    return primary_code(exc) in _BUSY


def classify(exc: sqlite3.Error) -> Failure:
    """Return the class of an error of SQLite. A statement that failed because of a lock has changed nothing."""
    return Failure.CONFLICT if is_busy(exc) else Failure.FINAL


def explain(exc: sqlite3.Error, path: str) -> MultiqError:
    """Return multiq's exception for SQLite's error *exc* about the file at *path*. The file is not locked: see
    write_lock.py."""
    code = primary_code(exc)
    if code in _ERRORS:
        error, sentence = _ERRORS[code]
        return error(f"{path} {sentence} ({exc})")
    if any(words in str(exc) for words in _UNREADABLE):
        return MalformedRecord(exc)
    if any(words in str(exc) for words in _TABLES_GONE):
        return BackendCorrupt(
            f"{path} does not hold the tables that multiq made: one was dropped, renamed or replaced ({exc}); "
            "restore it, or drop everything named multiq_* to start empty"
        )
    return BackendError(f"SQLite failed on {path}: {exc}")


def primary_code(exc: sqlite3.Error) -> int:
    """Return the primary result code, like ``sqlite3.SQLITE_BUSY``."""
    return getattr(exc, "sqlite_errorcode", 0) & 0xFF  # The lowest byte of an extended code is the primary code.
