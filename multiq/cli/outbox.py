"""``multiq outbox``: list and enqueue the jobs that wait in an application's own database."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from multiq.errors import MultiqError
from multiq.formatting import duration, many
from multiq.terminal_escapes import safe

from .exits import FAILED, OK
from .options import common_options, connection_option, traceback_option, verbose_option
from .output import Column, note, print_json, say, show, table

if TYPE_CHECKING:
    from multiq.app import App
    from multiq.outbox import OutboxJob

_app = click.argument("app_path", metavar="[APP]", required=False)


@click.group(short_help="List and enqueue the jobs that wait in outboxes.", invoke_without_command=True)
@connection_option
@verbose_option
@traceback_option
@click.pass_context
def outbox(ctx: click.Context) -> None:
    """List and enqueue the jobs that wait in outboxes, which are tables of an application's own database.

    Every worker of the app enqueues the waiting jobs, too.

    \b
      multiq outbox list shop.tasks:app
      multiq outbox relay shop.tasks:app
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@outbox.command("list", short_help="List the jobs that wait.")
@_app
@click.option("-n", "--limit", type=click.IntRange(min=1), default=50, show_default=True, help="How many jobs.")
@common_options
def list_(app_path: str | None, limit: int, as_json: bool) -> None:
    """List the jobs that wait in the outboxes of APP (like shop.tasks:app). The oldest job of each outbox is first."""
    from .apps import default_app, load_app

    with load_app(app_path or default_app()) as app:
        _check(app)
        found = [(box.name, job) for box in app.outboxes for job in box.waiting(limit + 1)]
    shown = found[:limit]
    if as_json:
        jobs = [{"outbox": name, "queue": job.queue, "id": job.id, **_document(job)} for name, job in shown]
        print_json({"jobs": jobs, "more": len(found) > limit})
    elif not shown:
        click.echo("no job waits")
    else:
        columns = [
            Column("OUTBOX"),
            Column("QUEUE"),
            Column("ID"),
            Column("AGE", right=True),
            Column("TRIES", right=True),
            Column("ERROR", gives_way=True),
        ]
        show(table(columns, [_row(name, job) for name, job in shown]))
        if len(found) > limit:
            note(f"there are more: multiq outbox list --limit {2 * limit}")


@outbox.command("relay", short_help="Enqueue the jobs that wait.")
@_app
@common_options
def relay(app_path: str | None, as_json: bool) -> int:
    """Enqueue the jobs that wait in the outboxes of APP (like shop.tasks:app), and end.

    The command leaves out jobs that another process is enqueueing now, and jobs that wait for their next attempt after
    an error.
    """
    from .apps import default_app, load_app

    done = 0
    errors: list[str] = []
    with load_app(app_path or default_app()) as app:
        _check(app)
        for box in app.outboxes:
            try:
                done += box.relay()
            except MultiqError as exc:
                errors.append(f"{box.name}: {exc}")
    say(as_json, f"{many(done, 'job')} enqueued", enqueued=done, errors=errors)
    for error in errors:
        note(f"jobs wait: {safe(error)}")
    return FAILED if errors else OK


def _check(app: App) -> None:
    if not app.outboxes:
        raise MultiqError(
            "the app has no outbox: make one, like multiq.contrib.sqlalchemy.Outbox(app, engine), in a module that is "
            "imported with the app"
        )


def _document(job: OutboxJob) -> dict[str, object]:
    return {"age": job.age, "attempts": job.attempts, "retry_in": job.retry_in, "error": job.error or None}


def _row(name: str, job: OutboxJob) -> list[str]:
    return [safe(name), safe(job.queue), safe(job.id), duration(job.age), str(job.attempts), safe(job.error)]
