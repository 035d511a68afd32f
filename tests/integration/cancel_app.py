"""Tasks that are cancelled while they run, for workers in processes of their own."""

from __future__ import annotations

import asyncio
import time

from worker_app import note

import multiq

app = multiq.App()
LONG = 120.0  # seconds: without a cancel, the job would end after this time


@app.task(keep=60, max_attempts=3, backoff=0)
def spin(number: int) -> None:
    note("start", number)
    ends_at = time.monotonic() + LONG
    while time.monotonic() < ends_at:
        time.sleep(0.01)
    note("end", number)


@app.task(keep=60, max_attempts=3, backoff=0)
def ask(number: int) -> None:
    note("start", number)
    job = multiq.current_job()
    ends_at = time.monotonic() + LONG
    while time.monotonic() < ends_at:
        job.check_cancelled()
        time.sleep(0.01)
    note("end", number)


@app.task(keep=60, max_attempts=3, backoff=0)
async def sleep(number: int) -> None:
    note("start", number)
    await asyncio.sleep(LONG)
    note("end", number)


@app.task(keep=60, max_crashes=0, ttr=2)
def brief(number: int, seconds: float) -> None:
    note("start", number)
    time.sleep(seconds)
    note("end", number)


@app.task
def add(value: int, more: int = 1) -> int:
    return value + more
