"""What only strace shows or does: which calls a server has made, and how it takes one that fails."""

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
    """Where it is missing or may not trace, the test is skipped."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: apt-get install strace")
    if subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, check=False).returncode:
        pytest.skip("ptrace is not allowed here")


def noting(calls: str, file: Path, command: Sequence[str], *, data: int = 0) -> list[str]:
    """A command that runs this one, and notes its calls on files in *file*, each with the file's path.

    With *data* so many bytes of what is written are noted, too; then all texts are in hexadecimal digits: ``\\x2f``.
    """
    how = ["-xx", "-s", str(data)] if data else ["-s", "0"]
    return ["strace", "-f", "-y", *how, "-e", f"trace={calls}", "-o", str(file), *command]


@contextlib.contextmanager
def injecting(server: Server, calls: str, fault: str, *options: str) -> Iterator[None]:
    """While this holds the server's calls of these names have a fault, as strace writes it: ``error=ENOSPC``."""
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
