"""The check before a reload: does the new code start? If it does not, the reload is given up."""

from __future__ import annotations

import logging
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_log = logging.getLogger("multiq.supervisor")


class ReloadCheck:
    """Runs *command*, which exits with 0 if the current code starts. The supervisor does not wait for it.

    *command* is None: every reload goes on without a check.
    """

    def __init__(self, command: Sequence[str] | None) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stale = False

    @property
    def pid(self) -> int | None:
        """The process of the running check."""
        return None if self._process is None else self._process.pid

    def begin(self) -> bool:
        """Start the check. Returns True if there is no command, so that the reload goes on immediately."""
        if self._command is None:
            return True
        if self._process is not None:
            self._is_stale = True  # files may have changed after the running check read them
            return False
        self._is_stale = False
        try:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL)  # noqa: S603 - our own command
        except OSError:  # a deployment is replacing the interpreter, or the system refuses to start a process
            _log.exception("the new code cannot be checked: the old code keeps running")
        return False

    def has_just_passed(self, *, is_stopping: bool) -> bool:
        """Whether the check has passed since the last call, and the reload goes on. If files may have changed during
        the check, this method starts the check again."""
        if self._process is None or self._process.poll() is None:
            return False
        code, self._process = self._process.returncode, None
        if self._is_stale and not is_stopping:
            return self.begin()
        if code:
            _log.error("the new code does not start (exit code %d): the old code keeps running", code)
        return not code and not is_stopping

    def end(self) -> None:
        """Kill the running check."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
