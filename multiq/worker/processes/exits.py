"""The exit codes of worker processes, and how a child's end is described."""

from __future__ import annotations

import signal

EXIT_OK = 0
EXIT_CRASHED = 1
EXIT_MEMORY = 12
"""The process uses more memory than it may. Laravel's workers exit with the same code."""
EXIT_OVERDUE = 13
"""A job ran on after it was notified of its time limit, so its process had to end."""
EXIT_RECYCLED = 14
"""The process has reached ``recycle_jobs`` or ``recycle_time``, and is to be replaced."""
EXIT_STUCK = 15
"""The event loop was held for longer than any job on it may run, and it is unknown by which job."""
EXIT_CUT_SHORT = 130
"""A second signal, or the end of the grace, ended jobs early; they were given back."""

_NAMED = frozenset(map(int, signal.Signals))


def describe_exit(status: int, exit_code: int | None) -> str:
    """How a child died. *status*: its exit code or, if negative, the signal; *exit_code*: the code that it wrote."""
    if status < 0:
        return (
            f"was killed by {signal.Signals(-status).name}" if -status in _NAMED else f"was killed by signal {-status}"
        )
    return (
        f"ended with code {status}" if exit_code is not None else f"ended with code {status} in the middle of its work"
    )
