"""Printing: JSON for programs, tables for people. Everything from a queue is escaped before a terminal sees it."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click
import msgspec

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

_PIPE_WIDTH = 4096  # columns: nothing is cut or wrapped on its way into a file or another program


def print_json(document: Any, *, indent: int = 2) -> None:
    """One JSON document on standard output; indent 0 puts it on one line."""
    raw = msgspec.json.encode(document)
    text = (msgspec.json.format(raw, indent=indent) if indent else raw).decode()
    click.echo(text if text.isascii() else "".join(map(_escape, text)))


def _escape(character: str) -> str:
    """A character that JSON may carry as it is but a terminal would act on, as JSON's own escape."""
    if character.isprintable() or character == "\n":
        return character
    return json.dumps(character)[1:-1]


def note(message: str) -> None:
    """A remark beside the result: on standard error, so that pipes carry results only."""
    click.secho(message, err=True, dim=True)


def console() -> Console:
    """Standard output as rich sees it: colours on a terminal only (and not under NO_COLOR), no markup."""
    from rich.console import Console

    plain = not sys.stdout.isatty()
    return Console(markup=False, highlight=False, emoji=False, soft_wrap=False, width=_PIPE_WIDTH if plain else None)


def show(*renderables: RenderableType) -> None:
    """Print to standard output, without the spaces that rich pads lines with."""
    out = console()
    if out.is_terminal:
        out.print(*renderables, sep="\n")
        return
    with out.capture() as capture:
        out.print(*renderables, sep="\n")
    click.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


def new_table(*, title: str | None = None) -> Table:
    """A table without lines, that fits its content."""
    from rich import box
    from rich.table import Table

    return Table(
        title=title,
        title_justify="left",
        title_style="dim",
        box=box.SIMPLE_HEAD if sys.stdout.isatty() else None,
        pad_edge=False,
        show_edge=False,
        header_style="bold",
    )
