"""The exit codes of worker processes, and the description of a child's end."""

from __future__ import annotations

import signal

EXIT_OK = 0
EXIT_CRASHED = 1
EXIT_MEMORY = 12
"""The process uses too much memory. Laravel's workers use the same code."""
EXIT_OVERDUE = 13
"""A job ran on after its timeout, so its process had to end."""
EXIT_RECYCLED = 14
"""The process has reached ``recycle_jobs`` or ``recycle_time``, and must be replaced."""
EXIT_STUCK = 15
"""The event loop was blocked for longer than the longest timeout of its jobs, and the job that blocked it is
unknown."""
EXIT_SUPERFLUOUS = 16
"""A worker that scales has too little work for this process."""
EXIT_CUT_SHORT = 130
"""A second signal, or the end of the grace, ended jobs early. The jobs were given back."""

_NAMED = frozenset(map(int, signal.Signals))


def describe_exit(status: int, exit_code: int | None) -> str:
    """Describe how a child died.

    *status* is the child's exit code, or the negative number of the signal that killed it. *exit_code* is the code that
    the child wrote into its in-flight table, or None.
    """
    if status < 0:
        return (
            f"was killed by {signal.Signals(-status).name}" if -status in _NAMED else f"was killed by signal {-status}"
        )
    return (
        f"ended with code {status}" if exit_code is not None else f"ended with code {status} in the middle of its work"
    )
