"""A consumer that wraps another consumer, to run code around each of its calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Consumer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.errors import LeaseLost

    from .types import Lease, Verdict


class ConsumerAround(Consumer):
    """Passes all calls on to *inner*. A subclass overrides ``reserve``, ``settle`` and ``exchange``."""

    def __init__(self, inner: Consumer) -> None:
        self.queues = inner.queues
        self.inner = inner

    @property
    def asked_at(self) -> float:  # type: ignore[override]
        return self.inner.asked_at

    @property
    def most_gated(self) -> int | None:
        return self.inner.most_gated

    @most_gated.setter
    def most_gated(self, value: int | None) -> None:
        self.inner.most_gated = value

    @property
    def sees_all(self) -> bool:  # type: ignore[override]
        return self.inner.sees_all

    def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
        return self.inner.reserve(limit, timeout) if queues is None else self.inner.reserve(limit, timeout, queues)

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        return self.inner.settle(verdicts)

    def exchange(
        self, verdicts: Sequence[Verdict], limit: int, timeout: float, queues: Sequence[str] | None = None
    ) -> tuple[list[LeaseLost | None], list[Lease]]:
        if queues is None:
            return self.inner.exchange(verdicts, limit, timeout)
        return self.inner.exchange(verdicts, limit, timeout, queues)

    def interrupt(self) -> None:
        self.inner.interrupt()

    def close(self) -> None:
        self.inner.close()
