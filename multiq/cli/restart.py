"""``multiq restart`` tells all workers of a connection to end, so that their service manager starts them again."""

from __future__ import annotations

import click

from .options import common_options
from .output import say


@click.command(short_help="Tell all workers to end, so that they are started again.")
@common_options
def restart(as_json: bool) -> None:
    """Tell each worker of the connection to finish the jobs that it runs, and then to exit with 0.

    Workers notice the command within some seconds. The workers' service manager (systemd, supervisord, Kubernetes)
    starts the workers again, with the current code.
    """
    from multiq.control.flags import Control

    from .apps import open_app

    with open_app() as app:
        Control(app.backend).restart()
    say(as_json, "all workers finish their running jobs, and end", restarted=True)
