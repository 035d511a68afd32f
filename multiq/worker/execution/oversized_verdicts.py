"""Removes values that are larger than the backend accepts from the verdicts of a refused call.

The backend has refused the whole call because of these values, so it has carried out none of the verdicts.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from multiq.backend import Ack, After, Bury, Enqueue, GiveBack, Put, Release
from multiq.outcome import without_value
from multiq.validation import check_reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.backend import Step, Verdict
    from multiq.errors import PayloadTooLarge
    from multiq.worker.processes.inflight import Held

_log = logging.getLogger("multiq.worker")


def shrink(refused: Sequence[Held], error: PayloadTooLarge) -> list[Held]:
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
