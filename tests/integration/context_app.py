"""Tasks that note their job's id, and the values that other jobs have left in context variables."""

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
"""Set by each job, and never reset."""
tone: ContextVar[str] = ContextVar("tone", default="none")
"""Set by the program before it starts the worker."""
request: ContextVar[str] = ContextVar("request", default="none")
"""Set by a middleware."""

tone.set("program")


@app.middleware
def name_request(job: JobContext) -> Iterator[None]:
    request.set(job.id)
    yield


def look(number: int) -> None:
    """Note the job's id and the values of the context variables, and set ``left``."""
    note(f"job:{multiq.current_job().id}", number)
    note(f"request:{request.get()}", number)
    note(f"left:{left.get()}", number)
    note(f"tone:{tone.get()}", number)
    left.set(number)
    tone.set("job")


async def look_twice(number: int) -> None:
    """Record these values before and after other jobs have run on the loop, in a subtask, and in a thread."""
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


class Tell(multiq.Middleware):
    def ended(self, job: JobContext, ending: multiq.Ending) -> None:
        note(f"hook:{multiq.current_job().id}:{job.id}", 0)


@app.task(middleware=[Tell()])
def plain(number: int) -> None:
    look(number)


@app.task(middleware=[Tell()])
async def coroutine(number: int) -> None:
    await look_twice(number)


@app.task(middleware=[Tell()])
@hidden
async def decorated(number: int) -> None:
    await look_twice(number)
