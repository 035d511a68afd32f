"""Shell completion: the values that a shell offers when the user types a queue or a connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from click.shell_completion import CompletionItem

from .connection import chosen_connection

if TYPE_CHECKING:
    import click


def complete_queue(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the queues whose names begin with *incomplete*, for shell completion. The list is empty if the backend
    cannot list its queues.
    """
    from multiq.app import App
    from multiq.control.flags import visible_queues

    from .framework_app import current_settings

    before, comma, incomplete = incomplete.rpartition(",")
    try:
        with App(chosen_connection(ctx), settings=current_settings(), create=False) as app:
            names = visible_queues(app.backend)
    except Exception:  # noqa: BLE001 - no error may be printed while the user types a line
        return []
    return [CompletionItem(before + comma + name) for name in names if name.startswith(incomplete)]


def complete_connection(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from multiq.errors import MultiqError

    from .framework_app import current_settings

    try:
        names = current_settings().connections
    except MultiqError:
        return []
    return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]
