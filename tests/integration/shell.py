"""The command line for tests. Most commands run in this process, which is faster, and some as separate processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from click.testing import CliRunner

import multiq
from multiq.cli import cli

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TASKS = """
import multiq

app = multiq.App()
empty = multiq.App()
number = 3

@app.task(name="mail.reset", queue="mail", max_attempts=2, backoff=0)
def reset(address: str, name: str = "you") -> None:
    if address == "bad":
        raise ValueError("550 no such mailbox")
    print(f"sent to {address}\\n", end="", flush=True)
"""


class Done(NamedTuple):
    """What a command printed, and the code it ended with."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> dict[str, Any]:
        """The error that ``--json`` printed."""
        error: dict[str, Any] = json.loads(self.err)["error"]
        return error


class Shell:
    """``multiq`` in a folder, on a SQLite file there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"sqlite:///{folder}/jobs.db"
        self.environment = {"MULTIQ_URL": self.url}
        self.app = multiq.App(settings=multiq.Settings(url=self.url))
        (folder / "shop").mkdir()
        (folder / "shop" / "tasks.py").write_text(TASKS)

    def __call__(self, *arguments: str, stdin: str | bytes | None = None, **environment: str) -> Done:
        """Run in this process."""
        result = CliRunner().invoke(cli, arguments, input=stdin, env={**self.environment, **environment})
        return Done(result.exit_code, result.stdout, result.stderr)

    def run(self, *arguments: str, stdin: bytes | None = None, **environment: str) -> Done:
        """Run as a process of its own."""
        done = subprocess.run(
            [sys.executable, "-m", "multiq", *arguments],
            cwd=self.folder,
            env=self.all_environment(**environment),
            input=stdin,
            capture_output=True,
            timeout=60,
            check=False,
        )
        return Done(done.returncode, done.stdout.decode(), done.stderr.decode())

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start as a process of its own, and return at once."""
        return subprocess.Popen(
            [sys.executable, "-m", "multiq", *arguments],
            cwd=self.folder,
            env=self.all_environment(**environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def make_store(self) -> None:
        """Make an empty store."""
        self.app.backend.queues()

    def all_environment(self, **environment: str) -> dict[str, str]:
        return {**os.environ, **self.environment, **environment}

    def everything(self) -> list[Any]:
        """Return all that the store holds. A refused command must not change the store's content."""
        backend = self.app.backend
        found: list[Any] = []
        for name in backend.queues():
            found.append(backend.stats(name).paused_for is not None)
            for state in ("ready", "delayed", "reserved", "buried"):
                found += [
                    (job.queue, job.id, job.state, job.body, job.priority, job.attempt)
                    for job in self.app.queue(name).jobs(state)
                ]
        return found


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    """``multiq`` in a folder of its own, which is the current one, on a SQLite file there."""
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path)
    yield shell
    shell.app.close()
