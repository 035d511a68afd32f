"""Controlling all workers of a connection: down, up, restart; with real processes, on each backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from processes import until, worker
from servers.redis import RedisServer
from shell import Shell
from worker_app import app, quick, read_diary

from multiq.control.flags import DOWN, RESTART, Control

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def shell(shell: Shell, url: str) -> Shell:
    """On each backend."""
    shell.environment = {"MULTIQ_URL": url}
    return shell


@pytest.mark.long
@pytest.mark.one_row
def test_down_keeps_all_workers_from_taking_jobs_and_up_ends_it(tmp_path: Path, url: str, shell: Shell) -> None:
    # Given two workers, as on two hosts
    (tmp_path / "a").mkdir()
    with worker(tmp_path, url, "processes=2") as first, worker(tmp_path / "a", url, "processes=1") as second:
        until(lambda: first.log.count(" working ") == 2 and " working " in second.log)
        # When the connection is taken down, also twice
        assert shell.run("down").out == "workers take no more jobs\n"
        assert shell.run("down").out == "it was down already\n"
        until(lambda: first.log.count(" paused ") == 2 and second.log.count(" paused ") == 1)
        quick.enqueue(1)
        # Then no worker takes a job, not even a new worker, except one with force=True
        (tmp_path / "b").mkdir()
        with worker(tmp_path / "b", url, "processes=1") as third:
            until(lambda: " paused " in third.log)
            until(lambda: app.queue().stats().ready == 1)  # a worker on beanstalkd may first give the job back
            assert not any(read_diary(each.diary) for each in (first, second, third))
        (tmp_path / "c").mkdir()
        with worker(tmp_path / "c", url, "processes=1, force=True") as forced:
            until(lambda: [row[0] for row in read_diary(forced.diary)] == ["start", "end"])
            until(lambda: app.queue().stats().reserved == 0)  # the job's ack comes after the end in the diary
        quick.enqueue(2)
        until(lambda: app.queue().stats().ready == 1)
        # When the connection is brought up, then the workers continue
        assert shell.run("up").out == "workers take jobs again\n"
        assert shell.run("up").out == "it was not down\n"
        until(lambda: app.queue().stats().ready == 0)


@pytest.mark.long
def test_restart_ends_running_workers_and_no_later_ones(tmp_path: Path, url: str, shell: Shell) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    with worker(tmp_path, url, "processes=1") as first, worker(tmp_path / "a", url, "processes=2") as second:
        until(lambda: " working " in first.log and " working " in second.log)
        quick.enqueue(1)
        until(lambda: app.queue().stats().ready == 0)
        for _ in range(2):
            assert shell.run("restart").code == 0
        assert first.wait() == second.wait() == 0
    with worker(tmp_path / "b", url, "processes=1, max_time=7") as later:
        assert later.wait() == 0
        assert "restart" not in later.log


@pytest.mark.long
def test_a_restart_reaches_a_worker_whose_first_reads_of_the_flags_have_failed(tmp_path: Path) -> None:
    # Given a worker that started before its server did, and reads the flags only every five seconds
    shell = Shell(tmp_path)
    with RedisServer() as server:
        server.kill()
        worker = shell.start("worker", "shop.tasks:app", "-p", "1", "-c", server.url)
        with worker, shell.app:
            log = worker.stderr
            assert log is not None
            until(lambda: " down " in log.readline())
            # When the server starts, and a restart is requested at once
            server.start()
            shell.environment = {"MULTIQ_URL": server.url}
            assert shell.run("restart").code == 0
            # Then the worker ends
            assert worker.wait(60) == 0


@pytest.mark.long
def test_control_flags_are_in_no_listing(url: str, shell: Shell) -> None:
    control = Control(app.backend)
    assert control.read().last_restart is None
    shell.run("down")
    shell.run("restart")
    assert control.read().last_restart is not None
    quick.enqueue(1)
    listed = [row["queue"] for row in shell.run("stats", "--json").json["queues"]]
    assert listed == ["default"]
    assert set(app.backend.queues()) == {"default", DOWN, RESTART}
