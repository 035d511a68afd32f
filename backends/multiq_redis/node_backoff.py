"""Servers of a cluster that did not answer are left alone for a while, so that the queues of the others go on.

So is, on any server, a line one of whose keys holds something that another program has written.

====================  ======================================================================
who is left alone     a server (or a line whose server is not known) that failed, for a second
how it is asked next  for a quarter of a second, every sixteenth time for as long as a call may take
when it is over       at its first answer, or when the line has another server
====================  ======================================================================
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from multiq.driverkit.net import Address
    from multiq.errors import BackendError

    from .topology import Servers

_log = logging.getLogger("multiq.redis")

_REST = 1.0  # seconds
_SHORT = 0.25  # seconds that a server has which did not answer lately
_PATIENT_EACH = 16


class _Failure:
    """What is known of a server that did not answer."""

    def __init__(self) -> None:
        self.line = ""
        """The one whose call failed last."""
        self.times = 0
        self.until = 0.0  # monotonic
        self.error: BackendError | None = None
        self.is_of_line = False
        """Whether the line is at fault, not its server."""


class Resting:
    """What one consumer knows of lines that cannot be read and, in a cluster, of servers that failed."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self.failures: dict[Address | str, _Failure] = {}

    def failed(self, line: str, error: BackendError) -> None:
        """A line's server did not answer."""
        failure = self.failures.setdefault(self._where(line), _Failure())
        failure.line = line
        failure.times += 1
        failure.error = error
        patient = failure.times % _PATIENT_EACH == 0
        failure.until = time.monotonic() + (self._servers.timeout if patient else _REST)

    def cannot_be_read(self, line: str, error: BackendError) -> None:
        """A line's keys hold something else."""
        failure = self.failures.get(line)
        if failure is None or not failure.is_of_line:
            _log.error("a line is left out until its keys can be read, line %s: %s", line, error)
            failure = self.failures[line] = _Failure()
        failure.line, failure.error, failure.is_of_line = line, error, True
        failure.until = time.monotonic() + _REST

    def answered(self, line: str) -> None:
        """It did. What is known of a server that has lost its lines to another is of no use any more."""
        self.failures.pop(self._where(line), None)
        self.failures.pop(line, None)
        for place, failure in tuple(self.failures.items()):
            if not failure.is_of_line and self._where(failure.line) != place:
                del self.failures[place]

    def error_of(self, line: str) -> BackendError | None:
        """Why a line is not to be asked now; None: it may be."""
        for place in (self._where(line), line):
            failure = self.failures.get(place)
            if failure is not None and time.monotonic() < failure.until:
                return failure.error
        return None

    def of(self, lines: Iterable[str]) -> frozenset[str]:
        """Those of these lines that are not to be asked now."""
        return frozenset(line for line in lines if self.error_of(line) is not None) if self.failures else frozenset()

    def patience(self, line: str) -> float:
        """Seconds that a line's server is given for a call."""
        failure = self.failures.get(self._where(line)) or self.failures.get(line)
        if failure is None or failure.is_of_line or failure.times % _PATIENT_EACH == _PATIENT_EACH - 1:
            return self._servers.timeout
        return min(_SHORT, self._servers.timeout)

    def next_end(self) -> float:
        """When the first of them may be asked again; monotonic."""
        return min((failure.until for failure in self.failures.values()), default=float("inf"))

    def _where(self, line: str) -> Address | str:
        return self._servers.known(line) or line
