"""The number of a worker's processes. A worker that scales has a smallest and a largest number of processes."""

from __future__ import annotations

import re
from typing import NamedTuple

MOST_PROCESSES = 1024
_RANGE = re.compile(r"\s*(\d{1,9})\s*:\s*(\d{1,9})\s*", re.ASCII)


class ProcessRange(NamedTuple):
    least: int
    most: int

    @property
    def scales(self) -> bool:
        return self.least < self.most

    def __str__(self) -> str:
        return f"{self.least}:{self.most}" if self.scales else str(self.most)


def read_process_range(text: str) -> ProcessRange:
    """Read ``MIN:MAX``. Raises ``ValueError``. The message of the error is the broken rule."""
    found = _RANGE.fullmatch(text)
    if found is None:
        raise ValueError("must be a whole number, or MIN:MAX like 1:8")
    least, most = int(found[1]), int(found[2])
    if not 1 <= least <= most <= MOST_PROCESSES:
        raise ValueError(f"must be MIN:MAX with 1 <= MIN <= MAX <= {MOST_PROCESSES}")
    return ProcessRange(least, most)
