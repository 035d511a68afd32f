"""``multiq down`` has all workers of a connection take no more jobs, on every host."""

from __future__ import annotations

import click

from .options import common_options
from .output import say


@click.command(short_help="Stop all workers from taking jobs.")
@common_options
def down(as_json: bool) -> None:
    """Have all workers of the connection take no more jobs, until ``multiq up``.

    Jobs that run go on; jobs can be enqueued. Workers started with --force ignore it.
    """
    from multiq.control.flags import Control

    from .apps import open_app

    with open_app(create=True) as app:
        is_new = Control(app.backend).take_down()
    say(as_json, "workers take no more jobs" if is_new else "it was down already", down=True, changed=is_new)
