"""Health and metrics over HTTP: real workers answer, whatever their jobs do meanwhile."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from processes import until, worker
from prometheus_client.parser import text_string_to_metric_families
from servers.redis import RedisServer
from worker_app import app, clutch, endless, fail, nap, quick, suicide

import multiq
from multiq.errors import ExtraNotInstalled
from multiq.worker.monitoring import http_server as worker_http
from multiq.worker.monitoring.http_server import listen, parse_address

if TYPE_CHECKING:
    from collections.abc import Iterator

    from processes import WorkerProcess


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        app.connect(server.url)
        yield server
        app.close()


def port_of(process: WorkerProcess) -> int:
    """Return the port of a worker that was started with port 0."""
    until(lambda: "health and metrics are on" in process.log)
    found = re.search(r"on http://127\.0\.0\.1:(\d+)", process.log)
    assert found is not None
    return int(found[1])


def ask(port: int, path: str, method: str = "GET") -> tuple[int, bytes, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    with contextlib.closing(connection):
        connection.request(method, path)
        reply = connection.getresponse()
        return reply.status, reply.read(), reply.headers


def figures(port: int) -> dict[tuple[str, ...], float]:
    """Return every sample's value by its name and its labels."""
    status, page, _ = ask(port, "/metrics")
    assert status == 200
    return {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


@pytest.mark.long
def test_the_figures_are_those_of_all_processes_the_dead_included(tmp_path: Path, server: RedisServer) -> None:
    with worker(tmp_path, server.url, "processes=2, http=':0', kill_after=0.3") as process:
        port = port_of(process)
        jobs = "multiq_jobs_total"
        # When jobs have ended in every possible way
        quick.options(queue="elsewhere").enqueue(1)
        quick.enqueue_many([(number,) for number in range(50)])
        until(lambda: figures(port)[jobs, "done", "quick"] == 50)
        fail.enqueue(1)
        until(lambda: figures(port)[jobs, "buried", "fail"] == 1)
        suicide.enqueue(1)
        until(lambda: figures(port)[jobs, "buried", "suicide"] == 1)
        endless.enqueue(1, "stuck")
        until(lambda: figures(port)[jobs, "buried", "endless"] == 1)
        quick.enqueue(50)
        until(lambda: figures(port)[jobs, "done", "quick"] == 51)
        # Then the jobs are counted, although the processes that ran them have ended
        now = figures(port)
        assert (now[jobs, "retried", "fail"], now[jobs, "retried", "endless"]) == (2, 1)
        assert now["multiq_jobs_timed_out_total", "endless"] == 2
        assert now["multiq_jobs_crashed_total",] == now["multiq_processes_crashed_total",] == 3
        assert now["multiq_processes_replaced_total",] == 2
        assert now["multiq_job_seconds_count", "quick"] == now["multiq_job_seconds_bucket", "+Inf", "quick"] == 51
        assert 0 < now["multiq_job_seconds_sum", "quick"] < 51
        assert now["multiq_processes",] == 2
        until(lambda: figures(port).get(("multiq_queue_jobs", "default", "buried")) == 3)
        assert not any("elsewhere" in key for key in figures(port))  # a queue that this worker does not serve
        assert now["multiq_job_wait_seconds_count", "quick"] == 51
        assert now["multiq_job_wait_seconds_count", "fail"] == 1  # its later attempts do not count as waits
        until(lambda: figures(port).get(("multiq_queue_oldest_age_seconds", "default")) == 0)
        assert figures(port)["multiq_up",] == 1


def test_the_page_has_as_many_series_as_the_documentation_says(tmp_path: Path, server: RedisServer) -> None:
    with worker(tmp_path, server.url, "processes=1, http=':0'") as process:
        port = port_of(process)
        until(lambda: ("multiq_queue_jobs", "default", "ready") in figures(port))
        keys = figures(port)
    assert sum("quick" in key for key in keys) == 41
    assert sum("default" in key for key in keys) == 7
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert "For each task there are 41 series." in text
    assert "For each queue there are at most 7 series." in text


def test_probes_are_answered_whatever_jobs_do(tmp_path: Path, server: RedisServer) -> None:
    with worker(tmp_path, server.url, "processes=1, http='127.0.0.1:0'") as process:
        port = port_of(process)
        until(lambda: ask(port, "/readyz")[0] == 200)
        # Given the only child in a call that keeps the interpreter to itself
        clutch.enqueue(1, 30)
        until(lambda: figures(port)["multiq_jobs_running",] == 1)
        # Then both probes report that the worker is healthy
        for path in ("/healthz", "/readyz"):
            status, body, headers = ask(port, path)
            assert (status, json.loads(body)["running"]) == (200, 1)
            assert headers["Content-Type"] == "application/json"
            assert headers["Cache-Control"] == "no-store"
            assert "Server" not in headers
        # When the worker takes no more jobs, then it is healthy and not ready
        process.send(signal.SIGUSR2)
        until(lambda: ask(port, "/readyz")[0] == 503)
        assert ask(port, "/healthz")[0] == 200
        assert json.loads(ask(port, "/readyz")[1])["waits_for"] == ["it is paused"]


@pytest.mark.long
def test_the_worker_reports_its_own_figures_while_the_backend_is_silent(tmp_path: Path, server: RedisServer) -> None:
    with worker(tmp_path, server.url, "processes=1, http=':0'") as process:
        port = port_of(process)
        until(lambda: ("multiq_queue_jobs", "default", "ready") in figures(port))
        # When the server reads requests and never answers, for which a call may wait longer than a connection lasts
        server.pause()
        try:
            until(lambda: ("multiq_queue_jobs", "default", "ready") not in figures(port))
            # Then each page is served, without the figures of queues, and says why
            assert (figures(port)["multiq_processes",], figures(port)["multiq_up",]) == (1, 0)
        finally:
            server.go_on()
        # And with these figures when the server answers again
        until(lambda: ("multiq_queue_jobs", "default", "ready") in figures(port))


@pytest.mark.long
def test_a_start_and_a_reload_do_not_make_a_worker_unwell(tmp_path: Path, server: RedisServer) -> None:
    with listen(parse_address(":0")) as free:
        port = free.getsockname()[1]
    slow_forks = (
        "import os, sys, time, multiq, worker_app; from multiq.logging import setup_logging; setup_logging('info');"
        "os.register_at_fork(before=lambda: time.sleep(0.5));"
        f"worker = multiq.Worker(worker_app.app, processes=1, http=':{port}'); worker.owns_process = True;"
        "sys.exit(worker.run())"
    )
    with worker(tmp_path, server.url, code=slow_forks) as process:
        # Given a probe that asks without a pause, from before the first answer until after a reload
        answers = []
        while process.log.count("working   ") < 2:
            with contextlib.suppress(OSError, http.client.HTTPException):  # nothing listens yet, or no longer
                answers.append(ask(port, "/healthz"))
            if answers and process.log.count("working   ") == 1 and "reloading" not in process.log:
                process.send(signal.SIGHUP)
        # Then each answer is that the worker is well
        assert [body for status, body, _ in answers if status != 200] == []
        assert len({json.loads(body)["children"][0] for _, body, _ in answers if json.loads(body)["children"]}) >= 2


@pytest.mark.long
def test_a_reload_keeps_the_http_address(tmp_path: Path, server: RedisServer) -> None:
    with listen(parse_address(":0")) as free:
        port = free.getsockname()[1]
    with worker(tmp_path, server.url, f"processes=1, http=':{port}'") as process:
        process.wait_until_working()
        nap.enqueue(1, 3)
        until(lambda: figures(port)["multiq_jobs_running",] == 1)
        process.send(signal.SIGHUP)
        until(lambda: process.log.count("health and metrics are on") == 2)
        until(lambda: json.loads(ask(port, "/readyz")[1])["up_for"] < 3)
        assert ask(port, "/healthz")[0] == 200
        process.send(signal.SIGTERM)
        assert process.wait() == 0


@pytest.mark.long
def test_a_sidecar_that_dies_is_followed_by_one_that_answers(tmp_path: Path, server: RedisServer) -> None:
    with worker(tmp_path, server.url, "processes=1, http=':0'") as process:
        port = port_of(process)
        quick.enqueue(1)
        until(lambda: figures(port)["multiq_jobs_total", "done", "quick"] == 1)
        children = json.loads(ask(port, "/healthz")[1])["children"]
        (sidecar,) = {child.pid for child in psutil.Process(process.process.pid).children()} - set(children)
        os.kill(sidecar, signal.SIGKILL)
        until(lambda: "starting another one" in process.log)
        # A request that comes meanwhile waits for the next sidecar, which continues the same counters.
        assert figures(port)["multiq_jobs_total", "done", "quick"] == 1


def test_other_pages_are_not_found(tmp_path: Path, server: RedisServer) -> None:
    with worker(tmp_path, server.url, "processes=1, http=':0'") as process:
        port = port_of(process)
        process.wait_until_working()
        assert ask(port, "/")[0] == ask(port, "/metrics/../etc/passwd")[0] == 404
        assert ask(port, "/metrics", "POST")[0] == ask(port, "/healthz", "DELETE")[0] == 405
        assert ask(port, "/healthz", "HEAD")[:2] == (200, b"")
        # And a malformed request does not affect later requests
        for rubbish in (b"\x00\xff\r\n\r\n", b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 20_000 + b"\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
                connection.sendall(rubbish)
                assert b" 200 " not in connection.recv(100)
        silent = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(150)]
        assert ask(port, "/healthz")[0] == 200  # silent connections are closed, so this request is answered
        for connection in silent:
            connection.close()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (":9000", ("127.0.0.1", 9000)),
        ("localhost:0", ("localhost", 0)),
        ("0.0.0.0:9000", ("0.0.0.0", 9000)),  # noqa: S104 - given explicitly
        ("[::1]:9000", ("::1", 9000)),
    ],
)
def test_a_valid_address_is_parsed(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text", ["", "9000", "host", "host:", ":x", ":70000", "a:1/metrics", "me:pw@host:1", "::1:9000"]
)
def test_a_malformed_address_is_refused(text: str) -> None:
    with pytest.raises(multiq.OptionInvalid, match="write HOST:PORT"):
        parse_address(text)


def test_an_http_address_in_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_http, "_BIND_PATIENCE", 0.1)
    with listen(parse_address(":0")) as taken, pytest.raises(multiq.OptionInvalid, match="cannot be bound"):
        listen(parse_address(f":{taken.getsockname()[1]}"))


def test_http_needs_an_extra(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ExtraNotInstalled, match=r"pip install 'multiq\[metrics\]'"):
        multiq.Worker(app, processes=1, http=":0")
    with pytest.raises(multiq.OptionInvalid, match="need a process beside the jobs"):
        multiq.Worker(app, processes=0, http=":0")
