"""A worker stores the limits of its app's code, and stores them again after the store has lost its data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from processes import until, worker
from servers.redis import RedisServer
from stores import PAIRED, PAIRS, STORES

import multiq
from multiq.backend import Drop
from multiq.errors import BackendUnavailable
from multiq.worker.processes import stored_limits
from multiq.worker.processes.stored_limits import StoredLimits

if TYPE_CHECKING:
    from pathlib import Path


def program(url: str) -> multiq.App:
    app = multiq.App(url)

    @app.task(name="one", queue="mail", limits=multiq.Limit("api", slots=2))
    def one() -> None: ...

    @app.task(name="two", queue="sms", limits=multiq.Limit("all", slots=3, scope="app"))
    def two() -> None: ...

    return app


def numbers(app: multiq.App) -> dict[tuple[str, str], Any]:
    return {(place, state.name): state.quota.slots for place, states in app.limits.list().items() for state in states}


def lose(app: multiq.App) -> None:
    """Delete what the store has of the limits, as a loss of all data does."""
    for place, name in numbers(app):
        app.limits.remove(place, name)
    for home in ("mail", "multiq.limits"):
        app.backend.carry_out([Drop(home, "limits")])


def fail(*_: object) -> None:
    raise BackendUnavailable("the server does not answer")


@pytest.fixture
def _looks_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_limits, "_LOOK_EVERY", 0.0)


@pytest.mark.usefixtures("_looks_always")
@pytest.mark.parametrize("store", ["sqlite", "redis", "mysql", PAIRED])
def test_limits_are_stored_again_only_if_the_store_has_lost_its_data(store: str, tmp_path: Path) -> None:
    with ({**STORES, **PAIRS})[store](tmp_path) as url:
        # Given a worker that has stored the limits of its code
        app = program(url)
        limits = StoredLimits(app)
        limits.store_if_due()
        stored = {("mail", "api"): 2, ("@app", "all"): 3}
        assert numbers(app) == stored
        # When an operator changes a limit and removes the other, then the worker changes nothing
        app.limits.set("mail", "api", slots=7)
        assert app.limits.remove("@app", "all")
        limits.store_if_due()
        assert numbers(app) == {("mail", "api"): 7}
        # When the store loses its data
        lose(app)
        assert numbers(app) == {}
        # Then the worker stores the numbers of its code again
        limits.store_if_due()
        assert numbers(app) == stored
        assert app.limits.remove("mail", "api")
        limits.store_if_due()
        assert numbers(app) == {("@app", "all"): 3}
        app.close()


@pytest.mark.usefixtures("_looks_always")
def test_a_worker_looks_again_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = program(f"sqlite:///{tmp_path}/jobs.db")
    limits = StoredLimits(app)
    limits.store_if_due()
    lose(app)
    # When the backend fails at the look for lost limits
    with monkeypatch.context() as patched:
        patched.setattr(stored_limits, "_AGAIN", 0.0)
        patched.setattr(type(app.backend), "note", fail)
        limits.store_if_due()
    # Then the next look stores them
    limits.store_if_due()
    assert numbers(app) == {("mail", "api"): 2, ("@app", "all"): 3}
    app.close()


@pytest.mark.usefixtures("_looks_always")
def test_a_limit_that_cannot_be_stored_keeps_no_other_limit_from_being_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Given two tasks that give a limit different numbers, and further limits before and after them
    app = program(f"sqlite:///{tmp_path}/jobs.db")

    @app.task(name="three", queue="mail", limits=[multiq.Limit("api", slots=9), multiq.Limit("beside", slots=4)])
    def three() -> None: ...

    @app.task(name="four", queue="mail", limits=multiq.Limit("later", slots=5))
    def four() -> None: ...

    limits = StoredLimits(app)
    limits.store_if_due()
    stored = {("mail", "api"): 2, ("@app", "all"): 3, ("mail", "beside"): 4, ("mail", "later"): 5}
    assert numbers(app) == stored
    # Then the worker logs the conflict once, and still looks for a loss of data
    lose(app)
    limits.store_if_due()
    assert numbers(app) == stored
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert "limit api must have the same numbers" in errors[0]
    app.close()


WORKER = """
import sys, multiq

app = multiq.App()

@app.task(name="one", queue="mail", limits=multiq.Limit("api", slots=2))
def one() -> None: ...

sys.exit(multiq.Worker(app, processes=%d).run())
"""


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_the_limits_of_a_running_worker_hold_again_after_redis_has_lost_its_data(
    processes: int, tmp_path: Path
) -> None:
    # Given a worker whose task has a limit, on a server that saves nothing
    with (
        RedisServer() as server,
        multiq.App(server.url) as app,
        worker(tmp_path, server.url, code=WORKER % processes),
    ):
        until(lambda: "mail" in app.limits.list("mail"))
        # When the server loses its data
        server.ask("FLUSHALL")
        assert app.limits.list("mail") == {}
        # Then the worker stores its limits again
        until(lambda: "mail" in app.limits.list("mail"))
