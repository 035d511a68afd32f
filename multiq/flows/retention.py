"""Deletes the outcomes that jobs of a flow have passed on, when the flow has ended and its ``keep`` is over.

While a flow is open, these outcomes do not expire. The step that ends the flow stores a note with their ids
(``record.Leftover``). When the note is due, a worker deletes first the outcomes and then the note.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from multiq.backend import DELAY_MAX, Drop, Version
from multiq.errors import JobNotFound

from .record import HOME, Leftover, due_leftovers, put_leftover

if TYPE_CHECKING:
    from multiq.backend import Backend, Step

KEPT_WHILE_OPEN = DELAY_MAX
"""The seconds for which a job keeps an outcome that later jobs of its flow need."""

AT_ONCE = 20  # flows
_LATER = 3600.0  # seconds until the next check of jobs that run on after the end of their flow


def delete_leftovers(backend: Backend) -> int:
    """Delete the outcomes of up to ``AT_ONCE`` flows that have ended long enough ago. Returns the number of these
    flows.

    Raises ``BackendError``.
    """
    found = due_leftovers(backend, AT_ONCE)
    for note, flow_id, leftover in found:
        running = {queue: left for queue, ids in leftover.jobs.items() if (left := _forget(backend, queue, ids))}
        steps: list[Step] = [Drop(HOME, note.key)]
        if running:  # the flow was cancelled while these jobs ran, or continued without them
            steps.append(put_leftover(flow_id, Leftover(running, max(leftover.keep, _LATER)), time.time()))
        backend.carry_out(steps, when=[Version(HOME, note.key, note.version)])
    return len(found)


def _forget(backend: Backend, queue: str, ids: list[str]) -> list[str]:
    """Delete the outcomes of these jobs, without reading them. Returns the jobs that have not ended."""
    if backend.forget(queue, ids) == len(ids):
        return []
    left = [own_id for own_id in ids if _is_there(backend, queue, own_id)]
    # some of these jobs may have ended meanwhile
    backend.forget(queue, [own_id for own_id in ids if own_id not in left])
    return left


def _is_there(backend: Backend, queue: str, own_id: str) -> bool:
    try:
        backend.peek(queue, own_id)
    except JobNotFound:
        return False
    return True
