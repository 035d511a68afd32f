"""multiq in applications of Starlette: opening and closing the app, the status of jobs, errors. ``docs/fastapi.md``."""

from __future__ import annotations

import asyncio
import inspect
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from multiq.app import App
from multiq.async_calls import run
from multiq.errors import ArgumentsInvalid, BackendTimeout, ExtraNotInstalled, MultiqError
from multiq.formatting import shown
from multiq.validation import check_timeout

from .job_view import HEADERS, NOT_FOUND, PASSING, TIMEOUT, check_queues, find_handle, may_repeat, text_of, view_job

try:
    from starlette.exceptions import HTTPException
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
    from starlette.websockets import WebSocket
except ImportError as exc:
    raise ExtraNotInstalled("multiq.contrib.starlette needs Starlette: pip install 'multiq[starlette]'") from exc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from starlette.requests import HTTPConnection, Request

    from multiq.job import JobHandle

    Lifespan: TypeAlias = Callable[[Any], AbstractAsyncContextManager[Any]]
    May: TypeAlias = Callable[[Request, JobHandle], bool | Awaitable[bool]]

__all__ = ["exception_handlers", "get_app", "lifespan", "status_route"]

CLOSE_WITHIN = 10.0
"""When an application ends, it waits at most this number of seconds for calls to a store that does not answer."""

_KEY = "multiq"  # a key of the application's state
_TRY_AGAIN_LATER = 1013  # a WebSocket's close code

_log = logging.getLogger("multiq.web")


def lifespan(app: App, inner: Lifespan | None = None, *, close_within: float = CLOSE_WITHIN) -> Lifespan:
    """Return the ``lifespan=`` of a web application that uses *app*.

    - *inner*: the application's own lifespan. The inner lifespan begins when *app* is open, and ends before *app* is
      closed.
    - *close_within*: the maximum number of seconds that the end of the lifespan waits for enqueues that have begun.
      Default: 10.

    The beginning of the lifespan imports the driver, but does not connect. So an application starts even if the store
    is down. The beginning raises ``UrlInvalid`` and ``BackendNotInstalled``. Raises ``ArgumentsInvalid`` if *app* is
    not a ``multiq.App``.
    """
    if not isinstance(app, App):
        raise ArgumentsInvalid(f"lifespan must have a multiq.App, got {shown(app)}")
    if inner is not None and not callable(inner):
        raise ArgumentsInvalid(f"inner must be a lifespan (a function that takes the application), got {shown(inner)}")
    seconds = check_timeout(close_within, "close_within")
    own = asynccontextmanager(inner) if inspect.isasyncgenfunction(inner) else inner

    @asynccontextmanager
    async def of_both(web: Any) -> AsyncIterator[dict[str, Any]]:
        await app.abackend()
        setattr(web.state, _KEY, app)
        try:
            if own is None:
                yield {_KEY: app}
            else:
                async with own(web) as state:
                    yield {**(state or {}), _KEY: app}
        finally:
            await _close(app, seconds)

    return of_both


def get_app(connection: HTTPConnection) -> App:
    """Return the app of the application's ``lifespan``. Raises ``MultiqError``."""
    state = connection.scope.get("state", {})
    found = state.get(_KEY) or getattr(connection.app.state, _KEY, None)  # a mounted application has its own app.state
    if not isinstance(found, App):
        raise MultiqError(
            "this application has no multiq app: make it with lifespan=lifespan(app), and let the server or the test "
            "client run its lifespan"
        )
    return found


