"""Subscribers that never return, to the events that ``HANGING_EVENTS`` names."""

from __future__ import annotations

import asyncio
import os
import time

from worker_app import note

import multiq
from multiq import events

app = multiq.App()


def hang(event: events.Event) -> None:
    note(f"hangs:{type(event).__name__}", 0)
    time.sleep(300)


for name in os.environ.get("HANGING_EVENTS", "").split():
    app.on(getattr(events, name))(hang)


@app.task
def work(number: int) -> None:
    note("start", number)


@app.task
async def nap(number: int) -> None:
    note("start", number)
    await asyncio.sleep(300)


@app.task(timeout=0.3, max_attempts=1)
def deaf(number: int) -> None:
    """Ignores its time limit."""
    note("start", number)
    give_up_at = time.monotonic() + 300
    while time.monotonic() < give_up_at:
        try:
            while True:
                time.sleep(0.01)
        except multiq.SoftTimeout:
            pass
