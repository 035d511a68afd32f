"""The ways in which a worker runs jobs, as arguments of ``Worker``: with and without a supervisor."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
from processes import worker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from processes import WorkerProcess

WAYS = {"inline": "", "threads": ", threads=3", "coroutines": ", concurrency=3"}

ALONE = {f"{name}-alone": f"processes=0{way}" for name, way in WAYS.items()}
SUPERVISED = {f"{name}-supervised": f"processes=1{way}" for name, way in WAYS.items()}
MODES = ALONE | SUPERVISED

#: a supervisor makes the smallest difference for jobs that run inline and on threads: these modes run in ``make
#: test-long``
_LONG = {"inline-supervised", "threads-supervised"}

in_each_mode = pytest.mark.parametrize(
    "mode",
    [pytest.param(mode, marks=pytest.mark.long if name in _LONG else (), id=name) for name, mode in MODES.items()],
)


@contextlib.contextmanager
def worker_of(
    module: str, folder: Path, url: str, arguments: str, *, owns_process: bool = True
) -> Iterator[WorkerProcess]:
    """A worker of the app in *module*. With *owns_process* the worker may end its process, as on the command line."""
    code = (
        f"import sys, multiq, {module}; from multiq.logging import setup_logging; setup_logging('info');"
        f"worker = multiq.Worker({module}.app, {arguments}); worker.owns_process = {owns_process};"
        "sys.exit(worker.run())"
    )
    with worker(folder, url, code=code) as process:
        yield process
