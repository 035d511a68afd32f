"""A worker that is paused, down, or both: ending one state does not end the other, and new processes keep both."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from processes import until, worker
from worker_app import app, nap, quick, read_diary

from multiq.control.flags import Control

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from processes import WorkerProcess

SUPERVISED = ["processes=1", "processes=1, threads=2", "processes=1, concurrency=2"]
ALONE = ["", "threads=2", "concurrency=2"]
LOOKED = 7.0  # seconds: a worker reads the flag ``down`` every five seconds


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A new SQLite file, to which the test app enqueues."""
    app.connect(f"sqlite:///{tmp_path}/jobs.db")
    return app.url


def words(process: WorkerProcess, word: str) -> list[int]:
    return [number for said, number, _, _ in read_diary(process.diary) if said == word]


def child_of(process: WorkerProcess) -> int:
    """Return the pid of the first child."""
    names = [line.split(" working ")[1].split()[0] for line in process.log.splitlines() if " working " in line]
    return int(names[0].rpartition(":")[2])


@pytest.mark.long
@pytest.mark.parametrize("mode", [*ALONE, *SUPERVISED])
def test_a_worker_that_is_down_takes_no_jobs_because_of_a_sigcont(tmp_path: Path, url: str, mode: str) -> None:
    # Given a worker whose connection is down
    Control(app.backend).take_down()
    with worker(tmp_path, url, mode) as process:
        until(lambda: " paused " in process.log)
        quick.enqueue(1)
        # When it gets SIGCONT, as from an operator who has stopped it with a debugger
        process.send(signal.SIGCONT)
        time.sleep(1.5)
        # Then it stays paused
        assert words(process, "start") == []
        # And it takes jobs again when the connection is up
        Control(app.backend).bring_up()
        until(lambda: words(process, "end") == [1], timeout=30)
        process.send(signal.SIGTERM)
        assert process.wait() == 0, process.log


@pytest.mark.long
@pytest.mark.parametrize("mode", [*ALONE, *SUPERVISED])
def test_a_worker_that_was_paused_stays_so_when_the_connection_comes_up(tmp_path: Path, url: str, mode: str) -> None:
    Control(app.backend).take_down()
    with worker(tmp_path, url, mode) as process:
        until(lambda: " paused " in process.log)
        process.send(signal.SIGUSR2)
        time.sleep(0.2)
        quick.enqueue(1)
        Control(app.backend).bring_up()
        time.sleep(LOOKED)
        assert words(process, "start") == []
        process.send(signal.SIGCONT)
        until(lambda: words(process, "end") == [1])


@pytest.mark.long
@pytest.mark.parametrize("mode", SUPERVISED)
def test_a_child_that_starts_while_its_connection_is_down_works_when_it_is_up(
    tmp_path: Path, url: str, mode: str
) -> None:
    # Given a worker that does not know yet that its connection is down
    with worker(tmp_path, url, mode) as process:
        process.wait_until_working()
        time.sleep(0.3)  # the worker's sidecar has just read the flag
        Control(app.backend).take_down()
        # When a child is replaced, and the connection comes up before the sidecar has checked again
        os.kill(child_of(process), signal.SIGKILL)
        until(lambda: process.log.count(" working ") == 2)
        time.sleep(0.3)
        Control(app.backend).bring_up()
        # Then the new child works
        quick.enqueue(1)
        until(lambda: words(process, "end") == [1], timeout=20)


@pytest.mark.parametrize("mode", SUPERVISED)
def test_a_child_that_replaces_a_paused_one_is_paused(tmp_path: Path, url: str, mode: str) -> None:
    with worker(tmp_path, url, mode) as process:
        process.wait_until_working()
        process.send(signal.SIGUSR2)
        until(lambda: " paused " in process.log)
        quick.enqueue(1)
        os.kill(child_of(process), signal.SIGKILL)
        until(lambda: process.log.count(" working ") == 2)
        time.sleep(1.0)
        assert words(process, "start") == []
        process.send(signal.SIGCONT)
        until(lambda: words(process, "end") == [1])


@contextlib.contextmanager
def reloading_worker(folder: Path, url: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """``multiq worker`` of the test app, which can reload."""
    environment = {
        **os.environ,
        "MULTIQ_URL": url,
        "WORKER_TEST_DIARY": f"{folder}/diary",
        "PYTHONPATH": os.path.dirname(__file__),  # noqa: PTH120 - a string is wanted
    }
    command = [sys.executable, "-m", "multiq", "worker", "worker_app:app", *options]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stderr=log, start_new_session=True)
    try:
        yield process
    except BaseException as exc:
        exc.add_note((folder / "log").read_text())
        raise
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def log(folder: Path) -> str:
    return (folder / "log").read_text()


@pytest.mark.long
@pytest.mark.parametrize("options", [["-p", "1"], ["-p", "2", "-t", "2"]])
def test_a_reload_keeps_a_pause(tmp_path: Path, url: str, options: list[str]) -> None:
    children = int(options[1])
    with reloading_worker(tmp_path, url, *options) as process:
        until(lambda: log(tmp_path).count(" working ") == children)
        process.send_signal(signal.SIGUSR2)
        until(lambda: log(tmp_path).count(" paused ") == children)
        # When a paused worker reloads
        process.send_signal(signal.SIGHUP)
        until(lambda: log(tmp_path).count(" working ") == 2 * children)
        # Then the new children are paused
        quick.enqueue(1)
        time.sleep(1.0)
        assert read_diary(tmp_path / "diary") == []
        # And they continue after SIGCONT. The next reload keeps that state, too
        process.send_signal(signal.SIGCONT)
        until(lambda: len(read_diary(tmp_path / "diary")) == 2)
        process.send_signal(signal.SIGHUP)
        until(lambda: log(tmp_path).count(" working ") == 3 * children)
        quick.enqueue(2)
        until(lambda: len(read_diary(tmp_path / "diary")) == 4)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.long
def test_sighup_while_the_interpreter_is_replaced_ends_no_process(tmp_path: Path, url: str) -> None:
    # Given a worker at work
    with reloading_worker(tmp_path, url, "-p", "1") as process:
        until(lambda: " working " in log(tmp_path))
        for turn in range(1, 4):
            # When the worker reloads, and gets more SIGHUPs until the new program works
            process.send_signal(signal.SIGHUP)
            until(lambda turn=turn: log(tmp_path).count("reloading:") >= turn)  # type: ignore[misc]  # bound at once
            rolled_at = len(log(tmp_path))
            give_up_at = time.monotonic() + 60
            while " working " not in log(tmp_path)[rolled_at:] and process.poll() is None:
                assert time.monotonic() < give_up_at
                process.send_signal(signal.SIGHUP)
                time.sleep(0.001)
            # Then it survives
            assert process.poll() is None, log(tmp_path)
        # And works
        nap.enqueue(1, 0)
        until(lambda: len(read_diary(tmp_path / "diary")) == 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
