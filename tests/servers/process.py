"""A server's process for a test: in a temporary folder, paused and killed at will, and gone when the tests are.

Starting and ending are what ``multiq bench`` has for its own throwaway servers; here a server that is missing skips the
test, and one that does not start fails it.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from multiq.bench import servers
from multiq.bench.servers import HOST, PATIENCE, ServerFailed, ServerMissing, free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

__all__ = ["HOST", "PATIENCE", "Server", "free_port", "require", "until"]


def require(program: str, package: str | None = None) -> str:
    """The path of a server's program. Missing, it skips the test, or under CI fails it, and names what to install.

    The *package* is mostly called as the program is.
    """
    try:
        return servers.find(program, package or program)
    except ServerMissing as exc:
        message = f"run .ci/install-servers: {exc}"
    if os.environ.get("CI", "").lower() in {"1", "true"}:
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


def until(condition: Callable[[], object], what: str) -> None:
    """Wait until a condition holds; a hang fails the test."""
    give_up_at = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > give_up_at:
            raise AssertionError(f"waited {PATIENCE:g} s in vain until {what}")
        time.sleep(0.01)


class Server(servers.Server):
    """A server's process: started, waited for, paused, killed, started again, and always ended."""

    def __init__(self) -> None:
        require(self.program, self.package)
        self._folder = tempfile.TemporaryDirectory(prefix="multiq-", ignore_cleanup_errors=True)
        super().__init__(Path(self._folder.name))

    def start(self, *, wait: bool = True) -> Self:
        """Start, and wait until it serves. A server that does not start fails the test with its log."""
        try:
            return super().start(wait=wait)
        except ServerFailed as exc:
            raise AssertionError(str(exc)) from exc

    def pause(self) -> None:
        """SIGSTOP: the kernel goes on accepting and acknowledging; the process does not answer."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """End it, and remove its folder."""
        super().close()
        self._folder.cleanup()
