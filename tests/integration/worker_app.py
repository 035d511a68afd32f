"""The app that the worker's tests run in processes of their own. Each job notes what it does in a file, the *diary*.

Lines are written with one ``write`` each to a file opened for appending, so they survive a ``kill -9``.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import resource
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import multiq
from multiq.worker.execution.fetcher import Fetcher

if TYPE_CHECKING:
    from collections.abc import Callable

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


def diary() -> list[tuple[str, int, int, int]]:
    """Like ``read_diary``, with the diary of this process."""
    return read_diary(Path(_diary)) if _diary is not None else []


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
async def aquick(number: int) -> None:
    note("start", number)
    note("end", number)


@app.task(timeout=0.8)
def brief(number: int) -> None:
    """Has a time limit, and ends long before that."""
    note("start", number)
    note("end", number)


@app.task(ttr=600, max_crashes=1, max_attempts=0, loosen=True)
def leave(number: int, way: str) -> None:
    """Ends its process, by other means than an exception."""
    note("start", number)
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif way == "exec":
        os.execvp("true", ["true"])  # noqa: S606 - no shell is wanted
    elif way == "exit of C":
        ctypes.CDLL(None).exit(0)
    else:
        os._exit(int(way.removeprefix("exit ")))


@app.task(ttr=2, max_crashes=0, max_attempts=0)
def nap(number: int, seconds: float) -> None:
    note("start", number)
    time.sleep(seconds)
    note("end", number)


@app.task(max_attempts=1)
def wait_for_a_file(number: int) -> None:
    """Runs until the file ``go-NUMBER`` is beside the diary."""
    note("start", number)
    while not (Path(_diary or "").parent / f"go-{number}").exists():
        time.sleep(0.01)
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
    """Calls into C, each of which holds the interpreter's lock for some hundredths of a second."""
    note("start", number)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        re.fullmatch(_SLOW_PATTERN, "a" * 20)
    note("end", number)


@app.task(max_attempts=3, backoff=0.05)
def fail(number: int) -> None:
    note("start", number)
    raise ValueError(f"number {number} is not to my liking")


@app.task(ttr=1, max_attempts=2, backoff=0.05)
def clutch(number: int, seconds: int) -> None:
    """One call into C that holds the interpreter's lock: ``PyDLL`` does not release it."""
    note("start", number)
    ctypes.PyDLL(None).sleep(seconds)
    note("end", number)


@app.task(timeout=0.3, max_attempts=2, backoff=0.05)
def endless(number: int, way: str) -> None:
    """Runs for minutes, in a way that a time limit can or cannot interrupt."""
    note("start", number)
    if way == "told":
        while True:
            time.sleep(0.01)
            multiq.current_job().check()
    elif way == "asleep":
        time.sleep(300)
    elif way == "deaf":
        while True:
            with contextlib.suppress(BaseException):
                time.sleep(0.01)
    else:
        ctypes.PyDLL(None).sleep(300)


@app.task(timeout=0.3, max_attempts=2, backoff=0.05)
async def aendless(number: int, way: str) -> None:
    """The same as a coroutine."""
    note("start", number)
    if way == "told":
        await asyncio.sleep(300)
    elif way == "asleep":
        time.sleep(300)  # noqa: ASYNC251 - blocks the loop on purpose
    elif way == "deaf":
        while True:
            with contextlib.suppress(BaseException):
                await asyncio.sleep(0.01)
    else:
        ctypes.PyDLL(None).sleep(300)


@app.task(timeout=0.5, max_attempts=1)
def flood(number: int) -> None:
    """Enqueues as long as its time limit allows, so that the limit ends in the middle of a driver's call."""
    note("start", number)
    sent = 0
    try:
        while True:
            quick.options(queue="flood").enqueue(sent)
            sent += 1
    except TimeoutError:
        quick.options(queue="flood").enqueue(-1)
        note("sent", sent)
        raise


@app.task(timeout=0.5, max_attempts=1)
async def aflood(number: int) -> None:
    """The same, with the task cancelled in the middle of a call."""
    note("start", number)
    sent = 0
    try:
        while True:
            await quick.options(queue="flood").aenqueue(sent)
            sent += 1
    except asyncio.CancelledError:
        await asyncio.shield(quick.options(queue="flood").aenqueue(-1))
        note("sent", sent)
        raise


@app.task(max_attempts=2, backoff=0.05)
def greedy(number: int) -> None:
    """Asks for more memory than its process may have."""
    note("start", number)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**30, hard))
    try:
        bytearray(2**31)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


class EndlessText(Exception):
    """An exception whose text is an endless recursion."""

    def __str__(self) -> str:
        return repr(self)

    def __repr__(self) -> str:
        return str(self)


#: exceptions that a job may raise and that are not ordinary errors
EXCEPTIONS: dict[str, Callable[[], BaseException]] = {
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "BaseException": lambda: BaseException("bare"),
    "EndlessText": EndlessText,
    "MemoryError": lambda: MemoryError("m" * 100_000_000),
    "ExceptionGroup": lambda: ExceptionGroup("many", [ValueError(number) for number in range(1000)]),
}


@app.task(max_attempts=1)
def throw(number: int, kind: str) -> None:
    note("start", number)
    make = EXCEPTIONS[kind]
    raise make()


@app.task(max_attempts=1)
async def athrow(number: int, kind: str) -> None:
    note("start", number)
    make = EXCEPTIONS[kind]
    raise make()


@app.task
def bulky(number: int) -> bytes:
    """Its result is larger than any store takes, and is not kept."""
    note("start", number)
    result = bytes(200_000_000)
    note("end", number)
    return result


@app.task(ttr=2, max_crashes=0)
def kill_a_thread(number: int) -> None:
    """The thread that monitors this job ends with an error of its own, once."""
    note("start", number)
    if _diary is not None and len(read_diary(Path(_diary))) > 1:
        note("end", number)
        return

    def die(self: Fetcher) -> None:
        raise RuntimeError("an unexpected error")

    Fetcher.touch_due = die  # type: ignore[method-assign]  # this process is lost anyway
    time.sleep(300)
