"""``multiq schema``: check, create and upgrade the tables of a backend that has migrations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from multiq.terminal_escapes import safe

from .connection import chosen_connection
from .exits import FAILED, OK
from .options import common_options, connection_option, traceback_option, verbose_option
from .output import note, print_json

if TYPE_CHECKING:
    from multiq.app import App
    from multiq.backend import SchemaState

_MEANING = {
    "ready": "this multiq can use the tables",
    "missing": "there are no tables yet: multiq schema up makes them, or the first call, if the user may create tables",
    "older": "the tables are older than this multiq needs: run multiq schema up",
    "newer": "the tables are newer than this multiq can use: upgrade multiq",
}


@click.group(short_help="Create or upgrade a database's tables.", invoke_without_command=True)
@connection_option
@verbose_option
@traceback_option
@click.pass_context
def schema(ctx: click.Context) -> None:
    """Check, create or upgrade the tables of a backend that keeps jobs in your database.

    A new multiq with older tables refuses to work until "up" has run. An old multiq continues to work with newer
    tables, except after a migration that says the opposite. To upgrade multiq, run "up" first, and then replace the
    programs one by one.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@schema.command(short_help="Run the migrations that are missing.")
@click.argument("target", required=False, metavar="[URL|NAME]")
@common_options
def up(target: str | None, as_json: bool) -> int:
    """Run the missing migrations. Workers may run during the migrations. If no migration is missing, the command does
    nothing."""
    with _app(target) as app:
        place = _place(app)
        names = app.backend.schema().up()
    if as_json:
        print_json({"connection": place, "applied": names})
        return OK
    for name in names:
        click.echo(name)
    note(f"{len(names) or 'no'} migration{'' if len(names) == 1 else 's'} run: {safe(place)}")
    return OK


@schema.command("show-sql", short_help="Print the migrations, and run nothing.")
@click.argument("target", required=False, metavar="[URL|NAME]")
@click.option(
    "--since", type=click.IntRange(0), default=0, metavar="VERSION", help="Only the migrations after this version."
)
@common_options
def show_sql(target: str | None, since: int, as_json: bool) -> int:
    """Print the SQL that "up" would run on tables of VERSION, for the database's own client. VERSION 0 means that there
    are no tables yet.

    Needs no server.
    """
    with _app(target) as app:
        text = app.backend.schema().sql(since)
    if as_json:
        print_json({"sql": text})
    else:
        click.echo(text, nl=False)
    return OK


@schema.command(short_help="Check whether this multiq can use the tables.")
@click.argument("target", required=False, metavar="[URL|NAME]")
@common_options
def check(target: str | None, as_json: bool) -> int:
    """Check whether this multiq can use the tables. Changes nothing. Exits with 1 if this multiq cannot use the
    tables."""
    with _app(target) as app:
        place = _place(app)
        found = app.backend.schema().check()
    if as_json:
        print_json({"connection": place, "ready": found.state == "ready", **_numbers(found)})
    else:
        click.echo(f"version {found.found}, needed {found.needed}: {_MEANING[found.state]}")
        note(safe(place))
    return OK if found.state == "ready" else FAILED


def _app(target: str | None) -> App:
    from multiq.app import App

    from .framework_app import current_settings

    return App(target or chosen_connection(), settings=current_settings())


def _place(app: App) -> str:
    from multiq.settings.url import redact

    return redact(app.url)


def _numbers(found: SchemaState) -> dict[str, object]:
    return {"state": found.state, "found": found.found, "needed": found.needed}
