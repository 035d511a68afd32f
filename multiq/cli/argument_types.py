"""The types of arguments and options that several commands share. ``durations`` has one more."""

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING, Any

import click

from multiq.validation import check_name

from .completion import complete_queue

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    ParameterType = click.ParamType[Any]
else:
    ParameterType = click.ParamType  # only newer versions of click have a generic ParamType

_ID_LENGTH = 256


class Moment(ParameterType):
    """A point in time in ISO 8601, with a time zone. Examples: ``2027-01-31T09:00Z``, ``2027-01-31T09:00+02:00``."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dt.datetime:
        text = str(value).strip()
        try:
            moment = dt.datetime.fromisoformat(text)
        except ValueError:
            self.fail(f"must be an ISO 8601 time like 2027-01-31T09:00Z, got {shown(value)}", param, ctx)
        if moment.utcoffset() is None:
            self.fail(
                f"must have a time zone, got {shown(value)}: add Z for UTC, or an offset like +02:00",
                param,
                ctx,
            )
        return moment


class QueueName(ParameterType):
    """A queue's name. Raises ``NameInvalid`` if the text is not a valid name."""

    name = "queue"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:  # noqa: ARG002
        return check_name(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return complete_queue(ctx, param, incomplete)


class JobCount(ParameterType):
    """A number of jobs: an integer from 1, or ``all``, which becomes infinity."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value)
        if text == "all":
            return float("inf")
        if not (text.isascii() and text.isdecimal() and len(text) <= 15 and int(text) > 0):
            self.fail(f"must be a number of jobs, or all, got {shown(value)}", param, ctx)
        return int(text)


class ProcessCount(ParameterType):
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
            self.fail(f"must be a whole number, or MIN:MAX like 1:8, got {shown(value)}", param, ctx)


class JobId(ParameterType):
    """A job's id from any backend. Text that a backend could read as several words is rejected."""

    name = "id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if not (0 < len(text) <= _ID_LENGTH and text.isascii() and text.isprintable() and " " not in text):
            self.fail(f"a job's id must be one word of ASCII, got {shown(value)}", param, ctx)
        return text


class Json(ParameterType):
    """A JSON value that has the Python type *kind*, or one of several types."""

    name = "json"

    def __init__(self, kind: type | tuple[type, ...] = object, example: str = "'{\"a\": 1}'") -> None:
        self._kind = kind
        self._example = example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            parsed = json.loads(value, parse_constant=_refuse)
        except (ValueError, RecursionError) as exc:
            self.fail(f"must be JSON like {self._example}, got {shown(value)} ({exc})", param, ctx)
        if not isinstance(parsed, self._kind):
            self.fail(f"{shown(value)} is JSON, but not what is needed here: write it like {self._example}", param, ctx)
        return parsed


def shown(value: Any) -> str:
    """Return *value* for an error message."""
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _refuse(word: str) -> Any:
    raise ValueError(f"JSON has no {word}")
