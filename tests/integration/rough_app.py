"""Tasks that disturb their worker: they fork, take over its signals, and start programs. On the app of
``worker_app``."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from worker_app import app, note, read_diary

import multiq

PROGRAM = """
import sys
{before}
import multiq, rough_app
from multiq.logging import setup_logging
setup_logging("info")
sys.exit(multiq.Worker(rough_app.app, {arguments}).run())
"""


def program(arguments: str = "", before: str = "") -> str:
    """The code of a process that does something *before* it runs a worker of this app."""
    return PROGRAM.format(arguments=arguments, before=before)


def _masks(lines: list[str]) -> dict[str, int]:
    return {line[:6]: int(line[7:], 16) for line in lines if line[:6] in {"SigBlk", "SigIgn"}}


@app.task(max_attempts=1)
def start_program(number: int) -> None:
    """Start a program, read the signal handling that the program has inherited, and end the program."""
    shown = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True)
    masks = _masks(shown.stdout.splitlines())
    asked = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2]
    for name, mask in masks.items():
        for each in [*asked, signal.SIGCONT, signal.SIGCHLD, signal.SIGURG]:
            if mask & 1 << each - 1:
                note(name, each)
    child = subprocess.Popen(["sleep", "300"])
    child.terminate()
    try:
        note("ended", child.wait(30))
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        note("deaf", number)


@app.task(max_attempts=1)
async def astart_program(number: int) -> None:
    """The same on an event loop."""
    child = await asyncio.create_subprocess_exec("sleep", "300")
    child.terminate()
    try:
        note("ended", await asyncio.wait_for(child.wait(), 30))
    except TimeoutError:
        child.kill()
        await child.wait()
        note("deaf", number)


@app.task(max_attempts=1)
def fork_children(number: int) -> None:
    """Fork with ``multiprocessing``, and end each child by another signal. Each of these signals ends a process."""
    fork = multiprocessing.get_context("fork")
    for kind in (signal.SIGTERM, signal.SIGUSR2, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT):
        child = fork.Process(target=time.sleep, args=(300,))
        child.start()
        assert child.pid is not None
        time.sleep(0.05)  # else the signal may come before the child's own hooks have run
        os.kill(child.pid, kind)
        child.join(30)
        if child.exitcode is None:
            note("deaf", kind)
            child.kill()
            child.join()
        else:
            note("died", -child.exitcode)
    note("end", number)


@app.task(max_attempts=1)
def clone(number: int, way: str) -> None:
    """Forks. Both the parent and the child return from the task."""
    note("start", number)
    child = os.fork()
    if child == 0:
        note("clone", number)
        if way == "raises":
            raise ValueError("in the clone")
        if way == "exits":
            sys.exit(7)
        return
    give_up_at = time.monotonic() + 10
    ended, status = 0, 0
    while not ended and time.monotonic() < give_up_at:
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        note("went-on", number)
    else:
        note("left", os.waitstatus_to_exitcode(status))
    note("end", number)


@app.task(max_attempts=1)
async def take_signals(number: int, way: str) -> None:
    """An event loop takes over the wake-up socket of the process, or its SIGTERM as well."""
    loop = asyncio.get_running_loop()
    taken = signal.SIGTERM if way == "term" else signal.SIGALRM
    loop.add_signal_handler(taken, note, "heard", number)
    os.kill(os.getpid(), taken)
    await asyncio.sleep(0.05)
    if way == "tidy":
        loop.remove_signal_handler(taken)
    note("end", number)


@app.task(max_attempts=1)
def take_signals_in_a_loop(number: int) -> None:
    """The same in a loop of the task's own, which does not restore the worker's signal handlers."""

    async def main() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, note, "heard", number)

    asyncio.run(main())
    note("end", number)


@app.task(max_attempts=1)
def give_signals_up(number: int) -> None:
    """Lets SIGTERM end its process, as a closed event loop does, and goes on running."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    note("start", number)
    time.sleep(60.0)
    note("end", number)


@app.task(max_attempts=1)
def take_real_time_signals(number: int) -> None:
    """Handles a real-time signal, which has a number but no name."""
    signal.signal(signal.SIGRTMIN + 2, lambda *_: note("heard", number))
    os.kill(os.getpid(), signal.SIGRTMIN + 2)
    time.sleep(0.05)
    note("end", number)


@app.task(max_attempts=1)
def grow(number: int, mebibytes: int) -> None:
    """Allocates memory and never frees it."""
    _kept.append(b"x" * (mebibytes << 20))
    note("end", number)


_kept: list[bytes] = []


@app.task(ttr=2, max_attempts=0, max_crashes=0)
def nap_through(number: int, seconds: float) -> None:
    """Sleeps, and notes if the sleep is cut short."""
    note("start", number)
    give_up_at = time.monotonic() + seconds
    while time.monotonic() < give_up_at:
        time.sleep(0.01)
    note("end", number)


def diary_has(word: str) -> bool:
    """Whether this process has written that word to the diary."""
    return any(row[0] == word for row in read_diary(Path(os.environ["WORKER_TEST_DIARY"])))


@app.task(timeout=1.0, ttr=60, max_attempts=1)
def wait_to_be_told(number: int) -> None:
    """Runs until its timeout is raised, and notes that."""
    job: Any = multiq.current_job()
    try:  # the timeout may be raised in note(), if the process is stopped there
        note("start", number)
        while True:
            time.sleep(0.01)
            job.check()
    except multiq.SoftTimeout:
        note("told", number)
        raise


@app.task(timeout=1.0, ttr=60, max_attempts=1)
async def await_to_be_told(number: int) -> None:
    """The same on an event loop."""
    try:
        note("start", number)
        await asyncio.sleep(300)
    except (asyncio.CancelledError, multiq.SoftTimeout):  # SoftTimeout: the process was stopped within note()
        note("told", number)
        raise
