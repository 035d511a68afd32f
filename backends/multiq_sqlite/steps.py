"""The steps of a verdict or of ``carry_out``: enqueues, arrivals at held jobs, and changes of notes."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

from multiq.backend import Ack, Arrive, Drop, Enqueue, Put

from .errors import MalformedRecord
from .limits import place
from .notes import change_notes
from .records import READY, due_after, in_batches, repeated
from .statements import statement
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
            _arrive(transaction, [step for step in run if isinstance(step, Arrive)], now)


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


# --- arrivals --------------------------------------------------------------------------------------------


def _arrive(transaction: Transaction, steps: Sequence[Arrive], now: int) -> None:
    arrivals: dict[tuple[str, str], list[Arrive]] = {}
    for step in steps:
        arrivals.setdefault((step.queue, step.id), []).append(step)
    for (queue, job_id), at_job in arrivals.items():
        row = transaction.execute("terms", {"queue": queue, "id": job_id}).fetchone()
        if row is not None:  # If there is no row, there is no such held job.
            _arrive_at(transaction, at_job, row, now)


def _arrive_at(transaction: Transaction, steps: Sequence[Arrive], row: tuple[int, Any, Any], now: int) -> None:
    """Count arrivals at one held job, in their order, until it is released."""
    seq, awaits, delay = row
    if type(awaits) is not int or type(delay) is not int:
        raise MalformedRecord(f"job number {seq} is held, awaits {awaits!r} arrivals and has the delay {delay!r}")
    for run in _runs(steps):
        if run[0].doom:
            release(transaction, seq, has_gates=delay < 0)
            doomed = run[0].doom.encode("utf-8", "backslashreplace")
            transaction.execute("doom", {"seq": seq, "doomed": doomed})
            return
        new = _add_members(transaction, seq, run)
        awaits += new * (run[0].expect - 1)
        if awaits <= 0:
            release(transaction, seq, *due_after(-1 - delay if delay < 0 else delay, now), has_gates=delay < 0)
            return
    transaction.execute("await", {"seq": seq, "awaits": awaits})


def release(transaction: Transaction, seq: int, state: int = READY, due_at: int = 0, *, has_gates: bool = True) -> None:
    """Release a held job, and delete the data about its arrivals. *has_gates*: whether it may have gates."""
    transaction.execute("let_go", {"seq": seq, "state": state, "due_at": due_at})
    transaction.execute("forget_terms", {"seq": seq})
    if has_gates:
        place(transaction, [seq])


def _runs(steps: Sequence[Arrive]) -> list[Sequence[Arrive]]:
    """Split arrivals at one job into runs. The order within a run does not matter.

    A plain arrival only lowers the number of awaited members, so plain arrivals form a run. An arrival with ``expect``
    or ``doom`` is a separate run.
    """
    runs: list[Sequence[Arrive]] = []
    for is_plain, run in itertools.groupby(steps, key=lambda step: not step.expect and not step.doom):
        if is_plain:
            runs += in_batches(list(run))
        else:
            runs += [[step] for step in run]
    return runs


def _add_members(transaction: Transaction, seq: int, steps: Sequence[Arrive]) -> int:
    """Store the members of these arrivals. Returns the number of members that had not arrived before."""
    parameters: list[Any] = []
    for step in steps:
        # Lone surrogates are encoded, too, so that different members have different bytes.
        parameters += (seq, step.member.encode("utf-8", "surrogatepass"))
    return transaction.execute_text(_arrive_text(len(steps)), parameters).rowcount


@functools.lru_cache(maxsize=16)
def _arrive_text(rows: int) -> str:
    return repeated(statement("arrive"), "(?, ?)", rows)
