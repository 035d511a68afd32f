"""The optional capabilities of a backend.

Each backend has one record of its capabilities. The conformance suite, ``multiq backends``, the table in
``docs/backends.md`` and the text of ``Unsupported`` use this record. The value of a missing capability is a ``Gap``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, get_type_hints

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

GapKind: TypeAlias = Literal["not done", "cannot today", "never"]


class Gap(msgspec.Struct, frozen=True):
    """The kind of a missing capability, and the reason. A ``Gap`` is false in a condition, so that ``if
    capabilities.give_back:`` works.

    - ``not done``: multiq does not implement the capability yet.
    - ``cannot today``: no current version of the store can implement it.
    - ``never``: the capability contradicts the nature of the store.
    """

    kind: GapKind
    reason: str

    def __bool__(self) -> bool:
        return False


Claim: TypeAlias = Literal[True] | Gap


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """A backend's capabilities. The annotation of each field defines its capability. Each capability has conformance
    tests.
    """

    backend: str

    # --- measures ---
    delay_resolution: Annotated[float, "delays are honoured to this many seconds, rounded up"]
    min_ttr: Annotated[float, "the shortest lease in seconds; a shorter ttr is raised to it"] = 1.0
    poll_interval: Annotated[
        float, "if an idle consumer polls: the seconds between two polls; a job may be that late"
    ] = 0.5
    max_body: Annotated[int | None, "the largest body in bytes; None: memory is the limit"] = None
    longest_delay: Annotated[
        float | None, "the longest delay in seconds; a longer one is refused; None: a century, as everywhere in multiq"
    ] = None

    # --- capabilities ---
    client_ids: Annotated[Claim, "takes the caller's id, so that repeating an enqueue makes no second job"]
    atomic_batches: Annotated[Claim, "a batch is enqueued whole or not at all"]
    waits_in_server: Annotated[Claim, "an idle consumer waits in a call of the server, and does not poll"]
    shared: Annotated[Claim, "several processes use the same queues"]
    persistent: Annotated[Claim, "jobs outlive the process or server that holds them"]
    disconnect_ends_lease: Annotated[Claim, "a job is ready again the moment its worker's connection drops"]
    give_back: Annotated[Claim, "a reservation can be undone without counting an attempt"]
    lists_jobs: Annotated[Claim, "lists all jobs of a state, in pages, not just the first"]
    durable_attempts: Annotated[Claim, "attempts and crashes survive a restart of the server"]
    transactional_enqueue: Annotated[Claim, "enqueues inside the caller's own database transaction"]
    reasons: Annotated[Claim, "keeps the reason of a release, bury or abandon with the job"]
    stable_ids: Annotated[Claim, "a job keeps its id when it is rescheduled"]
    portable_leases: Annotated[
        Claim, "a lease can be settled by any process that has its token, not only by the process that reserved the job"
    ]
    fenced_late: Annotated[Claim, "a verdict after the lease's end is refused by the store itself"]
    total_order: Annotated[Claim, "a queue has one order, by priority, then age, and not one order per partition"] = (
        True
    )
    priorities: Annotated[Claim, "jobs have priorities; without it, any priority but the default is refused"] = True
    exact_counts: Annotated[Claim, "counts jobs exactly; without it, a count is an estimate, or None"] = True
    memos: Annotated[
        Claim, "keeps with a job a memo for its next attempt and a detail to be shown, stored atomically with a verdict"
    ] = Gap("not done", "the driver does not implement it yet")

    unique: Annotated[
        Claim,
        "an enqueue adds no job if another job of the queue has the same key; decided atomically with the enqueue",
    ] = Gap("not done", "the driver does not implement it yet")
    one_step: Annotated[
        Claim,
        "a verdict is atomic with the outcome or memo that it stores, and with its steps (new jobs, arrivals, notes) "
        "in its own queue",
    ] = True
    one_step_everywhere: Annotated[Claim, "a verdict is atomic with its steps in all queues, not only in its own"] = (
        Gap("not done", "the driver does not implement it yet")
    )

    # --- optional parts of a backend: each has a base class (``OPTIONAL_PARTS``) ---
    inspection: Annotated[Claim, "looks at a job by its id, and lists the jobs of a state"] = True
    management: Annotated[Claim, "deletes, reschedules and kicks a single job by its id"] = True
    pausing: Annotated[Claim, "pauses and resumes a queue"] = True
    purging: Annotated[Claim, "deletes all jobs of a queue in given states, and counts them"] = True
    outcomes: Annotated[Claim, "keeps the outcome of a job that is done, stored atomically with its ack"] = Gap(
        "not done", "the driver does not implement it yet"
    )
    holds: Annotated[
        Claim, "holds a job until the jobs that it awaits have ended; each end is counted atomically with its verdict"
    ] = Gap("not done", "the driver does not implement it yet")
    notes: Annotated[Claim, "keeps notes beside the jobs, and changes them by compare-and-set"] = Gap(
        "not done", "the driver does not implement it yet"
    )
    limits: Annotated[
        Claim, "hands out jobs only within their limits: for each key, so many at a time, or so many in a period"
    ] = Gap("not done", "the driver does not implement it yet")
    schema: Annotated[Claim, "has tables that an operator migrates with `multiq schema`"] = Gap(
        "never", "its store has no tables that an operator would have to migrate"
    )
    diagnosis: Annotated[Claim, "checks its server's settings for `multiq doctor`"] = Gap(
        "not done", "the driver has no checks of its own; the general ones are made"
    )

    @property
    def limits_kept_by(self) -> Literal["reserve", "permits", "nothing"]:
        """How this backend enforces the limits of a queue: within the reserve, or by permits that a worker requests
        after the reserve.

        A limit with ``scope="app"`` is enforced by permits on every backend that has notes and steps.
        """
        if self.limits:
            return "reserve"
        return "permits" if self.notes and self.holds else "nothing"

    def claim(self, power: str) -> Claim:
        """Return True if the backend has this capability, else the ``Gap``."""
        value: Claim = getattr(self, power)
        return value

    def gaps(self) -> Iterator[tuple[str, Gap]]:
        """Yield the name and the ``Gap`` of each missing capability."""
        for power in POWERS:
            claim = self.claim(power)
            if isinstance(claim, Gap):
                yield power, claim


def _definitions() -> dict[str, str]:
    hints = get_type_hints(Capabilities, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}


#: name of each capability or measure -> its definition
DEFINITIONS: dict[str, str] = _definitions()
MEASURES: tuple[str, ...] = ("delay_resolution", "min_ttr", "poll_interval", "max_body", "longest_delay")
POWERS: tuple[str, ...] = tuple(name for name in DEFINITIONS if name not in MEASURES)
