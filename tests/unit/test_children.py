"""A process is signalled only if its pid certainly belongs to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from multiq.worker.processes.reload import is_child


def test_a_process_counts_as_a_child_until_it_is_reaped() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert is_child(process.pid)
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert is_child(process.pid)  # it is dead, but its pid is not reused yet
    process.communicate()
    assert not is_child(process.pid)


def test_other_processes_are_not_children() -> None:
    assert not is_child(os.getppid())
    assert not is_child(os.getpid())
