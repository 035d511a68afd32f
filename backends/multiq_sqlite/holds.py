"""Held jobs: counts the arrivals at a held job, and releases the job with the last arrival."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

from .errors import MalformedRecord
from .limits import place
from .records import READY, due_after, in_batches, repeated
from .statements import statement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.backend import Arrive

    from .connection import Transaction


def arrive(transaction: Transaction, steps: Sequence[Arrive], now: int) -> None:
    """Count arrivals at held jobs. The last arrival at a job releases it."""
    arrivals: dict[tuple[str, str], list[Arrive]] = {}
    for step in steps:
        arrivals.setdefault((step.queue, step.id), []).append(step)
    for (queue, job_id), at_job in arrivals.items():
        row = transaction.execute("terms", {"queue": queue, "id": job_id}).fetchone()
        if row is not None:  # If there is no row, there is no such held job.
            _arrive_at(transaction, at_job, row, now)


def release(transaction: Transaction, seq: int, state: int = READY, due_at: int = 0, *, has_gates: bool = True) -> None:
    """Release a held job, and delete the data about its arrivals. *has_gates*: whether it may have gates."""
    transaction.execute("let_go", {"seq": seq, "state": state, "due_at": due_at})
    transaction.execute("forget_terms", {"seq": seq})
    if has_gates:
        place(transaction, [seq])


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
