"""The file: its path, its identity, and how it is created."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from typing import TypeAlias

from multiq.errors import BackendUnavailable, UrlInvalid

FileIdentity: TypeAlias = "tuple[int, int] | None"

create_lock = threading.Lock()
"""Held while a file is created."""


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
        status = os.stat(path)  # noqa: PTH116 - before each call, and half the cost of Path.stat
    except OSError:
        return None
    return (status.st_dev, status.st_ino)


def create_file(path: str) -> None:
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


def require_file(path: str) -> None:
    """Raise ``BackendUnavailable`` if there is no file."""
    if not _is_there(path):
        raise missing(f"there is no file {path}")


def missing(what: str) -> BackendUnavailable:
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
