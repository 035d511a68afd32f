"""The app that ``worker_losses.py`` has a worker run: ``multiq worker losses_app:app``.

Each job first writes a line to a file that is opened for appending. A line that was written survives any end of the
process, and is written without multiq.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time

import multiq

TTR = 5.0  # seconds: if a process dies before it reads the reply to a reserve, its jobs are due again after this
TIMEOUT = 2.0  # seconds: many times what a limited job takes
LASTS = 3.5  # seconds: longer than TIMEOUT, --kill-after and half a second
WAYS = ("SIGKILL", 0, 12, 13, 14, 130)
"""How a killer ends its process: by a signal, or with an exit code that once meant an orderly end of a worker."""

app = multiq.App()
_FOLDER = os.environ.get("LOSSES_FOLDER", ".")
#: on beanstalkd, the end of a connection counts as a crash of all jobs that were reserved on it
_CRASHES = int(os.environ.get("LOSSES_MAX_CRASHES", "5"))


def _note(word: str, number: int) -> None:
    handle = os.open(f"{_FOLDER}/diary", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(handle, f"{word} {number} {os.getpid()}\n".encode())
    os.close(handle)


@app.task(ttr=TTR, max_crashes=_CRASHES)
def short(number: int) -> None:
    _note("ran", number)


@app.task(ttr=TTR, max_crashes=_CRASHES)
async def ashort(number: int) -> None:
    _note("ran", number)
    await asyncio.sleep(0.001)


@app.task(ttr=TTR, max_crashes=_CRASHES, timeout=TIMEOUT)
def limited(number: int) -> None:
    _note("ran", number)


@app.task(ttr=TTR, max_crashes=_CRASHES, timeout=TIMEOUT)
async def alimited(number: int) -> None:
    _note("ran", number)


@app.task(ttr=TTR, max_crashes=_CRASHES)
def lasting(number: int) -> None:
    """Has no time limit, and runs for longer than any other job's limit."""
    _note("ran", number)
    time.sleep(LASTS)
    _note("lasted", number)


@app.task(ttr=TTR, max_crashes=_CRASHES)
async def alasting(number: int) -> None:
    _note("ran", number)
    await asyncio.sleep(LASTS)
    _note("lasted", number)


@app.task(ttr=TTR, max_crashes=0)
def killer(number: int, way: str | int) -> None:
    """Ends its process the first time it runs."""
    _note("ran", number)
    _kill(number, way)


@app.task(ttr=TTR, max_crashes=0)
async def akiller(number: int, way: str | int) -> None:
    _note("ran", number)
    _kill(number, way)


def _kill(number: int, way: str | int) -> None:
    try:
        os.close(os.open(f"{_FOLDER}/killed-{number}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    _note("kill", number)
    if way == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        os._exit(int(way))
