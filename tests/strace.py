"""strace: record which system calls a server makes, and let some of them fail."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from servers.process import until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from servers.process import Server


def require() -> None:
    """Skip the test if strace is missing or is not allowed to trace."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: apt-get install strace")
    if subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, check=False).returncode:
        pytest.skip("ptrace is not allowed here")


def noting(calls: str, file: Path, command: Sequence[str], *, data: int = 0) -> list[str]:
    """A command that runs *command*, and records its *calls* in *file*, with the path of the file that each is on.

    *data*: the number of written bytes that are recorded, too; then all texts are in hexadecimal digits: ``\\x2f``.
    """
    how = ["-xx", "-s", str(data)] if data else ["-s", "0"]
    return ["strace", "-f", "-y", *how, "-e", f"trace={calls}", "-o", str(file), *command]


@contextlib.contextmanager
def injecting(server: Server, calls: str, fault: str, *options: str) -> Iterator[None]:
    """In the block the server's *calls* have a fault, in the notation of strace: ``error=ENOSPC``."""
    command = ["strace", "-f", "-qq", "-o", "/dev/null", "-p", str(server.pid), *options]
    inject = ["-e", f"trace={calls}", "-e", f"inject={calls}:{fault}"]
    with subprocess.Popen([*command, *inject], stderr=subprocess.DEVNULL) as tracer:
        try:
            until(lambda: _is_traced(server), "strace holds the server")
            yield
        finally:
            tracer.terminate()


def _is_traced(server: Server) -> bool:
    return "TracerPid:\t0" not in Path(f"/proc/{server.pid}/status").read_text()
