"""The interface's types for the optional capabilities ``outcomes``, ``memos``, ``holds`` and ``notes``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

if TYPE_CHECKING:
    from .types import NewJob

MAX_STEPS = 1_000  # of one verdict, or of one call of carry_out

OutcomeKind: TypeAlias = Literal["done", "cancelled"]


class Enqueue(msgspec.Struct, frozen=True):
    """A step that enqueues a job. If the queue has a job with the same id, the step changes nothing."""

    queue: str
    job: NewJob


class Arrive(msgspec.Struct, frozen=True):
    """A step that records the arrival of *member* at a held job.

    If a member arrives again, that arrival does not count. After the last arrival the job is ready, or delayed by its
    own delay. If the job is not held, the step changes nothing.
    """

    queue: str
    id: str
    member: str
    """Any text of 1 to 200 characters, for example the id of the job that has ended."""
    expect: int = 0
    """The number of additional members for which the job waits from now on. Ignored if *member* has arrived before."""
    doom: str = ""
    """If not empty: the reason why the job must not run. The job becomes ready immediately, and its leases show the
    reason (``Lease.doomed``)."""


class Put(msgspec.Struct, frozen=True):
    """A step that stores a note. The new note replaces the note that has the same key, if there is one."""

    home: str
    """The name of a queue. The queue need not have jobs."""
    key: str
    value: bytes
    ttl: float | None = None
    """Seconds after which the note is deleted. None: the note is not deleted."""


class Drop(msgspec.Struct, frozen=True):
    """A step that deletes a note. If there is no such note, the step changes nothing."""

    home: str
    key: str


Step: TypeAlias = Enqueue | Arrive | Put | Drop


class Version(msgspec.Struct, frozen=True):
    """A condition of ``carry_out``: the note has this version."""

    home: str
    key: str
    version: str
    """Empty: there is no such note."""


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that are kept under a name, beside the jobs of a queue."""

    key: str
    value: bytes
    version: str
    """Each ``Put`` gives the note a new version. No note with this key has had that version before."""
    expires_in: float | None
    """Seconds until the note is deleted. None: the note is not deleted."""


class NotePage(msgspec.Struct, frozen=True):
    """A page of notes, sorted by key. Pass ``after`` to ``notes`` to get the next page. None: this is the last page."""

    notes: list[Note]
    after: str | None


class After(msgspec.Struct, frozen=True):
    """What a verdict stores, atomically with the job's new state. A refused verdict stores nothing.

    A verdict ignores the fields that do not apply to it. The core sends these fields only to backends with certain
    capabilities: ``keep`` and ``outcome`` need ``outcomes``, ``memo`` and ``detail`` need ``memos``, and ``steps``
    needs ``holds``.
    """

    keep: float = 0.0
    """Ack: seconds for which the outcome is kept. 0: no outcome is kept."""
    outcome: bytes = b""
    """Ack: any bytes, at most ``max_body``."""
    kind: OutcomeKind = "done"
    """Ack: how the job ended."""
    memo: bytes | None = None
    """Touch, Release, Bury, GiveBack: bytes for the job's next lease. None: the stored memo stays."""
    detail: bytes | None = None
    """Release, Bury: bytes that ``peek`` shows. None: the stored detail is deleted. In the same way, a release or bury
    without a reason deletes the stored reason."""
    steps: tuple[Step, ...] = ()
    """At most 1,000 steps that the verdict carries out, if it is accepted. Needs the capability ``holds``."""
    is_uncounted: bool = False
    """GiveBack: the attempt is not counted. Only a pair uses this field, because a pair's server itself counts
    attempts. Other backends ignore the field."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The kept outcome of a job that is gone."""

    queue: str
    id: str
    kind: OutcomeKind
    body: bytes
    attempt: int
    """The number of the reservation that was acked."""
    age: float
    """Seconds since the ack."""
    expires_in: float
    """Seconds until the outcome is no longer returned."""


class OutcomePage(msgspec.Struct, frozen=True):
    """A page of a history. Pass ``after`` to ``history`` to get the next page. None: this is the last page."""

    outcomes: list[Outcome]
    after: str | None
