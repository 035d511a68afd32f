"""``multiq pause`` stops workers from taking a queue's jobs for a while."""

from __future__ import annotations

import click

from multiq.formatting import duration

from .argument_types import QueueName
from .durations import Duration
from .options import common_options
from .output import say


@click.command(short_help="Stop workers from taking a queue's jobs for a while.")
@click.argument("queue", type=QueueName())
@click.argument("length", type=Duration(), metavar="TIME")
@common_options
def pause(queue: str, length: float, as_json: bool) -> None:
    """Stop workers from taking a queue's jobs for TIME (90, 10m, 2h). After TIME, the queue resumes without a command.

    Running jobs continue, and delays continue to count down.
    """
    from .apps import open_app

    with open_app(create=True) as app:
        app.queue(queue).pause(length)
    say(as_json, f"queue {queue} is paused for {duration(length)}", queue=queue, paused_for=length)
