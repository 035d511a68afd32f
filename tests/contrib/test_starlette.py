"""multiq in applications of Starlette and FastAPI: lifespan, dependencies, the status of jobs, a store that hangs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any

import pytest
from fastapi import Depends, FastAPI, Header, HTTPException, Request
from fastapi.testclient import TestClient
from httpx2 import ASGITransport, AsyncClient
from servers.redis import RedisServer
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.websockets import WebSocketDisconnect
from stores import STORES

import multiq
from multiq import errors, testing
from multiq.backend import Ack, After, NewJob, Release
from multiq.contrib.fastapi import AppDep, get_app, get_queue, status_router
from multiq.contrib.starlette import exception_handlers, lifespan, status_route

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from starlette.websockets import WebSocket


class Shop:
    """An app with tasks, and its web application."""

    def __init__(self, url: str, **options: Any) -> None:
        self.app = app = multiq.App(url)

        @app.task(queue="mail", keep=60, max_attempts=1)
        def send(order: int) -> dict[str, int]:
            if order < 0:
                raise ValueError(f"no order {order}: password=secret")
            if order == 0:
                raise multiq.BuryJob("no such order")
            return {"order": order}

        self.send = send
        self.web = FastAPI(lifespan=lifespan(app), exception_handlers=exception_handlers)

        @self.web.post("/orders/{order}", status_code=202)
        async def place(order: int) -> dict[str, str]:
            return {"job": (await send.aenqueue(order)).ref}

        @self.web.get("/alive")
        async def alive() -> bool:
            return True

        self.web.include_router(status_router(**({"dependencies": []} | options)), prefix="/jobs")

    def work(self) -> None:
        multiq.Worker(self.app, stop_when_empty=True).run()


@pytest.fixture
def shop() -> Iterator[Shop]:
    shop = Shop("memory://")
    yield shop
    shop.app.close()


def seen(client: TestClient, ref: str) -> dict[str, Any]:
    answer = client.get(f"/jobs/{ref}")
    assert answer.status_code == 200, answer.text
    assert answer.headers["cache-control"] == "no-store"
    view: dict[str, Any] = answer.json()
    assert view["ref"] == ref
    return view


# --- the lifespan ---


def test_the_lifespan_begins_before_the_application_s_own_and_ends_after_it() -> None:
    # given a lifespan of the application's own, which enqueues when it begins and when it ends
    app = multiq.App("memory://")
    told: list[object] = []

    @asynccontextmanager
    async def own(_web: Starlette) -> AsyncIterator[dict[str, str]]:
        told.append(app.has_backend)
        await app.queue().aenqueue("begin")
        yield {"database": "open"}
        await app.queue().aenqueue("end")
        told.append(await app.queue().astats())

    async def show(request: Request) -> JSONResponse:
        return JSONResponse({"database": request.state.database, "url": request.state.multiq.url})

    # when the application runs
    with TestClient(Starlette(routes=[Route("/", show)], lifespan=lifespan(app, own))) as client:
        answer = client.get("/").json()

    # then its state has the values of both, and both enqueues were made
    assert answer == {"database": "open", "url": "memory://"}
    assert told[0] is True
    assert isinstance(told[1], multiq.QueueStats)
    assert told[1].ready == 2
    app.close()


def test_a_lifespan_that_is_a_plain_async_generator_is_composed_too() -> None:
    app = multiq.App("memory://")
    told = []

    async def own(_web: Starlette) -> AsyncIterator[None]:
        told.append("begin")
        yield
        told.append("end")

    with TestClient(Starlette(lifespan=lifespan(app, own))):  # type: ignore[arg-type]
        assert told == ["begin"]
    assert told == ["begin", "end"]
    app.close()


def test_a_url_that_cannot_be_used_fails_the_start(tmp_path: Path) -> None:
    app = multiq.App("nonsense://localhost")
    with pytest.raises(errors.BackendNotInstalled), TestClient(Starlette(lifespan=lifespan(app))):
        pass


def test_a_store_that_is_down_does_not_fail_the_start() -> None:
    app = multiq.App("redis://127.0.0.1:1")
    with TestClient(FastAPI(lifespan=lifespan(app))) as client:
        assert client.get("/docs").status_code == 200


def test_the_lifespan_of_something_else_than_an_app_is_refused() -> None:
    with pytest.raises(errors.ArgumentsInvalid, match=r"lifespan must have a multiq\.App, got 'redis://localhost'"):
        lifespan("redis://localhost")  # type: ignore[arg-type]
    with pytest.raises(errors.ArgumentsInvalid, match=r"inner must be a lifespan \(a function .*\), got 5"):
        lifespan(multiq.App("memory://"), 5)  # type: ignore[arg-type]


def test_enqueues_that_run_when_the_application_ends_are_stored(tmp_path: Path) -> None:
    # given an application whose endpoint does not wait for its enqueues
    app = multiq.App(f"sqlite:///{tmp_path}/jobs.db")
    begun: set[asyncio.Task[Any]] = set()

    async def start(_request: Request) -> JSONResponse:
        begun.update(asyncio.ensure_future(app.queue().aenqueue(number)) for number in range(50))
        await asyncio.sleep(0)
        return JSONResponse(None)

    # when it ends directly after the request
    with TestClient(Starlette(routes=[Route("/", start)], lifespan=lifespan(app))) as client:
        client.get("/")

    # then all jobs are stored
    assert app.queue().stats().ready == 50
    app.close()


def test_an_application_ends_although_the_store_hangs(caplog: pytest.LogCaptureFixture) -> None:
    with RedisServer() as server:
        # given an enqueue to a server that does not answer for a minute
        app = multiq.App(f"{server.url}?timeout=60")
        app.queue().enqueue("first")
        begun = []

        async def start(_request: Request) -> JSONResponse:
            begun.append(asyncio.ensure_future(app.queue().aenqueue("second")))
            await asyncio.sleep(0.1)
            return JSONResponse(None)

        web = Starlette(routes=[Route("/", start)], lifespan=lifespan(app, close_within=0.2))
        server.pause()

        # when the application ends
        with caplog.at_level(logging.WARNING, "multiq.web"), TestClient(web) as client:
            client.get("/")

        # then it does not wait for the server
        assert begun[0].done()
        assert "ends without waiting" in caplog.text
        server.go_on()
        asyncio.run(app.aclose())


# --- dependencies ---


def test_endpoints_get_the_app_and_its_queues_by_dependencies(shop: Shop) -> None:
    @shop.web.get("/mail")
    async def mail(
        queue: Annotated[multiq.Queue, Depends(get_queue("mail"))], app: AppDep
    ) -> tuple[str, int | None, bool]:
        return queue.name, (await queue.astats()).ready, app is shop.app

    with TestClient(shop.web) as client:
        client.post("/orders/7")
        assert client.get("/mail").json() == ["mail", 1, True]


def test_a_test_can_override_the_app(shop: Shop) -> None:
    @shop.web.get("/mail")
    async def mail(queue: Annotated[multiq.Queue, Depends(get_queue("mail"))]) -> int | None:
        await queue.aenqueue("letter")
        return (await queue.astats()).ready

    with multiq.App("memory://") as other, TestClient(shop.web) as client:
        shop.web.dependency_overrides[get_app] = lambda: other
        assert client.get("/mail").json() == 1
        asyncio.run(other.aclose())
        assert (other.queue("mail").stats().ready, shop.app.queue("mail").stats().ready) == (1, 0)


def test_the_fake_of_the_testing_kit_has_what_requests_enqueue(shop: Shop) -> None:
    with testing.fake(shop.app) as jobs, TestClient(shop.web) as client:
        ref = client.post("/orders/7").json()["job"]
        jobs.assert_enqueued(shop.send, (7,))
        assert seen(client, ref)["status"] == "queued"
        jobs.run()
        assert seen(client, ref)["result"] == {"order": 7}
        jobs.advance(61)
        assert client.get(f"/jobs/{ref}").status_code == 404


def test_a_client_without_a_lifespan_is_told_what_is_missing(shop: Shop) -> None:
    with pytest.raises(multiq.MultiqError, match="lifespan=lifespan"):
        TestClient(shop.web).get("/jobs/mail~1")


def test_a_mounted_application_uses_the_app_of_the_outer_one(shop: Shop) -> None:
    handle = shop.send.enqueue(7)
    outer = Starlette(routes=[Mount("/api", shop.web)], lifespan=lifespan(shop.app))
    with TestClient(outer) as client:
        assert client.get(f"/api/jobs/{handle.ref}").json()["status"] == "queued"


def test_an_async_client_needs_only_the_lifespan_context(shop: Shop) -> None:
    async def main() -> None:
        async with (
            shop.web.router.lifespan_context(shop.web),
            AsyncClient(transport=ASGITransport(shop.web), base_url="http://shop") as client,
        ):
            made = await asyncio.gather(*(client.post(f"/orders/{number}") for number in range(1, 21)))
            refs = {answer.json()["job"] for answer in made}
            assert len(refs) == 20
            assert {(await client.get(f"/jobs/{ref}")).json()["status"] for ref in refs} == {"queued"}

    asyncio.run(main())


# --- the status of jobs ---


def test_the_status_says_where_a_job_is_and_what_came_of_it(shop: Shop) -> None:
    with TestClient(shop.web) as client:
        ref = client.post("/orders/7").json()["job"]
        assert seen(client, ref) == {"ref": ref, "status": "queued", "progress": None, "result": None, "reason": None}
        shop.work()
        assert seen(client, ref)["status"] == "done"
        assert seen(client, ref)["result"] == {"order": 7}


def test_the_status_of_a_running_job_has_its_progress(shop: Shop) -> None:
    views: list[dict[str, Any]] = []
    with TestClient(shop.web) as client:

        @shop.app.task
        def convert() -> None:
            job = multiq.current_job()
            job.progress(0.25, "page 1 of 4")
            while not (views and views[-1]["progress"]):
                views.append(seen(client, shop.app.job(job.queue, job.id).ref))

        convert.enqueue()
        shop.work()
    assert views[-1]["status"] == "running"
    assert views[-1]["progress"] == {"fraction": 0.25, "message": "page 1 of 4"}


def test_a_memo_of_another_program_does_not_hide_the_status(shop: Shop) -> None:
    # given a job with a memo that is not multiq's
    with TestClient(shop.web) as client:
        ref = client.post("/orders/7").json()["job"]
        consumer = shop.app.backend.consumer(["mail"])
        (lease,) = consumer.reserve(1, 0)
        consumer.settle([Release(lease, after=After(memo=b"page 1"))])
        consumer.close()

        # then the answer has the status, without a progress
        assert seen(client, ref) == {"ref": ref, "status": "queued", "progress": None, "result": None, "reason": None}


@pytest.mark.parametrize(
    ("kind", "reasons", "reason"),
    [
        ("done", False, "the outcome cannot be read"),
        ("cancelled", False, None),
        ("cancelled", True, "the outcome cannot be read"),
    ],
)
def test_an_outcome_of_another_program_does_not_hide_the_status(kind: Any, reasons: bool, reason: str | None) -> None:
    # given a job that is gone, with an outcome that is not multiq's
    shop = Shop("memory://", reasons=reasons)
    with TestClient(shop.web) as client:
        ref = client.post("/orders/7").json()["job"]
        consumer = shop.app.backend.consumer(["mail"])
        (lease,) = consumer.reserve(1, 0)
        consumer.settle([Ack(lease, After(keep=60, outcome=b"done, pa\xdfword", kind=kind))])
        consumer.close()

        # then the answer has the status, without a result
        assert seen(client, ref) == {"ref": ref, "status": kind, "progress": None, "result": None, "reason": reason}
    shop.app.close()


@pytest.mark.parametrize("reasons", [False, True])
def test_the_reason_of_a_failure_is_shown_only_on_request(reasons: bool) -> None:
    shop = Shop("memory://", reasons=reasons)
    with TestClient(shop.web) as client:
        failed, late = shop.send.enqueue(-1), shop.send.options(delay=60).enqueue(1)
        shop.work()
        late.cancel(reason="the customer is gone")
        view, cancelled = seen(client, failed.ref), seen(client, late.ref)
    shop.app.close()
    assert (view["status"], cancelled["status"]) == ("failed", "cancelled")
    assert view["reason"] == ("ValueError: no order -1: password=secret" if reasons else None)
    assert cancelled["reason"] == ("the customer is gone" if reasons else None)


def test_a_job_that_is_done_without_a_value_says_why(shop: Shop) -> None:
    @shop.app.task(keep=60)
    def odd() -> Any:
        return {1, 2}

    handle = odd.enqueue()
    shop.work()
    with TestClient(shop.web) as client:
        view = seen(client, handle.ref)
    assert (view["status"], view["result"]) == ("done", None)
    assert "type set" in view["reason"]


@pytest.mark.parametrize(
    "ref",
    [
        "mail~0199a8b2-0000-7000-8000-000000000000",
        "mail",
        "~",
        "mail~~%%",
        "mail~~!",
        "%00",
        "a~b~c",
        "x" * 2000,
        "é~1",
    ],
)
def test_a_job_that_does_not_exist_is_not_found(shop: Shop, ref: str) -> None:
    with TestClient(shop.web) as client:
        answer = client.get(f"/jobs/{ref}")
    assert answer.status_code == 404
    assert answer.json() == {"detail": "There is no such job, or its outcome is no longer kept."}


def test_a_job_whose_outcome_is_not_kept_is_not_found_when_it_is_done(shop: Shop) -> None:
    handle = shop.send.options(keep=0).enqueue(7)
    with TestClient(shop.web) as client:
        assert seen(client, handle.ref)["status"] == "queued"
        shop.work()
        assert client.get(f"/jobs/{handle.ref}").status_code == 404


def test_only_the_jobs_of_the_named_queues_are_shown() -> None:
    shop = Shop("memory://", queues=["mail"])
    ours, other = shop.send.enqueue(1), shop.app.queue("secrets").enqueue("plans")
    with TestClient(shop.web) as client:
        assert seen(client, ours.ref)["status"] == "queued"
        assert client.get(f"/jobs/{other.ref}").status_code == 404
    shop.app.close()


def test_the_jobs_of_multiq_itself_are_not_shown(shop: Shop) -> None:
    shop.app.backend.enqueue("multiq.down", [NewJob(b"flag", "flag")])
    with TestClient(shop.web) as client:
        assert client.get(f"/jobs/{shop.app.job('multiq.down', 'flag').ref}").status_code == 404


def test_a_dependency_decides_who_may_see_a_job() -> None:
    owners: dict[str, str] = {}

    async def may_see(ref: str, x_user: Annotated[str, Header()] = "") -> None:
        if owners.get(ref) != x_user:
            raise HTTPException(404)

    shop = Shop("memory://", dependencies=[Depends(may_see)])
    with TestClient(shop.web) as client:
        ref = client.post("/orders/7").json()["job"]
        owners[ref] = "ann"
        assert client.get(f"/jobs/{ref}").status_code == 404
        assert client.get(f"/jobs/{ref}", headers={"x-user": "eve"}).status_code == 404
        assert client.get(f"/jobs/{ref}", headers={"x-user": "ann"}).json()["status"] == "queued"
    shop.app.close()


def test_a_status_router_must_be_told_who_may_see_jobs() -> None:
    def may_see() -> None: ...

    with pytest.raises(TypeError, match="dependencies"):
        status_router()  # type: ignore[call-arg]
    with pytest.raises(errors.ArgumentsInvalid, match="dependencies must be a list"):
        status_router(dependencies=Depends(get_app))
    with pytest.raises(errors.OptionInvalid, match="queues must be a list of names, got 'mail'"):
        status_router(dependencies=[], queues="mail")
    with pytest.raises(errors.OptionInvalid, match="queues must be a list of names, got 5"):
        status_router(dependencies=[], queues=5)  # type: ignore[arg-type]
    with pytest.raises(errors.ArgumentsInvalid, match=r"dependencies must be a list like \[Depends\(may_see\)\], got"):
        status_router(dependencies=[may_see])


def test_starlette_s_route_asks_a_function_who_may_see_a_job(shop: Shop) -> None:
    def may_see(request: Request, handle: multiq.JobHandle) -> bool:
        return handle.queue == "mail" and request.headers.get("x-user") == "ann"

    async def may_see_later(request: Request, handle: multiq.JobHandle) -> bool:
        await asyncio.sleep(0)
        return may_see(request, handle)

    handle = shop.send.enqueue(7)
    for may in (may_see, may_see_later):
        web = Starlette(routes=[status_route("/{ref}", may=may)], lifespan=lifespan(shop.app))
        with TestClient(web) as client:
            assert client.get(f"/{handle.ref}").status_code == 404
            assert client.get(f"/{handle.ref}", headers={"x-user": "ann"}).json()["status"] == "queued"
    with pytest.raises(errors.ArgumentsInvalid, match=r"path must have \{ref\}, got '/jobs'"):
        status_route("/jobs", may=None)
    with pytest.raises(errors.ArgumentsInvalid, match=r"path must have \{ref\}, got None"):
        status_route(None, may=None)  # type: ignore[arg-type]


STORE_ROWS = [pytest.param(name, marks=[] if name == "sqlite" else pytest.mark.long) for name in STORES]


@pytest.mark.parametrize("store", STORE_ROWS)
def test_the_status_is_right_on_each_store(store: str, tmp_path: Path) -> None:
    with STORES[store](tmp_path) as url:
        shop = Shop(url, reasons=True)
        has_outcomes = shop.app.backend.declared.outcomes
        if not has_outcomes:
            shop.send.default = shop.send.options(keep=0)._options
        with TestClient(shop.web) as client:
            done, failed = client.post("/orders/7").json()["job"], client.post("/orders/0").json()["job"]
            assert seen(client, done)["status"] == "queued"
            shop.work()
            assert seen(client, failed)["status"] == "failed"
            if has_outcomes:
                assert seen(client, failed)["reason"] == "no such order"
                assert seen(client, done)["result"] == {"order": 7}
            else:
                assert client.get(f"/jobs/{done}").status_code == 404
        shop.app.close()


# --- a store that does not answer ---


def test_a_hung_store_is_answered_with_503_and_holds_up_nothing_else() -> None:
    with RedisServer() as server:
        shop = Shop(f"{server.url}?timeout=1", timeout=0.5)
        handle = shop.send.enqueue(1)
        finished: list[str] = []

        async def main() -> None:
            async with (
                shop.web.router.lifespan_context(shop.web),
                AsyncClient(transport=ASGITransport(shop.web), base_url="http://shop") as client,
            ):
                # given a server that does not answer
                server.pause()

                async def ask(method: str, path: str) -> Any:
                    answer = await client.request(method, path)
                    finished.append(path)
                    return answer

                # when some requests need the server, and another request does not
                asked = [ask("GET", f"/jobs/{handle.ref}") for _ in range(5)]
                asked += [ask("POST", f"/orders/{number}") for number in range(5)]
                answers = await asyncio.gather(*asked, ask("GET", "/alive"))
                server.go_on()

                # then the first ones are answered with 503, and the other one at once
                assert [answer.status_code for answer in answers] == [503] * 10 + [200]
                assert finished[0] == "/alive"
                assert answers[0].json() == {"detail": "The job queue does not answer. Try again later."}
                assert answers[0].headers["retry-after"] == "5"
                assert server.url not in "".join(answer.text for answer in answers)

        asyncio.run(main())
        shop.app.close()


def test_an_uncertain_enqueue_says_so_and_asks_for_no_repetition() -> None:
    with RedisServer() as server:
        shop = Shop(f"{server.url}?timeout=1")
        shop.send.enqueue(1)  # connects
        with TestClient(shop.web) as client:
            client.post("/orders/1")
            server.pause()
            answer = client.post("/orders/2")
            server.go_on()
        shop.app.close()
    assert answer.status_code == 503
    assert answer.json()["detail"].endswith("It is unknown whether the job was enqueued.")
    assert "retry-after" not in answer.headers


def test_a_websocket_is_closed_if_the_store_does_not_answer() -> None:
    app = multiq.App("redis://127.0.0.1:1")

    async def talk(socket: WebSocket) -> None:
        await socket.accept()
        await app.queue().aenqueue("letter")

    web = Starlette(routes=[WebSocketRoute("/", talk)], lifespan=lifespan(app), exception_handlers=exception_handlers)
    with TestClient(web) as client, client.websocket_connect("/") as socket:
        with pytest.raises(WebSocketDisconnect) as caught:
            socket.receive_text()
        assert caught.value.code == 1013


# --- a server's process ---

_PROGRAM = """
import sys, multiq, uvicorn
from fastapi import FastAPI
from multiq.contrib.fastapi import lifespan, exception_handlers
jobs = multiq.App(sys.argv[1])
web = FastAPI(lifespan=lifespan(jobs), exception_handlers=exception_handlers)
@web.post("/{number}")
async def place(number: int) -> str:
    return (await jobs.queue("orders").aenqueue(number)).id
