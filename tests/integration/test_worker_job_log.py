"""The log lines of ``multiq worker`` about failing, crashing and ending jobs."""

from __future__ import annotations

import json
import re
import signal
from typing import TYPE_CHECKING

import pytest
from servers.process import until
from shell import Shell
from test_worker_outages import having, listening

import multiq
from multiq import events
from multiq.backend import Ack

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TASKS = """
import asyncio, os, signal, sys, time
import multiq

app = multiq.App()

@app.task(max_attempts=1)
def fail() -> None:
    check()

def check() -> None:
    try:
        {}["no"]
    except KeyError as exc:
        raise ValueError("not to my liking") from exc

@app.task(max_attempts=1)
async def afail() -> None:
    check()

@app.task(max_attempts=1)
def no_json() -> None:
    quick.enqueue(object())

@app.task(max_attempts=1, timeout=0.2)
def endless() -> None:
    while True:
        time.sleep(0.01)

@app.task(max_crashes=1)
def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)

@app.task
def nap() -> None:
    sys.stdout.write("napping\\n")  # in one piece: print writes the end of the line by itself
    sys.stdout.flush()
    time.sleep(300)

@app.task
def quick(what: object = None) -> None:
    pass
"""


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    (tmp_path / "shop" / "tasks.py").write_text(TASKS)
    yield shell
    shell.app.close()


def enqueue(shell: Shell, *names: str) -> None:
    for name in names:
        shell.app.tasks.clear()
        shell.app.task(name=name)(lambda: None).enqueue()


@pytest.mark.long
def test_a_traceback_has_the_frames_of_the_app_only(shell: Shell) -> None:
    enqueue(shell, "fail", "afail", "no_json", "endless")
    done = shell.run("worker", "shop.tasks:app", "-p", "0", "--stop-when-empty")
    frames = re.findall(r'File "(.*)", line \d+, in (\w+)', done.err)
    assert {file for file, _ in frames} == {str(shell.folder / "shop" / "tasks.py")}
    names = [name for _, name in frames]
    assert names == ["check", "fail", "check", "check", "afail", "check", "no_json", "endless"]
    assert "The above exception was the direct cause" in done.err
    assert done.err.count("Traceback (most recent call last)") == 6
    # with the level debug, tracebacks also have multiq's own frames
    enqueue(shell, "fail")
    done = shell.run("worker", "shop.tasks:app", "-p", "0", "--stop-when-empty", "--log-level", "debug")
    assert re.search(r'File ".*/multiq/worker/execution/runner.py", line', done.err)


@pytest.mark.long
def test_a_crashed_job_s_reason_and_its_attempt_agree(shell: Shell) -> None:
    enqueue(shell, "die")
    done = shell.run("worker", "shop.tasks:app", "-p", "1", "--stop-when-empty", "--log-format", "json")
    told = [json.loads(line) for line in done.err.splitlines()]
    (crash,) = [line for line in told if line.get("event") == "crashed"]
    assert (crash["task"], crash["queue"]) == ("die", "default")
    (job,) = shell("jobs", "default", "buried", "--json").json["jobs"]
    assert job["attempt"] == 2
    assert job["reason"].startswith("poison: attempt 2 did not begin, as 1 before it ended without a verdict")


def test_a_lost_job_s_task_is_named() -> None:
    app = multiq.App("memory://")
    lost: list[events.JobLost] = []
    app.on(events.JobLost)(lost.append)

    @app.task(name="slow.one")
    def lose() -> None:
        (answer,) = app.backend.consumer(["default"]).settle([Ack(multiq.current_job().lease)])
        assert answer is None

    lose.enqueue()
    multiq.Worker(app, stop_when_empty=True).run()
    assert [(event.task, event.queue) for event in lost] == [("slow.one", "default")]


@pytest.mark.one_row
@pytest.mark.parametrize("processes", ["0", "1"])
def test_the_first_signal_says_what_is_waited_for_and_what_a_second_one_does(shell: Shell, processes: str) -> None:
    enqueue(shell, "nap", "nap")
    arguments = "worker", "shop.tasks:app", "-p", processes, "-t", "2", "--grace", "40"
    process = shell.start(*arguments)
    with listening(process) as lines:
        assert process.stdout is not None
        for _ in range(2):
            assert process.stdout.readline() == "napping\n"
        process.send_signal(signal.SIGINT)
        until(lambda: having("waits for", lines), "it says what it waits for")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    (line,) = having("waits for", lines)
    assert " info " in line
    assert "waits for 2 jobs that run, up to 40.0 s; a second signal (Ctrl-C) gives them back at once" in line


def test_an_idle_worker_s_end_says_nothing_of_waiting(shell: Shell) -> None:
    process = shell.start("worker", "shop.tasks:app")
    with listening(process) as lines:
        until(lambda: having(" working ", lines), "it works")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert not having("waits for", lines)


@pytest.mark.long
def test_routine_recycling_is_not_logged_as_a_warning(shell: Shell) -> None:
    enqueue(shell, *["quick"] * 5)
    done = shell.run("worker", "shop.tasks:app", "--recycle-jobs", "2", "--prefetch", "1", "--stop-when-empty")
    lines = having("has worked for long enough", done.err.splitlines())
    assert lines
    assert all(" info " in line for line in lines)
    assert not having(" warning ", done.err.splitlines())
