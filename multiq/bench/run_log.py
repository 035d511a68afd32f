"""The run log: a record of each run of a job, in a file per process that is mapped into its memory.

Writing one is no system call, and what was written outlives a SIGKILL. Times are of CLOCK_MONOTONIC, in nanoseconds:
one clock for all processes of a machine.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEAD = struct.Struct("<qddqq")  # finished, CPU seconds when the worker began, when it ended (0: not yet), pid, spare
_RECORD = struct.Struct("<qqqii")  # job number, start, end (0: not yet), attempt, 1: this run is to fail
_COUNT = struct.Struct("<q")
_SUFFIX = ".runs"
_UNFINISHED = ".new"


class Run(NamedTuple):
    """One run of one job."""

    number: int
    start: int
    end: int
    """0: it never came to its end, or has not yet."""
    attempt: int
    pid: int
    failed: bool = False
    """It ended by raising, as the workload wants it."""

    @property
    def is_finished(self) -> bool:
        return self.end != 0 and not self.failed


class RunLogFull(RuntimeError):
    """More runs than the log has room for: the store hands out the same jobs again and again."""


class RunLog:
    """Where one worker process writes its runs. Its threads may share it; a file is as large as *capacity* says."""

    def __init__(self, folder: Path, capacity: int) -> None:
        handle, name = tempfile.mkstemp(_UNFINISHED, f"{os.getpid()}-", folder)
        try:
            os.ftruncate(handle, _HEAD.size + capacity * _RECORD.size)  # sparse: takes room as it is written
            self._map = mmap.mmap(handle, 0)
        finally:
            os.close(handle)
        self.path = Path(name).with_suffix(_SUFFIX)
        self._capacity = capacity
        self._next = itertools.count()
        self._finished = itertools.count(1)
        # a worker that is one of several threads knows its own share only
        is_alone = threading.current_thread() is threading.main_thread()
        self._cpu = time.process_time if is_alone else time.thread_time
        _HEAD.pack_into(self._map, 0, 0, self._cpu(), 0.0, os.getpid(), 0)
        Path(name).rename(self.path)  # renamed last: no reader sees a file without its head

    def begin(self, number: int, attempt: int, *, fails: bool = False) -> int:
        """A run starts now. Returns what ``end`` wants. Raises ``RunLogFull``."""
        index = next(self._next)
        if index >= self._capacity:
            raise RunLogFull(f"{self._capacity} runs were expected at most, and this is one more: of job {number}")
        offset = _HEAD.size + index * _RECORD.size
        _RECORD.pack_into(self._map, offset, number, time.monotonic_ns(), 0, attempt, fails)
        return offset

    def end(self, offset: int) -> None:
        """The run that ``begin`` returned this for ends now."""
        _COUNT.pack_into(self._map, offset + 16, time.monotonic_ns())
        _COUNT.pack_into(self._map, 0, next(self._finished))

    def close(self) -> None:
        """The worker ends: note its CPU time."""
        struct.pack_into("<d", self._map, 16, self._cpu())


class RunLogReader:
    """Reads a run log, also while it is written."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.pid: int = _HEAD.unpack_from(self._map)[3]

    @property
    def ended(self) -> int:
        """Runs that came to an end, failed ones included."""
        count: int = _COUNT.unpack_from(self._map)[0]
        return count

    @property
    def cpu(self) -> float | None:
        """Seconds of CPU that the process used while it was a worker; None: it has not ended, or was killed."""
        began, ended = struct.unpack_from("<dd", self._map, 8)
        return ended - began if ended else None

    def runs(self) -> Iterator[Run]:
        """In the order in which they began."""
        size = len(self._map) - _HEAD.size
        for offset in range(_HEAD.size, _HEAD.size + size, _RECORD.size):
            number, start, end, attempt, fails = _RECORD.unpack_from(self._map, offset)
            if not start:
                return
            yield Run(number, start, end, attempt, self.pid, bool(fails))

    def close(self) -> None:
        self._map.close()


class RunLogs:
    """All run logs of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._readers: dict[Path, RunLogReader] = {}

    def look(self) -> list[RunLogReader]:
        """Those there are now."""
        for path in sorted(self.folder.glob(f"*{_SUFFIX}")):
            if path not in self._readers:
                self._readers[path] = RunLogReader(path)
        return list(self._readers.values())

    def ended(self) -> int:
        """Runs that came to an end so far."""
        return sum(reader.ended for reader in self.look())

    def cpu(self) -> float | None:
        """Seconds of CPU of all workers, once they have ended; None if one of them cannot say."""
        parts = [reader.cpu for reader in self.look()]
        return None if None in parts else sum(part for part in parts if part is not None)

    def runs(self) -> list[Run]:
        """All runs, by their start."""
        return sorted((run for reader in self.look() for run in reader.runs()), key=lambda run: run.start)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
