"""``multiq down`` stops all workers of a connection, on every host, from taking jobs."""

from __future__ import annotations

import click

from .options import common_options
from .output import say


@click.command(short_help="Stop all workers from taking jobs.")
@common_options
def down(as_json: bool) -> None:
    """Stop all workers of the connection from taking jobs, until ``multiq up``.

    Running jobs continue, and programs can still enqueue jobs. Workers that were started with --force continue to take
    jobs.
    """
    from multiq.control.flags import Control

    from .apps import open_app

    with open_app(create=True) as app:
        is_new = Control(app.backend).take_down()
    say(as_json, "workers take no more jobs" if is_new else "it was down already", down=True, changed=is_new)
