"""``multiq soak`` as a whole: its output, its exit codes, and that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from processes import until
from servers.redis import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from shell import Shell

_PATIENCE = 280.0  # seconds; guards against a hang. Less than the limit of pytest, which hides what was printed
_FLUSH = "import socket as s; c=s.create_connection(('127.0.0.1',{})); c.sendall(b'FLUSHALL\\r\\n'); c.recv(9)"


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return the processes of a soak whose temporary files are in this folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder) in process.environ().get("SOAK_LOAD", ""):
                found.append(process)
        except psutil.Error:
            continue
    return found


def lasting(server: RedisServer) -> list[bytes]:
    """Return the keys of soaks that do not expire. The answers to clients' last calls do expire."""
    return [key for key in server.ask("KEYS", "*soak*") if server.ask("TTL", key) == -1]


@contextlib.contextmanager
def soak(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], str]]]:
    """``multiq soak`` as a process of its own, and what it has printed so far."""
    file = folder / "printed"
    with file.open("wb") as log:
        command = [sys.executable, "-m", "multiq", "soak", *arguments]
        running = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        yield running, file.read_text
    finally:
        running.kill()
        running.wait()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.mark.long
def test_a_store_that_keeps_its_promises_is_left_as_it_was(shell: Shell, temporary: Path) -> None:
    with RedisServer(appendonly="yes") as server:
        server.ask("SET", "theirs", "1")
        done = shell("soak", server.url, "--seconds", "3", "--seed", "7", "--json")
        assert done.code == 0, done
        assert lasting(server) == []
        assert server.ask("GET", "theirs") == b"1"
    (told,) = json.loads(done.out)["soaks"]
    assert told["clean"]
    assert told["found"] == []
    assert told["figures"]["run"] > 50
    figures = told["figures"]
    assert figures["faults"] + figures.get("faults missed", 0) > 0  # on a busy machine no client may be connected yet
    assert list(temporary.iterdir()) == []
    assert processes_of(temporary) == []


@pytest.mark.long
def test_a_server_that_forgets_its_jobs_is_reported(shell: Shell, temporary: Path) -> None:
    with RedisServer() as server:
        forget = f'{sys.executable} -c "{_FLUSH.format(server.port)}"'
        asked = ["--seconds", "8", "--fault", "restart server", "--restart-command", forget]
        done = shell("soak", server.url, *asked, "--history", str(shell.folder / "history"))
        assert done.code == 6, done
        assert lasting(server) == []
    assert "I1 nothing lost" in done.out
    assert "faults missed" in done.out  # the server was not restarted
    assert "restart server" not in done.out
    assert list((shell.folder / "history" / "0").glob("produce-1.*.jsonl"))


@pytest.mark.long
@pytest.mark.parametrize("numbers", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGTERM, signal.SIGINT] * 20])
def test_a_stopped_run_leaves_nothing_behind(shell: Shell, temporary: Path, numbers: list[signal.Signals]) -> None:
    with RedisServer() as server:
        # Given a soak whose jobs are in the store
        with soak(shell.folder, server.url, "--seconds", "3600") as (running, said):
            until(
                lambda: lasting(server) or running.poll() is not None,
                timeout=_PATIENCE,
                what=lambda: f"the soak has jobs in the store; it printed:\n{said()}",
            )
            assert running.poll() is None, said()
            # When the soak is told to end
            for number in numbers:
                running.send_signal(number)
                time.sleep(0.03)  # like a user who presses Ctrl-C several times
            until(
                lambda: running.poll() is not None,
                timeout=_PATIENCE,
                what=lambda: f"the soak ends; it printed:\n{said()}",
            )
        # Then the soak removes the data that it has stored
        assert running.returncode == 130, said()
        assert "stopped" in said()
        assert lasting(server) == []
    assert list(temporary.iterdir()) == []
    assert processes_of(temporary) == []


def test_a_store_that_is_not_there_leaves_no_folder_behind(shell: Shell, temporary: Path) -> None:
    done = shell("soak", "redis://127.0.0.1:1", "--history", "kept")
    assert done.code == 1, done
    assert "127.0.0.1:1" in done.err
    assert "Traceback" not in done.err
    assert not (shell.folder / "kept").exists()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["memory://"], "share"),
        (["sqlite:///a.db", "sqlite:///b.db", "--freeze-pid", "7"], "name one store"),
        (
            ["sqlite:///a.db", "--fault", "fire"],
            "fault 'fire' cannot be injected here; choose from: kill job process",
        ),
        (["sqlite:///a.db", "--fault", "cut"], "fault 'cut' cannot be injected here"),
        (["sqlite:///a.db", "--flush-scripts"], "no scripts"),
        (["sqlite:///a.db", "--seconds", "0"], "--seconds"),
        (["sqlite:///a.db", "--history", "."], "is there already"),
        ([], "URL|NAME"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_reported_before_anything_begins(
    shell: Shell, arguments: list[str], says: str, temporary: Path
) -> None:
    if "." in arguments:
        (shell.folder / "0").mkdir()
    done: Any = shell("soak", *arguments)
    assert done.code == 2, done
    assert says in done.err
    assert "Traceback" not in done.err
    assert not (shell.folder / "a.db").exists()
    assert list(temporary.iterdir()) == []
