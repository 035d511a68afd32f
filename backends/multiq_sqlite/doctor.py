"""Checks whether a file is set up for jobs: its library, disk, permissions, tables and settings. Creates nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from multiq.backend import Finding
from multiq.errors import BackendCorrupt

from . import schema
from .disk_space import KEPT_BACK
from .errors import explain, is_busy
from .opening import require_library
from .write_lock import lock_timeout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from multiq.bench.adapter import Survives

    from .pool import Pool

MOUNTS = Path("/proc/self/mounts")

_REMOTE = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "ocfs2", "glusterfs"})
_REMOTE_FUSE = frozenset({"sshfs", "s3fs", "glusterfs", "rclone"})
_VOLATILE = frozenset({"tmpfs", "ramfs"})
_LOW_SPACE = 256 * 1024 * 1024  # bytes
# bytes of a write-ahead log. SQLite restarts the log at 4 MB unless a reader prevents it.
_LONG_LOG = 256 * 1024 * 1024
_OTHERS = 0o077  # the permission bits of group and others


def examine(pool: Pool) -> list[Finding]:
    """Return the findings on the file, its disk and its settings. Raises ``BackendError``."""
    require_library()
    path = Path(os.path.realpath(pool.path))
    return [
        *_place(path),
        *_file_findings(path),
        _synchronous(pool.synchronous),
        _library(sqlite3.sqlite_version_info),
    ]


# --- the library -----------------------------------------------------------------------------------------


def _library(version: tuple[int, ...]) -> Finding:
    """Return the finding on SQLite's version.

    Older versions may damage a file if several processes restart its log: https://sqlite.org/wal.html#walresetbug.
    """
    shown = f"Python has version {'.'.join(map(str, version))}"
    if version >= (3, 51, 3) or (3, 50, 7) <= version < (3, 51) or (3, 44, 6) <= version < (3, 45):
        return Finding("ok", "SQLite", shown)
    return Finding(
        "warn",
        "SQLite",
        f"{shown}, whose WAL-reset bug can in rare moments lose commits and damage a file that several processes "
        "write, unless its builder has patched it",
        "use a Python with SQLite 3.51.3 or newer (or 3.50.7, 3.44.6), or one process, and keep backups",
    )


# --- its place ---------------------------------------------------------------------------------------


def _place(path: Path) -> Iterator[Finding]:
    folder = path.parent
    if not folder.is_dir():
        yield Finding("bad", "folder", f"there is no folder {folder}", "make it")
        return
    if os.access(folder, os.W_OK | os.X_OK):
        yield Finding("ok", "folder", "this user can write in it, as SQLite must for its log")
    else:
        yield Finding(
            "bad", "folder", "this user cannot write in it, where SQLite keeps its log", f"chmod u+wx {folder}"
        )
    yield _file_system(folder)
    yield _space(folder)


def _file_system(folder: Path) -> Finding:
    kind = file_system_of(folder)
    if kind is None:
        return Finding("unknown", "file system", "its kind is unknown", "it must be a local disk")
    if kind in _REMOTE or kind.removeprefix("fuse.") in _REMOTE_FUSE:
        return Finding(
            "bad",
            "file system",
            f"{kind} is a network file system, without the locks and shared memory that SQLite's write-ahead log "
            "needs: jobs can be lost or run twice",
            "put the file on a local disk",
        )
    if kind in _VOLATILE:
        return Finding("warn", "file system", f"{kind} is memory: a restart loses all jobs", "put it on a disk")
    if kind == "overlay":
        return Finding(
            "warn", "file system", "overlay is a container's layer: it is deleted with the container", "use a volume"
        )
    return Finding("ok", "file system", f"{kind}, a local one")


def file_system_of(folder: Path) -> str | None:
    """Return the type of the file system that holds a folder, like ``ext4``. None if the system does not list it."""
    try:
        mounts = [line.split(" ") for line in MOUNTS.read_text().splitlines()]
    except OSError:
        return None
    found: tuple[str, str | None] = ("", None)
    for _, quoted, kind, *_ in mounts:
        point = quoted.encode().decode("unicode_escape")  # The system writes a space as \040.
        if folder.is_relative_to(point) and len(point) >= len(found[0]):  # A later mount hides an earlier one.
            found = (point, kind)
    return found[1]


def _space(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    if free < _LOW_SPACE:
        return Finding(
            "warn",
            "free space",
            f"{free / 1e6:,.0f} MB are left",
            f"make room: below {KEPT_BACK / 1e6:,.0f} MB, multiq refuses new jobs; on a full disk, all calls fail",
        )
    return Finding("ok", "free space", f"{free / 1e9:,.1f} GB are left")


# --- the file --------------------------------------------------------------------------------------------


def _file_findings(path: Path) -> Iterator[Finding]:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        yield Finding(
            "unknown", "file", f"{path} is not there yet: the first job creates it", "run this command again after that"
        )
    except OSError as exc:
        yield Finding("bad", "file", f"this user cannot reach it: {exc.strerror}", f"chmod u+x {path.parent}")
    else:
        yield from _file(path)
        yield from _inside(path)


def _file(path: Path) -> Iterator[Finding]:
    if not os.access(path, os.R_OK | os.W_OK):
        yield Finding("bad", "file", "this user cannot read and write it", f"chown or chmod {path}")
    mode = path.stat().st_mode
    if mode & _OTHERS:
        yield Finding(
            "warn",
            "permissions",
            f"mode {mode & 0o777:o}: other users than the owner can access the jobs",
            f"chmod 600 {path}",
        )
    else:
        yield Finding("ok", "permissions", f"mode {mode & 0o777:o}: only the owner can access it")
    log = path.with_name(path.name + "-wal")
    if log.exists() and log.stat().st_size > _LONG_LOG:
        yield Finding(
            "warn",
            "write-ahead log",
            f"it has grown to {log.stat().st_size / 1e6:,.0f} MB",
            "look for a program that keeps a transaction open: the log cannot restart before it ends",
        )


def _inside(path: Path) -> Iterator[Finding]:
    """Check the file's journal mode and its tables.

    This opens the file for writing if that is allowed. A read-only connection would leave the log's files behind.
    """
    mode = "rw" if os.access(path, os.W_OK) else "ro"
    try:
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(path))}?mode={mode}", uri=True, timeout=1)) as sqlite:
            (mode,) = sqlite.execute("PRAGMA journal_mode").fetchone()
            version = schema.version(sqlite, str(path))
    except BackendCorrupt as exc:
        yield Finding("bad", "tables", str(exc))
    except sqlite3.Error as exc:
        error = lock_timeout(exc, str(path), 1) if is_busy(exc) else explain(exc, str(path))
        yield Finding("bad", "file", str(error))
    else:
        yield _journal(mode)
        yield _tables(version)


def _journal(mode: str) -> Finding:
    if mode == "wal":
        return Finding("ok", "journal_mode", "wal: readers and the writer do not wait for each other")
    return Finding("warn", "journal_mode", f"{mode}: multiq changes it to wal when it opens the file")


def _tables(version: int | None) -> Finding:
    if version is None:
        return Finding(
            "unknown",
            "tables",
            "multiq has not made its tables in this file yet",
            "run this command again after the first job",
        )
    if version < schema.VERSION:
        return Finding("ok", "tables", f"version {version}: the next call upgrades them to {schema.VERSION}")
    return Finding("ok", "tables", f"version {version}, the version of this multiq")


def survives(synchronous: str, folder: Path) -> Survives:
    """Return the worst event that a job survives after its enqueue has returned.

    If the folder is in a file system in memory, a job does not survive a crash of the machine.
    """
    if synchronous != "full" or file_system_of(Path(os.path.realpath(folder))) in _VOLATILE:
        return "server crash"
    return "power loss"


def _synchronous(setting: str) -> Finding:
    if setting == "full":
        return Finding(
            "ok", "synchronous", "full: once a call has returned, its jobs and verdicts survive a power loss"
        )
    return Finding(
        "warn",
        "synchronous",
        f"{setting}: a power failure may undo all commits since the last checkpoint, however long ago that was; a "
        "killed process loses nothing",
        "leave ?synchronous= out of the URL, unless jobs may be lost",
    )
