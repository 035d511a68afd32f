"""``multiq history`` lists the kept outcomes of jobs that are gone."""

from __future__ import annotations

import base64
import json
import shlex
from typing import TYPE_CHECKING, Any

import click

from multiq.formatting import duration, shorten
from multiq.terminal_escapes import safe

from .argument_types import QueueName
from .options import common_options
from .output import Column, note, print_json, show, table

if TYPE_CHECKING:
    from multiq.history import OutcomeInfo

# seconds: if an outcome is kept longer than 50 years, workers delete the outcome after its flow's end
_FLOW_MIN = 50 * 365 * 86400.0


@click.command(short_help="List the kept outcomes of jobs that are gone.")
@click.argument("queue", type=QueueName(), required=False)
@click.option("--kind", type=click.Choice(["done", "cancelled"]), help="Only done jobs, or only cancelled jobs.")
@click.option(
    "-n", "--limit", type=click.IntRange(min=1), default=50, show_default=True, help="How many of each queue."
)
@click.option("--after", metavar="CURSOR", help="Show the next page: the cursor that the previous page printed.")
@common_options
def history(queue: str | None, kind: str | None, limit: int, after: str | None, as_json: bool) -> None:
    """List the kept outcomes of a queue, or of all known queues. The outcome that expires last comes first.

    Only jobs with `keep` leave an outcome. A queue that holds no job may be unknown. Name QUEUE to list the outcomes of
    an unknown queue.
    """
    from .apps import open_app
    from .find_job import known_queues

    if after is not None and queue is None:
        raise click.UsageError("--after continues the list of one queue: name the queue")
    found: list[OutcomeInfo] = []
    cursors: dict[str, str] = {}
    with open_app() as app:
        if not app.backend.capabilities.outcomes:
            raise app.backend.unsupported("outcomes")
        names = known_queues(app) if queue is None else [queue]
        for name in names:
            page = app.queue(name).history(kind=kind, limit=limit, after=after)
            found += page.outcomes
            if page.after is not None:
                cursors[name] = page.after
    if as_json:
        print_json({"queues": names, "outcomes": [outcome_document(each) for each in found], "after": cursors})
        return
    if found:
        columns = [
            Column("ID"),
            Column("QUEUE"),
            Column("KIND"),
            Column("TRY", right=True),
            Column("ENDED", right=True),
        ]
        columns += [Column("KEPT FOR", right=True), Column("VALUE", gives_way=True)]
        show(table(columns, [_row(each) for each in found]))
    else:
        click.echo(f"no outcome is kept in {', '.join(names)}")
    for name, cursor in cursors.items():
        note(f"there are more: multiq history {name} --after={shlex.quote(safe(cursor))}")
    if queue is None:
        note("queues that hold no job are not known: multiq history QUEUE shows one of them")


def outcome_document(outcome: OutcomeInfo) -> dict[str, Any]:
    """Return an outcome in the form that ``--json`` prints. If the outcome is not a JSON object, ``outcome_base64`` has
    its bytes."""
    document = outcome.document
    return {
        **{name: getattr(outcome, name) for name in outcome.__struct_fields__ if name != "body"},
        "outcome": document or None,
        "outcome_base64": None if document else base64.b64encode(outcome.body).decode(),
    }


def _row(outcome: OutcomeInfo) -> list[str]:
    omitted = outcome.omitted
    value = json.dumps(outcome.value, ensure_ascii=False) if omitted is None else f"({omitted})"
    return [
        safe(outcome.id),
        safe(outcome.queue),
        outcome.kind,
        str(outcome.attempt),
        f"{duration(outcome.age)} ago",
        "its flow" if outcome.expires_in > _FLOW_MIN else duration(outcome.expires_in),
        shorten(safe(value), 200),
    ]
