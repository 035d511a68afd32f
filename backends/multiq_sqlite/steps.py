"""The steps of a verdict or of ``carry_out``: enqueues, arrivals at held jobs (holds.py), and changes of notes."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from multiq.backend import Ack, Arrive, Drop, Enqueue, Put

from .holds import arrive
from .notes import change_notes
from .unique import insert_all, key_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from multiq.backend import NewJob, Step, Verdict

    from .connection import Transaction


def steps_of(verdict: Verdict) -> tuple[Step, ...]:
    """Return the steps that the verdict carries out if it is accepted."""
    return () if verdict.after is None else verdict.after.steps


def steps_after(accepted: Sequence[Verdict]) -> list[Step]:
    """Return the steps of the verdicts, without the enqueues that have no effect in the contract's order.

    The driver carries out all verdicts first, and then all steps. By the contract, a verdict's steps come before the
    next verdict. The order matters only if a step enqueues a job with the id of a job that a later verdict acks. By the
    contract, that job still exists when the step is carried out, so the enqueue changes nothing.
    """
    acks = {(one.lease.queue, one.lease.id): at for at, one in enumerate(accepted) if isinstance(one, Ack)}
    return [
        step
        for at, verdict in enumerate(accepted)
        for step in steps_of(verdict)
        if not (isinstance(step, Enqueue) and acks.get((step.queue, step.job.id), -1) > at)
    ]


def have_keys(verdicts: Sequence[Verdict]) -> bool:
    """Whether a step enqueues a job with a unique key. A later verdict may end the job that has this key."""
    return any(
        isinstance(step, Enqueue) and key_of(step.job) is not None for verdict in verdicts for step in steps_of(verdict)
    )


def largest_of(steps: Iterable[Step]) -> int:
    """Return the size of the largest value that the steps store."""
    return max((_size(step) for step in steps), default=0)


def carry_out(transaction: Transaction, steps: Sequence[Step], now: int) -> None:
    """Carry out steps in their order."""
    # Notes and jobs do not depend on each other. If the notes come first, more of the other steps share a statement.
    change_notes(transaction, [step for step in steps if isinstance(step, Put | Drop)], now)
    others = [step for step in steps if isinstance(step, Enqueue | Arrive)]
    for is_enqueue, run in itertools.groupby(others, key=lambda step: isinstance(step, Enqueue)):
        if is_enqueue:
            _enqueue(transaction, [step for step in run if isinstance(step, Enqueue)], now)
        else:
            arrive(transaction, [step for step in run if isinstance(step, Arrive)], now)


def _size(step: Step) -> int:
    if isinstance(step, Enqueue):
        return len(step.job.body)
    return len(step.value) if isinstance(step, Put) else 0


def _enqueue(transaction: Transaction, steps: Sequence[Enqueue], now: int) -> None:
    jobs: dict[str, list[NewJob]] = {}
    for step in steps:
        jobs.setdefault(step.queue, []).append(step.job)
    for queue, new in jobs.items():
        insert_all(transaction, queue, new, now)
