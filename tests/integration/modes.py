"""The ways in which a worker runs jobs, as arguments of ``Worker``: with and without a supervisor."""

from __future__ import annotations

import pytest

WAYS = {"inline": "", "threads": ", threads=3", "coroutines": ", concurrency=3"}

ALONE = {f"{name}-alone": f"processes=0{way}" for name, way in WAYS.items()}
SUPERVISED = {f"{name}-supervised": f"processes=1{way}" for name, way in WAYS.items()}
MODES = ALONE | SUPERVISED

in_each_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
