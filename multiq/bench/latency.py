"""Latencies: histograms and their percentiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hdrh.histogram import HdrHistogram

if TYPE_CHECKING:
    from collections.abc import Iterable

_LONGEST = 3_600_000_000  # us: an hour


def histogram(nanoseconds: Iterable[float]) -> HdrHistogram:
    """A histogram of times in ns. The histogram stores whole microseconds, to three significant digits."""
    recorded = HdrHistogram(1, _LONGEST, 3)
    for value in nanoseconds:
        recorded.record_value(min(_LONGEST, max(1, round(value / 1000))))
    return recorded


def percentiles(word: str, recorded: HdrHistogram, *which: float) -> dict[str, float | None]:
    """Percentiles in ms, by name: ``pickup p50``, ``pickup p99.9``."""
    return {
        f"{word} p{percent:g}": recorded.get_value_at_percentile(percent) / 1000 if recorded.total_count else None
        for percent in which
    }


def encoded(recorded: HdrHistogram) -> str:
    """The histogram as text for a report."""
    text: str = recorded.encode().decode()
    return text
