"""Verdicts whose replies were lost, and finding out by the job what became of them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from multiq.backend import Ack, Bury
from multiq.errors import BackendTimeout, LeaseLost

from .facts import job_facts

if TYPE_CHECKING:
    from multiq.backend import Verdict

    from .facts import JobFacts
    from .holding import Held
    from .wires import Session, Wires

_FIRST_PAUSE = 0.002  # seconds between two looks at a job whose old connection the server still takes for alive
_LONGEST_PAUSE = 0.1
_MOST = 10_000  # verdicts that nobody has asked about again


class _Doubt(NamedTuple):
    verdict: Verdict
    held: Held


class Doubts:
    """What one consumer has said and not heard back, and what it has heard in calls that failed."""

    def __init__(self) -> None:
        self._open: dict[str, _Doubt] = {}  # by token
        self._answers: dict[str, tuple[type[Verdict], LeaseLost | None]] = {}

    def __bool__(self) -> bool:
        return bool(self._open or self._answers)

    def add(self, verdict: Verdict, held: Held) -> None:
        """This verdict was sent, and its reply did not come."""
        if len(self._open) >= _MOST:
            del self._open[next(iter(self._open))]
        self._open[verdict.lease.token] = _Doubt(verdict, held)

    def remember(self, verdict: Verdict, answer: LeaseLost | None) -> None:
        """This answer was heard, and whoever asked has not been told."""
        if len(self._answers) >= _MOST:
            del self._answers[next(iter(self._answers))]
        self._answers[verdict.lease.token] = type(verdict), answer

    def recall(self, verdict: Verdict) -> tuple[bool, LeaseLost | None]:
        """Whether the answer to a verdict that is said again is known, and the answer."""
        known = self._answers.pop(verdict.lease.token, None)
        if known is None:
            return False, None
        kind, answer = known
        if answer is None and kind is not type(verdict):  # it had another one, that counted
            answer = LeaseLost(verdict.lease.queue, verdict.lease.id)
        return True, answer

    def resolve(self, wires: Wires, tokens: list[str]) -> None:
        """Find out about those of *tokens* that are in doubt; ``recall`` has the answers then.

        A job that the server still thinks us to hold is waited for: our last words may not have reached it. Raises
        ``BackendError`` if it takes too long.
        """
        left = [token for token in tokens if token in self._open]
        pause = _FIRST_PAUSE
        while left:
            with wires.borrowed() as session:
                left = [token for token in left if not self._is_resolved(session, token)]
                if not left:
                    return
                if time.monotonic() + pause > session.deadline:
                    break
            time.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)
        if left:
            raise BackendTimeout(
                f"{wires.shown} has not noticed yet that a connection is gone: what was said on it is open"
            )

    def _is_resolved(self, session: Session, token: str) -> bool:
        doubt = self._open[token]
        lease = doubt.verdict.lease
        ((line, body),) = session.ask(b"stats-job %b" % lease.id.encode(), is_safe=True)
        facts = job_facts(body) if line.startswith(b"OK ") else None
        if facts is not None and facts.state == b"reserved" and facts.reserves == doubt.held.facts.reserves:
            return False
        del self._open[token]
        self.remember(doubt.verdict, None if _has_counted(doubt, facts) else LeaseLost(lease.queue, lease.id))
        return True


def _has_counted(doubt: _Doubt, job: JobFacts | None) -> bool:
    """Whether a verdict was carried out, as far as the job tells. Else it is, or will be, run again."""
    before = doubt.held.facts
    if job is None:
        return isinstance(doubt.verdict, Ack)
    if isinstance(doubt.verdict, Ack) or job.reserves != before.reserves:
        return False
    if isinstance(doubt.verdict, Bury):
        return job.buries > before.buries
    return job.releases > before.releases