uvicorn.run(web, port=0, log_level="info")
"""


@pytest.mark.long
def test_a_server_that_is_told_to_end_has_stored_what_it_answered(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    log = tmp_path / "log"
    with log.open("w") as out:
        server = subprocess.Popen([sys.executable, "-c", _PROGRAM, url], stdout=out, stderr=out)
    try:
        while "running on http" not in (text := log.read_text()):
            assert server.poll() is None, text
            time.sleep(0.02)
        base = text.partition("running on ")[2].split()[0]
        answered: list[str] = []

        async def main() -> None:
            async with AsyncClient(base_url=base) as client:

                async def customer() -> None:
                    with contextlib.suppress(Exception):
                        while True:
                            answer = await client.post("/7")
                            if answer.status_code == 200:
                                answered.append(answer.json())
                                if len(answered) == 100:
                                    server.terminate()

                await asyncio.gather(*(customer() for _ in range(20)))

        # when it gets SIGTERM in the middle of many requests
        asyncio.run(main())
        assert server.wait(60) in {0, -15}, log.read_text()
    finally:
        server.kill()
        server.wait()

    # then each job whose request was answered is in the queue
    assert len(answered) >= 100
    with multiq.App(url) as app:
        stored = {job.id for job in app.queue("orders").jobs("ready", limit=10_000)}
    assert set(answered) <= stored
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize("name", ["fastapi", "starlette"])
def test_a_missing_library_is_named_with_its_extra(name: str) -> None:
    code = f"import sys; sys.modules['{name}'] = None; import multiq.contrib.{name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"pip install 'multiq[{name}]'" in done.stderr
    assert "ExtraNotInstalled" in done.stderr
