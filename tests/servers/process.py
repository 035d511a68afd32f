"""A server's process: a temporary folder, ports that nobody else has, and gone when the tests are.

Nothing is shared with a server that runs on the machine anyway, and the usual ports are never used.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

HOST = "127.0.0.1"
PATIENCE = 20.0  # seconds; guards against a hang, and no test waits for it
_PORTS = range(20000, 32000)  # below those that the kernel hands out by itself, and a cluster's bus (+10000) fits
_LOG_SHOWN = 3000  # characters

#: a server's program -> the Debian package that has it
_PACKAGES = {
    "beanstalkd": "beanstalkd",
    "mariadbd": "mariadb-server",
    "redis-server": "redis-server",
}

_SHEPHERD = """
import os, signal, sys
alive = set()
for line in sys.stdin:
    (alive.add if line[0] == "+" else alive.discard)(int(line[1:]))
for pid in alive:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


def require(program: str) -> str:
    """The path of a server's program. Missing, it skips the test, or under CI fails it, and says what to install."""
    found = shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
    if found is not None:
        return found
    message = f"{program} is not installed: run .ci/install-servers, or: apt-get install {_PACKAGES[program]}"
    if os.environ.get("CI", "").lower() in {"1", "true"}:
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


def free_port() -> int:
    """A TCP port of this machine that nobody listens on, its bus port included."""
    while True:
        port = random.choice(_PORTS)
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind((HOST, port))
            other.bind((HOST, port + 10000))
            return port


def until(condition: Callable[[], object], what: str) -> None:
    """Wait until a condition holds; a hang fails the test."""
    give_up_at = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > give_up_at:
            raise AssertionError(f"waited {PATIENCE:g} s in vain until {what}")
        time.sleep(0.01)


class _Shepherd:
    """Kills what is left when this process dies without a chance to tidy up, as by SIGKILL."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def tell(self, word: str) -> None:
        if self._process is None:
            command = [sys.executable, "-S", "-c", _SHEPHERD]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
            atexit.register(self._end, self._process)
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def _end(self, process: subprocess.Popen[str]) -> None:
        process.communicate()


_shepherd = _Shepherd()


class Server(ABC):
    """A server's process: started, waited for, paused, killed, started again, and always ended.

    In a session of its own, so that Ctrl-C reaches the tests only, which then end it.
    """

    program: ClassVar[str]

    def __init__(self) -> None:
        self._program = require(self.program)
        self._folder = tempfile.TemporaryDirectory(prefix="multiq-", ignore_cleanup_errors=True)
        self.folder = Path(self._folder.name)  # short: a UNIX socket's path takes 107 bytes
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> Sequence[str]:
        """What is run."""
        return [self._program, *self.arguments()]

    @abstractmethod
    def arguments(self) -> Sequence[str]:
        """What follows the program's name."""

    @abstractmethod
    def answers(self) -> bool:
        """Whether it serves."""

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server does not run"
        return self._process.pid

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, *, wait: bool = True) -> Self:
        """Start, and wait until it serves. A server that does not start fails the test with its log."""
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
            )
        _shepherd.tell(f"+{self.pid}")
        give_up_at = time.monotonic() + PATIENCE
        while wait and not self.answers():
            if not self.is_running or time.monotonic() > give_up_at:
                shown = self.log[-_LOG_SHOWN:]
                self.kill()
                raise AssertionError(f"{self.program} did not start; the end of its log:\n{shown}")
            time.sleep(0.01)
        return self

    def stop(self) -> None:
        """A clean end, as by the system's service manager."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """``kill -9``, its own children included."""
        if self.is_running:
            os.killpg(self.pid, signal.SIGKILL)
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """SIGSTOP: the kernel goes on accepting and acknowledging, nobody answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """End it, and remove its folder."""
        self.kill()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self if self.is_running else self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _shepherd.tell(f"-{process.pid}")