def status_route(
    path: str = "/jobs/{ref}",
    *,
    may: May | None,
    queues: Sequence[str] | None = None,
    reasons: bool = False,
    timeout: float = TIMEOUT,
) -> Route:
    """Return a route that answers with the status, the progress and the result of a job.

    - *path*: must have ``{ref}``. Clients put the job's ``handle.ref`` into this place of the path.
    - *may*: a function or coroutine function that gets the request and the job's handle. This function returns whether
      the request may see the job. If it returns False, the answer is the same as for a job that does not exist. None:
      every client that knows the reference may see the job.
    - *queues*: the queues whose jobs are shown. Default: all.
    - *reasons*: whether the answer says why a job has failed or was cancelled. Default: False.
    - *timeout*: seconds after which the answer is 503. Default: 5.

    Answers 404 if there is neither the job nor its outcome.
    """
    if not isinstance(path, str) or "{ref}" not in path:
        raise ArgumentsInvalid(f"path must have {{ref}}, got {shown(path)}")
    if may is not None and not callable(may):
        raise ArgumentsInvalid(f"may must be a function of the request and the handle, or None, got {shown(may)}")
    shown_queues, seconds = check_queues(queues), check_timeout(timeout)

    async def multiq_job(request: Request) -> Response:
        async def is_allowed(handle: JobHandle) -> bool:
            answer = True if may is None else may(request, handle)
            return await answer if inspect.isawaitable(answer) else answer

        app = get_app(request)
        view = await look(
            app, request.path_params["ref"], is_allowed, queues=shown_queues, reasons=reasons, timeout=seconds
        )
        return JSONResponse(view, headers=HEADERS)

    return Route(path, multiq_job, methods=["GET"], name="multiq_job")


async def look(
    app: App,
    ref: str,
    is_allowed: Callable[[JobHandle], Awaitable[bool]] | None = None,
    *,
    queues: frozenset[str] | None,
    reasons: bool,
    timeout: float,  # noqa: ASYNC109 - becomes a 503, and no TimeoutError
) -> dict[str, Any]:
    """Return the view of the job *ref*. Raises ``HTTPException`` with 404 or 503."""
    backend = await app.abackend()
    handle = find_handle(app, ref, queues)
    if handle is None or not (is_allowed is None or await is_allowed(handle)):
        raise HTTPException(404, NOT_FOUND, headers=HEADERS)
    try:
        # asyncio.timeout is not used, because its TimeoutError could not be distinguished from an error of the caller
        call = asyncio.ensure_future(run(backend, view_job, app, handle, reasons=reasons))
        try:
            done, _ = await asyncio.wait([call], timeout=timeout)
        finally:
            call.cancel()
        if not done:
            raise BackendTimeout(f"the status of job {handle.id} was not read within {timeout:g} s")
        view = call.result()
    except PASSING as exc:
        _log.warning("the status of a job cannot be read: %s", exc)
        raise HTTPException(503, text_of(exc), headers={**HEADERS, **_retry_after(exc)}) from exc
    if view is None:
        raise HTTPException(404, NOT_FOUND, headers=HEADERS)
    return view


async def _answer_503(connection: HTTPConnection, error: Exception) -> Response:
    """If the store did not answer or was full during a request, answer the request with 503."""
    _log.warning("%s is answered with 503: %s", connection.url.path, error)
    if isinstance(connection, WebSocket):
        await connection.close(_TRY_AGAIN_LATER, "The job queue does not answer.")
    return JSONResponse({"detail": text_of(error)}, status_code=503, headers=_retry_after(error))


exception_handlers: dict[int | type[Exception], Any] = dict.fromkeys(PASSING, _answer_503)
"""The ``exception_handlers=`` of a web application: requests are answered with 503 if the store does not answer."""


def _retry_after(error: Exception) -> Mapping[str, str]:
    return {"Retry-After": "5"} if may_repeat(error) else {}


async def _close(app: App, seconds: float) -> None:
    """Wait until enqueues that have begun are stored, and close the connections."""
    closing = asyncio.ensure_future(app.aclose())
    try:
        done, _ = await asyncio.wait([closing], timeout=seconds)
    finally:
        if not closing.done():
            closing.cancel()
    if not done:
        _log.warning("the store does not answer: the application ends without waiting for its calls")
    elif not closing.cancelled() and (error := closing.exception()) is not None:
        _log.warning("the connections could not be closed: %s", error)
