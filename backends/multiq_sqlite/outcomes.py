"""The outcomes of deleted jobs. An ack stores an outcome until it expires."""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from multiq.backend import Outcome
from multiq.driverkit.clock import SECOND, nanoseconds

from .errors import MalformedRecord
from .records import in_batches, move, repeated
from .statements import statement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.backend import Ack, After, OutcomeKind

    from .connection import Transaction

KINDS: tuple[OutcomeKind, ...] = ("done", "cancelled")  # The table stores the index in this tuple.

_DROPPED_PER_KEEP = 2  # expired outcomes that each new outcome deletes: more than one, so that their number falls
_TYPES = (int, str, int, int, int, int, bytes)


def keep_outcomes(transaction: Transaction, acks: Sequence[tuple[int, Ack]], now: int) -> None:
    """Keep the outcomes of these acks. Each ack has the seq of its job. The jobs must not be deleted yet."""
    kept = [(seq, ack) for seq, ack in acks if ack.after is not None and ack.after.keep > 0]
    if not kept:
        return
    for batch in in_batches(kept):
        transaction.execute_text(_keep_text(len(batch)), _keep_parameters(batch, now))
    for queue, count in Counter(ack.lease.queue for _, ack in kept).items():
        drop_expired(transaction, queue, _DROPPED_PER_KEEP * count, now)


def keep_deleted(transaction: Transaction, queue: str, seqs: Sequence[int], after: After, now: int) -> None:
    """Keep the same outcome for each of these jobs. The transaction deletes the jobs later."""
    values = now, code_of(after.kind), now + nanoseconds(after.keep), after.outcome
    for batch in in_batches(seqs):
        transaction.execute_text(_keep_text(len(batch)), [value for seq in batch for value in (seq, *values)])
    drop_expired(transaction, queue, _DROPPED_PER_KEEP * len(seqs), now)


def drop_expired(transaction: Transaction, queue: str, limit: int, now: int) -> int:
    """Delete up to *limit* outcomes that have expired. Returns their number."""
    return move(transaction, "forget", "expired", {"queue": queue, "limit": limit, "now": now})


def code_of(kind: OutcomeKind) -> int:
    return KINDS.index(kind)


class OutcomeRow(NamedTuple):
    """An outcome as ``outcomes`` and ``history`` read it. Times are nanoseconds."""

    seq: int
    id: str
    kind: int
    attempt: int
    kept_at: int
    expires_at: int
    body: bytes

    @property
    def place(self) -> tuple[int, int]:
        """The sort key of a history."""
        return self.expires_at, self.seq

    def outcome(self, queue: str, now: int) -> Outcome:
        """Return the public outcome at the time *now*."""
        if tuple(map(type, self)) != _TYPES or not 0 <= self.kind < len(KINDS):
            raise MalformedRecord(f"outcome number {self.seq} has a column with a wrong value")
        return Outcome(
            queue=queue,
            id=self.id,
            kind=KINDS[self.kind],
            body=self.body,
            attempt=self.attempt,
            age=max(0, now - self.kept_at) / SECOND,
            expires_in=(self.expires_at - now) / SECOND,
        )


@functools.lru_cache(maxsize=16)
def _keep_text(rows: int) -> str:
    return repeated(statement("keep"), "(?, ?, ?, ?, ?)", rows)


def _keep_parameters(batch: Sequence[tuple[int, Ack]], now: int) -> list[Any]:
    parameters: list[Any] = []
    for seq, ack in batch:
        after = ack.after
        assert after is not None  # noqa: S101 - the caller has chosen these acks
        parameters += (seq, now, code_of(after.kind), now + nanoseconds(after.keep), after.outcome)
    return parameters
