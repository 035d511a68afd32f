"""The health file: a worker's status as JSON, for `multiq health` and for probes that run a command."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING

import msgspec

from multiq.errors import OptionInvalid

if TYPE_CHECKING:
    from pathlib import Path

    from .health import HealthReport

_log = logging.getLogger("multiq.sidecar")


class HealthFile:
    """A worker's health report as a JSON file.

    The file's modification time is the last time at which the worker was healthy. The time 1970-01-01 means that the
    worker was never healthy.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._well_at = 0.0
        self._is_refused = False

    def write(self, report: HealthReport) -> None:
        """Replace the file atomically. An error of the file system is logged once."""
        if report.is_well:
            self._well_at = time.time()
        new = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            new.unlink(missing_ok=True)
            handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
            os.utime(new, (self._well_at, self._well_at))
            new.replace(self._path)
        except OSError as exc:
            if not self._is_refused:
                _log.warning("the health file cannot be written: %s", exc)
            self._is_refused = True
        else:
            self._is_refused = False


def check_path(path: Path) -> Path:
    """Return the absolute path of a health file. Raises ``OptionInvalid`` if the file cannot be written."""
    path = path.absolute()
    if path.is_dir():
        raise OptionInvalid(f"health_file must be a file, got the folder {str(path)!r}: name a file in it")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OptionInvalid(f"health_file must be in a folder that exists and is writable, got {str(path)!r}")
    return path
