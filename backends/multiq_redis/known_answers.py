"""Keeps the answers to verdicts that a failed exchange could not return, until the caller passes the same verdicts
again."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from multiq.backend import Touch
from multiq.errors import LeaseLost

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from multiq.backend import Step, Verdict

    from .exchange import Exchange

_MOST = 100_000  # stored answers; some verdicts are never repeated

_Key: TypeAlias = "tuple[type[Verdict], str, str, str, tuple[Step, ...]]"


class KnownAnswers:
    """The answers that one consumer has not returned yet."""

    def __init__(self) -> None:
        self.by_verdict: dict[_Key, LeaseLost | None] = {}

    def use(self, exchange: Exchange) -> None:
        """Answer the verdicts of an exchange whose answers are known."""
        used = set()
        for at, verdict in enumerate(exchange.verdicts):
            if (key := _key(verdict)) in self.by_verdict:
                lease, is_refused = verdict.lease, key in used and not isinstance(verdict, Touch)
                exchange.answers[at] = LeaseLost(lease.queue, lease.id) if is_refused else self.by_verdict[key]
                used.add(key)

    def forget(self, verdicts: Sequence[Verdict]) -> None:
        """Drop the stored answers to *verdicts*, because the caller gets these answers now."""
        for verdict in verdicts:
            self.by_verdict.pop(_key(verdict), None)

    def remember(self, known: Iterable[tuple[Verdict, LeaseLost | None]]) -> None:
        """Store answers until the caller passes the same verdicts again.

        The answer to a touch without steps is not stored, because a later touch of the same lease is a new request.
        The answer to a touch with steps is stored, because its steps must not be carried out again.
        """
        for verdict, answer in known:
            key = _key(verdict)
            if not isinstance(verdict, Touch) or key[-1]:
                self.by_verdict.setdefault(key, answer)  # if a verdict is sent twice, the first answer counts
        while len(self.by_verdict) > _MOST:
            del self.by_verdict[next(iter(self.by_verdict))]


def _key(verdict: Verdict) -> _Key:
    """Identifies a repeated verdict. A lease takes many touches, so the key of a touch has its steps."""
    steps = verdict.after.steps if isinstance(verdict, Touch) and verdict.after is not None else ()
    return type(verdict), verdict.lease.queue, verdict.lease.id, verdict.lease.token, steps
