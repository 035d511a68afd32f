"""Exit codes. ``report`` turns an error into a message and an exit code. ``docs/cli.md`` has the table of codes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sys
import textwrap
import traceback
from typing import TYPE_CHECKING, Any, TypeGuard

import click

from multiq import errors
from multiq.terminal_escapes import safe

if TYPE_CHECKING:
    from collections.abc import Sequence

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

_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}
_LINES = 16  # the largest number of lines of a message, so that the message and the prompt fit on one screen
_COLUMNS = 600  # the largest number of characters in a line of a message


def exit_code(error: Exception) -> int:
    if isinstance(error, click.ClickException):
        return USAGE
    if isinstance(error, click.Abort):
        return STOPPED
    if isinstance(error, errors.MultiqError):
        return next((code for kind, code in _CODES if isinstance(error, kind)), FAILED)
    return FAILED


def report(error: Exception, arguments: Sequence[str]) -> int:
    """Print an error on standard error, and return the exit code. The error is printed as text, or with ``--json`` as a
    line of JSON."""
    with contextlib.suppress(OSError):  # if standard error cannot be written to, the exit code is the only result
        _tell(error, arguments)
    return exit_code(error)


def _tell(error: Exception, arguments: Sequence[str]) -> None:
    flags = list(arguments)[: list(arguments).index("--")] if "--" in arguments else arguments
    with_traceback = "--traceback" in flags or os.environ.get("MULTIQ_TRACEBACK", "") not in {"", "0"}
    if with_traceback:
        traceback.print_exception(error)
    if "--json" in flags:
        fields: dict[str, Any] = {"type": _kind(error), "message": _sentence(error)}
        if isinstance(error, errors.EnqueueUncertain):
            fields["ids"] = error.ids
        document = {"error": fields}
        click.echo(json.dumps(document, ensure_ascii=False), err=True)
    elif isinstance(error, click.Abort):
        click.echo("stopped", err=True)
    else:
        click.secho(_fit(f"error: {_sentence(error)}"), fg="red", err=True)
        hint = _hint(error)
        if hint and not with_traceback:
            click.echo(hint, err=True)


def _kind(error: Exception) -> str:
    """Return the name of the error's public class, on which scripts can rely."""
    if isinstance(error, click.ClickException):
        return "UsageError"
    if isinstance(error, click.Abort):
        return "Stopped"
    for kind in type(error).__mro__:
        name: str = kind.__name__
        if kind is not errors.MultiqError and getattr(errors, name, None) is kind:
            return name
    return type(error).__name__


def _sentence(error: Exception) -> str:
    if isinstance(error, click.ClickException):
        message = error.format_message()
        return safe(message[:1].lower() + message[1:].removesuffix("."), keep="\n")
    if isinstance(error, click.Abort):
        return "stopped"
    if isinstance(error, errors.EnqueueUncertain):
        return safe(error.what, keep="\n")
    if isinstance(error, errors.MultiqError):
        return safe(str(error), keep="\n")
    if _is_of_system(error):
        return _system_sentence(error)
    return safe(f"this should not happen: {type(error).__name__}: {error}", keep="\n")


def _is_of_system(error: Exception) -> TypeGuard[OSError]:
    """Whether a standard stream cannot be written to, or the current folder is gone.

    A driver raises multiq's own errors, never an ``OSError``.
    """
    return isinstance(error, OSError) and (_is_folder_gone() or (error.filename is None and error.errno in _UNWRITABLE))


def _system_sentence(error: OSError) -> str:
    if _is_folder_gone():
        return "the current folder is not there any more: it was deleted or moved; change to another one"
    return safe(f"standard output cannot be written to: {error.strerror}")


def _is_folder_gone() -> bool:
    try:
        os.getcwd()  # noqa: PTH109 - raises if the folder is gone
    except OSError:
        return True
    return False


def _fit(message: str) -> str:
    """Cut *message* so that it fits on one screen. On a terminal, lines are broken between words."""
    lines = [line if len(line) <= _COLUMNS else line[: _COLUMNS - 3] + "..." for line in message.splitlines()]
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        lines = [part for line in lines for part in _wrap(line, width)]
    if len(lines) > _LINES:
        lines = [*lines[: _LINES - 1], f"  ... and {len(lines) - _LINES + 1} more lines"]
    return "\n".join(lines)


def _wrap(line: str, width: int) -> list[str]:
    indent = line[: len(line) - len(line.lstrip(" -"))]
    return textwrap.wrap(
        line, width, subsequent_indent=" " * len(indent), break_long_words=False, break_on_hyphens=False
    ) or [""]


def _hint(error: Exception) -> str:
    if isinstance(error, click.UsageError) and error.ctx is not None:
        return f"see: {error.ctx.command_path} --help"
    if isinstance(error, errors.EnqueueUncertain):
        return safe("; ".join(getattr(error, "__notes__", ())))
    if not isinstance(error, click.ClickException | errors.MultiqError) and not _is_of_system(error):
        return "add --traceback to see where"
    return ""
