"""``multiq worker --watch``: a worker reloads as soon as its code changes, and only if the new code starts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest
from processes import until
from shell import Shell

import multiq
from multiq.errors import ExtraNotInstalled
from multiq.worker.processes import auto_reload

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SHOP = """
import multiq

app = multiq.App()

@app.task
def serve(number):
    with open("served", "ab", 0) as served:
        served.write(b"{version} %d\\n" % number)
"""
BROKEN = "import multiq\n\napp = multiq.App(\n"
COMMAND = ["-m", "multiq", "worker", "watched:app", "-p", "1", "--watch"]


class Watched:
    """A worker with ``--watch``, and the app's code, which the test can change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.app = multiq.App(settings=multiq.Settings(url=f"sqlite:///{folder}/jobs.db"))
        self._numbers = iter(range(1000))
        self.process: subprocess.Popen[bytes]

    def change(self, code: str) -> None:
        """Replace the file in one step, as editors do."""
        (self.folder / "new").write_text(code)
        (self.folder / "new").rename(self.folder / "watched.py")

    def start(self, *arguments: str) -> None:
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=self.folder,
                env={**os.environ, "MULTIQ_URL": self.app.url, "PYTHONDONTWRITEBYTECODE": "1"},
                stderr=log,
                start_new_session=True,
            )

    def start_watching(self) -> None:
        self.start(*COMMAND)
        assert self.serve() == "first"
        until(lambda: "reloads when" in self.log, what=lambda: self.log)

    def start_reloaded(self, *, meanwhile: str = "pass") -> None:
        """Start the program as a reload does. *meanwhile* is called while the program handles no signals yet."""
        reload = (
            "import os, signal, sys; from multiq.worker.processes.reload import reload_environment;"
            "from multiq.worker.processes.signals import HANDLED_BY_SUPERVISOR;"
            "reading, writing = os.pipe(); os.set_inheritable(writing, True);"
            f"signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_BY_SUPERVISOR); {meanwhile};"
            f"os.execve(sys.executable, [sys.executable, *{COMMAND!r}], reload_environment(writing, []))"
        )
        self.start("-c", reload)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def serve(self) -> str:
        """Run a job. Returns the version of the code that ran the job."""
        number = next(self._numbers)
        self.app.queue().enqueue({"multiq": 1, "task": "serve", "args": [number]})
        served = self.folder / "served"
        until(lambda: served.exists() and served.read_text().endswith(f" {number}\n"), what=lambda: self.log)
        return served.read_text().splitlines()[-1].split()[0]

    def goes_on(self, version: str) -> None:
        """Wait until jobs are run by this version."""
        until(lambda: self.serve() == version, what=lambda: self.log)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    watched = Watched(tmp_path)
    watched.change(SHOP.format(version="first"))
    try:
        yield watched
    finally:
        watched.app.close()
        if watched.process.poll() is None:
            os.killpg(watched.process.pid, signal.SIGKILL)
        watched.process.wait()


@pytest.mark.long
def test_auto_reload_takes_a_change_refuses_a_broken_one_and_takes_its_repair(watched: Watched) -> None:
    # Given a worker with auto-reload, at work
    watched.start_watching()
    # When its code changes, then it continues with the new code
    watched.change(SHOP.format(version="second"))
    watched.goes_on("second")
    # When the code is broken, then the log reports it, and the old code keeps running
    watched.change(BROKEN)
    until(lambda: "the new code does not start" in watched.log, what=lambda: watched.log)
    assert watched.serve() == "second"
    # When the code is repaired, then the worker loads the repaired code
    watched.change(SHOP.format(version="third"))
    watched.goes_on("third")
    # And the worker is still one process with one watcher, which ends with it
    (watcher,) = _watchers(watched.process.pid)
    watched.process.send_signal(signal.SIGTERM)
    assert watched.process.wait(30) == 0, watched.log
    assert not watcher.is_running()


@pytest.mark.long
def test_a_change_while_the_last_one_is_tried_is_tried_too(watched: Watched) -> None:
    # Given a worker that reloads code whose check is slow and fails
    watched.start_watching()
    watched.change("import time\nopen('tried', 'w').close()\ntime.sleep(3)\n" + BROKEN.replace("(", ""))
    until((watched.folder / "tried").exists)
    # When the code is repaired meanwhile, then the worker loads the repaired code
    watched.change(SHOP.format(version="second"))
    watched.goes_on("second")


@pytest.mark.long
def test_auto_reload_waits_for_code_that_breaks_between_check_and_exec(watched: Watched) -> None:
    # Given a program that was re-executed by a reload, and whose code does not start any more
    watched.change(BROKEN)
    watched.start_reloaded()
    until(lambda: "the old processes keep running until the code is changed" in watched.log, what=lambda: watched.log)
    # When the code changes, then the program starts
    watched.change(SHOP.format(version="second"))
    watched.process.send_signal(signal.SIGHUP)
    assert watched.serve() == "second"


@pytest.mark.long
def test_auto_reload_takes_a_change_made_while_a_reloaded_program_starts(watched: Watched) -> None:
    watched.start_reloaded(meanwhile="os.kill(os.getpid(), signal.SIGHUP)")
    until(lambda: "reloading" in watched.log, what=lambda: watched.log)
    watched.goes_on("first")


@pytest.mark.long
def test_a_watcher_ends_with_a_supervisor_that_was_killed(watched: Watched) -> None:
    watched.start_watching()
    (watcher,) = _watchers(watched.process.pid)
    watched.process.kill()
    watched.process.wait()
    until(lambda: not watcher.is_running())


def test_auto_reload_needs_a_supervisor(watched: Watched) -> None:
    shell = Shell(watched.folder)
    with shell.app:
        told = shell.run("worker", "shop.tasks:app", "-p", "0", "--watch", "--check")
    watched.start("-c", "")
    assert told.code == 2
    assert "--watch needs a supervisor" in told.err


def test_watch_names_the_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_reload, "find_spec", lambda name: None)
    with pytest.raises(ExtraNotInstalled, match=r"pip install 'multiq\[watch\]'"):
        auto_reload.check_library()


def _watchers(supervisor: int) -> list[psutil.Process]:
    """Return the processes that watch files for this worker."""
    found = []
    for child in psutil.Process(supervisor).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a process from before the reload has just ended
            if auto_reload.__name__ in child.cmdline():
                found.append(child)
    return found
