"""Verdicts as statements. Decides which verdicts may be carried out.

Nearly all verdicts are acks, and a batch of acks takes a fast path. It deletes the jobs whose leases are live. The
number of deleted rows shows whether all leases were live. For any other batch, the jobs are locked and read first.

A *fence* is a job's seq with the token of its reservation.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from multiq.backend import Abandon, Ack, Bury, Enqueue, GiveBack, Release, Touch
from multiq.errors import LeaseLost

from . import outcomes, receipts, steps
from .gates import GATE_MARK
from .outcomes import NOTHING_KEPT, Keeping, Notes
from .records import RESERVED, microseconds
from .statements import render
from .steps import NO_STEPS, Steps
from .unique import lock_keys_of, parts_of, resolve_steps, steps_have_keys

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from multiq.backend import Step, Verdict

    from .connection import Reply, Session
    from .pool import Pool
    from .receipts import Proof, Ticket

Fence = tuple[int, int]
"""A job's seq and the token of its reservation."""

Key = tuple[Any, ...]
"""Identifies a repeated verdict by its fence and its kind. The key of a touch with steps also has the steps."""

# The end of a reason that was cut to a quarter of a packet. In hex, the reason then takes half of the packet.
_CUT = b"..."

_GATE = f":{GATE_MARK}"

_MAX_UNCONFIRMED = 100_000  # verdicts that are remembered

_CHANGES = ((Touch, "touch"), (Ack, "remove"))


def fence_of(verdict: Verdict) -> Fence:
    """Split the text ``Lease.token`` into the job's seq and the number that the reservation has stored with the job.

    For a text that is not a pair of numbers, returns (0, 0), which fits no job.
    """
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
        """Return the answers that committed transactions gave to this verdict.

        *found*: the receipts and tickets of committed transactions.

        There may be several answers, because a call may name the verdict twice.
        """
        return [answer for proof, answer in self._pending.get(key, ()) if proof is None or found.get(proof)]

    def begin(self, batch: Batch, answers: Sequence[LeaseLost | None], proof: Proof | None) -> None:
        """Store the answers of a transaction whose reply was lost.

        *proof* is the transaction's receipt or ticket. None: the transaction was committed, but the call returned no
        answers. A touch without steps is stored only if another verdict of the batch has ended the lease. Any other
        touch without steps can simply be carried out again.
        """
        named = batch.named()
        ended = {key[0] for key in named if key[1] is not Touch}
        for key, answer in zip(named, answers, strict=True):
            if key[0] in ended or len(key) > len(("fence", "kind")):
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
        self._storing = [verdict for verdict in verdicts if verdict.after is not None]
        """The verdicts with an ``After``: an outcome, a memo, a detail or steps."""
        self.has_steps = any(map(_steps_of, self._storing))
        self.has_keys = self.has_steps and any(steps_have_keys(_steps_of(verdict)) for verdict in self._storing)
        """Whether a step enqueues a job with a unique key."""
        self.ends_of_gates: list[Fence] = []
        """The fences of the leases that free slots."""
        if _GATE in "".join([verdict.lease.token for verdict in verdicts]):
            self.ends_of_gates = [
                fence
                for fence, verdict in zip(self.fences, verdicts, strict=True)
                if _GATE in verdict.lease.token and not isinstance(verdict, Touch)
            ]
        self.steps: Steps = NO_STEPS
        """The steps of the accepted verdicts, in the present attempt of the transaction."""
        self._accepted: list[tuple[int, Verdict, tuple[Any, ...]]] = []
        """The accepted verdicts, each with the seq of its job and the name and values of its statement."""
        self._queues: frozenset[str] = frozenset()

    def named(self) -> list[Key]:
        """Return the keys that identify these verdicts when they are repeated."""
        return [_key(fence, verdict) for fence, verdict in zip(self.fences, self.verdicts, strict=True)]

    @property
    def is_short(self) -> bool:
        """Whether the batch takes the fast path. All verdicts must be acks, each of another job."""
        return all(type(verdict) is Ack for verdict in self.verdicts) and len({seq for seq, _ in self.fences}) == len(
            self.fences
        )

    def check_sizes(self) -> None:
        """Raises ``PayloadTooLarge`` if a value does not fit into a packet. The caller has a session, so the size of a
        packet is known."""
        if self._storing:
            largest = outcomes.largest(self._storing)
            if self.has_steps:
                largest = max(largest, *(steps.largest(_steps_of(verdict)) for verdict in self._storing))
            outcomes.refuse_too_large(largest, self._pool.max_packet or 0)

    def keeping(self, *, is_guarded: bool = False) -> Keeping:
        """Return the statements that keep the outcomes of a batch of acks that are all accepted."""
        return Keeping.of(self._pool, self._storing, is_guarded=is_guarded) if self._storing else NOTHING_KEPT

    def begin_steps(self, accepted: Sequence[Verdict] | None = None) -> Steps:
        """Return the steps of the *accepted* verdicts, for a new attempt of the transaction. If *accepted* is None, all
        verdicts are accepted."""
        self.steps = NO_STEPS
        if self.has_steps:
            self.steps = Steps(self._pool, _steps_in_order(self.verdicts if accepted is None else accepted))
        return self.steps

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

    def carry_out_in_order(self, session: Session) -> None:
        """Carry out each accepted verdict and its steps before the next verdict. The next verdict may end the job that
        has a key.

        ``lock`` must have been called. The statements that it returned must not be sent.
        """
        wanted = [step for _, verdict, _ in self._accepted for step in _steps_of(verdict)]
        if locks := lock_keys_of(self._pool, wanted):
            session.execute(*locks)
        for seq, verdict, change in self._accepted:
            notes = Notes()
            notes.add(seq, verdict)
            keeps = Keeping.of(self._pool, [verdict]).statements
            session.execute(self._statement(change, [seq]), *notes.statements(), *keeps)
            if steps := _steps_of(verdict):
                self._carry_out(session, steps)

    def _carry_out(self, session: Session, steps: Sequence[Step]) -> None:
        for part in parts_of(steps):
            one = carry_out_part(session, self._pool, part)
            self._queues |= one.enqueued | one.released
        self._queues |= {step.queue for step in steps if isinstance(step, Enqueue)}

    @property
    def queues(self) -> frozenset[str]:
        """The queues in which the steps have added, changed or released jobs."""
        return self.steps.enqueued | self.steps.released | self._queues

    def are_done(self, acks: Iterable[Reply]) -> bool:
        """Whether the fast path has deleted all jobs. The ticket is an additional deleted row."""
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
        if expected:  # This is read after the locks, because the locks wait for the end of an unconfirmed transaction.
            asked.append(receipts.asked(expected))
        found, *more = session.begin(
            render("held", seqs=sorted({seq for seq, _ in self.fences}), now=self._pool.true_now), *asked
        )
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
        notes = Notes()
        accepted: list[Verdict] = []
        self._accepted = []
        self._queues = frozenset()
        changes: dict[tuple[Any, ...], list[int]] = defaultdict(list)
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
                change = _change(verdict, places, longest)
                changes[change].append(seq)
                self._accepted.append((seq, verdict, change))
                answers.append(None)
                notes.add(seq, verdict)
                accepted.append(verdict)
                if type(verdict) is not Touch:
                    del rows[seq]  # a reservation takes only one verdict
            else:
                answers.append(LeaseLost(verdict.lease.queue, verdict.lease.id))
        if not self.has_keys:
            self.begin_steps(accepted)
        # Touches are carried out first. Any other verdict on the same job ends its lease.
        order = sorted(changes, key=lambda change: change[0] != "touch")
        statements = [self._statement(change, changes[change]) for change in order]
        return answers, [*statements, *notes.statements(), *Keeping.of(self._pool, accepted).statements]

    def _statement(self, change: tuple[Any, ...], seqs: list[int]) -> str:
        verb, *values = change
        return render(verb, seqs=sorted(seqs), now=self._pool.now, **dict(values))


