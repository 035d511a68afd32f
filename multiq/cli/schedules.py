"""``multiq schedules``: list, make, pause, resume, run and remove schedules."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import click

from multiq.formatting import duration, many
from multiq.terminal_escapes import safe

from .argument_types import Json
from .durations import Duration
from .exits import FAILED, OK
from .options import common_options, connection_option, traceback_option, verbose_option
from .output import Column, note, print_json, say, show, show_enqueued, table

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable

    from multiq.app import App
    from multiq.schedules import NextRun, ScheduleInfo

_name = click.argument("name", metavar="NAME")
_app = click.option("--app", "app_path", metavar="APP", help="Also say which schedules this app's code no longer has.")


@click.group(short_help="List, make and pause schedules.", invoke_without_command=True)
@connection_option
@verbose_option
@traceback_option
@click.pass_context
def schedules(ctx: click.Context) -> None:
    """List, make, pause, resume, run and remove schedules.

    \b
      multiq schedules list
      multiq schedules add report shop.tasks:app report --cron '0 7 * * *'
      multiq schedules run report
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@schedules.command("list", short_help="List all schedules.")
@_app
@common_options
def list_(app_path: str | None, as_json: bool) -> None:
    """List all schedules of the connection, with the next time at which each schedule is due."""
    with _opened(app_path) as app:
        found = list(app.schedules.list())
    if as_json:
        print_json({"schedules": [_document(info) for info in found]})
    elif not found:
        click.echo("there is no schedule")
    else:
        columns = [
            Column("NAME"),
            Column("WHEN"),
            Column("ZONE"),
            Column("STATE"),
            Column("NEXT (UTC)"),
            Column("QUEUE"),
            Column("TASK", gives_way=True),
        ]
        show(table(columns, [_row(info) for info in found]))


@schedules.command("show", short_help="Show one schedule, and when it is due next.")
@_name
@_app
@common_options
def show_(name: str, app_path: str | None, as_json: bool) -> None:
    """Show a schedule's options, its last job, and the next five times at which the schedule is due."""
    from multiq.schedules.zone_database import zones_version

    with _opened(app_path) as app:
        info = app.schedules.get(name)
        status = None
        if info.last_id is not None and info.last_queue is not None:
            status = app.job(info.last_queue, info.last_id).state().value
    if as_json:
        print_json(_document(info) | {"last_state": status})
        return
    place = "" if info.last_queue == info.queue else f" in queue {safe(str(info.last_queue))}"
    for label, value in [
        ("schedule", safe(info.name)),
        ("state", _state(info)),
        ("when", f"{safe(info.when)} ({safe(info.zone)})"),
        ("task", f"{safe(info.task)}, in queue {safe(info.queue)}"),
        ("misfire", info.misfire + ("" if info.grace is None else f", within {duration(info.grace)}")),
        ("overlap", info.overlap + (f", left out {many(info.left_out, 'time')}" if info.left_out else "")),
        *([("jitter", duration(info.jitter))] if info.jitter else []),
        ("made by", "code" if info.origin == "code" else "app.schedules or multiq schedules add"),
        ("last made", "-" if info.last is None else _utc(info.last)),
        *([("last job", f"{info.last_id}{place}, {status}")] if info.last_id is not None else []),
        *(
            [("zones", f"{safe(info.zones)}; this host has {zones_version()}")]
            if info.zones and info.zone != "UTC"
            else []
        ),
        *([("late by", duration(info.late))] if info.late else []),
    ]:
        click.echo(f"{click.style(f'{label:<10}', dim=True)}{value}")
    if info.next:
        click.echo()
        columns = [Column("NEXT (UTC)"), Column(safe(info.zone))]
        show(table(columns, [[_utc(run.utc), run.local.strftime("%Y-%m-%d %H:%M:%S %z")] for run in info.next]))


