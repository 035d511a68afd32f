"""``multiq purge`` deletes the jobs of a queue that are in the named states."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from multiq.backend import State
from multiq.formatting import count, many
from multiq.terminal_escapes import safe

from .argument_types import QueueName
from .options import common_options
from .output import need_stdin, say

if TYPE_CHECKING:
    from collections.abc import Iterator

    from multiq.app import App


_PURGED = (State.READY, State.DELAYED, State.BURIED)
_PURGEABLE = (*_PURGED, State.HELD)


@click.command(short_help="Delete all jobs of a queue, or those in some states.")
@click.argument("queue", type=QueueName())
@click.argument("states", nargs=-1, metavar="[STATES]")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@common_options
def purge(queue: str, states: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """Delete all jobs of a queue that are in the named STATES. The default states are ready, delayed and buried.

    Running jobs are never deleted. Held jobs, which wait for other jobs of their flow, are deleted only if you name the
    state "held". If a held job is deleted, the rest of its flow never runs. The command first shows the number of jobs,
    and asks.

    \b
      multiq purge mail buried
      multiq purge mail ready,delayed --yes
    """
    from .apps import open_app

    chosen = list(_chosen_states(states))
    with open_app() as app:
        if not app.backend.capabilities.purging:
            raise app.backend.unsupported("purging")  # raised before the user is asked to confirm
        if not yes:
            _ask(app, queue, chosen)
        purged = app.queue(queue).purge(chosen)
    text = f"deleted {many(purged, 'job')} of queue {queue} ({', '.join(chosen)})"
    say(as_json, text, queue=queue, states=chosen, purged=purged)


def _chosen_states(words: tuple[str, ...]) -> Iterator[State]:
    names = [name.strip() for word in words for name in word.split(",")]
    for name in dict.fromkeys(names or _PURGED):
        if name not in _PURGEABLE:
            known = ", ".join(_PURGEABLE)
            why = "jobs that run cannot be purged" if name == State.RESERVED else f"a job has no state {name!r}"
            raise click.BadParameter(f"{why}: choose from {known}", param_hint="STATES")
        yield State(name)


def _ask(app: App, queue: str, states: list[State]) -> None:
    from multiq.settings.url import redact

    stats = app.backend.stats(queue)
    numbers = ", ".join(f"{count(getattr(stats, state))} {state}" for state in states)
    need_stdin("there is no terminal to ask; --yes deletes without a question")
    click.confirm(f"Delete the jobs of queue {queue} on {safe(redact(app.url))}: {numbers}?", abort=True, err=True)
