"""The app that the worker's tests run in processes of their own. What a job does goes to a file, not to the queue.

Lines are written with one ``write`` each to a file opened for appending, so they survive a ``kill -9``.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from typing import TYPE_CHECKING

import multiq

if TYPE_CHECKING:
    from pathlib import Path

app = multiq.App()
_SLOW_PATTERN = re.compile(r"(a?){20}a{20}")
_diary = os.environ.get("WORKER_TEST_DIARY")


def note(word: str, number: int) -> None:
    """One line of the diary."""
    if _diary is None:
        return
    handle = os.open(_diary, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(handle, f"{word} {number} {os.getpid()} {time.monotonic_ns()}\n".encode())
    finally:
        os.close(handle)


def read_diary(path: Path) -> list[tuple[str, int, int, int]]:
    """Word, number, pid and monotonic nanoseconds of each line."""
    if not path.exists():
        return []
    lines = (line.split() for line in path.read_text().splitlines())
    return [(word, int(number), int(pid), int(at)) for word, number, pid, at in lines]


@app.task(ttr=2, max_crashes=0, max_attempts=0)
def quick(number: int) -> None:
    note("start", number)
    note("end", number)


@app.task(ttr=2, max_crashes=0, max_attempts=0)
def nap(number: int, seconds: float) -> None:
    note("start", number)
    time.sleep(seconds)
    note("end", number)


@app.task(ttr=2)
async def anap(number: int, seconds: float) -> None:
    note("start", number)
    await asyncio.sleep(seconds)
    note("end", number)


@app.task(ttr=1, max_crashes=3)
def suicide(number: int) -> None:
    note("start", number)
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(ttr=2)
def hold_the_gil(number: int, seconds: float) -> None:
    """Calls into C, each of which keeps the interpreter to itself for some hundredths of a second."""
    note("start", number)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        re.fullmatch(_SLOW_PATTERN, "a" * 20)
    note("end", number)


@app.task(max_attempts=3, backoff=0.05)
def fail(number: int) -> None:
    note("start", number)
    raise ValueError(f"number {number} is not to my liking")