def _key(fence: Fence, verdict: Verdict) -> Key:
    if isinstance(verdict, Touch) and (steps := _steps_of(verdict)):
        return fence, Touch, steps
    return fence, type(verdict)


def _steps_of(verdict: Verdict) -> tuple[Step, ...]:
    return () if verdict.after is None else verdict.after.steps


def carry_out_part(session: Session, pool: Pool, part: Sequence[Step]) -> Steps:
    """Carry out a part of steps (``parts_of``) in the present transaction."""
    kept, before = resolve_steps(session, pool, part)
    steps = Steps(pool, kept, before=before)
    steps.read(session.execute(*steps.first) if steps.first else [])
    ending = [*steps.last, *steps.take_moves()]
    steps.read_last(session.execute(*ending) if ending else [])
    return steps


def _steps_in_order(accepted: Sequence[Verdict]) -> list[Step]:
    """Return the steps of accepted verdicts, without the enqueues that have no effect in the contract's order.

    The transaction carries out all verdicts first, and then all steps. By the contract, a verdict's steps come before
    the next verdict. If a step enqueues a job with the id of a job that a later verdict acks, that job still exists by
    the contract's order, and the enqueue changes nothing.
    """
    last = {(verdict.lease.queue, verdict.lease.id): at for at, verdict in enumerate(accepted)}
    return [
        step
        for at, verdict in enumerate(accepted)
        for step in _steps_of(verdict)
        if not (isinstance(step, Enqueue) and last.get((step.queue, step.job.id), -1) > at)
    ]


def _change(verdict: Verdict, places: dict[str, int], longest: int) -> tuple[Any, ...]:
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
            # A kick takes the jobs in the order in which they were buried. This also holds for the jobs of one batch.
            places[lease.queue] = place + 1
            return ("bury", ("place", place), ("reason", _bytes(reason, longest)))
        case Abandon(reason=reason):
            return ("abandon", ("reason", _bytes(reason, longest)))
        case _:
            return (next(verb for kind, verb in _CHANGES if type(verdict) is kind),)


def _bytes(reason: str | None, longest: int) -> bytes | None:
    """Return a reason as bytes, short enough for a statement. Error texts may be very long or have lone surrogates."""
    if reason is None:
        return None
    kept = reason[: longest + 1].encode("utf-8", "backslashreplace")
    if len(kept) <= longest:
        return kept
    return kept[: longest - len(_CUT)].decode("utf-8", "ignore").encode() + _CUT
