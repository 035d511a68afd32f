"""Verdicts as statements: which verdicts may be carried out, and how.

Nearly all verdicts are acks, and a batch of acks takes a fast path. It deletes the jobs whose leases are live, and the
number of deleted rows shows whether all leases are. For any other batch, the jobs are locked and read first.

A *fence* is a job's seq with the token of its reservation.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from multiq.backend import Abandon, Ack, Bury, GiveBack, Release, Touch
from multiq.errors import LeaseLost

from . import receipts
from .records import RESERVED, microseconds
from .statements import render

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from multiq.backend import Verdict

    from .connection import Reply, Session
    from .pool import Pool
    from .receipts import Proof, Ticket

Fence = tuple[int, int]
"""A job's seq and the token of its reservation."""

Key = tuple[Fence, type]
"""Identifies a repeated verdict by its fence and its kind."""

# The end of a reason that was cut to a quarter of a packet. In hex, the reason then takes half of the packet.
_CUT = b"..."

_MAX_UNCONFIRMED = 100_000  # verdicts that are remembered

_ONE_STEP = ((Touch, "touch"), (Ack, "remove"))


def fence_of(verdict: Verdict) -> Fence:
    """Return the seq and the token in a lease's token. A text in another form gives (0, 0), which fits no job."""
    seq, _, token = verdict.lease.token.partition(":")
    try:
        return int(seq) % 2**63, int(token) % 2**64
    except ValueError:
        return 0, 0


class UnconfirmedVerdicts:
    """Verdicts of transactions whose COMMIT had no reply. They are stored until the caller repeats them and gets the
    answers.

    The consumer may make other calls between the lost reply and the repetition.
    """

    def __init__(self) -> None:
        self._pending: dict[Key, list[tuple[Proof | None, LeaseLost | None]]] = {}

    def about(self, batch: Batch) -> bool:
        """Whether an earlier call may have carried out any of these verdicts."""
        return bool(self._pending) and not self._pending.keys().isdisjoint(batch.named())

    def proofs(self, batch: Batch) -> list[Proof]:
        """Return the receipts and tickets of the transactions that may have carried out these verdicts."""
        return [proof for key in batch.named() for proof, _ in self._pending.get(key, ()) if proof is not None]

    def answers(self, key: Key, found: Mapping[Proof, int]) -> list[LeaseLost | None]:
        """Return the answers of committed transactions to this verdict. *found* has their receipts and tickets.

        There may be several answers, because a call may name the verdict twice.
        """
        return [answer for proof, answer in self._pending.get(key, ()) if proof is None or found.get(proof)]

    def begin(self, batch: Batch, answers: Sequence[LeaseLost | None], proof: Proof | None) -> None:
        """Store the answers of a transaction whose reply was lost.

        *proof* is the transaction's receipt or ticket. None means that the transaction was committed, but the call
        returned no answers. Touches are left out, because a touch can just be repeated.
        """
        for key, answer in zip(batch.named(), answers, strict=True):
            if key[1] is not Touch:
                self._pending.setdefault(key, []).append((proof, answer))
        while len(self._pending) > _MAX_UNCONFIRMED:  # Forget the oldest verdicts, which were never repeated.
            del self._pending[next(iter(self._pending))]

    def end(self, batch: Batch) -> None:
        """Forget these verdicts, because the caller gets its answers now."""
        if self._pending:
            for key in batch.named():
                self._pending.pop(key, None)


