"""One exchange: its verdicts, its jobs so far, and the scripts that settle and reserve, one per partition.

A server at maxmemory refuses the script that stores outcomes. The call is then made again with
``lua/exchange_at_maxmemory.lua``, which keeps no outcomes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from multiq.errors import BackendFull

from .records import is_gated, partition_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from multiq.backend import Lease, Verdict
    from multiq.backend.effects import After
    from multiq.errors import BackendError, LeaseLost

    from .client import Call, Client

PLAIN = "exchange"  # the script for most calls
WITH_AFTER = "exchange_after"  # the script for calls that have an ``After``
WITH_STEPS = "exchange_steps"  # the script for calls with steps
WITH_UNIQUE = "exchange_unique"  # replaces WITH_STEPS if a step enqueues a job with a unique key
WITH_GATES = "exchange_gated"  # replaces the other scripts in a queue with gated jobs
_AT_MAXMEMORY = "exchange_at_maxmemory"  # replaces WITH_AFTER on a full server

SLICE = 500  # jobs or verdicts in one script, which takes the server a few milliseconds
_SLICE_BYTES = 8_000_000  # bytes of outcomes, memos and details in one script
# steps in one script, which takes the server some milliseconds. A single verdict may have more steps
_MOST_STEPS = 1500
MOST_WEIGHT = (_SLICE_BYTES, _MOST_STEPS)

NEVER = float("inf")
# seconds for which an exchange parks the ready jobs of fair limits before it hands out one of them: less than the half
# second after which a waiting consumer has its job (3.10)
_PARKING_TIME = 0.3
_ONLY_PARKING_TIME = 0.5  # seconds after which an exchange ends although it has only parked jobs: a worker must touch


class PartitionCall(NamedTuple):
    """One call of ``lua/exchange.lua``, or of ``lua/exchange_after.lua``."""

    call: Call
    verdicts: Sequence[Verdict]
    indexes: Sequence[int]
    """The verdicts' indexes in the list of the exchange."""
    share: int
    """The number of jobs that the call asks for."""
    parks_first: bool
    """Whether the call parks ready jobs of fair limits before it hands out one of them."""


class Exchange:
    """What one exchange has to do, and what it has done so far."""

    # These are class attributes because most exchanges never set them.
    deadline = NEVER
    """The monotonic time at which the exchange must end. It is set when a server has not answered."""
    failure: BackendError | None = None
    excluded: frozenset[str] = frozenset()
    """Partitions that get no calls, because their server does not answer or their keys cannot be read."""
    was_answered = False
    is_cut_short = False
    """Whether jobs may be due that no call has looked at, because the call would have taken too long."""
    parks_until = NEVER
    """The time from which this exchange no longer parks ready jobs of fair limits before it hands out one of them."""
    gives_up_at = NEVER
    """The time from which this exchange asks a queue only once, because it has only parked jobs until then."""
    after: Mapping[int, After] = {}
    """The ``After`` of each verdict that has one. The keys are the verdicts' indexes."""
    weights: Mapping[int, tuple[int, int]] = {}
    """The number of bytes and of steps of each ``After``. The keys are the verdicts' indexes. Empty if one script can
    take all verdicts."""

    def __init__(self, verdicts: Sequence[Verdict], limit: int) -> None:
        self.verdicts = list(verdicts)  # a call without a reply is read later, and the caller may change its list
        self.limit = limit
        """The number of jobs to return. It is lowered when the jobs so far have as many bytes as one reserve may
        return."""
        self.answers: dict[int, LeaseLost | None] = {}
        self.leases: list[Lease] = []
        self.queues = dict.fromkeys([verdict.lease.queue for verdict in verdicts])
        """The verdicts' queues, in the order of the verdicts."""
        self.tokens = [verdict.lease.token for verdict in verdicts]

    @property
    def wanted(self) -> int:
        """The number of further jobs to ask for. It may be negative."""
        return self.limit - len(self.leases)

    @property
    def gated_count(self) -> int:
        """The number of reserved jobs with gates."""
        return sum(map(is_gated, self.leases))

    @property
    def has_nothing_to_return(self) -> bool:
        """Whether a failure must be raised. This is so if a verdict has no answer, or if no server has answered."""
        return len(self.answers) < len(self.verdicts) or not (self.leases or self.was_answered)

    def goes_on(self, call: PartitionCall, found: Sequence[Lease], sent_at: float) -> bool:
        """Whether a call that has not looked at all jobs is followed by another one in the same partition."""
        if call.call.verb != WITH_GATES:
            return True
        self.gives_up_at = min(self.gives_up_at, sent_at + _ONLY_PARKING_TIME)
        if call.parks_first:
            self.parks_until = min(self.parks_until, sent_at + _PARKING_TIME)
        # The script may only park jobs, and there may be many of them. The jobs of this exchange must not wait.
        return bool(found) or not self.leases

    def fits(self, indexes: list[int]) -> bool:
        """Whether one script may carry out these verdicts."""
        return len(indexes) <= SLICE and (not self.weights or not self.sliced(indexes)[1])

    def sliced(self, indexes: list[int]) -> tuple[list[int], list[int]]:
        """Split these verdicts into those that the next script carries out, and the rest."""
        most, size, steps = SLICE, 0, 0
        for count, at in enumerate(indexes[:most]) if self.weights else ():
            own_size, own_steps = self.weights.get(at, (0, 0))
            size, steps = size + own_size, steps + own_steps
            if (size > _SLICE_BYTES or steps > _MOST_STEPS) and count > 0:
                most = count
                break
        return indexes[:most], indexes[most:]

    def unanswered(self, queue: str) -> dict[str, list[int]]:
        """The indexes of the verdicts without an answer. The keys are the queue's partitions."""
        if not self.answers and queue in self.queues and len(self.queues) == 1 and "/" not in "".join(self.tokens):
            return {queue: list(range(len(self.verdicts)))}  # the common case: all are in the first partition
        indexes: dict[str, list[int]] = {}
        for at, verdict in enumerate(self.verdicts):
            if verdict.lease.queue == queue and at not in self.answers:
                indexes.setdefault(partition_of(verdict.lease), []).append(at)
        return indexes


def replies(client: Client, calls: Sequence[Call], deadline: float | None) -> Iterator[Any]:
    """Make one round trip. Yields for each call its reply, or its error. A call that a full server refuses is made
    again with ``_AT_MAXMEMORY``."""
    for call, reply in zip(calls, client.perform_each(calls, deadline), strict=True):
        if isinstance(reply, BackendFull) and call.verb == WITH_AFTER:
            yield from client.perform_each([_at_maxmemory(call)], deadline)
        else:
            yield reply


def repeat(client: Client, call: Call, deadline: float) -> Any:
    """Repeat a call under its number. Raises ``BackendError``.

    A full server refuses ``WITH_AFTER`` before the script checks the number. ``_AT_MAXMEMORY`` finds the answer of the
    first attempt, if there was one.
    """
    try:
        return client.perform(call, deadline)
    except BackendFull:
        if call.verb != WITH_AFTER:
            raise
        return client.perform(_at_maxmemory(call), deadline)


def _at_maxmemory(call: Call) -> Call:
    return call._replace(verb=_AT_MAXMEMORY)
