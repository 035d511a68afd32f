"""The options of one job of a task, such as its queue, delay and headers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from .backend import PRIORITY_DEFAULT, TTR_DEFAULT
from .errors import OptionInvalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .limits import Limit
    from .unique import Unique


class CallOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of one job of a task. All values are checked. Times are in seconds."""

    queue: str
    priority: int = PRIORITY_DEFAULT
    delay: float = 0.0
    ttr: float = TTR_DEFAULT
    connection: Any = None
    id: str | None = None
    max_attempts: int | None = None
    max_crashes: int | None = None
    retry_for: float | None = None
    timeout: float | None = None
    headers: dict[str, str] = {}
    keep: float = 0.0
    expires: float | None = None
    unique: Unique | None = None
    limits: tuple[Limit, ...] = ()
    has_terms: bool = False
    """Whether the task has *unique* or *limits*. Without *unique* and *limits*, an enqueue needs no further check."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "has_terms", self.unique is not None or bool(self.limits))
        if self.unique is not None and self.limits:
            _refuse_permits(self.unique, self.limits)


def _refuse_permits(unique: Unique, limits: Sequence[Limit]) -> None:
    """Raise ``OptionInvalid`` for limits with permits and a key that a job has only until it is reserved.

    A worker reserves a job to ask for its permits, and gives the job back if a permit is refused. Without its key in
    between, any number of jobs of one key could wait.
    """
    for limit in limits:
        if limit.scope == "app" and (unique.follows or unique.until == "reserved"):
            given = "on_conflict='follow'" if unique.follows else "until='reserved'"
            raise OptionInvalid(
                f"limit {limit.name} must have scope='queue' with {given}, got scope='app': a job that asks for a "
                "permit is reserved, so it does not have its unique key while it waits"
            )
