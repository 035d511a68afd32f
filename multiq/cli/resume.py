"""``multiq resume`` ends a queue's pause."""

from __future__ import annotations

import click

from .argument_types import QueueName
from .options import common_options
from .output import say


@click.command(short_help="End a pause.")
@click.argument("queue", type=QueueName())
@common_options
def resume(queue: str, as_json: bool) -> None:
    """End a queue's pause now."""
    from .apps import open_app

    with open_app() as app:
        app.queue(queue).resume()
    say(as_json, f"queue {queue} is not paused", queue=queue, paused_for=None)
