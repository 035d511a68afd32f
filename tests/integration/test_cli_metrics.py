"""``multiq metrics``: the queues' numbers for Prometheus, on each backend and without a worker."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from processes import until
from prometheus_client.parser import text_string_to_metric_families
from servers.redis import RedisServer
from stores import url
from worker_app import app

from multiq.cli import cli

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["url"]  # a fixture


def figures(page: str) -> dict[tuple[str, ...], float]:
    """Return every sample's value by its name and its labels."""
    return {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def printed(url: str, *arguments: str, code: int = 0) -> dict[tuple[str, ...], float]:
    result = CliRunner().invoke(cli, ["-c", url, "metrics", *arguments])
    assert result.exit_code == code, result.output
    return figures(result.stdout)


@pytest.mark.one_row
def test_the_page_has_the_numbers_of_each_queue(url: str) -> None:
    # Given jobs in several states
    queue = app.queue("mail")
    queue.enqueue_many([1, 2, 3])
    queue.enqueue(4, delay=3600)
    with queue.reserve() as job:
        job.bury("no such mailbox")
    queue.pause(600)
    # Then the page has the numbers that the backend knows, and no others
    page = printed(url, "mail", "unused")
    stats = queue.stats()
    for state in ("ready", "delayed", "reserved", "buried"):
        assert page["multiq_queue_jobs", "mail", state] == getattr(stats, state)
        assert page["multiq_queue_jobs", "unused", state] == 0
    assert (("multiq_queue_jobs", "mail", "held") in page) == bool(app.backend.declared.holds)
    assert page["multiq_up",] == page["multiq_queue_paused", "mail"] == 1
    assert page["multiq_queue_paused", "unused"] == page["multiq_queue_oldest_age_seconds", "unused"] == 0
    assert page["multiq_queues_left_out",] == 0


@pytest.mark.one_row
def test_the_age_is_that_of_the_job_that_is_next(url: str) -> None:
    queue = app.queue("mail")
    queue.enqueue("old")
    began = time.monotonic()
    until(lambda: printed(url)["multiq_queue_oldest_age_seconds", "mail"] >= 1)
    queue.enqueue("new")
    assert 1 <= printed(url)["multiq_queue_oldest_age_seconds", "mail"] <= time.monotonic() - began + 1
    # When the old job is gone, then the age is that of the new job
    with queue.reserve():
        pass
    assert printed(url)["multiq_queue_oldest_age_seconds", "mail"] < 1 + time.monotonic() - began


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        app.connect(server.url)
        yield server
        app.close()


@contextlib.contextmanager
def exporter(folder: Path, url: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int, Path]]:
    """``multiq metrics --http :0``, its port and its log."""
    log = folder / "exporter.log"
    command = [sys.executable, "-m", "multiq", "-c", url, "metrics", "--http", ":0", *arguments]
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=folder, stderr=file, env={**os.environ})
    try:
        until(lambda: "health and metrics are on" in log.read_text())
        found = re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text())
        assert found is not None
        yield process, int(found[1]), log
    finally:
        process.kill()
        process.wait()


def ask(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as reply:
        return str(reply.read().decode())


@pytest.mark.long
def test_the_exporter_serves_all_queues_and_ends_with_zero(tmp_path: Path, server: RedisServer) -> None:
    with exporter(tmp_path, server.url) as (process, port, _):
        assert figures(ask(port))["multiq_up",] == 1
        app.queue("mail").enqueue(1)
        until(lambda: ("multiq_queue_jobs", "mail", "ready") in figures(ask(port)))
        assert ask(port, "/healthz") == ask(port, "/readyz") == "ok\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


@pytest.mark.long
def test_the_exporter_says_that_a_hung_server_does_not_answer(tmp_path: Path, server: RedisServer) -> None:
    app.queue("mail").enqueue(1)
    with exporter(tmp_path, server.url, "--timeout", "300ms") as (_, port, log):
        until(lambda: figures(ask(port)).get(("multiq_queue_jobs", "mail", "ready")) == 1)
        # When the server reads requests and never answers
        server.pause()
        try:
            # Then each page is served, without the numbers of queues
            until(lambda: figures(ask(port))["multiq_up",] == 0)
            assert not any("mail" in key for key in figures(ask(port)))
            assert "the queues cannot be read: the backend has not answered within 0.3 s" in log.read_text()
        finally:
            server.go_on()
        # And the page has these numbers when the server answers again
        until(lambda: figures(ask(port)).get(("multiq_queue_jobs", "mail", "ready")) == 1)
        assert figures(ask(port))["multiq_up",] == 1


def test_a_backend_that_is_not_there_is_a_page_that_says_so_and_exit_code_one() -> None:
    result = CliRunner().invoke(cli, ["-c", "redis://localhost:9", "metrics"])
    assert result.exit_code == 1
    assert figures(result.stdout) == {("multiq_up",): 0}
    assert "localhost:9 cannot be reached" in result.stderr


def test_the_number_of_queues_on_the_page_is_limited(tmp_path: Path) -> None:
    app.connect(f"sqlite:///{tmp_path}/jobs.db")
    for number in range(5):
        app.queue(f"queue-{number}").enqueue(1)
    page = printed(app.url, "--max-queues", "3")
    assert {key[1] for key in page if key[0] == "multiq_queue_jobs"} == {"queue-0", "queue-1", "queue-2"}
    assert page["multiq_queues_left_out",] == 2
    # And all queues that the command line names are shown
    named = printed(app.url, "--max-queues", "1", "queue-3", "queue-4")
    assert {key[1] for key in named if key[0] == "multiq_queue_jobs"} == {"queue-3", "queue-4"}
    app.close()


@pytest.mark.parametrize("timeout", ["0", "2h"])
def test_a_timeout_out_of_range_is_refused(tmp_path: Path, timeout: str) -> None:
    result = CliRunner().invoke(cli, ["-c", f"sqlite:///{tmp_path}/jobs.db", "metrics", "--timeout", timeout])
    assert result.exit_code == 2
    assert "--timeout must be from 0.1 to 60 seconds" in result.stderr
