"""The app of the soak, for ``multiq worker multiq.soak.tasks:app``.

Each job records one line before its work and one line after it. The module reads the soak's settings from the
environment, so that only processes of a soak can import it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import multiq

from .history import Recorder
from .load import MAX_ATTEMPTS, MAX_CRASHES, TIMEOUT, TTR, of_this_process

if TYPE_CHECKING:
    from collections.abc import Iterator

_load = of_this_process()
_folder = Path(_load.folder)

app = multiq.App()
_options: Any = {
    "queue": _load.tasks,
    "ttr": TTR,
    "max_attempts": MAX_ATTEMPTS,
    "max_crashes": MAX_CRASHES,
    "backoff": 0.2,
}
_recorders: dict[int, Recorder] = {}
_opening = threading.Lock()


class Planned(Exception):
    """Raised by a job that fails on purpose."""


def _recorder() -> Recorder:
    pid = os.getpid()
    with _opening:
        if pid not in _recorders:
            _recorders[pid] = Recorder(_folder, "job")
        return _recorders[pid]


@contextlib.contextmanager
def _written_down(mark: str, digest: str) -> Iterator[int]:
    number, job = int(mark.split("#")[1]), multiq.current_job()
    recorder = _recorder()
    op = recorder.invoke("start", jobs=(number,), attempts=(job.attempt,), digests=(digest,))
    try:
        yield number
    except BaseException:
        recorder.answer("ok", "end", op, jobs=(number,), outcome="raised")
        raise
    recorder.answer("ok", "end", op, jobs=(number,), outcome="done")


def _ends(kind: str, seconds: float) -> None:
    """Record a fault that the job is about to make on its own process, as ``nemesis`` records its faults."""
    recorder = _recorder()
    recorder.note("fault", kind=kind, target=recorder.proc, value=seconds)


def _is_first_time(number: int) -> bool:
    with contextlib.suppress(FileExistsError):
        os.close(os.open(_folder / f"once-{number}", os.O_CREAT | os.O_EXCL))
        return True
    return False


@app.task(**_options)
def brief(mark: str, digest: str) -> None:
    with _written_down(mark, digest):
        pass


@app.task(**_options)
async def abrief(mark: str, digest: str) -> None:
    with _written_down(mark, digest):
        await asyncio.sleep(0.001)


@app.task(**_options)
def short(mark: str, digest: str) -> None:
    with _written_down(mark, digest):
        time.sleep(0.02)


@app.task(**_options)
def long(mark: str, digest: str) -> None:
    with _written_down(mark, digest):
        time.sleep(1.5 * TTR)


@app.task(**_options)
async def along(mark: str, digest: str) -> None:
    with _written_down(mark, digest):
        await asyncio.sleep(1.5 * TTR)


@app.task(**_options)
def fail(mark: str, digest: str) -> None:
    """A job that fails in its first run."""
    with _written_down(mark, digest) as number:
        if _is_first_time(number):
            raise Planned


@app.task(**_options)
def fail_always(mark: str, digest: str) -> None:
    with _written_down(mark, digest):
        raise Planned


@app.task(**_options)
def kill(mark: str, digest: str) -> None:
    """A job that kills its process with SIGKILL in its first run."""
    with _written_down(mark, digest) as number:
        if _is_first_time(number):
            _ends("kill", 1.0)
            os.kill(os.getpid(), signal.SIGKILL)


@app.task(**_options)
def leave(mark: str, digest: str) -> None:
    """A job that ends its process with exit code 0 in its first run."""
    with _written_down(mark, digest) as number:
        if _is_first_time(number):
            _ends("kill", 1.0)
            os._exit(0)


@app.task(timeout=TIMEOUT, **_options)
def hang(mark: str, digest: str) -> None:
    """A job that ignores its time limit in its first run, so that its process must be ended."""
    with _written_down(mark, digest) as number:
        if _is_first_time(number):
            _ends("kill", 10.0)
            until = time.monotonic() + 30
            while time.monotonic() < until:
                with contextlib.suppress(BaseException):
                    time.sleep(0.05)


@app.task(timeout=TIMEOUT, **_options)
async def ahang(mark: str, digest: str) -> None:
    """A job that exceeds its time limit in its first run."""
    with _written_down(mark, digest) as number:
        if _is_first_time(number):
            await asyncio.sleep(30)


KINDS: dict[str, tuple[Any, int]] = {
    "brief": (brief, 60),
    "abrief": (abrief, 20),
    "short": (short, 10),
    "fail": (fail, 4),
    "fail_always": (fail_always, 1),
    "long": (long, 1),
    "along": (along, 1),
    "kill": (kill, 1),
    "leave": (leave, 1),
    "hang": (hang, 1),
    "ahang": (ahang, 1),
}
"""The task of each kind, and its weight: a client draws the kind of each job by these weights."""
