"""The app of ``test_worker_blame.py``: it records every event of a job, and the calls of a job's own hooks."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING

from worker_app import note

import multiq
from multiq import events

if TYPE_CHECKING:
    from multiq.job import JobContext

app = multiq.App()


def _listen(kind: type[events.JobEvent]) -> None:
    def write(event: events.JobEvent) -> None:
        note(kind.__name__, _number(event.job))
        if isinstance(event, events.JobTimedOut):
            stack = getattr(event, "stack", None)
            note("stack-shown" if stack and "where_it_hangs" in stack else "stack-not-shown", _number(event.job))

    app.events.subscribe(kind, write)


def _number(job: JobContext) -> int:
    return int(job.envelope.args[0]) if job.envelope else -1


for _kind in (events.JobTimedOut, events.JobOverdue, events.JobFailed, events.JobRetried, events.JobBuried):
    _listen(_kind)


class Told(multiq.Middleware):
    def ended(self, job: JobContext, ending: multiq.Ending) -> None:
        note(f"ended:{ending.verdict}", _number(job))


def where_it_hangs(way: str) -> None:
    if way == "stuck":
        ctypes.PyDLL(None).sleep(300)
    while True:
        try:
            time.sleep(0.01)
        except BaseException:
            time.sleep(0.01)


@app.task(ttr=30, timeout=0.3, max_attempts=2, backoff=0.05, middleware=[Told()])
def hang(number: int, way: str) -> None:
    note("start", number)
    where_it_hangs(way)


@app.task(ttr=30, timeout=0.3, max_attempts=2, backoff=0.05, middleware=[Told()])
async def ahang(number: int, way: str) -> None:
    """Blocks the loop of its process."""
    note("start", number)
    where_it_hangs(way)


@app.task(ttr=30, timeout=1.0, max_attempts=1)
async def patient(number: int) -> None:
    """Runs for a little more than half of its time limit."""
    note("start", number)
    for _ in range(12):
        await asyncio.sleep(0.05)
    note("end", number)


@app.task(ttr=30, timeout=1.0, max_attempts=2)
async def lenient(number: int) -> None:
    """The same, with a second attempt."""
    await patient.function(number)


@app.task(ttr=30, timeout=60)
async def block(number: int, seconds: float) -> None:
    """Blocks the loop for less than its time limit."""
    note("start", number)
    await asyncio.sleep(0.1)
    time.sleep(seconds)  # noqa: ASYNC251 - blocks the loop on purpose
    note("end", number)


@app.task(ttr=30, timeout=0.5, max_attempts=1)
async def block_for_ever(number: int) -> None:
    note("start", number)
    await asyncio.sleep(0.1)
    where_it_hangs("deaf")


@app.task(ttr=30, timeout=0.5, max_attempts=1)
async def hold_by_callback(number: int) -> None:
    """A callback of this job blocks the loop, while the job itself waits."""
    note("start", number)
    await asyncio.sleep(0.1)
    asyncio.get_running_loop().call_soon(where_it_hangs, "deaf")
    await asyncio.sleep(300)


@app.task(ttr=30, timeout=0.5, max_attempts=1)
async def leave_timer(number: int) -> None:
    """A timer blocks the loop long after its job has ended."""
    note("start", number)
    asyncio.get_running_loop().call_later(0.2, where_it_hangs, "deaf")


@app.task(ttr=30, timeout=0.5, max_attempts=3)
async def hold_by_thread(number: int) -> None:
    """In the first run, a thread of this job schedules a callback without the job's context, which blocks the loop."""
    note("start", number)
    await asyncio.sleep(0.1)
    if multiq.current_job().attempt == 1:
        loop = asyncio.get_running_loop()
        threading.Thread(target=loop.call_soon_threadsafe, args=(where_it_hangs, "deaf")).start()
        await asyncio.sleep(300)
    note("end", number)


@app.task(ttr=600)
def rest(number: int, seconds: float) -> None:
    """A plain function, which runs on a thread and not on the loop."""
    note("start", number)
    time.sleep(seconds)
    note("end", number)


@app.task(ttr=1, max_crashes=0)
def stop_us(number: int) -> None:
    """Stops its process, as a debugger does. The second run returns at once."""
    note("start", number)
    if os.environ.get("BLAME_STOPS") == "1":
        # The signal goes to this thread. A signal to the process would let this thread run on for a moment.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    note("end", number)


@app.task(ttr=1, max_crashes=0)
def step(number: int) -> None:
    note("start", number)
    note("end", number)


@app.task(ttr=30, timeout=0.4, max_attempts=1)
def wait_in(number: int, way: str) -> None:
    """One call that blocks for minutes and releases the interpreter's lock."""
    note("start", number)
    try:
        if way == "sleep":
            time.sleep(300)
        else:
            one, other = socket.socketpair()
            with one, other:
                one.recv(1)
    finally:
        note("tidied", number)
