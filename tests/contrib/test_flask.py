"""multiq in applications of Flask: the extension, its configuration, its command line, and the status of jobs."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import weakref
from typing import TYPE_CHECKING, Any

import flask
import pytest
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from servers.process import until
from servers.redis import RedisServer
from stores import STORES

import multiq
from multiq import errors, testing
from multiq.contrib.flask import Multiq

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from flask.testing import FlaskClient


class Shop:
    """An extension with tasks, and an application factory."""

    def __init__(self) -> None:
        self.queue = Multiq()
        self.seen: list[tuple[int, str]] = []

        @self.queue.task(queue="mail", keep=60, max_attempts=1)
        def send(order: int) -> dict[str, Any]:
            if order < 0:
                raise ValueError(f"no order {order}: password=secret")
            return {"order": order, "web": flask.current_app.name}

        self.send = send

    def create(self, name: str = "shop", url: str = "memory://", **options: Any) -> Flask:
        web = Flask(name)
        web.config["MULTIQ_URL"] = url
        self.queue.init_app(web)

        @web.post("/orders/<int:order>")
        def place(order: int) -> dict[str, str]:
            return {"job": self.send.enqueue(order).ref}

        web.register_blueprint(self.queue.status_blueprint(**({"may": None} | options)), url_prefix="/jobs")
        return web

    def work(self, web: Flask, **options: Any) -> None:
        multiq.Worker(web.extensions["multiq"], stop_when_empty=True, **options).run()


@pytest.fixture
def shop() -> Iterator[Shop]:
    shop = Shop()
    yield shop
    for app in shop.queue.apps:
        app.close()


def seen(client: FlaskClient, ref: str) -> dict[str, Any]:
    answer = client.get(f"/jobs/{ref}")
    assert answer.status_code == 200, answer.text
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.json is not None
    return dict(answer.json)


# --- the extension ---


def test_a_task_enqueues_on_the_application_that_the_factory_made(shop: Shop) -> None:
    web = shop.create()
    client = web.test_client()
    ref = client.post("/orders/7").json["job"]  # type: ignore[index]
    assert seen(client, ref)["status"] == "queued"
    shop.work(web)
    assert seen(client, ref)["result"] == {"order": 7, "web": "shop"}


def test_a_task_of_two_applications_enqueues_on_the_current_one(shop: Shop) -> None:
    # given two applications of one extension
    one, two = shop.create("one"), shop.create("two")

    # when each gets requests
    for web in (one, two, two):
        assert web.test_client().post("/orders/7").status_code == 200

    # then each has its own jobs, and runs them in its own context
    assert [web.extensions["multiq"].queue("mail").stats().ready for web in (one, two)] == [1, 2]
    with two.app_context():
        assert shop.queue.app is two.extensions["multiq"]
        handle = shop.send.enqueue(1)
    shop.work(two)
    assert handle.result(0)["web"] == "two"
    assert one.extensions["multiq"].queue("mail").stats().ready == 1

    # and outside of both contexts, an enqueue does not choose an application
    with pytest.raises(errors.TaskNotIncluded, match="included in 2 apps"):
        shop.send.enqueue(1)
    with pytest.raises(multiq.MultiqError, match="2 applications"):
        _ = shop.queue.app


def test_an_application_that_is_excluded_is_collected(shop: Shop) -> None:
    web = shop.create()
    with web.app_context():
        shop.send.enqueue(1)
    web.extensions["multiq"].exclude(shop.queue)
    web.extensions["multiq"].close()
    known = weakref.ref(web)
    del web
    gc.collect()
    assert known() is None


def test_an_extension_without_an_application_says_so() -> None:
    with pytest.raises(multiq.MultiqError, match=r"init_app\(web\) first"):
        _ = Multiq().app


def test_an_application_takes_one_extension(shop: Shop) -> None:
    web = shop.create()
    with pytest.raises(errors.OptionInvalid, match="at most one extension of multiq, got a second one"):
        shop.queue.init_app(web)
    with pytest.raises(errors.ArgumentsInvalid, match="must have a Flask application, got 'shop'"):
        shop.queue.init_app("shop")  # type: ignore[arg-type]


def test_the_extension_can_be_made_with_its_application() -> None:
    web = Flask("shop")
    web.config["MULTIQ_URL"] = "memory://"
    queue = Multiq(web, prefix="shop")

    @queue.task
    def late() -> str:
        return flask.current_app.name

    with testing.sync(queue.app):
        late.enqueue()
    assert late.name == "shop.late"
    queue.app.close()


# --- the configuration ---


def test_the_configuration_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIQ_URL", "sqlite:///other.db")
    monkeypatch.setenv("MULTIQ_MAX_BODY", "1000")
    web = Flask("shop")
    web.config.update(
        MULTIQ_URL="memory://",
        MULTIQ_WORKER_THREADS=4,
        MULTIQ_WORKER_QUEUES={"high": 3, "low": 1},
        MULTIQ_LOG_JOBS=True,
        MULTIQ_STORE=None,
    )
    settings = Multiq(web).app.settings
    assert (settings.url, settings.max_body, settings.worker.threads) == ("memory://", 1000, 4)
    assert (settings.worker.queues, settings.log.jobs) == ({"high": 3, "low": 1}, True)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MULTIQ_WORKER_THREADS", "many", "or the environment: MULTIQ_WORKER_THREADS: must be a whole number"),
        ("MULTIQ_WORKER_THREAD", 4, r"app.config: MULTIQ_WORKER_THREAD: unknown key \(did you mean MULTIQ_WORKER_T"),
    ],
)  # fmt: skip
def test_a_wrong_key_of_the_configuration_is_named(name: str, value: object, message: str) -> None:
    web = Flask("shop")
    web.config[name] = value
    with pytest.raises(errors.SettingsInvalid, match=message):
        Multiq(web)


def test_keys_of_the_configuration_that_are_no_texts_are_not_multiq_s() -> None:
    web = Flask("shop")
    web.config.update({"MULTIQ_URL": "memory://", 5: "five", None: "none"})
    assert Multiq(web).app.url == "memory://"


# --- jobs ---


@pytest.mark.parametrize("mode", [{}, {"threads": 2}, {"concurrency": 2}], ids=str)
def test_each_job_has_an_application_context_of_its_own(shop: Shop, mode: dict[str, int]) -> None:
    web = shop.create()
    torn_down: list[BaseException | None] = []
    web.teardown_appcontext(torn_down.append)

    @shop.queue.task(max_attempts=1)
    def plain(number: int) -> None:
        assert not hasattr(flask.g, "number")
        flask.g.number = number
        shop.seen.append((number, flask.current_app.name))
        if number == 3:
            raise LookupError("three")

    @shop.queue.task
    async def coroutine(number: int) -> None:
        assert not hasattr(flask.g, "number")
        flask.g.number = number
        shop.seen.append((number, flask.current_app.name))

    # when jobs run
    for number in range(1, 4):
        plain.enqueue(number)
        coroutine.enqueue(10 + number)
    shop.work(web, **mode)

    # then each had a context, which was torn down with the job's error
    assert sorted(shop.seen) == [(number, "shop") for number in (1, 2, 3, 11, 12, 13)]
    assert len(torn_down) == 6
    assert [str(error) for error in torn_down if error is not None] == ["three"]
    assert not flask.has_app_context()


def test_a_session_of_flask_sqlalchemy_ends_with_its_job(shop: Shop, tmp_path: Path) -> None:
    # given a model, and a task that leaves its session with an uncommitted row
    database = SQLAlchemy()
    web = shop.create()
    web.config["SQLALCHEMY_DATABASE_URI"] = f"sqlite:///{tmp_path}/shop.db"
    database.init_app(web)
    orders = database.Table("orders", database.Column("number", database.Integer, primary_key=True))
    with web.app_context():
        database.create_all()

    @shop.queue.task(max_attempts=1)
    def add(number: int, *, commit: bool) -> int:
        database.session.execute(orders.insert().values(number=number))
        if commit:
            database.session.commit()
        return len(database.session.execute(orders.select()).all())

    # when it runs twice on the same thread, then the second session does not see the row of the first session
    first = add.options(keep=60).enqueue(1, commit=False)
    second = add.options(keep=60).enqueue(2, commit=True)
    shop.work(web)
    assert (first.result(0), second.result(0)) == (1, 1)
    with web.app_context():
        database.engine.dispose()


# --- the status of jobs ---


def test_the_reason_of_a_failure_is_shown_only_on_request(shop: Shop) -> None:
    for reasons in (False, True):
        web = shop.create(reasons=reasons)
        client = web.test_client()
        ref = client.post("/orders/0").json["job"]  # type: ignore[index]
        with web.app_context():
            failed = shop.send.enqueue(-1)
        shop.work(web)
        assert seen(client, ref)["status"] == "done"
        view = seen(client, failed.ref)
        assert view["status"] == "failed"
        assert view["reason"] == ("ValueError: no order -1: password=secret" if reasons else None)


def test_a_function_decides_who_may_see_a_job(shop: Shop) -> None:
    web = shop.create(may=lambda handle: handle.queue == "mail" and flask.request.headers.get("X-User") == "ann")
    client = web.test_client()
    ref = client.post("/orders/7").json["job"]  # type: ignore[index]
    assert client.get(f"/jobs/{ref}").status_code == 404
    assert client.get(f"/jobs/{ref}", headers={"X-User": "ann"}).json["status"] == "queued"  # type: ignore[index]


@pytest.mark.parametrize("ref", ["mail~1", "mail", "~", "mail~~!", "a b", "x" * 999, "multiq.down~1"])
def test_a_job_that_does_not_exist_is_not_found(shop: Shop, ref: str) -> None:
    answer = shop.create().test_client().get(f"/jobs/{ref}")
    assert answer.status_code == 404
    assert answer.json == {"detail": "There is no such job, or its outcome is no longer kept."}


def test_a_status_blueprint_must_be_told_who_may_see_jobs(shop: Shop) -> None:
    with pytest.raises(TypeError, match="may"):
        shop.queue.status_blueprint()  # type: ignore[call-arg]
    with pytest.raises(errors.ArgumentsInvalid, match="may must be a function"):
        shop.queue.status_blueprint(may=True)  # type: ignore[arg-type]
    with pytest.raises(errors.OptionInvalid, match="queues must be a list of names, got 5"):
        shop.queue.status_blueprint(may=None, queues=5)  # type: ignore[arg-type]
    for name in ("", "a.b", 5):
        with pytest.raises(errors.ArgumentsInvalid, match="name must be a text without dots, got"):
            shop.queue.status_blueprint(may=None, name=name)  # type: ignore[arg-type]


def test_the_fake_of_the_testing_kit_has_what_requests_enqueue(shop: Shop) -> None:
    web = shop.create()
    with testing.fake(shop.queue.app) as jobs:
        ref = web.test_client().post("/orders/7").json["job"]  # type: ignore[index]
        jobs.assert_enqueued(shop.send, (7,))
        jobs.run()
        assert seen(web.test_client(), ref)["status"] == "done"


# --- a store that does not answer ---


def test_a_hung_store_is_answered_with_503(shop: Shop) -> None:
    with RedisServer() as server:
        web = shop.create(url=f"{server.url}?timeout=1")
        client = web.test_client()
        ref = client.post("/orders/7").json["job"]  # type: ignore[index]
        server.pause()
        status, order = client.get(f"/jobs/{ref}"), client.post("/orders/8")
        server.go_on()
    assert (status.status_code, order.status_code) == (503, 503)
    assert status.headers["Retry-After"] == "5"
    assert server.url not in status.text + order.text


def test_the_application_s_own_page_for_503_is_shown(shop: Shop) -> None:
    web = shop.create(url="redis://127.0.0.1:1")
    web.register_error_handler(503, lambda error: (f"Sorry! {error.description}", 503))
    answer = web.test_client().post("/orders/8")
    assert (answer.status_code, answer.text) == (503, "Sorry! The job queue does not answer. Try again later.")


# --- the command line ---

_MODULE = """
import os
from flask import Flask, current_app
from multiq.contrib.flask import Multiq

