"""``multiq tick``: makes the next jobs of schedules once, for a crontab."""

from __future__ import annotations

import click

from multiq.formatting import many

from .durations import Duration
from .options import common_options
from .output import say


@click.command(short_help="Make the jobs of schedules for the next minute, once.")
@click.argument("app_path", metavar="[APP]", required=False)
@click.option("--ahead", type=Duration(), default=90.0, show_default=True, metavar="TIME", help="At most 4m.")
@common_options
def tick(app_path: str | None, ahead: float, as_json: bool) -> None:
    """Make the schedules' jobs of the next 90 seconds (--ahead), and end. For a crontab:

    \b
      * * * * * multiq tick shop.tasks:app

    The command first stores the schedules in the code of APP. Without APP, the command stores the schedules of the app,
    or of the modules, that the settings name.
    """
    from multiq.schedules import Scheduler
    from multiq.schedules.record import AHEAD_MOST

    from .apps import find_default_app, load_app, open_app

    if ahead > AHEAD_MOST:
        raise click.BadParameter(f"must be at most {AHEAD_MOST / 60:g} minutes", param_hint="--ahead")
    app_path = app_path or find_default_app()
    with load_app(app_path) if app_path is not None else open_app() as app:
        scheduler = Scheduler(app, ahead=ahead)
        scheduler.look()
    say(as_json, f"{many(scheduler.made, 'job')} made", made=scheduler.made)