class Batch:
    def __init__(self, pool: Pool, verdicts: Sequence[Verdict]) -> None:
        self.verdicts = verdicts
        self.fences = [fence_of(verdict) for verdict in verdicts]
        self._pool = pool

    def named(self) -> list[Key]:
        """Return the keys that identify these verdicts when they are repeated."""
        return [(fence, type(verdict)) for fence, verdict in zip(self.fences, self.verdicts, strict=True)]

    @property
    def is_short(self) -> bool:
        """Whether the batch takes the fast path. All verdicts must be acks, each of another job."""
        return all(type(verdict) is Ack for verdict in self.verdicts) and len({seq for seq, _ in self.fences}) == len(
            self.fences
        )

    def acks(self, ticket: Ticket) -> list[str]:
        """Return the statements of the fast path. One statement acks all jobs of the same reserve.

        The first statement deletes the ticket.
        """
        now = self._pool.now
        if len(self.fences) == 1:
            ((seq, token),) = self.fences
            return [render("ack_with_ticket", seqs=seq, token=token, now=now, ticket=ticket.writer)]
        seqs = defaultdict(list)
        for seq, token in self.fences:
            seqs[token].append(seq)
        statements: list[str] = []
        for token, numbers in seqs.items():
            numbers.sort()
            if statements:
                statements.append(render("ack", seqs=numbers, token=token, now=now))
            else:
                statements.append(render("ack_with_ticket", seqs=numbers, token=token, now=now, ticket=ticket.writer))
        return statements

    def are_done(self, acks: Iterable[Reply]) -> bool:
        """Whether the fast path has deleted all jobs. The ticket is one more deleted row."""
        return sum(ack.affected for ack in acks) == len(self.fences) + 1

    def all_done(self) -> list[LeaseLost | None]:
        """Return the answers if every verdict is accepted."""
        return [None] * len(self.verdicts)

    def lock(self, session: Session, unconfirmed: UnconfirmedVerdicts) -> tuple[list[LeaseLost | None], list[str]]:
        """Begin a transaction and lock the jobs. Returns the answers, and the statements that must still be run.

        *unconfirmed* holds the verdicts that an earlier call may have carried out.
        """
        now = self._pool.now
        queues = sorted({verdict.lease.queue for verdict in self.verdicts if isinstance(verdict, Bury)})
        asked = [render("last_buried", queue=queue.encode(), now=now) for queue in queues]
        expected = unconfirmed.proofs(self)
        if expected:  # read after the locks, which wait for the end of an unconfirmed transaction
            asked.append(receipts.asked(expected))
        found, *more = session.begin(render("held", seqs=sorted({seq for seq, _ in self.fences}), now=now), *asked)
        proofs = receipts.found(expected, more.pop()) if expected else {}
        places = {queue: answer.rows[0][0] for queue, answer in zip(queues, more, strict=True)}
        return self._judge({row[0]: row[1:] for row in found.rows}, places, unconfirmed, proofs)

    def _judge(
        self,
        rows: dict[int, tuple[int, int, int]],
        places: dict[str, int],
        unconfirmed: UnconfirmedVerdicts,
        proofs: Mapping[Proof, int],
    ) -> tuple[list[LeaseLost | None], list[str]]:
        answers: list[LeaseLost | None] = []
        steps: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        repeated: Counter[Key] = Counter()
        is_doubtful = unconfirmed.about(self)
        longest = (self._pool.max_packet or 0) // 4
        for verdict, key in zip(self.verdicts, self.named(), strict=True):
            seq, token = key[0]
            found_token, state, is_live = rows.get(seq, (0, -1, 0))
            if is_doubtful and (given := unconfirmed.answers(key, proofs)):
                answers.append(given[min(repeated[key], len(given) - 1)])
                repeated[key] += 1
            elif found_token == token and state == RESERVED and is_live:
                steps[_step(verdict, places, longest)].append(seq)
                answers.append(None)
                if type(verdict) is not Touch:
                    del rows[seq]  # a reservation takes only one verdict
            else:
                answers.append(LeaseLost(verdict.lease.queue, verdict.lease.id))
        # Touches are carried out first. Any other verdict on the same job ends its lease.
        order = sorted(steps, key=lambda step: step[0] != "touch")
        return answers, [self._statement(step, steps[step]) for step in order]

    def _statement(self, step: tuple[Any, ...], seqs: list[int]) -> str:
        verb, *values = step
        return render(verb, seqs=sorted(seqs), now=self._pool.now, **dict(values))


def _step(verdict: Verdict, places: dict[str, int], longest: int) -> tuple[Any, ...]:
    """Return the name and the values of the verdict's statement. Jobs with the same result share one statement.

    *longest* is the greatest length of a reason in bytes.
    """
    match verdict:
        case Release(delay=delay, priority=priority, reason=reason):
            return (
                "release",
                ("delay", microseconds(delay)),
                ("priority", priority),
                ("reason", _bytes(reason, longest)),
            )
        case GiveBack(delay=delay):
            return ("give_back", ("delay", microseconds(delay)))
        case Bury(lease=lease, reason=reason):
            place = places[lease.queue]
            # A kick takes the longest buried job first, also among the jobs of one batch.
            places[lease.queue] = place + 1
            return ("bury", ("place", place), ("reason", _bytes(reason, longest)))
        case Abandon(reason=reason):
            return ("abandon", ("reason", _bytes(reason, longest)))
        case _:
            return (next(verb for kind, verb in _ONE_STEP if type(verdict) is kind),)


def _bytes(reason: str | None, longest: int) -> bytes | None:
    """Return a reason as bytes, short enough for a statement. Error texts may be very long or have lone surrogates."""
    if reason is None:
        return None
    kept = reason[: longest + 1].encode("utf-8", "backslashreplace")
    if len(kept) <= longest:
        return kept
    return kept[: longest - len(_CUT)].decode("utf-8", "ignore").encode() + _CUT
