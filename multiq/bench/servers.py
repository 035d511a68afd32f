"""A throwaway server's process, with its own folder and its own port. A throwaway server ends when this process ends.

A throwaway server shares nothing with other servers on the machine, and never uses the usual ports.
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

import psutil

from multiq.errors import MultiqError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Self

HOST = "127.0.0.1"
PATIENCE = 60.0  # seconds after which a server counts as hung
_PORTS = range(11000, 20000)  # the bus of a cluster adds 10000, and the kernel's ephemeral ports begin at 32768
_ELSEWHERE = ":/usr/sbin:/usr/local/sbin"  # folders of servers that are often not on a user's PATH
_LOG_SHOWN = 3000  # characters

#: The program of ``_Reaper``'s process. The program reads lines about server processes and folders: "+pid" or "+folder"
#: is sent when a process or folder begins to exist, and "-pid" or "-folder" when it is gone. At the end of its input,
#: the program kills the remaining processes and removes the remaining folders.
_REAPER = """
import os, shutil, signal, sys
alive = set()
for line in sys.stdin:
    (alive.add if line[0] == "+" else alive.discard)(line[1:-1])
for pid in filter(str.isdigit, alive):
    try:
        os.kill(int(pid), signal.SIGKILL)
    except ProcessLookupError:
        pass
for folder in alive:
    shutil.rmtree(folder, ignore_errors=True)
"""


class ServerMissing(MultiqError, LookupError):
    """A server's program is not installed."""


class ServerFailed(MultiqError):
    """A throwaway server did not start. The message has the end of the server's log."""


def find(program: str, package: str) -> str:
    """The path of a server's program. Raises ``ServerMissing``, which names the Debian *package* to install."""
    found = shutil.which(program, path=os.environ.get("PATH", "") + _ELSEWHERE)
    if found is None:
        raise ServerMissing(
            f"{program} is not installed, so no server can be started: apt-get install {package} (on Debian, Ubuntu), "
            "or give the URL of a running server"
        )
    return found


def free_port() -> int:
    """A free TCP port of this machine. The bus port (the port plus 10,000) is free, too.

    The port stays reserved until this process ends, even while no server listens. To reserve the port, this process
    holds the UDP port of the same number. A port whose UDP port is in use is never returned.
    """
    while True:
        port = random.choice(_PORTS)  # noqa: S311 - a port is not a secret
        with (
            contextlib.suppress(OSError),
            socket.socket() as one,
            socket.socket() as other,
            socket.socket(type=socket.SOCK_DGRAM) as taken,
        ):
            one.bind((HOST, port))
            other.bind((HOST, port + 10000))
            taken.bind((HOST, port))
            taken.detach()  # stays open
            return port


@contextlib.contextmanager
def temporary_folder(parent: Path | None = None) -> Iterator[Path]:
    """A temporary folder. The folder is removed at the end, even if this process is killed.

    The folder's name is short, because servers create UNIX sockets in the folder.
    """
    with tempfile.TemporaryDirectory(prefix="multiq-bench-", dir=parent, ignore_cleanup_errors=True) as name:
        _shepherd.tell(f"+{name}")
        yield Path(name)
        _shepherd.tell(f"-{name}")


def cpu_seconds(pid: int) -> float | None:
    """CPU seconds that a process of this machine has used, in user and in system mode. The result is None if the times
    cannot be read."""
    with contextlib.suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return None


def resident_bytes(pid: int) -> int | None:
    """The resident memory of a process of this machine. The result is None if the memory cannot be read."""
    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return None


class Server(ABC):
    """The process of a server, with its start and its end.

    The server runs in its own session, so that Ctrl-C reaches only this process. On Ctrl-C, this process ends the
    server. The server does not outlive this process, even if this process is killed.
    """

    program: ClassVar[str]
    package: ClassVar[str]
    """The Debian package that has the program."""

    def __init__(self, folder: Path) -> None:
        """Raises ``ServerMissing``. The path of a UNIX socket in *folder* has at most 107 bytes."""
        self._program = find(self.program, self.package)
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> Sequence[str]:
        return [self._program, *self.arguments()]

    @abstractmethod
    def arguments(self) -> Sequence[str]:
        """The command-line arguments after the program's name."""

    @abstractmethod
    def answers(self) -> bool:
        """Whether the server answers requests."""

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server does not run"  # noqa: S101 - a bug, not a user's mistake
        return self._process.pid

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, *, wait: bool = True) -> Self:
        """Start the server, and wait until it answers. Raises ``ServerFailed``."""
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - found on the PATH, with arguments of our own
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
                raise ServerFailed(f"{self.program} did not start; the end of its log:\n{shown}")
            time.sleep(0.01)
        return self

    def stop(self) -> None:
        """Shut the server down cleanly, as the system's service manager does."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """``kill -9`` the server and its children."""
        if self.is_running:
            os.killpg(self.pid, signal.SIGKILL)
        self._end(signal.SIGKILL)

    def close(self) -> None:
        """End the server. The server's data may be lost."""
        self.kill()

    def __enter__(self) -> Self:
        if not self.is_running:
            try:
                self.start()
            except BaseException:  # an exception such as Ctrl-C while the server starts
                self.close()
                raise
        return self

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


class _Reaper:
    """Ends the servers and removes the folders that are left over when SIGKILL ends this process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._is_over = False

    def tell(self, word: str) -> None:
        if self._is_over:
            return  # this process is exiting and has cleaned up already
        if self._process is None:
            command = [sys.executable, "-S", "-c", _REAPER]
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter
                command, stdin=subprocess.PIPE, text=True, start_new_session=True
            )
            atexit.register(self._end, self._process)
        assert self._process.stdin is not None  # noqa: S101 - stdin is a pipe
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def _end(self, process: subprocess.Popen[str]) -> None:
        self._is_over = True
        process.communicate()


_shepherd = _Reaper()
