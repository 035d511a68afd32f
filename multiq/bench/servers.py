"""A throwaway server's process: in a folder of its own, on a port that nobody else has, and gone when we are.

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

import psutil

from multiq.errors import MultiqError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Self

HOST = "127.0.0.1"
PATIENCE = 60.0  # seconds; guards against a hang, and nobody waits for it
_PORTS = range(11000, 20000)  # with a cluster's bus (+10000), below those that the kernel hands out by itself (32768)
_ELSEWHERE = ":/usr/sbin:/usr/local/sbin"  # where servers are installed, and users' PATHs do not look
_LOG_SHOWN = 3000  # characters

#: reads "+pid" or "+folder" for what begins to be, "-pid" or "-folder" for what has ended
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
    """A server of our own did not start; the message has the end of its log."""


def find(program: str, package: str) -> str:
    """The path of a server's program. Raises ``ServerMissing``, which names the Debian *package* that has it."""
    found = shutil.which(program, path=os.environ.get("PATH", "") + _ELSEWHERE)
    if found is None:
        raise ServerMissing(
            f"{program} is not installed, so none can be started: apt-get install {package} (on Debian and its kin), "
            "or give the URL of a server that runs already"
        )
    return found


def free_port() -> int:
    """A TCP port of this machine that nobody listens on, its bus port included.

    Until this process ends no other one gets it from here: its UDP port of the same number says that it is taken, also
    while the server has not begun to listen, or is being restarted.
    """
    while True:
        port = random.choice(_PORTS)  # noqa: S311 - a port is no secret
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
    """With a short name, as servers have UNIX sockets in it, and gone at the end, even where we are killed."""
    with tempfile.TemporaryDirectory(prefix="multiq-bench-", dir=parent, ignore_cleanup_errors=True) as name:
        _shepherd.tell(f"+{name}")
        yield Path(name)
        _shepherd.tell(f"-{name}")


def cpu_seconds(pid: int) -> float | None:
    """What a process of this machine has used so far, user and system; None where it is out of sight."""
    with contextlib.suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return None


def resident_bytes(pid: int) -> int | None:
    """The memory of a process of this machine; None where it is out of sight."""
    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return None


class Server(ABC):
    """A server's process: started, waited for, ended, and started again.

    In a session of its own, so that Ctrl-C reaches us only, who then end it. It does not outlive us, even where we
    are killed.
    """

    program: ClassVar[str]
    package: ClassVar[str]
    """The Debian package that has the program."""

    def __init__(self, folder: Path) -> None:
        """Raises ``ServerMissing``. The *folder*'s name is best short: a UNIX socket's path takes 107 bytes."""
        self._program = find(self.program, self.package)
        self.folder = folder
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
        assert self._process is not None, "the server does not run"  # noqa: S101 - a slip of ours, not of a user
        return self._process.pid

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, *, wait: bool = True) -> Self:
        """Start, and wait until it serves. Raises ``ServerFailed``."""
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
        """A clean end, as by the system's service manager."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """``kill -9``, its own children included."""
        if self.is_running:
            os.killpg(self.pid, signal.SIGKILL)
        self._end(signal.SIGKILL)

    def close(self) -> None:
        """End it, whatever it holds."""
        self.kill()

    def __enter__(self) -> Self:
        if not self.is_running:
            try:
                self.start()
            except BaseException:  # an impatient Ctrl-C, too
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
    """Ends and removes what is left when this process dies without a chance to tidy up, as by SIGKILL."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._is_over = False

    def tell(self, word: str) -> None:
        if self._is_over:
            return  # this process tidies up at its very end, and there is nothing left to do
        if self._process is None:
            command = [sys.executable, "-S", "-c", _REAPER]
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter
                command, stdin=subprocess.PIPE, text=True, start_new_session=True
            )
            atexit.register(self._end, self._process)
        assert self._process.stdin is not None  # noqa: S101 - it was asked for
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def _end(self, process: subprocess.Popen[str]) -> None:
        self._is_over = True
        process.communicate()


_shepherd = _Reaper()
