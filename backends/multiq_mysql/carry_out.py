"""Carries out the steps of a call of ``carry_out`` in one transaction, if its conditions hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiq.backend import Enqueue

from . import notes, outcomes
from .settle import carry_out_part
from .steps import Steps, largest
from .unique import lock_keys_of, parts_of, resolve_steps, steps_have_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.backend import Step, Version

    from .connection import Session
    from .pool import Pool


class CarryOut:
    """A call of ``carry_out``. After a lost reply, the next attempt checks whether the steps were carried out."""

    def __init__(self, pool: Pool, steps: Sequence[Step], when: Sequence[Version]) -> None:
        self._pool = pool
        self._steps = steps
        self._when = when
        self.queues: frozenset[str] = frozenset()
        """The queues in which the call has added or released jobs."""

    def run(self, session: Session) -> bool:
        outcomes.refuse_too_large(largest(self._steps), self._pool.max_packet or 0)
        if session.done_before(waits=True):
            return True
        conditions = notes.Conditions(self._pool, self._when)
        earlier: list[Steps] = []
        if steps_have_keys(self._steps):
            _, *replies = session.begin(session.write_receipt(done=1), *conditions.statements)
            if not conditions.hold(replies):
                session.roll_back()
                return False
            *parts, last = parts_of(self._steps)
            if parts:
                session.execute(*lock_keys_of(self._pool, self._steps))
            earlier = [carry_out_part(session, self._pool, part) for part in parts]
            kept, before = resolve_steps(session, self._pool, last)
            steps = Steps(self._pool, kept, conditions.absent, before)
            steps.read(session.execute(*steps.first) if steps.first else [])
        else:
            steps = Steps(self._pool, self._steps, conditions.absent)
            _, *replies = session.begin(session.write_receipt(done=1), *conditions.statements, *steps.first)
            at = len(conditions.statements)
            if not conditions.hold(replies[:at]):
                session.roll_back()
                return False
            steps.read(replies[at:])
        self.queues = steps.released | {step.queue for step in self._steps if isinstance(step, Enqueue)}
        self.queues = self.queues.union(*(part.released for part in earlier))
        steps.read_last(session.commit(*steps.last, *steps.take_moves()))
        return True
