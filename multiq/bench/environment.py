"""The conditions of a run apart from multiq: the machine, the versions, and the machine's other load."""

from __future__ import annotations

import hashlib
import os
import platform
import sqlite3
import statistics
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_LIBRARIES = ("msgspec", "hiredis", "PyMySQL", "greenstalk")
_CPU_INFO = Path("/proc/cpuinfo")
_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_VOLATILE = frozenset({"tmpfs", "ramfs"})

_PIECES = 5  # pieces of work in one reading; the result is the median of their durations
_WARMING = 8  # readings that warm up the machine; after them, all pieces of work are equally fast
_SLOWED = 1.25  # the ratio of a duration to the shortest duration; an idle machine stays below this ratio
_OFTEN = 0.2  # share of all repeats
_STOLEN = 0.02  # share of the CPU time of all cores
_BUSY = 0.5  # share of the cores that were busy in the minute before the run


def describe(folder: Path) -> dict[str, str]:
    """The machine and the versions, as text. *folder* is the folder of the servers."""
    return {
        "CPU": _cpu(),
        "cores": _cores(),
        **dict(_speed()),
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "disk": file_system_of(folder) or "unknown",
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "SQLite": sqlite3.sqlite_version,
        **dict(_libraries()),
        "load": f"{psutil.getloadavg()[0]:.2f}",
    }


def file_system_of(folder: Path) -> str | None:
    """The type of the file system that holds a folder, as in ``ext4``. The result is None if the system does not report
    the type."""
    real, found, kind = folder.resolve(), "", None
    with suppress(OSError, psutil.Error):
        for partition in psutil.disk_partitions(all=True):
            point = partition.mountpoint
            if real.is_relative_to(point) and len(point) >= len(found):  # a later mount hides an earlier one
                found, kind = point, partition.fstype
    return kind


def is_volatile(folder: Path) -> bool:
    """Whether the folder's file system is in memory, so that even synced files do not survive a power loss."""
    return file_system_of(folder) in _VOLATILE


class Reading(NamedTuple):
    """One measurement of the machine's current speed."""

    seconds: float
    """The duration of a fixed piece of work with some computing and some system calls."""
    stolen: float
    """Steal time: the CPU seconds that the host gave to other machines since the start, summed over all cores. 0 means
    unknown."""
    passed: float
    """CPU seconds of all cores since the machine started."""


class Meter:
    """Measures the machine's speed apart from multiq, by a fixed piece of work before and after each repeat."""

    def __init__(self) -> None:
        self.reference = float("inf")
        """The shortest duration of the fixed piece of work so far, in seconds."""
        self._calms: list[float] = []
        self._load = psutil.getloadavg()[0]
        self._first = self._last = min(self.read() for _ in range(_WARMING))

    def read(self) -> Reading:
        """Measure now. A measurement takes about 20 ms. During a measurement, no process of the run may work."""
        times = psutil.cpu_times()
        reading = Reading(
            statistics.median(_timed() for _ in range(_PIECES)), float(getattr(times, "steal", 0.0)), float(sum(times))
        )
        self.reference = min(self.reference, reading.seconds)
        self._last = reading
        return reading

    def calm(self, readings: Sequence[Reading]) -> float:
        """The slowness of the machine around a repeat. 1.0 means as fast as the fastest reading so far. 2.0 means half
        as fast."""
        calm = max(reading.seconds for reading in readings) / self.reference
        self._calms.append(calm)
        return calm

    def verdict(self) -> str | None:
        """Known reasons why the figures of this run may be unreliable, in one or two sentences. The result is None if
        there are no known reasons."""
        return "; ".join(self._reasons()) or None

    def _reasons(self) -> Iterator[str]:
        slowed = [calm for calm in self._calms if calm > _SLOWED]
        if len(slowed) > _OFTEN * len(self._calms):
            yield (
                f"around {len(slowed)} of {len(self._calms)} repeats a fixed piece of work took more than "
                f"{_SLOWED:g} times as long as at its fastest, up to {max(slowed):.1f} times: something else used this "
                "machine or its host, or its cores are not alike"
            )
        stolen, passed = self._last.stolen - self._first.stolen, self._last.passed - self._first.passed
        if passed > 0 and stolen / passed > _STOLEN:
            yield f"the machine's host gave {stolen / passed:.0%} of its CPU time to others"
        if self._load > _BUSY * (os.cpu_count() or 1):
            yield f"the machine was at work when the run began (load {self._load:.1f})"


def _timed() -> float:
    """Do the fixed piece of work, and return its duration in seconds. Half of the work runs in the kernel, like half of
    a queue's work."""
    start = time.perf_counter()
    data = b"multiq"
    for _ in range(2000):
        data = hashlib.sha256(data).digest()
    for _ in range(2000):
        os.stat("/")  # noqa: PTH116 - the bare system call
    return time.perf_counter() - start


def _cpu() -> str:
    with suppress(OSError):
        for line in _CPU_INFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _cores() -> str:
    """The number of cores that this process may use, and the part of them that a container's quota allows."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with suppress(OSError, ValueError):
        quota, period = _QUOTA.read_text().split()
        if quota != "max":
            return f"{count}, of which {int(quota) / int(period):g} may be used"
    return str(count)


def _speed() -> Iterator[tuple[str, str]]:
    with suppress(OSError):
        yield "governor", _GOVERNOR.read_text().strip()


def _libraries() -> Iterator[tuple[str, str]]:
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            yield name, version(name)
