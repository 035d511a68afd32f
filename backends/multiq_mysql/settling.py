"""Verdicts as statements: which of them may be carried out, and how.

The short way is for acks, which are nearly all there is: they are deleted under the condition that their lease is
live, and the count of rows tells whether all were. Any other batch is locked and read first.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from multiq.backend import Abandon, Ack, Bury, GiveBack, Release, Touch
from multiq.errors import LeaseLost

from .jobs import RESERVED, microseconds
from .statements import render

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.backend import Verdict

    from .connection import Database, Session

Fence = tuple[int, int]
"""A job's seq and its reservation's token."""

_ONE_STEP = ((Touch, "touch"), (Ack, "remove"), (GiveBack, "give_back"))


def fence_of(verdict: Verdict) -> Fence:
    """What is not one of our tokens fits no job."""
    seq, _, token = verdict.lease.token.partition(":")
    try:
        return int(seq) % 2**63, int(token) % 2**64
    except ValueError:
        return 0, 0


class Batch:
    """The verdicts of one call."""

    def __init__(self, database: Database, verdicts: Sequence[Verdict]) -> None:
        self.verdicts = verdicts
        self.fences = [fence_of(verdict) for verdict in verdicts]
        self._database = database

    @property
    def is_short(self) -> bool:
        """Whether there are only acks, each of another job."""
        return all(type(verdict) is Ack for verdict in self.verdicts) and len({seq for seq, _ in self.fences}) == len(
            self.fences
        )

    def acks(self) -> list[str]:
        """The short way's statements, one for each reserve that the jobs came from."""
        seqs = defaultdict(list)
        for seq, token in self.fences:
            seqs[token].append(seq)
        return [
            render("ack", seqs=sorted(numbers), token=token, now=self._database.now) for token, numbers in seqs.items()
        ]

    def all_done(self) -> list[LeaseLost | None]:
        """The answers if all went well."""
        return [None] * len(self.verdicts)

    def all_lost(self) -> list[LeaseLost | None]:
        """The answers if nothing did."""
        return [LeaseLost(verdict.lease.queue, verdict.lease.id) for verdict in self.verdicts]

    def lock(self, session: Session, doubted: frozenset[Fence]) -> tuple[list[LeaseLost | None], list[str]]:
        """Begin a transaction with the jobs locked. Returns the answers, and the statements that are left to run.

        *doubted* are fences whose verdicts may have been carried out by an earlier call.
        """
        now = self._database.now
        queues = sorted({verdict.lease.queue for verdict in self.verdicts if isinstance(verdict, Bury)})
        asked = [render("last_buried", queue=queue.encode(), now=now) for queue in queues]
        found, *last = session.begin(render("held", seqs=sorted({seq for seq, _ in self.fences}), now=now), *asked)
        places = {queue: answer.rows[0][0] for queue, answer in zip(queues, last, strict=True)}
        return self._judge({row[0]: row[1:] for row in found.rows}, places, doubted)

    def _judge(
        self, rows: dict[int, tuple[int, int, int]], places: dict[str, int], doubted: frozenset[Fence]
    ) -> tuple[list[LeaseLost | None], list[str]]:
        answers: list[LeaseLost | None] = []
        steps: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for verdict, (seq, token) in zip(self.verdicts, self.fences, strict=True):
            found_token, state, is_live = rows.get(seq, (0, -1, 0))
            if found_token == token and state == RESERVED and is_live:
                steps[_step(verdict, places)].append(seq)
                answers.append(None)
                if type(verdict) is not Touch:
                    del rows[seq]  # one verdict is all that a reservation takes
            elif (seq, token) in doubted and _was_carried_out(verdict, found_token == token, state):
                answers.append(None)
            else:
                answers.append(LeaseLost(verdict.lease.queue, verdict.lease.id))
        # touch first: on one job it cannot come after another verdict, which would have ended the lease
        order = sorted(steps, key=lambda step: step[0] != "touch")
        return answers, [self._statement(step, steps[step]) for step in order]

    def _statement(self, step: tuple[Any, ...], seqs: list[int]) -> str:
        verb, *values = step
        return render(verb, seqs=sorted(seqs), now=self._database.now, **dict(values))


def _step(verdict: Verdict, places: dict[str, int]) -> tuple[Any, ...]:
    """What is to be done, so that jobs with which the same is done share a statement."""
    match verdict:
        case Release(delay=delay, priority=priority, reason=reason):
            return ("release", ("delay", microseconds(delay)), ("priority", priority), ("reason", _bytes(reason)))
        case Bury(lease=lease, reason=reason):
            place = places[lease.queue]
            places[lease.queue] = place + 1  # the longest buried is kicked first, also of one batch
            return ("bury", ("place", place), ("reason", _bytes(reason)))
        case Abandon(reason=reason):
            return ("abandon", ("reason", _bytes(reason)))
        case _:
            return (next(verb for kind, verb in _ONE_STEP if type(verdict) is kind),)


def _was_carried_out(verdict: Verdict, is_our_token: bool, state: int) -> bool:
    """For a verdict that may have been committed without our knowing: a job that is gone was acked by us, one that
    kept our token and is not reserved any more was settled by us. Nothing else leaves that behind.
    """
    if type(verdict) is Ack:
        return state == -1
    return is_our_token and state != RESERVED


def _bytes(reason: str | None) -> bytes | None:
    """An error's text may hold halves of surrogate pairs, which UTF-8 cannot."""
    return None if reason is None else reason.encode("utf-8", "backslashreplace")
