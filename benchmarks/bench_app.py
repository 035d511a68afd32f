"""The tasks that the benchmarks run, in a module of its own so that worker processes can import it."""

from __future__ import annotations

import asyncio
import os
import time

import multiq

app = multiq.App()


@app.task
def noop(number: int) -> None:
    """Does nothing, so that only multiq's own work is measured."""


@app.task
def stamp(sent_at: int) -> None:
    """Writes how many nanoseconds after ``sent_at`` the job began. ``sent_at`` is a time of ``time.monotonic_ns``,
    which is one clock for all processes."""
    late = time.monotonic_ns() - sent_at
    handle = os.open(os.environ["BENCH_STAMPS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(handle, f"{late}\n".encode())
    finally:
        os.close(handle)


@app.task
def nap(seconds: float) -> None:
    """Sleeps, like a job that waits for another service."""
    time.sleep(seconds)


@app.task(name="anap")
async def anap(seconds: float) -> None:
    """Does the work of ``nap`` as a coroutine."""
    await asyncio.sleep(seconds)


@app.task
def compute(seconds: float) -> None:
    """Keeps a core busy for *seconds* / 10 seconds of this process's own CPU time."""
    end = time.thread_time() + seconds / 10
    while time.thread_time() < end:
        pass
