"""The run log records each run of a job. Each process has its own file, which is mapped into its memory.

Writing a record takes no system call. A written record survives a SIGKILL of its process. Times are CLOCK_MONOTONIC in
nanoseconds, which is the same clock for all processes of a machine.
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

_HEAD = struct.Struct("<qddqq")  # ended runs, CPU seconds at the worker's begin and end (0: not yet), pid, spare
_RECORD = struct.Struct("<qqqii")  # job number, start, end (0: not yet), attempt, 1 if this run is to fail
_COUNT = struct.Struct("<q")
_SUFFIX = ".runs"
_UNFINISHED = ".new"


class Run(NamedTuple):
    """One run of one job."""

    number: int
    start: int
    end: int
    """The time of the end. The end time is 0 if the run has not ended."""
    attempt: int
    pid: int
    failed: bool = False
    """Whether the run has raised the error that the workload planned."""

    @property
    def is_finished(self) -> bool:
        return self.end != 0 and not self.failed


class RunLogFull(RuntimeError):
    """There are more runs than the log has room for, because the store hands out the same jobs again and again."""


class RunLog:
    """The log of one worker process's runs, with room for *capacity* runs. Threads may share one log."""

    def __init__(self, folder: Path, capacity: int) -> None:
        handle, name = tempfile.mkstemp(_UNFINISHED, f"{os.getpid()}-", folder)
        try:
            os.ftruncate(handle, _HEAD.size + capacity * _RECORD.size)  # sparse: only written parts take disk space
            self._map = mmap.mmap(handle, 0)
        finally:
            os.close(handle)
        self.path = Path(name).with_suffix(_SUFFIX)
        self._capacity = capacity
        self._next = itertools.count()
        self._finished = itertools.count(1)
        # if a worker is one of several threads in a process, it counts only the CPU time of its own thread
        is_alone = threading.current_thread() is threading.main_thread()
        self._cpu = time.process_time if is_alone else time.thread_time
        _HEAD.pack_into(self._map, 0, 0, self._cpu(), 0.0, os.getpid(), 0)
        Path(name).rename(self.path)  # the file is renamed last, so that no reader sees a file without a header

    def begin(self, number: int, attempt: int, *, fails: bool = False) -> int:
        """Record that a run starts now. Returns the offset for ``end``. Raises ``RunLogFull``."""
        index = next(self._next)
        if index >= self._capacity:
            raise RunLogFull(f"at most {self._capacity} runs were expected, but job {number} begins one more")
        offset = _HEAD.size + index * _RECORD.size
        _RECORD.pack_into(self._map, offset, number, time.monotonic_ns(), 0, attempt, fails)
        return offset

    def end(self, offset: int) -> None:
        """Record that the run at this *offset* ends now."""
        _COUNT.pack_into(self._map, offset + 16, time.monotonic_ns())
        _COUNT.pack_into(self._map, 0, next(self._finished))

    def close(self) -> None:
        """Record the worker's CPU time when the worker ends."""
        struct.pack_into("<d", self._map, 16, self._cpu())


class RunLogReader:
    """Reads a run log. A reader may read the log while a worker writes it."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.pid: int = _HEAD.unpack_from(self._map)[3]

    @property
    def ended(self) -> int:
        """The number of ended runs, including failed runs."""
        count: int = _COUNT.unpack_from(self._map)[0]
        return count

    @property
    def cpu(self) -> float | None:
        """CPU seconds of the worker. The value is None if the worker's process still runs, or was killed."""
        began, ended = struct.unpack_from("<dd", self._map, 8)
        return ended - began if ended else None

    def runs(self) -> Iterator[Run]:
        """The runs, in the order in which they began."""
        size = len(self._map) - _HEAD.size
        for offset in range(_HEAD.size, _HEAD.size + size, _RECORD.size):
            number, start, end, attempt, fails = _RECORD.unpack_from(self._map, offset)
            if not start:
                return
            yield Run(number, start, end, attempt, self.pid, bool(fails))

    def close(self) -> None:
        self._map.close()


class RunLogs:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._readers: dict[Path, RunLogReader] = {}

    def look(self) -> list[RunLogReader]:
        """The run logs that exist now."""
        for path in sorted(self.folder.glob(f"*{_SUFFIX}")):
            if path not in self._readers:
                self._readers[path] = RunLogReader(path)
        return list(self._readers.values())

    def ended(self) -> int:
        """The number of ended runs."""
        return sum(reader.ended for reader in self.look())

    def cpu(self) -> float | None:
        """CPU seconds of all ended workers. The value is None if the CPU time of one worker is unknown."""
        parts = [reader.cpu for reader in self.look()]
        return None if None in parts else sum(part for part in parts if part is not None)

    def runs(self) -> list[Run]:
        """All runs, in the order in which they began."""
        return sorted((run for reader in self.look() for run in reader.runs()), key=lambda run: run.start)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
