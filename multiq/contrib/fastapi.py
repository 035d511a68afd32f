"""multiq in applications of FastAPI: the lifespan, dependencies, the status of jobs, errors. ``docs/fastapi.md``."""

# no "from __future__ import annotations": FastAPI evaluates the annotations of endpoints

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal

from multiq.app import App
from multiq.errors import ArgumentsInvalid, ExtraNotInstalled
from multiq.formatting import shown
from multiq.queue import Queue
from multiq.validation import check_name, check_timeout

from .job_view import HEADERS, TIMEOUT, check_queues
from .starlette import exception_handlers, lifespan, look
from .starlette import get_app as app_of

try:
    from fastapi import APIRouter, Depends, Response, params
    from fastapi.requests import HTTPConnection
    from pydantic import BaseModel, Field
except ImportError as exc:
    raise ExtraNotInstalled("multiq.contrib.fastapi needs FastAPI: pip install 'multiq[fastapi]'") from exc

__all__ = ["AppDep", "JobView", "exception_handlers", "get_app", "get_queue", "lifespan", "status_router"]


# The dependencies are coroutines, because FastAPI runs plain functions on a pool of 40 threads.
async def get_app(connection: HTTPConnection) -> App:
    """Return the app of the application's ``lifespan``: ``Depends(get_app)``. Raises ``MultiqError``."""
    return app_of(connection)


AppDep = Annotated[App, Depends(get_app)]
"""The annotation of a parameter that gets the app of the lifespan: ``async def place_order(app: AppDep)``."""


def get_queue(name: str = "default") -> Callable[[App], Awaitable[Queue]]:
    """Return a dependency that gives an endpoint a queue of the app: ``Depends(get_queue("mail"))``.

    Raises ``NameInvalid``.
    """
    check_name(name)

    async def queue(app: AppDep) -> Queue:
        return app.queue(name)

    return queue


class JobProgress(BaseModel):
    """How far a job has come."""

    fraction: float = Field(description="From 0 to 1.")
    message: str


class JobView(BaseModel):
    """The answer of the status endpoint about a job."""

    ref: str = Field(description="The job's reference, which is part of the endpoint's path.")
    status: Literal["queued", "delayed", "held", "running", "failed", "done", "cancelled"]
    progress: JobProgress | None = Field(description="As the job has last set it.")
    result: Any = Field(description="The value that the task returned, if the job is done.")
    reason: str | None = Field(description="Why there is no result, if the application shows this.")


def status_router(
    *,
    dependencies: Sequence[Any],
    queues: Sequence[str] | None = None,
    reasons: bool = False,
    timeout: float = TIMEOUT,
) -> APIRouter:
    """Return a router that answers ``GET /{ref}`` with the status, the progress and the result of a job.

    - *dependencies*: functions that decide who may see a job, like ``[Depends(may_see)]``. A dependency gets the job's
      reference as its parameter ``ref: str``. To refuse a request, a dependency raises an ``HTTPException``. ``[]``:
      every client that knows the reference may see the job.
    - *queues*: the queues whose jobs are shown. Default: all.
    - *reasons*: whether the answer says why a job has failed or was cancelled. Default: False.
    - *timeout*: seconds after which the answer is 503. Default: 5.

    ``ref`` is a ``handle.ref``. Answers 404 if there is neither the job nor its outcome.
    """
    is_list = isinstance(dependencies, Sequence) and not isinstance(dependencies, str)
    if not is_list or not all(isinstance(each, params.Depends) for each in dependencies):
        raise ArgumentsInvalid(f"dependencies must be a list like [Depends(may_see)], got {shown(dependencies)}")
    router = APIRouter(dependencies=list(dependencies))
    shown_queues, seconds = check_queues(queues), check_timeout(timeout)
    errors: dict[int | str, dict[str, Any]] = {
        404: {"description": "There is no such job, or its outcome is no longer kept"},
        503: {"description": "The job queue does not answer"},
    }

    @router.get("/{ref}", response_model=JobView, responses=errors, name="multiq_job", summary="Status of a job")
    async def multiq_job(ref: str, app: AppDep, response: Response) -> dict[str, Any]:
        response.headers.update(HEADERS)
        return await look(app, ref, queues=shown_queues, reasons=reasons, timeout=seconds)

    return router
