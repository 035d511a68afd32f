"""Prints the error that ends a command: as text with a hint, or with ``--json`` as a line of JSON."""

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

from .exits import exit_code

if TYPE_CHECKING:
    from collections.abc import Sequence

_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}
_LINES = 16  # the largest number of lines of a message, so that the message and the prompt fit on one screen
_COLUMNS = 600  # the largest number of characters in a line of a message


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
