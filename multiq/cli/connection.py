"""The connection that ``-c`` names, before or after the command. Click's context carries it to the commands."""

from __future__ import annotations

import click

_CONNECTION = "multiq.connection"


def keep_connection(ctx: click.Context, _param: click.Parameter, value: str | None) -> None:
    """The callback of ``-c``."""
    if value is not None:
        ctx.meta[_CONNECTION] = value


def chosen_connection(context: click.Context | None = None) -> str | None:
    """Return the connection that ``-c`` names, before or after the command. Without ``-c``, return None."""
    context = context or click.get_current_context(silent=True)  # None in the tests of a program
    connection: str | None = None if context is None else context.meta.get(_CONNECTION)
    return connection
