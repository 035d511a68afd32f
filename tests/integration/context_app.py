"""Tasks that look at their context: which job they are, and what others have left in context variables."""

from __future__ import annotations

import asyncio
import functools
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from worker_app import note

import multiq

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from multiq.job import JobContext

app = multiq.App()

left: ContextVar[int] = ContextVar("left", default=-1)
"""What a job leaves behind."""
tone: ContextVar[str] = ContextVar("tone", default="none")
"""What the program has set before it started the worker."""
request: ContextVar[str] = ContextVar("request", default="none")
"""What a middleware sets."""

tone.set("program")


@app.middleware
def name_request(job: JobContext) -> Iterator[None]:
    request.set(job.id)
    yield


def look(number: int) -> None:
    """Note what is to be seen here, and leave something behind."""
    note(f"job:{multiq.current_job().id}", number)
    note(f"request:{request.get()}", number)
    note(f"left:{left.get()}", number)
    note(f"tone:{tone.get()}", number)
    left.set(number)
    tone.set("job")


async def look_twice(number: int) -> None:
    """Before and after the loop has done other things, in a subtask, and in a thread."""
    look(number)
    await asyncio.sleep(0.01)
    note(f"job:{multiq.current_job().id}", number)
    note(f"job:{await asyncio.to_thread(lambda: multiq.current_job().id)}", number)
    note(f"job:{await asyncio.create_task(find_id())}", number)


async def find_id() -> str:
    return multiq.current_job().id


def hidden(function: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., Any]:
    """A decorator that hides that its function is a coroutine function."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return function(*args)

    return call


def tell(job: JobContext, _result: object) -> None:
    note(f"hook:{multiq.current_job().id}:{job.id}", 0)


@app.task(on_success=tell)
def plain(number: int) -> None:
    look(number)


@app.task(on_success=tell)
async def coroutine(number: int) -> None:
    await look_twice(number)


@app.task(on_success=tell)
@hidden
async def decorated(number: int) -> None:
    await look_twice(number)
