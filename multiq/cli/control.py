"""``multiq down``, ``up`` and ``restart``: control all workers of a connection, on every host."""

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


@click.command(short_help="Let workers take jobs again after down.")
@common_options
def up(as_json: bool) -> None:
    """Have the workers of the connection take jobs again."""
    from multiq.control.flags import Control

    from .apps import open_app

    with open_app() as app:
        was_down = Control(app.backend).bring_up()
    say(as_json, "workers take jobs again" if was_down else "it was not down", down=False, changed=was_down)


@click.command(short_help="Tell all workers to end, so that they are started again.")
@common_options
def restart(as_json: bool) -> None:
    """Have each worker of the connection finish what it runs and exit with 0, within some seconds.

    What keeps them running (systemd, supervisord, Kubernetes) starts them again, with the current code.
    """
    from multiq.control.flags import Control

    from .apps import open_app

    with open_app() as app:
        Control(app.backend).restart()
    say(as_json, "all workers that run now end after what they run", restarted=True)
