"""Two kinds of orphans: processes that jobs have left behind, and the children of a worker whose supervisor has ended.

- A supervisor that is process 1 of a container becomes the parent of the processes that jobs have left behind, and
  reaps them (``reap_orphans``).
- The sidecar ends the children of a worker whose supervisor has died, or has reloaded (``OrphanedChildren``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
from typing import TYPE_CHECKING

from .dead_children import UNKNOWN_EXIT
from .inflight import LIVE

if TYPE_CHECKING:
    from collections.abc import Collection

    from .shared_state import SharedState

_log = logging.getLogger("multiq.sidecar")


def reap_orphans(ours: Collection[int | None]) -> None:
    """Reap the ended children of this process, up to the first one in *ours*. These are the worker's own processes,
    which their owners reap."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in ours:
            os.waitpid(ended.si_pid, os.WNOHANG)


class OrphanedChildren:
    """The children of one worker, for the time after the supervisor's end.

    Before that, the supervisor notices ended children and kills overdue ones itself. The sidecar opens a handle on each
    child already at this time, because the pid of a child that has ended can be reused.
    """

    def __init__(self, shared_state: SharedState) -> None:
        self._tables = shared_state.tables
        self._handles: dict[tuple[int, float], _ProcessHandle] = {}  # (number, life) of a table -> its child

    def watch(self) -> list[tuple[int, float]]:
        """Open a handle on each living child before its pid can be reused. Close the handles of ended children.

        Returns the ``number`` and ``life`` of the tables of these ended children. Also call this method while the
        supervisor lives.
        """
        # For each table, ``life`` is read first, and the pid is read once after that. If a new child gets the table
        # between these two reads, the pid is 0 at that moment.
        pids = {(table.number, table.life): table.pid for table in self._tables if table.state == LIVE}
        living = {key: pid for key, pid in pids.items() if pid}
        ended = list(self._handles.keys() - living.keys())
        for key in ended:
            self._handles.pop(key).close()
        for key in living.keys() - self._handles.keys():
            self._handles[key] = _ProcessHandle(living[key])
        return ended

    def end(self, *, killing: bool) -> None:
        """Mark the tables of ended children as dead. With *killing*, kill the children that have not ended.

        Call this method only after the supervisor's end. The supervisor does this work while it lives.
        """
        for table in self._tables:
            if table.state != LIVE:
                continue
            child = self._handles.get((table.number, table.life))
            if child is None or child.is_gone():  # None: the table was assigned to a child that was never forked
                table.mark_dead(UNKNOWN_EXIT, time.monotonic(), is_cut=child is not None and child.was_killed)
            elif killing:
                child.kill()


class _ProcessHandle:
    """A handle on a process that is not a child of the sidecar.

    If the system supports pidfds, the handle has one. A later process with the same pid is then not mistaken for the
    process of the handle.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._descriptor: int | None = None
        self._was_gone = False
        self.was_killed = False
        if hasattr(os, "pidfd_open"):
            try:
                self._descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._was_gone = True
            except OSError:  # an old kernel, or too many open files
                _log.debug("process %d has no pidfd", pid, exc_info=True)

    def is_gone(self) -> bool:
        if self._was_gone or self._descriptor is None:
            return self._was_gone or not self._send(0)
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def kill(self) -> None:
        self.was_killed = True
        self._send(signal.SIGKILL)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _send(self, number: int) -> bool:
        """Returns False if the process does not exist."""
        try:
            if self._descriptor is None:
                os.kill(self._pid, number)
            else:
                signal.pidfd_send_signal(self._descriptor, number)
        except ProcessLookupError:
            return False
        return True