queue = Multiq(prefix="shop")

@queue.task(keep=60)
def tell(word):
    with open("told", "a") as file:
        print(word, current_app.name, os.getpid() == queue.starter, file=file)
    return word

def create_app():
    web = Flask("shop_web")
    web.config.from_prefixed_env()
    web.config.setdefault("MULTIQ_URL", "sqlite:///own.db")
    queue.init_app(web)
    queue.starter = os.getpid()
    return web
"""


def flask_command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "shop.py").write_text(_MODULE)
    command = [sys.executable, "-m", "flask", "--app", "shop", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=100)


@pytest.mark.long
def test_flask_multiq_runs_jobs_and_looks_at_queues(tmp_path: Path) -> None:
    # given a job in the store that only the application's configuration names
    enqueued = flask_command(tmp_path, "multiq", "enqueue", "shop.tell", "--args", '["hello"]')
    assert enqueued.returncode == 0, enqueued.stderr
    assert (tmp_path / "own.db").exists()
    assert "default" in flask_command(tmp_path, "multiq", "stats").stdout
    added = flask_command(tmp_path, "multiq", "schedules", "add", "x", "shop.tell", "--every", "1h", "--args", '["x"]')
    assert "stored schedule x" in added.stdout, added.stderr

    # when a worker is started by flask, with options
    worked = flask_command(tmp_path, "multiq", "worker", "--stop-when-empty", "-p", "1", "-t", "2")

    # then it has run the job, in a child, in a context of the application
    assert worked.returncode == 0, worked.stderr
    assert (tmp_path / "told").read_text() == "hello shop_web False\n"
    assert "shop_web:(Flask)" in worked.stderr + worked.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["worker", "--check"], 0, ""),
        (["--help"], 0, "Usage: flask multiq"),
        (["worker", "--help"], 0, "Usage: flask multiq worker"),
        (["nonsense"], 2, "there is no command 'nonsense'"),
        (["peek", "1"], 3, "no queue has job 1"),
        (["-c", "memory://", "stats"], 0, ""),
    ],
)
@pytest.mark.long
def test_flask_multiq_has_the_options_and_exit_codes_of_multiq(
    tmp_path: Path, arguments: list[str], code: int, told: str
) -> None:
    multiq.App(f"sqlite:///{tmp_path}/own.db").queue().stats()
    done = flask_command(tmp_path, "multiq", *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    assert told in done.stdout + done.stderr


@pytest.mark.parametrize("store", [pytest.param(name, marks=pytest.mark.long) for name in STORES if "+" not in name])
def test_the_status_is_right_on_each_store(shop: Shop, store: str, tmp_path: Path) -> None:
    with STORES[store](tmp_path) as url:
        web = shop.create(url=url)
        client = web.test_client()
        if not shop.queue.app.backend.declared.outcomes:
            shop.send.default = shop.send.options(keep=0)._options
        done = client.post("/orders/7").json["job"]  # type: ignore[index]
        assert seen(client, done)["status"] == "queued"
        shop.work(web)
        if shop.queue.app.backend.declared.outcomes:
            assert seen(client, done)["result"]["order"] == 7
        else:
            assert client.get(f"/jobs/{done}").status_code == 404
        shop.queue.app.close()


@pytest.mark.long
def test_a_worker_of_flask_reloads_the_code(tmp_path: Path) -> None:
    # given a worker that flask has started
    (tmp_path / "shop.py").write_text(_MODULE)
    log = tmp_path / "log"
    with log.open("w") as out:
        worker = subprocess.Popen(
            [sys.executable, "-m", "flask", "--app", "shop", "multiq", "worker"], cwd=tmp_path, stdout=out, stderr=out
        )
    try:
        with multiq.App(f"sqlite:///{tmp_path}/own.db") as app:
            queue, told = app.queue(), tmp_path / "told"
            envelope = {"multiq": 1, "task": "shop.tell", "args": ["one"], "kwargs": {}}
            queue.enqueue(envelope)
            until(lambda: told.exists() and told.read_text(), "the first job ran")

            # when the code has changed, and it gets SIGHUP
            (tmp_path / "shop.py").write_text(_MODULE.replace("print(word,", "print(word * 2,"))
            worker.send_signal(signal.SIGHUP)
            until(lambda: "reload" in log.read_text(), "the worker reloads")
            envelope["args"] = ["two"]

            # then jobs run with the new code
            def is_new() -> bool:
                queue.enqueue(envelope)
                return "twotwo" in told.read_text()

            until(is_new, "the new code runs")
        worker.terminate()
        assert worker.wait(60) == 0, log.read_text()
        assert "Traceback" not in log.read_text()
    finally:
        worker.kill()
        worker.wait()


def test_a_missing_library_is_named_with_its_extra() -> None:
    code = "import sys; sys.modules['flask'] = None; import multiq.contrib.flask"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'multiq[flask]'" in done.stderr