@schedules.command("add", short_help="Store a new schedule.")
@_name
@click.argument("app_path", metavar="[APP]", required=False)
@click.argument("task_name", metavar="TASK", required=False)
@click.option("--cron", metavar="EXPRESSION", help="Like '*/5 * * * *'; with six fields, the first is the second.")
@click.option("--every", type=Duration(), metavar="TIME", help="Like 90, 5m, 1h.")
@click.option("--at", multiple=True, metavar="HH:MM", help="A time of day; may be given several times.")
@click.option("--zone", default="UTC", show_default=True, metavar="ZONE", help="The time zone of --cron and --at.")
@click.option("--args", type=Json(list, "'[1]'"), metavar="JSON", help="The task's positional arguments.")
@click.option("--kwargs", type=Json(dict, "'{\"a\": 1}'"), metavar="JSON", help="The task's keyword arguments.")
@click.option("--misfire", default="once", show_default=True, metavar="POLICY", help="once, skip, all or all(N).")
@click.option("--grace", type=Duration(), metavar="TIME", help="When a missed occurrence is too late.")
@click.option("--overlap", default="allow", show_default=True, metavar="POLICY", help="allow, skip or follow.")
@click.option("--jitter", type=Duration(), default=0.0, metavar="TIME", help="The longest delay of an occurrence.")
@click.option("--replace", is_flag=True, help="Change the schedule if there is one of this name.")
@common_options
def add(
    *,
    name: str,
    app_path: str | None,
    task_name: str | None,
    cron: str | None,
    every: float | None,
    at: tuple[str, ...],
    args: list[Any] | None,
    kwargs: dict[str, Any] | None,
    replace: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Store a new schedule of TASK of APP (like shop.tasks:app). Workers notice the schedule within about 20 seconds.

    Without APP, the command uses the app that the settings name. The arguments are checked against the task's function.
    """
    from multiq.errors import ScheduleNotFound

    from .apps import default_app, load_app

    if app_path is None:
        raise click.UsageError("Missing argument 'TASK'.")
    if task_name is None:
        app_path, task_name = default_app(), app_path
    with load_app(app_path) as app:
        call = app.find_task(task_name).s(*(args or []), **(kwargs or {}))
        word = "changed"
        info = None
        if replace:
            with contextlib.suppress(ScheduleNotFound):
                info = app.schedules.change(name, call, cron, every=every, at=at or None, **options)
        if info is None:
            word, info = "stored", app.schedules.add(name, call, cron, every=every, at=at or None, **options)
    following = f": due next at {_utc(info.next[0].utc)}" if info.next else ""
    say(as_json, f"{word} schedule {safe(name)}{following}", **_document(info))


@schedules.command("run", short_help="Run a schedule's task once, now.")
@_name
@common_options
def run(name: str, as_json: bool) -> None:
    """Enqueue the task of a schedule once, now. The schedule does not change.

    If the task is unique and another job has its key, no job is added, and the ID is that job's.
    """
    with _opened(None) as app:
        handle = app.schedules.run(name)
    if as_json:
        print_json({"queue": handle.queue, "id": handle.id, "new": handle.was_new})
    else:
        show_enqueued(handle)


@schedules.command("pause", short_help="Make no more jobs of a schedule.")
@_name
@common_options
def pause(name: str, as_json: bool) -> None:
    """Make no more jobs of a schedule, and delete its jobs that are not due yet."""
    _change(name, as_json, "paused", lambda app: app.schedules.pause(name))


@schedules.command("resume", short_help="Make jobs of a paused schedule again.")
@_name
@common_options
def resume(name: str, as_json: bool) -> None:
    """Make jobs of a paused schedule again. For due times during the pause, no jobs are made."""
    _change(name, as_json, "resumed", lambda app: app.schedules.resume(name))


@schedules.command("remove", short_help="Remove a schedule.")
@_name
@common_options
def remove(name: str, as_json: bool) -> None:
    """Remove a schedule, and delete its jobs that are not due yet.

    If an app's code still has the schedule, the schedule comes back when a worker of this app starts.
    """
    with _opened(None) as app:
        app.schedules.remove(name)
    say(as_json, f"removed schedule {safe(name)}", removed=[name])


@schedules.command("prune", short_help="List schedules that are no longer in the code, or remove them.")
@click.argument("app_path", metavar="[APP]", required=False)
@click.option("--yes", is_flag=True, help="Remove the listed schedules.")
@common_options
def prune(app_path: str | None, yes: bool, as_json: bool) -> int:
    """List the schedules that code has made, but that the code of APP no longer has. With --yes, remove the listed
    schedules.

    Without --yes, exits with 1 if the list is not empty.
    """
    from .apps import default_app

    with _opened(app_path or default_app()) as app:
        names = [info.name for info in app.schedules.vanished()]
        for name in names if yes else ():
            app.schedules.remove(name)
    if as_json:
        print_json({"vanished": names, "removed": names if yes else []})
    elif not names:
        click.echo("no schedule has vanished from the code")
    else:
        click.echo("\n".join(map(safe, names)))
        note("removed" if yes else f"{many(len(names), 'schedule')} left by code: remove with --yes")
    return FAILED if names and not yes else OK


# --- helpers ---------------------------------------------------------------------------------------------


def _opened(path: str | None) -> App:
    from .apps import load_app, open_app

    return open_app() if path is None else load_app(path)


def _change(name: str, as_json: bool, word: str, change: Callable[[App], ScheduleInfo]) -> None:
    with _opened(None) as app:
        info = change(app)
    say(as_json, f"{word} schedule {safe(name)}", **_document(info))


def _document(info: ScheduleInfo) -> dict[str, Any]:
    import msgspec

    document: dict[str, Any] = msgspec.structs.asdict(info)
    return document | {"next": [_times(run) for run in info.next]}


def _times(run: NextRun) -> dict[str, str]:
    return {"utc": run.utc.isoformat(), "local": run.local.isoformat()}


def _row(info: ScheduleInfo) -> list[str]:
    following = _utc(info.next[0].utc) if info.next else "-"
    return [
        safe(info.name), safe(info.when), safe(info.zone), _state(info), following, safe(info.queue), safe(info.task),
    ]  # fmt: skip


def _state(info: ScheduleInfo) -> str:
    state = "paused" if info.is_paused else "active"
    return f"{state}, vanished" if info.is_vanished else state


def _utc(moment: dt.datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M:%S")
