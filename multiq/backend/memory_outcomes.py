"""The outcomes that the memory backend keeps, of all queues. The caller holds the store's lock around each call."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import msgspec

from multiq.driverkit.clock import SECOND, nanoseconds

from .effects import Outcome, OutcomePage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .effects import After, OutcomeKind

_DROPPED_PER_KEEP = 2  # expired outcomes that each new outcome deletes: more than one, so that their number falls
_STALE_KEPT = 64  # stale entries that a heap may have in addition to one for each outcome


class KeptOutcome(msgspec.Struct, frozen=True):
    """An outcome as it is stored. Times are in nanoseconds by the store's clock."""

    id: str
    kind: OutcomeKind
    body: bytes
    attempt: int
    kept_at: int
    expires_at: int

    @classmethod
    def of(cls, job_id: str, attempt: int, after: After | None, now: int) -> KeptOutcome | None:
        """Return the outcome that an ack keeps. None: the ack keeps no outcome."""
        if after is None or after.keep <= 0:
            return None
        return cls(job_id, after.kind, after.outcome, attempt, now, now + nanoseconds(after.keep))


class _Kept:
    """The outcomes of one queue."""

    __slots__ = ("by_id", "expiring")

    def __init__(self) -> None:
        self.by_id: dict[str, KeptOutcome] = {}
        self.expiring: list[tuple[int, str]] = []
        """A heap of ``expires_at`` and id. An entry is stale if its outcome was forgotten or replaced."""

    def is_stale(self, entry: tuple[int, str]) -> bool:
        outcome = self.by_id.get(entry[1])
        return outcome is None or outcome.expires_at != entry[0]


class KeptOutcomes:
    """The kept outcomes of all queues of a store.

    An asynchronous exception (Ctrl-C, a time limit) may end any method in the middle. Even then, every stored outcome
    has a heap entry: ``JobQueue.mend`` calls ``keep`` again, and ``drop_expired`` deletes an outcome before it deletes
    the entry.
    """

    def __init__(self) -> None:
        self._queues: dict[str, _Kept] = {}

    def keep(self, queue: str, outcome: KeptOutcome) -> None:
        """Store an outcome. The new outcome replaces an older outcome with the same id. Also delete a few expired
        outcomes."""
        kept = self._queues.setdefault(queue, _Kept())
        kept.by_id[outcome.id] = outcome
        heapq.heappush(kept.expiring, (outcome.expires_at, outcome.id))
        self.drop_expired(queue, _DROPPED_PER_KEEP, outcome.kept_at)
        if len(kept.expiring) > 2 * len(kept.by_id) + _STALE_KEPT:
            kept.expiring = [entry for entry in kept.expiring if not kept.is_stale(entry)]
            heapq.heapify(kept.expiring)

    def drop_expired(self, queue: str, limit: int, now: int) -> int:
        """Delete up to *limit* outcomes that have expired. Returns their number."""
        kept = self._queues.get(queue, _NONE)
        dropped = 0
        while kept.expiring and kept.expiring[0][0] <= now and dropped < limit:
            if not kept.is_stale(kept.expiring[0]):
                del kept.by_id[kept.expiring[0][1]]
                dropped += 1
            heapq.heappop(kept.expiring)
        self._drop_if_empty(queue)
        return dropped

    def delete(self, queue: str, ids: Sequence[str], now: int) -> int:
        """Delete the outcomes of these jobs. Returns the number of deleted outcomes that had not expired."""
        kept = self._queues.get(queue, _NONE).by_id
        found = [kept.pop(job_id) for job_id in dict.fromkeys(ids) if job_id in kept]
        self._drop_if_empty(queue)
        return sum(outcome.expires_at > now for outcome in found)

    def find(self, queue: str, ids: Sequence[str], now: int) -> list[Outcome | None]:
        kept = self._queues.get(queue, _NONE).by_id
        return [_shown(queue, kept.get(job_id), now) for job_id in ids]

    def page(self, queue: str, kind: OutcomeKind | None, limit: int, after: str | None, now: int) -> OutcomePage:
        """Return a page of the outcomes. The outcome that expires last comes first."""
        kept = self._queues.get(queue, _NONE).by_id.values()
        live = [outcome for outcome in kept if outcome.expires_at > now and kind in {None, outcome.kind}]
        places = sorted(((_place(outcome), outcome) for outcome in live), key=lambda place: place[0], reverse=True)
        if after is not None:
            places = [place for place in places if place[0] < after]
        found = [shown for _, outcome in places[:limit] if (shown := _shown(queue, outcome, now)) is not None]
        return OutcomePage(found, places[limit - 1][0] if len(places) > limit else None)

    def _drop_if_empty(self, queue: str) -> None:
        if queue in self._queues and not self._queues[queue].by_id:
            del self._queues[queue]


_NONE = _Kept()  # of a queue without outcomes; it stays empty


def _place(outcome: KeptOutcome) -> str:
    """Return the outcome's position in the history, as text that sorts as the history does."""
    return f"{outcome.expires_at:020}.{outcome.id}"


def _shown(queue: str, outcome: KeptOutcome | None, now: int) -> Outcome | None:
    if outcome is None or outcome.expires_at <= now:
        return None
    return Outcome(
        queue=queue,
        id=outcome.id,
        kind=outcome.kind,
        body=outcome.body,
        attempt=outcome.attempt,
        age=(now - outcome.kept_at) / SECOND,
        expires_in=(outcome.expires_at - now) / SECOND,
    )
