"""Options that several commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import click

from multiq.terminal_escapes import safe

from .argument_types import Moment, QueueName
from .completion import complete_connection
from .connection import keep_connection
from .durations import Duration

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")

_VERBOSE = "multiq.verbose"


def connection_option(function: F) -> F:
    """``-c``: a connection's name or a URL, before or after the command. If ``-c`` is given twice, the option after the
    command is used.
    """
    return click.option(
        "-c",
        "--connection",
        metavar="URL|NAME",
        callback=keep_connection,
        shell_complete=complete_connection,
        expose_value=False,
        help="A configured connection, or a URL (other users see its password: see password_env).",
    )(function)


def traceback_option(function: F) -> F:
    """``--traceback``. ``exits.report`` searches the arguments for ``--traceback``, because the parsing itself may have
    failed.
    """
    return click.option(
        "--traceback",
        is_flag=True,
        expose_value=False,
        help="Show an error's traceback, too.",
    )(function)


def json_option(function: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


def _tell_settings(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if not value or ctx.meta.get(_VERBOSE):
        return
    ctx.meta[_VERBOSE] = True
    from multiq.settings.loader import describe_sources

    from .framework_app import given_app

    given = given_app()
    click.echo(f"settings: {safe(describe_sources() if given is None else f'those of {given}')}", err=True)


def verbose_option(function: F) -> F:
    """``-v``, before or after the command: show where the settings come from."""
    return click.option(
        "-v",
        "--verbose",
        is_flag=True,
        callback=_tell_settings,
        expose_value=False,
        help="Say which configuration file is used.",
    )(function)


def common_options(function: F) -> F:
    """The options of every command that talks to a backend."""
    return connection_option(json_option(verbose_option(traceback_option(function))))


def queue_option(function: F) -> F:
    """``-q``, for the commands that work on one job."""
    return click.option(
        "-q", "--queue", type=QueueName(), metavar="QUEUE", help="The job's queue; without it, all are searched."
    )(function)


def followers_option(function: F) -> F:
    """The option ``--followers``, for the commands that delete jobs."""
    return click.option(
        "--followers",
        type=click.Choice(["go", "stop"]),
        help="What the jobs of a flow that wait for a deleted job do: run (go), or end without a run (stop).",
    )(function)


def due_options(function: F) -> F:
    for option in (
        click.option("--at", type=Moment(), metavar="TIME", help="When it is due: 2027-01-31T09:00+02:00."),
        click.option("--delay", type=Duration(), metavar="TIME", help="How long from now it is due: 90, 5m, 1h30m."),
    ):
        function = option(function)
    return function
