"""The tasks that the benchmarks run, in a module of its own so that worker processes can import it."""

from __future__ import annotations

import os
import time

import multiq

app = multiq.App()


@app.task
def noop(number: int) -> None:
    """Nothing: what is measured is everything around it."""


@app.task
def stamp(sent_at: int) -> None:
    """Writes how many nanoseconds after ``sent_at`` (``time.monotonic_ns``, one clock for all processes) it began."""
    late = time.monotonic_ns() - sent_at
    handle = os.open(os.environ["BENCH_STAMPS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(handle, f"{late}\n".encode())
    finally:
        os.close(handle)
