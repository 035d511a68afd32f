"""Printing: JSON for programs, tables for people. Text from a queue is escaped before it is printed on a terminal."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

    from multiq.job import JobHandle

_PIPE_WIDTH = 4096  # columns: text for a file or for another program is neither cut nor wrapped


def take_standard_streams() -> None:
    """Open closed standard streams on ``os.devnull``. If a stream stayed closed, a connection or a file could get the
    stream's descriptor.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - open as long as the process
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # with a locale like de_DE.ISO-8859-1


def need_stdin(what: str) -> None:
    """Raise ``UsageError`` if standard input is closed, so that a closed input is not read as empty input."""
    if sys.stdin is None:
        raise click.UsageError(f"standard input is closed: {what}")


class Column(NamedTuple):
    title: str
    right: bool = False
    gives_way: bool = False
    """Whether the text is cut with an ellipsis when the terminal is narrow."""
    folds: bool = False
    """Whether the text is continued on more lines when the terminal is narrow."""
    fills: bool = False
    """Whether the column takes all free width. If one column takes all free width, other columns keep their position
    when the text changes."""
    style: str = ""


def print_json(document: Any, *, indent: int = 2) -> None:
    """Print one JSON document on standard output. With *indent* 0 the document is on one line."""
    raw = msgspec.json.encode(document)
    text = (msgspec.json.format(raw, indent=indent) if indent else raw).decode()
    click.echo(text if text.isascii() else "".join(map(_escape, text)))


def say(as_json: bool, sentence: str, **document: Any) -> None:
    """Report a result. Print *sentence*, or the JSON document if *as_json* is set."""
    if as_json:
        print_json(document)
    else:
        click.echo(sentence)


def _escape(character: str) -> str:
    """Return the character or its JSON escape. A character is escaped if a terminal would interpret it, or if the
    encoding of standard output lacks it."""
    if (character.isprintable() and _can_be_written(character)) or character == "\n":
        return character
    return json.dumps(character)[1:-1]


def _can_be_written(character: str) -> bool:
    encoding = getattr(sys.stdout, "encoding", None)
    if character.isascii() or encoding in {None, "utf-8", "UTF-8"}:
        return True
    try:
        character.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def note(message: str) -> None:
    """Print a remark on standard error, so that a pipe from standard output gets the result only."""
    with contextlib.suppress(OSError):  # on a full disk the remark is lost, but the result was printed
        click.secho(message, err=True, dim=True)


def show_enqueued(handle: JobHandle, due: str = "now") -> None:
    """Print the job's id, and a remark that tells whether the job was added."""
    click.echo(handle.id)
    if handle.was_new:
        note(f"enqueued in queue {handle.queue}, due {due}")
    else:
        note(f"no job was added: this job of queue {handle.queue} has the same unique key")


def console() -> Console:
    """Return standard output as a console of the library rich. Colours are used only on a terminal and without
    NO_COLOR. Markup is off."""
    from rich.console import Console

    plain = not sys.stdout.isatty()
    return Console(markup=False, highlight=False, emoji=False, soft_wrap=False, width=_PIPE_WIDTH if plain else None)


def width() -> int | None:
    """Return the width of the terminal on standard output, in columns. Return None if standard output is not a
    terminal, so that no text is cut.
    """
    return console().width if sys.stdout.isatty() else None


def show(*renderables: RenderableType) -> None:
    """Print to standard output, without rich's padding at the ends of lines."""
    out = console()
    if out.is_terminal:
        out.print(*renderables, sep="\n")
        return
    with out.capture() as capture:
        out.print(*renderables, sep="\n")
    click.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


def table(columns: Sequence[Column], rows: Sequence[Sequence[str | Text]], *, footer: Sequence[str] = ()) -> Table:
    """Return a table without border lines. Only columns with ``gives_way`` or ``folds`` become narrower than their
    text."""
    from rich import box
    from rich.table import Table

    on_terminal = sys.stdout.isatty()
    grid = Table(
        box=box.SIMPLE_HEAD if on_terminal else None,
        padding=(0, 1, 0, 0) if on_terminal else (0, 2, 0, 0),
        pad_edge=False,
        show_edge=False,
        header_style="bold",
    )
    for index, column in enumerate(columns):
        cells = [column.title, *(row[index] for row in rows), *footer[index : index + 1]]
        grid.add_column(
            column.title,
            justify="right" if column.right else "left",
            style=column.style,
            no_wrap=not (column.folds or column.gives_way),  # rich narrows only columns that may wrap
            overflow="fold",
            min_width=None if column.gives_way or column.folds else max(map(len, cells)),
            ratio=1 if column.gives_way and column.fills else None,
        )
    for row in rows:
        grid.add_row(
            *(_one_line(cell) if column.gives_way else cell for column, cell in zip(columns, row, strict=True))
        )
    if footer:
        grid.add_section()
        grid.add_row(*footer, style="bold")
    return grid


def lines_of(columns: Sequence[Column], rows: Sequence[Sequence[str]], widths: list[int]) -> Iterator[str]:
    """Return the lines of a part of a long table. The lines look like the output of ``show`` to a pipe, but are made
    many times faster.

    *widths*: the width of each column. For the first part, pass the widths of the titles. For each further part, pass
    the same list. ``lines_of`` increases the widths to fit *rows*.
    """
    for at in range(len(columns)):
        widths[at] = max([widths[at], *(len(row[at]) for row in rows)])
    for row in rows:
        cells = [
            cell.rjust(size) if column.right else cell.ljust(size)
            for column, size, cell in zip(columns, widths, row, strict=True)
        ]
        yield "  ".join(cells).rstrip()


def _one_line(cell: str | Text) -> Text:
    from rich.text import Text

    text = Text(cell) if isinstance(cell, str) else cell
    text.no_wrap, text.overflow = True, "ellipsis"
    return text
