"""A server's process for a test, in a temporary folder: tests can pause and kill it, and it ends with the tests.

Starting and ending are the code that ``multiq bench`` uses for its own throwaway servers. Here a missing server program
skips the test, and a server that does not start fails it.
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
    """The path of a server's program. If it is missing, the test is skipped, or under CI fails, naming what to install.

    *package* is needed only where its name differs from that of the program.
    """
    try:
        return servers.find(program, package or program)
    except ServerMissing as exc:
        message = f"run .ci/install-servers: {exc}"
    if os.environ.get("CI", "").lower() in {"1", "true"}:
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


def until(condition: Callable[[], object], what: str) -> None:
    """Wait until a condition holds; the test fails if this takes too long."""
    give_up_at = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > give_up_at:
            raise AssertionError(f"waited {PATIENCE:g} s in vain until {what}")
        time.sleep(0.01)


class Server(servers.Server):
    """A server's process that can be started, paused, killed and restarted, and is always ended after the test."""

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
        """SIGSTOP: the kernel still accepts connections and acknowledges data; the process does not answer."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT: end the pause."""
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """End it, and remove its folder."""
        super().close()
        self._folder.cleanup()
