"""``multiq up`` lets the workers of a connection take jobs again."""

from __future__ import annotations

import click

from .options import common_options
from .output import say


@click.command(short_help="Let workers take jobs again after down.")
@common_options
def up(as_json: bool) -> None:
    """Let the workers of the connection take jobs again, after ``multiq down``."""
    from multiq.control.flags import Control

    from .apps import open_app

    with open_app() as app:
        was_down = Control(app.backend).bring_up()
    say(as_json, "workers take jobs again" if was_down else "it was not down", down=False, changed=was_down)
