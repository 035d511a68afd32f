"""Exit codes, and which error ends a command with which code. ``docs/cli.md`` has the table of codes."""

from __future__ import annotations

import click

from multiq import errors

OK = 0
FAILED = 1
"""The command was tried and failed, for example because the backend is unreachable, full or damaged."""
USAGE = 2
"""The command cannot be tried. An option, argument, URL or setting is wrong, or a package is missing."""
NOT_FOUND = 3
"""The job, the failed job, the job's outcome or the app's task does not exist."""
RESERVED = 4
"""The job is running, waits for other jobs, is waited for by other jobs, or has a unique key that another job has
taken."""
UNSUPPORTED = 5
"""The backend lacks a capability that the command needs."""
BROKEN = 6
"""``multiq conformance``, ``multiq bench`` or ``multiq soak`` found a broken promise."""
UNSURE = 7
"""The outcome is unknown. For an enqueue: the enqueue was sent, and its reply was lost. For ``multiq bench --compare``:
no figure is certainly worse, and some figures cannot be judged.
"""
STOPPED = 130
"""The command was stopped by Ctrl-C, by a second signal, or by the answer "no"."""

#: Error classes and their exit codes. The first class that matches the error decides the code.
_CODES: tuple[tuple[type[Exception], int], ...] = (
    (errors.JobNotFound, NOT_FOUND),
    (errors.JobNotFailed, NOT_FOUND),
    (errors.TaskNotFound, NOT_FOUND),
    (errors.FlowNotFound, NOT_FOUND),
    (errors.ScheduleNotFound, NOT_FOUND),
    (errors.JobReserved, RESERVED),
    (errors.JobHeld, RESERVED),
    (errors.UniqueTaken, RESERVED),
    (errors.JobAwaited, RESERVED),
    (errors.EnqueueUncertain, UNSURE),
    (errors.Unsupported, UNSUPPORTED),
    (errors.BackendNotInstalled, USAGE),
    (ValueError, USAGE),  # NameInvalid, OptionInvalid, UrlInvalid, SettingsInvalid, PayloadInvalid...
    (TypeError, USAGE),  # ArgumentsInvalid
    (ImportError, USAGE),  # an extra is not installed
)


def exit_code(error: Exception) -> int:
    if isinstance(error, click.ClickException):
        return USAGE
    if isinstance(error, click.Abort):
        return STOPPED
    if isinstance(error, errors.MultiqError):
        return next((code for kind, code in _CODES if isinstance(error, kind)), FAILED)
    return FAILED
