"""The stored results of a run, and their medians, spreads and percentiles."""

from __future__ import annotations

import os
import platform
import statistics
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from peers.catalogue import ENTRIES, Entry
from peers.measure import Account, Description, Turn

if TYPE_CHECKING:
    from collections.abc import Sequence


class Row(msgspec.Struct):
    """One library on one store, with all its turns."""

    key: str
    turns: list[Turn] = []
    failure: str | None = None
    """Why the turns ended early."""

    @property
    def entry(self) -> Entry:
        return next(entry for entry in ENTRIES if entry.key == self.key)

    @property
    def description(self) -> Description | None:
        return self.turns[-1].description if self.turns else None

    @property
    def account(self) -> Account:
        """The counts of lost, doubled and early jobs of all turns together."""
        each = [turn.account for turn in self.turns]
        return Account(
            sum(one.jobs for one in each),
            sum(one.lost for one in each),
            sum(one.doubled for one in each),
            sum(one.early for one in each),
        )

    @property
    def is_clean(self) -> bool:
        return self.failure is None and self.account.is_clean

    def figures(self, name: str) -> list[float]:
        """The values of one figure, from all turns that measured it."""
        return [value for turn in self.turns if (value := getattr(turn, name)) is not None]

    def samples(self, name: str) -> list[float]:
        """The milliseconds of all turns, sorted."""
        return sorted(value for turn in self.turns for value in getattr(turn, name))

    def median(self, name: str) -> float | None:
        values = self.figures(name)
        return statistics.median(values) if values else None


class StoreRecord(msgspec.Struct):
    """The version of the store that held the jobs, and what survives a crash of that store."""

    version: str
    durability: str


class Run(msgspec.Struct):
    """The content of ``peers.json``."""

    when: str
    machine: str
    repeats: int
    stores: dict[str, StoreRecord]
    rows: list[Row]
    jobs: int = 0
    """How many jobs each library enqueued and drained in a turn. The number is 0 in older files, where the libraries'
    numbers differ."""

    def rows_of(self, store: str) -> list[Row]:
        """The rows of one store: multiq first, then the other libraries by drain rate, the fastest first."""
        rows = [row for row in self.rows if row.entry.store == store]
        return sorted(rows, key=lambda row: (not row.entry.is_ours, -(row.median("drain") or 0)))


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value that a *share* of the *ordered* values do not exceed."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def spread(values: Sequence[float]) -> float:
    """Half the difference of the highest and the lowest value, divided by the median."""
    return (max(values) - min(values)) / 2 / statistics.median(values)


def today() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d")


def machine() -> str:
    """The machine and versions on which figures depend, in one line."""
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    kernel = ".".join(platform.release().split(".")[:2])
    busy = f"load at the start {os.getloadavg()[0]:.1f}"
    cores = f"{os.cpu_count()} cores" + (f" ({names[0]})" if names else "")
    return f"{cores}, {platform.system()} {kernel}, Python {platform.python_version()}, {busy}"


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.exists() else []
