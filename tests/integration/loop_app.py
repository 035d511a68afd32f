"""Coroutine tasks that misuse their event loop: they end the loop, cancel themselves, and leave things behind."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from typing import TYPE_CHECKING, Any

from worker_app import note

import multiq

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

app = multiq.App()
_kept: list[object] = []


def hidden(function: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., Any]:
    """A decorator that hides that its function is a coroutine function."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return function(*args)

    return call


# --- rough with the loop ----------------------------------------------------------------------------------

ENDS: dict[str, type[BaseException]] = {"SystemExit": SystemExit, "KeyboardInterrupt": KeyboardInterrupt}


async def _raise(how: str) -> None:
    raise ENDS[how]


@app.task(max_attempts=1)
async def end_in_subtask(number: int, how: str) -> None:
    """Starts a subtask that raises an exception that ends an event loop, and does not await the subtask."""
    note("start", number)
    _kept.append(asyncio.create_task(_raise(how)))
    await asyncio.sleep(0.1)
    note("end", number)


@app.task(max_attempts=1)
async def end_in_awaited(number: int, how: str) -> None:
    note("start", number)
    await asyncio.gather(_raise(how), asyncio.sleep(0.1))
    note("end", number)


@app.task(max_attempts=1)
async def end_in_callback(number: int, how: str) -> None:
    note("start", number)

    def end() -> None:
        raise ENDS[how]

    asyncio.get_running_loop().call_soon(end)
    await asyncio.sleep(0.1)
    note("end", number)


@app.task(max_attempts=1)
async def stop_loop(number: int, how: str) -> None:
    note("start", number)
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.1)
    note("end", number)


@app.task(max_attempts=2, backoff=0)
async def cancel_itself(number: int) -> None:
    note("start", number)
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(1)
    note("end", number)


@app.task(max_attempts=2, backoff=0)
async def cancel_all(number: int) -> None:
    """Cancels all tasks of the loop, as shutdown recipes do."""
    note("start", number)
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(1)
    note("end", number)


@app.task(max_attempts=1)
async def bystander(number: int) -> None:
    note("start", number)
    await asyncio.sleep(0.5)
    note("end", number)


@app.task(max_attempts=1)
def plain(number: int) -> None:
    note("start", number)
    note("end", number)


# --- leaves things behind ---------------------------------------------------------------------------------


async def _tick(number: int) -> None:
    """Runs until it is cancelled."""
    while True:
        note("tick", number)
        await asyncio.sleep(0.02)


async def _tick_with_subtask(number: int) -> None:
    _kept.append(asyncio.create_task(_tick(number)))
    await asyncio.sleep(300)


async def _swallow(number: int) -> None:
    """Ignores its cancellation."""
    while True:
        try:
            note("swallow", number)
            await asyncio.sleep(300)
        except asyncio.CancelledError:
            note("cancelled", number)


@app.task(max_attempts=1)
async def leave_task(number: int) -> None:
    note("start", number)
    _kept.append(asyncio.create_task(_tick(number)))
    await asyncio.sleep(0.1)
    note("end", number)


@app.task(max_attempts=1)
@hidden
async def leave_task_decorated(number: int) -> None:
    note("start", number)
    _kept.append(asyncio.create_task(_tick(number)))
    await asyncio.sleep(0.1)
    note("end", number)


@app.task(max_attempts=1)
async def leave_subtask(number: int) -> None:
    note("start", number)
    _kept.append(asyncio.create_task(_tick_with_subtask(number)))
    await asyncio.sleep(0.1)
    note("end", number)


@app.task(max_attempts=1)
async def leave_and_fail(number: int) -> None:
    note("start", number)
    _kept.append(asyncio.ensure_future(_tick(number)))
    await asyncio.sleep(0.1)
    raise ValueError("on purpose")


@app.task(max_attempts=1, timeout=0.2)
@hidden
async def time_out_decorated(number: int) -> None:
    note("start", number)
    try:
        await _tick(number)
    except asyncio.CancelledError:
        note("cancelled", number)
        raise


@app.task(max_attempts=1, timeout=0.2)
async def time_out_with_subtask(number: int) -> None:
    note("start", number)
    await asyncio.gather(asyncio.shield(_tick(number)), asyncio.sleep(300))


@app.task(max_attempts=1)
async def take_time(number: int) -> None:
    """Runs after the other jobs. While this job runs, no task that the earlier jobs have started may still run."""
    note("start", number)
    subtask = asyncio.create_task(asyncio.sleep(0.3))
    await subtask
    note("end", number)


@app.task(max_attempts=1)
async def leave_swallower(number: int) -> None:
    note("start", number)
    _kept.append(asyncio.create_task(_swallow(number)))
    await asyncio.sleep(0.05)
    note("end", number)


@app.task(max_attempts=1)
async def leave_thread(number: int) -> None:
    """A thread of the loop's executor whose end is not awaited."""
    note("start", number)
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 60)
    _kept.append(asyncio.create_task(asyncio.to_thread(time.sleep, 60)))
    await asyncio.sleep(0.05)
    note("end", number)


@app.task(max_attempts=1)
@hidden
async def leave_thread_decorated(number: int) -> None:
    await leave_thread.function(number)


@app.task(max_attempts=1)
async def fill_pool(number: int) -> None:
    """Leaves enough busy threads behind that the loop's default executor has no free thread."""
    note("start", number)
    _kept.extend(asyncio.create_task(asyncio.to_thread(time.sleep, 60)) for _ in range(40))
    await asyncio.sleep(1)
    note("end", number)


@app.task(max_attempts=1)
async def use_pool(number: int) -> None:
    note("start", number)
    await asyncio.to_thread(note, "in-thread", number)
    note("end", number)


@app.task(max_attempts=1)
async def leave_generator(number: int) -> None:
    """Leaves an asynchronous generator behind, whose clean-up takes a minute."""
    note("start", number)

    async def numbers() -> Any:
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(60)

    generator = numbers()
    _kept.append(generator)
    await anext(generator)
    note("end", number)


# --- is cancelled -----------------------------------------------------------------------------------------


@app.task(max_attempts=3)
async def hold_on(number: int) -> None:
    """Swallows its cancellations, for a while."""
    note("start", number)
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            note("tick", number)
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            note("cancelled", number)
    note("end", number)


@app.task(max_attempts=3)
async def block(number: int) -> None:
    """Blocks the loop."""
    note("start", number)
    for _ in range(400):
        note("tick", number)
        time.sleep(0.05)  # noqa: ASYNC251 - blocks the loop on purpose
    note("end", number)


@app.task(max_attempts=3)
def plod(number: int) -> None:
    """A plain function that takes long."""
    note("start", number)
    for _ in range(400):
        note("tick", number)
        threading.Event().wait(0.05)
    note("end", number)


@app.task(max_attempts=3)
async def heed(number: int) -> None:
    """A coroutine that takes long and ends when it is cancelled."""
    note("start", number)
    for _ in range(400):
        note("tick", number)
        await asyncio.sleep(0.05)
    note("end", number)
