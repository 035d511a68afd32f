"""``multiq scheduler``: makes the jobs of schedules, without running jobs."""

from __future__ import annotations

import click

from .options import connection_option, traceback_option, verbose_option

_POLL = 0.25  # seconds


@click.command(short_help="Make the jobs of schedules, and run none.")
@click.argument("app_path", metavar="[APP]", required=False)
@connection_option
@verbose_option
@traceback_option
def scheduler(app_path: str | None) -> None:
    """Make the jobs of all schedules until SIGTERM or Ctrl-C. Workers make the jobs of schedules, too. A worker with
    --no-schedule makes no jobs of schedules.

    The command first stores the schedules in the code of APP (like shop.tasks:app). Without APP, the command stores the
    schedules of the app, or of the modules, that the settings name. Any number of schedulers may run: each occurrence
    is made once.
    """
    from multiq.logging import setup_logging
    from multiq.schedules import Scheduler
    from multiq.worker.processes.scheduling import Scheduling

    from .apps import find_default_app, load_app, open_app
    from .end_signals import EndSignals

    with EndSignals() as ended:
        app_path = app_path or find_default_app()
        with load_app(app_path) if app_path is not None else open_app() as app:
            setup_logging(app.settings.log.level, app.settings.log.format, over_app=False)
            Scheduler(app)  # raises Unsupported if the backend cannot have schedules
            scheduling = Scheduling(app)
            scheduling.notice()
            while not ended.wait(_POLL):
                scheduling.look_if_due()
