"""Options and argument types that several commands share."""

from __future__ import annotations

import datetime as dt
import json
import re
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from multiq.backend import DELAY_MAX
from multiq.terminal_escapes import safe
from multiq.validation import check_name

if TYPE_CHECKING:
    from collections.abc import Callable

    _Type = click.ParamType[Any]
else:
    _Type = click.ParamType  # only newer versions of click have a generic ParamType

F = TypeVar("F", bound="Callable[..., Any]")

_CONNECTION = "multiq.connection"
_VERBOSE = "multiq.verbose"
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_ID_LENGTH = 256


def chosen_connection() -> str | None:
    """Return the connection that ``-c`` names, before or after the command. Without ``-c``, return None."""
    context = click.get_current_context(silent=True)  # None in the tests of a program
    connection: str | None = None if context is None else context.meta.get(_CONNECTION)
    return connection


# --- types -----------------------------------------------------------------------------------------------


class Duration(_Type):
    """A duration: seconds, or a number with a unit. Examples: ``90``, ``1.5``, ``250ms``, ``5m``, ``1h30m``, ``2d``."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip().lower()
        try:
            seconds = _seconds(text)
        except ValueError:
            self.fail(f"must be seconds (90, 1.5), or like 250ms, 5m, 1h30m, 2d, got {_shown(value)}", param, ctx)
        if not 0 <= seconds <= DELAY_MAX:  # also refuses NaN
            self.fail(f"must be from 0 seconds to a century, got {_shown(value)}", param, ctx)
        return seconds


class Moment(_Type):
    """A point in time in ISO 8601, with a time zone. Examples: ``2027-01-31T09:00Z``, ``2027-01-31T09:00+02:00``."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dt.datetime:
        text = str(value).strip()
        try:
            moment = dt.datetime.fromisoformat(text)
        except ValueError:
            self.fail(f"must be an ISO 8601 time like 2027-01-31T09:00Z, got {_shown(value)}", param, ctx)
        if moment.utcoffset() is None:
            self.fail(
                f"must have a time zone, got {_shown(value)}: add Z for UTC, or an offset like +02:00",
                param,
                ctx,
            )
        return moment


class QueueName(_Type):
    """A queue's name. Raises ``NameInvalid`` if the text is not a valid name."""

    name = "queue"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:  # noqa: ARG002
        return check_name(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return complete_queue(ctx, param, incomplete)


class JobCount(_Type):
    """A number of jobs: an integer from 1, or ``all``, which becomes infinity."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value)
        if text == "all":
            return float("inf")
        if not (text.isascii() and text.isdecimal() and len(text) <= 15 and int(text) > 0):
            self.fail(f"must be a number of jobs, or all, got {_shown(value)}", param, ctx)
        return int(text)


class ProcessCount(_Type):
    """A whole number, or a range like ``1:8``. A range is returned as text. The worker checks the number or the
    range."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        text = str(value).strip()
        if ":" in text:
            return text
        try:
            return int(text)
        except ValueError:
            self.fail(f"must be a whole number, or MIN:MAX like 1:8, got {_shown(value)}", param, ctx)


class JobId(_Type):
    """A job's id from any backend. Text that a backend could read as several words is rejected."""

    name = "id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if not (0 < len(text) <= _ID_LENGTH and text.isascii() and text.isprintable() and " " not in text):
            self.fail(f"a job's id must be one word of ASCII, got {_shown(value)}", param, ctx)
        return text


class Json(_Type):
    """A JSON value that has the Python type *kind*, or one of several types."""

    name = "json"

    def __init__(self, kind: type | tuple[type, ...] = object, example: str = "'{\"a\": 1}'") -> None:
        self._kind = kind
        self._example = example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            parsed = json.loads(value, parse_constant=_refuse)
        except (ValueError, RecursionError) as exc:
            self.fail(f"must be JSON like {self._example}, got {_shown(value)} ({exc})", param, ctx)
        if not isinstance(parsed, self._kind):
            self.fail(
                f"{_shown(value)} is JSON, but not what is needed here: write it like {self._example}", param, ctx
            )
        return parsed


def _seconds(text: str) -> float:
    if _DURATION.fullmatch(text):
        return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
    return float(text)


def _refuse(word: str) -> Any:
    raise ValueError(f"JSON has no {word}")


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


# --- options ---------------------------------------------------------------------------------------------


def _keep_connection(ctx: click.Context, _param: click.Parameter, value: str | None) -> None:
    if value is not None:
        ctx.meta[_CONNECTION] = value


def complete_queue(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the queues whose names begin with *incomplete*, for shell completion. The list is empty if the backend
    cannot list its queues.
    """
    from multiq.app import App
    from multiq.control.flags import visible_queues

    from .framework_app import current_settings

    before, comma, incomplete = incomplete.rpartition(",")
    try:
        with App(ctx.meta.get(_CONNECTION), settings=current_settings(), create=False) as app:
            names = visible_queues(app.backend)
    except Exception:  # noqa: BLE001 - no error may be printed while the user types a line
        return []
    return [CompletionItem(before + comma + name) for name in names if name.startswith(incomplete)]


def _complete_connection(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from multiq.errors import MultiqError

    from .framework_app import current_settings

    try:
        names = current_settings().connections
    except MultiqError:
        return []
    return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]


def connection_option(function: F) -> F:
    """``-c``: a connection's name or a URL, before or after the command. If ``-c`` is given twice, the option after the
    command is used.
    """
    return click.option(
        "-c",
        "--connection",
        metavar="URL|NAME",
        callback=_keep_connection,
        shell_complete=_complete_connection,
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
