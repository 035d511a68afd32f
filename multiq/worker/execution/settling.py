"""Collects the verdicts on finished jobs, sends them to the backend together, and keeps them while the backend is down.

If the backend refuses a call because of its own limit on the size of a body, the call has carried out none of the
verdicts. They are sent again without the values that are too large. ``multiq.outcome`` has the setting ``max_result``.
"""

from __future__ import annotations

import logging
from collections import Counter
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec

from multiq.backend import Ack, After, Bury, Enqueue, GiveBack, Put, Release
from multiq.envelope import decode_json
from multiq.errors import BackendError, PayloadTooLarge
from multiq.events import JobLost
from multiq.job import task_of
from multiq.outcome import without_value
from multiq.validation import check_reason

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Sequence

    from multiq.backend import Consumer, Step, Verdict
    from multiq.errors import LeaseLost
    from multiq.events import Event
    from multiq.worker.processes.inflight import Held, InflightWriter

    from .backend_backoff import BackendBackoff

_log = logging.getLogger("multiq.worker")

_verdict_of = attrgetter("verdict")


class Settling:
    """The verdicts of one worker process. The fetcher calls the methods under its lock.

    - *held*: the jobs with held leases. A settled job is removed.
    - *events*: gets the ``JobLost`` events.
    - *inflight*: the table in which the supervisor and the sidecar see the held leases.
    """

    def __init__(
        self,
        consumer: Consumer,
        held: dict[Held, None],
        backoff: BackendBackoff,
        events: deque[Event],
        inflight: InflightWriter | None,
    ) -> None:
        self._consumer = consumer
        self._held = held
        self._backoff = backoff
        self._events = events
        self._inflight = inflight
        self.counts: Counter[type[Verdict]] = Counter()
        """The number of verdicts that the backend has accepted, by type."""
        self.on_settled: Callable[[Sequence[Held]], None] | None = None
        """Called with all jobs that are settled."""
        self.unsettled: list[Held] = []
        """Jobs whose verdicts wait for the end of an outage."""
        self.waiting: list[Held] = []
        """Those of them that the current call leaves out, because their part of the backend is down."""

    def settle(self, finished: Sequence[Held]) -> bool:
        """Settle *finished* now. Returns False if verdicts wait for the end of an outage."""
        pause = self._backoff.left()
        to_settle = self.collect(finished, pause)
        if not to_settle:
            self.unsettled = self.waiting
            return not self.waiting
        if pause and not self._backoff.is_partial:
            self.unsettled = to_settle
            return False
        try:
            lost = self._consumer.settle(verdicts_of(to_settle))
        except PayloadTooLarge as exc:
            self.shrink(to_settle, exc)
            return False
        except BackendError as exc:
            self.keep(to_settle, exc)
            self._backoff.failed(exc)
            return False
        self.accept(to_settle, lost)
        return not self.waiting

    def collect(self, finished: Sequence[Held], pause: float) -> list[Held]:
        """Return the jobs to settle now, without jobs that an abort has already settled.

        *pause*: the seconds until the next attempt to reach the backend, or the part of it that is down. 0: now.
        """
        all_held = self._held
        self.waiting = []
        if pause and self._backoff.is_partial:
            self.waiting, self.unsettled = self.unsettled, []
        if not self.unsettled:
            return [held for held in finished if held in all_held]
        collected, self.unsettled = dict.fromkeys([*self.unsettled, *finished]), []
        return [held for held in collected if held in all_held]

    def accept(self, settled: Sequence[Held], lost: Sequence[LeaseLost | None]) -> None:
        """Note the backend's answers to the collected verdicts."""
        self.unsettled = self.waiting
        all_held = self._held
        for held in settled:
            del all_held[held]
        if self.on_settled is not None:
            self.on_settled(settled)
        counted = settled
        if any(lost):
            refused = [held for held, error in zip(settled, lost, strict=True) if error is not None]
            counted = [held for held, error in zip(settled, lost, strict=True) if error is None]
            self._note_lost(refused)
        self.counts.update(map(type, map(_verdict_of, counted)))
        if self._inflight is not None and settled:
            self._inflight.drop(settled)
        if None in lost:  # a driver may report lost leases without asking the backend
            self.note_answer()

    def keep(self, to_settle: list[Held], error: BackendError) -> None:
        """Keep the verdicts of a failed call for the next call. Verdicts that the failed call has settled are not
        kept."""
        answers = error.settled
        self.waiting = self.unsettled = self.waiting + [held for held in to_settle if held.lease.token not in answers]
        settled = [held for held in to_settle if held.lease.token in answers]
        if settled:
            self.accept(settled, [answers[held.lease.token] for held in settled])

    def shrink(self, to_settle: Sequence[Held], error: PayloadTooLarge) -> None:
        """Keep the verdicts of a call that the backend has refused, without what is too large."""
        self.unsettled = self.waiting + _shrunk(to_settle, error)

    def note_answer(self) -> None:
        """Record that the backend has answered. If no verdicts wait for another part of the backend, the backend counts
        as up.
        """
        if self._backoff.is_down and not self.unsettled:
            self._backoff.answered()

    def _note_lost(self, refused: Sequence[Held]) -> None:
        for held in refused:
            held.is_lost = True
            if held.began_at:  # no work is lost if the job has not begun
                lease = held.lease
                task = task_of(decode_json(lease.body))
                self._events.append(JobLost(queue=lease.queue, job_id=lease.id, task=task))


def verdicts_of(finished: Sequence[Held]) -> list[Verdict]:
    return [verdict for verdict in map(_verdict_of, finished) if verdict is not None]


def _shrunk(refused: Sequence[Held], error: PayloadTooLarge) -> list[Held]:
    """Remove the values, memos and details that are too large from refused verdicts, but not their steps.

    Returns all of *refused*, whose verdicts may then be sent again. If no body is over the limit in the error, all
    verdicts are made smaller. A job with a step that is too large is buried, because its verdict would be refused again
    and again, together with all other verdicts.
    """
    limit = error.limit_bytes
    large = [held for held in refused if _largest(held.verdict) > limit] or refused
    _log.error("the verdicts on %d jobs are sent again, without values, memos and details: %s", len(large), error)
    for held in large:
        verdict = held.verdict
        if verdict is None or verdict.after is None:
            continue
        steps = verdict.after.steps  # without these steps a flow would stop
        if any(_size_of(step) > limit for step in steps):
            held.verdict = Bury(
                verdict.lease, check_reason(f"the job has run, and its verdict cannot be stored: {error}")
            )
        elif isinstance(verdict, Ack) and verdict.after.outcome:
            short = without_value(verdict.after.outcome, str(error), with_errors=False)
            held.verdict = Ack(verdict.lease, msgspec.structs.replace(verdict.after, outcome=short))
        elif isinstance(verdict, Release | Bury | GiveBack):
            held.verdict = msgspec.structs.replace(verdict, after=After(steps=steps) if steps else None)
    return list(refused)


def _largest(verdict: Verdict | None) -> int:
    """Return the number of bytes of the largest body that a verdict stores."""
    after = None if verdict is None else verdict.after
    if after is None:
        return 0
    return max(len(after.outcome), len(after.memo or b""), len(after.detail or b""), *map(_size_of, after.steps), 0)


def _size_of(step: Step) -> int:
    if isinstance(step, Enqueue):
        return len(step.job.body)
    return len(step.value) if isinstance(step, Put) else 0
