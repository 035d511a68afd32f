"""``multiq flows``: list, show, cancel and forget chains, groups, batches and flows."""

from __future__ import annotations

import datetime as dt
import itertools
from typing import TYPE_CHECKING

import click

from multiq.formatting import many
from multiq.terminal_escapes import safe

from .argument_types import JobId
from .durations import Duration
from .options import common_options, connection_option, traceback_option, verbose_option
from .output import Column, note, print_json, say, show, table

if TYPE_CHECKING:
    from multiq.flows import FlowInfo

_STATES = ("enqueuing", "open", "finished", "cancelled")


@click.group(short_help="List and cancel chains, batches and flows.", invoke_without_command=True)
@connection_option
@verbose_option
@traceback_option
@click.pass_context
def flows(ctx: click.Context) -> None:
    """List, show, cancel and forget chains, groups, batches and flows.

    \b
      multiq flows list --state open
      multiq flows show 019b7c2e-...
      multiq flows cancel 019b7c2e-...
      multiq flows sweep --older 1h --dry-run
      multiq flows forget 019b7c2e-...
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@flows.command("list", short_help="List open flows, and ended flows that are kept.")
@click.option("-n", "--limit", type=click.IntRange(min=1), default=50, show_default=True, help="How many flows.")
@click.option("--state", type=click.Choice(_STATES), help="Only flows in this state.")
@common_options
def list_(limit: int, state: str | None, as_json: bool) -> None:
    """List the flows that are open, or that have ended and are still kept. The oldest flow comes first."""
    from .apps import open_app

    with open_app() as app:
        wanted = (info for info in app.flows.list() if state is None or info.state == state)
        found = list(itertools.islice(wanted, limit + 1))
    shown = found[:limit]
    if as_json:
        print_json({"flows": shown, "more": len(found) > limit})
    elif not shown:
        click.echo(f"there is no flow{f' in the state {state}' if state else ''}")
    else:
        columns = [Column("ID"), Column("STATE"), Column("JOBS", right=True), Column("CREATED"), Column("NAME")]
        show(table(columns, [_row(info) for info in shown]))
        if len(found) > limit:
            note(f"there are more: multiq flows list --limit {2 * limit}")


@flows.command("show", short_help="Show one flow, and the states of its jobs.")
@click.argument("flow_id", type=JobId(), metavar="ID")
@click.option("-n", "--limit", type=click.IntRange(min=0), default=50, show_default=True, help="How many jobs.")
@common_options
def show_(flow_id: str, limit: int, as_json: bool) -> None:
    """Show one flow: its state, how many of its jobs have ended, and the states of its first jobs."""
    from multiq.flows.progress import view

    from .apps import open_app

    with open_app() as app:
        info, progress, found = view(app.backend, flow_id, limit)
    jobs = [{"id": job.id, "queue": job.queue, "status": status, "task": task} for job, task, status in found]
    if as_json:
        print_json({"flow": info, "done": progress.done, "total": progress.total, "jobs": jobs})
        return
    for label, value in [
        ("flow", safe(info.id)),
        ("name", safe(info.name) or "-"),
        ("state", info.state),
        ("done", f"{progress.done} of {progress.total}"),
        ("created", _time(info.created)),
        *([("ended", _time(info.finished))] if info.finished is not None else []),
    ]:
        click.echo(f"{click.style(f'{label:<10}', dim=True)}{value}")
    if jobs:
        click.echo()
        columns = [Column("JOB"), Column("QUEUE"), Column("STATUS"), Column("TASK", gives_way=True)]
        show(table(columns, [[safe(str(job[name])) for name in ("id", "queue", "status", "task")] for job in jobs]))
    statuses = {job["status"] for job in jobs}
    if "ended" in statuses:
        note("ended: the job is done or was deleted; it is not known which, because its task has no keep=")
    if "lost" in statuses:
        note("lost: the job has not ended, and the store has lost it")
    if "unknown" in statuses and info.state != "enqueuing":
        note("unknown: the job is done or was deleted, or the store has lost it")
    if info.state == "open" and statuses & {"lost", "unknown"}:
        note(f"the flow cannot end without its lost jobs: multiq flows cancel {flow_id}, and enqueue it again")
    if info.jobs > limit:
        note(f"{many(info.jobs - limit, 'job')} more: multiq flows show {flow_id} --limit {info.jobs}")


@flows.command("cancel", short_help="Cancel a flow: no further job of it starts.")
@click.argument("flow_id", type=JobId(), metavar="ID")
@click.option("--running", is_flag=True, help="Also cancel the running jobs.")
@click.option("--grace", type=Duration(), metavar="TIME", help="With --running: time to end by itself. Default: 5s.")
@common_options
def cancel(flow_id: str, running: bool, grace: float | None, as_json: bool) -> None:
    """Delete the jobs of a flow that have not started. Without --running, the flow's running jobs continue."""
    from .apps import open_app

    with open_app() as app:
        flow = app.flows.get(flow_id)
        deleted = flow.cancel(running=running, grace=grace)
        state = flow.info().state
    text = f"flow {flow_id} is {state}: {many(deleted, 'job')} deleted"
    say(as_json, text, flow=flow_id, state=state, deleted=deleted)


@flows.command("forget", short_help="Delete the record of a flow that has ended.")
@click.argument("flow_id", type=JobId(), metavar="ID")
@common_options
def forget(flow_id: str, as_json: bool) -> None:
    """Delete the record of a flow that has ended, or whose record cannot be read. The flow's jobs do not change."""
    from .apps import open_app

    with open_app() as app:
        app.flows.get(flow_id).forget()
    say(as_json, f"flow {flow_id} is forgotten", flow=flow_id)


@flows.command("sweep", short_help="Finish or drop flows whose producer has died.")
@click.option(
    "--older", "older_than", type=Duration(), metavar="TIME", default="1h", show_default=True,
    help="Only flows that were enqueued longer ago than this.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Change nothing.")
@common_options
def sweep(older_than: float, dry_run: bool, as_json: bool) -> None:
    """Finish or drop the flows whose producer died before it had enqueued all jobs.

    A flow is not changed if one of its jobs can still run. A batch whose jobs were all enqueued is finished. Any other
    flow whose producer died is cancelled.
    """
    from .apps import open_app

    with open_app() as app:
        swept = app.flows.sweep(older_than, dry_run=dry_run)
    if as_json:
        print_json({"flows": [each._asdict() for each in swept], "dry_run": dry_run})
        return
    for each in swept:
        click.echo(f"{safe(each.id)}  {'would be ' if dry_run else ''}{each.action}  {safe(each.name)}".rstrip())
    if not swept:
        click.echo("no flow has been left half enqueued")


def _row(info: FlowInfo) -> list[str]:
    return [safe(info.id), info.state, str(info.jobs), _time(info.created), safe(info.name)]


def _time(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
