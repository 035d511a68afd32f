"""``multiq limits``: list, change and remove the limits of queues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from multiq.formatting import count
from multiq.terminal_escapes import safe

from .argument_types import QueueName
from .durations import Duration
from .options import common_options, connection_option, traceback_option, verbose_option
from .output import Column, print_json, say, show, table

if TYPE_CHECKING:
    from multiq.backend import LimitState, Quota

_NONE = "none"
_app = click.option("--app", "app_path", metavar="APP", help="Also list the queues of this app's tasks.")


class _Place(QueueName):
    """A queue's name, or ``@app``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from multiq.validation import APP_SCOPE

        return APP_SCOPE if value == APP_SCOPE else super().convert(value, param, ctx)


class _Bound(click.ParamType[Any]):
    """A number, or ``none``."""

    name = "number"

    def __init__(self, kind: type[int | float]) -> None:
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == _NONE:
            return _NONE
        try:
            return self._kind(value)
        except ValueError:
            self.fail(f"must be a number, or {_NONE}, got {value!r}", param, ctx)


@click.group(short_help="List and change the limits of queues.", invoke_without_command=True)
@connection_option
@verbose_option
@traceback_option
@click.pass_context
def limits(ctx: click.Context) -> None:
    """List, change and remove limits. A limit says how many jobs with the same key run at a time, or start in a period.

    \b
      multiq limits list
      multiq limits set mail smtp --rate 5 --per 1m
      multiq limits set @app api --slots 3
      multiq limits remove mail smtp
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@limits.command("list", short_help="List the limits, and how many jobs wait at them.")
@click.argument("queue", type=_Place(), required=False)
@click.option("--keys", is_flag=True, help="Also list the keys with the most parked jobs.")
@_app
@common_options
def list_(queue: str | None, keys: bool, app_path: str | None, as_json: bool) -> None:
    """List the limits of QUEUE, or of all queues that have jobs.

    RUNNING is the number of leases of a limit. PARKED is the number of ready jobs that wait in the limit's lines. KEYS
    is the number of keys that have a lease or a parked job. A pinned limit was changed with `multiq limits set`. The
    limits of the whole app are listed as queue @app. A limit that is kept by permits parks no jobs, because refused
    jobs are delayed.
    """
    from .apps import load_app, open_app

    with open_app() if app_path is None else load_app(app_path) as app:
        found = app.limits.list(queue)
    if as_json:
        print_json({"queues": {name: [_document(state) for state in states] for name, states in found.items()}})
    elif not found:
        click.echo(f"{_of(queue)} has no limits" if queue is not None else "no queue with jobs has limits")
    else:
        columns = [
            Column("QUEUE"),
            Column("LIMIT"),
            Column("QUOTA", gives_way=True),
            Column("KEYS", right=True),
            Column("RUNNING", right=True),
            Column("PARKED", right=True),
        ]
        show(
            table(
                columns, [row for name, states in found.items() for state in states for row in _rows(name, state, keys)]
            )
        )


@limits.command("set", short_help="Change a limit, or make one.")
@click.argument("queue", type=_Place())
@click.argument("name", metavar="LIMIT")
@click.option("--slots", type=_Bound(int), metavar="N", help="The most jobs at a time; none: no bound.")
@click.option("--rate", type=_Bound(float), metavar="N", help="The jobs that start in --per seconds; none: no bound.")
@click.option("--per", type=Duration(), metavar="TIME", help="Like 1, 10m, 1h.")
@click.option("--burst", type=int, metavar="N", help="The jobs that may start at once after a pause.")
@click.option("--fair/--no-fair", default=None, help="Whether the key with the fewest running jobs is next.")
@common_options
def set_(queue: str, name: str, as_json: bool, **given: Any) -> None:
    """Change a limit of QUEUE, or make a new limit. Options that are not given keep their values. If QUEUE is @app, the
    limit applies to the whole app.

    The change takes effect immediately, for all workers. Running jobs continue. A changed limit is pinned: the numbers
    in the code do not replace its numbers until `multiq limits remove`.
    """
    from .apps import open_app

    changed: dict[str, Any] = {
        field: None if value == _NONE else value for field, value in given.items() if value is not None
    }
    with open_app(create=True) as app:
        state = app.limits.set(queue, name, **changed)
    say(as_json, f"limit {safe(name)} of {_of(queue)} is {_quota(state.quota)}", queue=queue, **_document(state))


@limits.command("remove", short_help="Remove a limit.")
@click.argument("queue", type=_Place())
@click.argument("name", metavar="LIMIT")
@common_options
def remove(queue: str, name: str, as_json: bool) -> None:
    """Remove a limit of QUEUE. A removed limit no longer applies to the queue's jobs.

    If the code of a worker or producer still has the limit, the limit is stored again when the program starts.
    """
    from .apps import open_app

    with open_app() as app:
        was_stored = app.limits.remove(queue, name)
    text = f"removed limit {safe(name)} of {_of(queue)}" if was_stored else f"{_of(queue)} has no limit {safe(name)}"
    say(as_json, text, queue=queue, removed=name if was_stored else None)


# --- helpers ---------------------------------------------------------------------------------------------


def _of(place: str) -> str:
    return "the app" if place.startswith("@") else f"queue {place}"


def _document(state: LimitState) -> dict[str, Any]:
    import msgspec

    quota = msgspec.structs.asdict(state.quota)
    top = [{"key": key, "running": running, "parked": parked} for key, running, parked in state.top]
    return {
        "name": state.name,
        **quota,
        "pinned": state.is_pinned,
        "keys": state.keys,
        "running": state.running,
        "parked": state.parked,
        "top": top,
    }


def _rows(queue: str, state: LimitState, keys: bool) -> list[list[str]]:
    quota = _quota(state.quota) + (", pinned" if state.is_pinned else "")
    rows = [[safe(queue), safe(state.name), quota, count(state.keys), count(state.running), count(state.parked)]]
    if keys:
        rows += [
            ["", "", f"  {safe(key) or '(no key)'}", "", count(running), count(parked)]
            for key, running, parked in state.top
        ]
    return rows


def _quota(quota: Quota) -> str:
    parts = [] if quota.slots is None else [f"{quota.slots} at a time"]
    if quota.rate is not None:
        parts.append(f"{quota.rate:g} in {quota.per:g} s, burst {quota.burst}")
    return ", ".join([*parts, *(["fair"] if quota.fair else [])])
