"""A backend around another backend. It seals the bytes that are stored, and opens the bytes that are read.

Everything that stores bytes uses the driver interface. So neither the code above this interface nor the drivers need to
know about seals. Control flags, reasons, and the notes of flows are not sealed. The notes of flows have no arguments
and no results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from multiq.backend import Ack, Backend, Lease
from multiq.backend.around import ConsumerAround
from multiq.backend.effects import Enqueue, Put
from multiq.control.flags import CONTROL_QUEUES
from multiq.envelope import refused_body
from multiq.errors import EnqueueUncertain, UrlInvalid

from .seal import OVERHEAD, Seal, SealBroken

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from multiq.backend import (
        After,
        Capabilities,
        Consumer,
        Finding,
        JobRecord,
        NewJob,
        Note,
        NotePage,
        Outcome,
        OutcomeKind,
        OutcomePage,
        Page,
        QueueStats,
        Schema,
        State,
        Step,
        Verdict,
        Version,
    )
    from multiq.backend.limits import LimitState, Quota
    from multiq.errors import JobNotFound, JobReserved, LeaseLost
    from multiq.settings.url import BackendUrl

    from .config import Payloads
    from .seal import Use

_SCHEDULES = "schedule/"  # notes whose keys begin with this have arguments of tasks


_FOR_TESTS = ("sync", "null", "fake")
_OUTCOME_ROOM = 64 * 1024  # bytes of an outcome besides its value


def sealed(backend: Backend, payloads: Payloads, most: int) -> Backend:
    """Return *backend* with sealed bytes. A backend for tests, which runs the jobs itself, is returned unchanged.

    *most*: the largest body or result of a task, in bytes.
    """
    if not payloads.is_used or backend.declared.backend in _FOR_TESTS:
        return backend
    return SealedBackend(backend, payloads, most + _OUTCOME_ROOM)


class OpenedLease(Lease, frozen=True):
    """A lease with opened bytes. ``stored`` is the driver's lease, with the sealed bytes."""

    stored: Lease | None = None


class SealedBackend(Backend):
    """The backend *inner*, with sealed bytes. *most*: the largest number of bytes that are compressed."""

    def __init__(self, inner: Backend, payloads: Payloads, most: int) -> None:
        self.inner = inner
        self.declared = inner.declared  # type: ignore[misc]  # this class has those of each of its objects
        self.options = inner.options  # type: ignore[misc]
        self.gathers_enqueues = inner.gathers_enqueues  # type: ignore[misc]
        self.payloads = payloads
        self._seal = Seal(payloads, most)

    @classmethod
    def from_url(cls, url: BackendUrl) -> SealedBackend:
        raise UrlInvalid(f"a SealedBackend must be made of another backend, got {url}; use App(payloads=...)")

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the inner backend, with a smaller ``max_body``, because sealed bytes are longer."""
        inner = self.inner.capabilities
        if inner.max_body is None:
            return inner
        return msgspec.structs.replace(inner, max_body=max(0, (inner.max_body - OVERHEAD) * 3 // 4))

    # --- jobs ---

    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
        sealed = [self._sealed_job(queue, job) for job in jobs]
        try:
            if connection is None:
                return self.inner.enqueue(queue, sealed)
            return self.inner.enqueue(queue, sealed, connection=connection)
        except EnqueueUncertain as exc:  # the error must have the caller's jobs, without seals
            plain = {job.id: job for job in jobs}
            exc.jobs = tuple(plain.get(job.id, job) for job in exc.jobs)
            exc.unsent = tuple(plain.get(job.id, job) for job in exc.unsent)
            raise

    def consumer(self, queues: Sequence[str]) -> Consumer:
        return SealedConsumer(self, self.inner.consumer(queues))

    def peek(self, queue: str, job_id: str) -> JobRecord:
        return self._shown(self.inner.peek(queue, job_id))

    def jobs(self, queue: str, state: State, *, limit: int = 100, after: str | None = None) -> Page:
        page = self.inner.jobs(queue, state, limit=limit, after=after)
        return msgspec.structs.replace(page, jobs=[self._shown(record) for record in page.jobs])

    def delete(self, queue: str, job_id: str) -> None:
        self.inner.delete(queue, job_id)

    def delete_many(
        self, queue: str, ids: Sequence[str], *, after: After | None = None
    ) -> list[JobNotFound | JobReserved | None]:
        if after is None or after.keep <= 0:
            return self.inner.delete_many(queue, ids, after=after)
        answers: list[JobNotFound | JobReserved | None] = []
        for own_id in ids:  # each outcome belongs to its job
            own = self._sealed_after(queue, own_id, after, keeps=True)
            answers += self.inner.delete_many(queue, [own_id], after=own)
        return answers

    def reschedule(self, queue: str, job_id: str, delay: float) -> str:
        return self.inner.reschedule(queue, job_id, delay)

    def kick(self, queue: str, limit: int) -> int:
        return self.inner.kick(queue, limit)

    def kick_job(self, queue: str, job_id: str) -> None:
        self.inner.kick_job(queue, job_id)

    def queues(self) -> list[str]:
        return self.inner.queues()

    def stats(self, queue: str) -> QueueStats:
        return self.inner.stats(queue)

    def pause(self, queue: str, seconds: float) -> None:
        self.inner.pause(queue, seconds)

    def resume(self, queue: str) -> None:
        self.inner.resume(queue)

    def purge(self, queue: str, states: Sequence[State]) -> int:
        return self.inner.purge(queue, states)

    # --- outcomes and notes ---

    def outcomes(self, queue: str, ids: Sequence[str]) -> list[Outcome | None]:
        return [None if found is None else self._opened_outcome(found) for found in self.inner.outcomes(queue, ids)]

    def history(
        self, queue: str, *, kind: OutcomeKind | None = None, limit: int = 100, after: str | None = None
    ) -> OutcomePage:
        page = self.inner.history(queue, kind=kind, limit=limit, after=after)
        return msgspec.structs.replace(page, outcomes=[self._opened_outcome(outcome) for outcome in page.outcomes])

    def forget(self, queue: str, ids: Sequence[str] | None = None, *, limit: int = 1000) -> int:
        return self.inner.forget(queue, ids, limit=limit)

    def carry_out(self, steps: Sequence[Step], *, when: Sequence[Version] = ()) -> bool:
        return self.inner.carry_out([self._sealed_step(step) for step in steps], when=when)

    def relay(self, queues: Sequence[str]) -> int:
        return self.inner.relay(queues)

    def note(self, home: str, key: str) -> Note | None:
        found = self.inner.note(home, key)
        return None if found is None else self._opened_note(home, found)

    def notes(self, home: str, prefix: str = "", *, limit: int = 100, after: str | None = None) -> NotePage:
        page = self.inner.notes(home, prefix, limit=limit, after=after)
        return msgspec.structs.replace(page, notes=[self._opened_note(home, note) for note in page.notes])

    def now(self, home: str) -> float:
        return self.inner.now(home)

    def limits(
        self, queue: str, change: Mapping[str, Quota | None] | None = None, *, pinned: bool = True
    ) -> list[LimitState]:
        return self.inner.limits(queue, change, pinned=pinned)

    def limits_beside(self, queue: str, quotas: Mapping[str, Quota], connection: Any) -> bool:
        return self.inner.limits_beside(queue, quotas, connection)

    def doctor(self) -> list[Finding]:
        return self.inner.doctor()

    def schema(self) -> Schema:
        return self.inner.schema()

    def close(self) -> None:
        self.inner.close()

    # --- sealing ---

    def settled(self, verdict: Verdict) -> Verdict:
        """Return the verdict for the driver, with sealed bytes."""
        lease = verdict.lease
        if isinstance(lease, OpenedLease) and lease.stored is not None:
            verdict = msgspec.structs.replace(verdict, lease=lease.stored)
        after = getattr(verdict, "after", None)
        if after is None:
            return verdict
        sealed = self._sealed_after(lease.queue, lease.id, after, keeps=isinstance(verdict, Ack) and after.keep > 0)
        return msgspec.structs.replace(verdict, after=sealed)

    def opened(self, lease: Lease) -> Lease:
        """Return a lease with opened bytes. If bytes cannot be opened, the reason replaces them."""
        if lease.queue in CONTROL_QUEUES:
            return lease
        body = self._open("job", lease.queue, lease.id, lease.body)
        memo = lease.memo and self._open("memo", lease.queue, lease.id, lease.memo)
        values = {name: getattr(lease, name) for name in lease.__struct_fields__ if name not in {"body", "memo"}}
        return OpenedLease(**values, body=body, memo=memo, stored=lease)

    def _sealed_job(self, queue: str, job: NewJob) -> NewJob:
        if queue in CONTROL_QUEUES:
            return job
        unique = None if job.terms is None else job.terms.unique
        key = unique.key.hex() if unique is not None and unique.on_conflict == "replace" else ""
        body = self._seal.close("job", queue, self._bound(job.id), job.body, key)
        return msgspec.structs.replace(job, body=body)

    def _sealed_step(self, step: Step) -> Step:
        if isinstance(step, Enqueue):
            return Enqueue(step.queue, self._sealed_job(step.queue, step.job))
        if isinstance(step, Put) and step.key.startswith(_SCHEDULES):
            value = self._seal.close("note", step.home, step.key, step.value)
            return msgspec.structs.replace(step, value=value)
        return step

    def _sealed_after(self, queue: str, own_id: str, after: After, *, keeps: bool) -> After:
        return msgspec.structs.replace(
            after,
            outcome=self._close("outcome", queue, own_id, after.outcome) if keeps else after.outcome,
            memo=after.memo and self._close("memo", queue, own_id, after.memo),
            detail=after.detail and self._close("detail", queue, own_id, after.detail),
            steps=tuple(self._sealed_step(step) for step in after.steps),
        )

    def _opened_outcome(self, outcome: Outcome) -> Outcome:
        body = self._open("outcome", outcome.queue, outcome.id, outcome.body)
        return msgspec.structs.replace(outcome, body=body)

    def _opened_note(self, home: str, note: Note) -> Note:
        if not note.key.startswith(_SCHEDULES):
            return note
        try:
            value = self._seal.open("note", home, note.key, bytes(note.value))
        except SealBroken as exc:
            value = refused_body(str(exc))
        return msgspec.structs.replace(note, value=value)

    def _shown(self, record: JobRecord) -> JobRecord:
        """Return a record with opened bytes. Bytes that cannot be opened are shown as they are stored."""
        if record.queue in CONTROL_QUEUES:
            return record
        return msgspec.structs.replace(
            record,
            body=self._try("job", record, record.body),
            memo=record.memo and self._try("memo", record, record.memo),
            detail=record.detail and self._try("detail", record, record.detail),
        )

    def _try(self, use: Use, record: JobRecord, stored: bytes) -> bytes:
        try:
            return self._seal.open(use, record.queue, self._bound(record.id), stored)
        except SealBroken:
            return stored

    def _close(self, use: Use, queue: str, own_id: str, plain: bytes) -> bytes:
        return self._seal.close(use, queue, self._bound(own_id), plain)

    def _open(self, use: Use, queue: str, own_id: str, stored: bytes) -> bytes:
        try:
            return self._seal.open(use, queue, self._bound(own_id), stored)
        except SealBroken as exc:
            return refused_body(str(exc))

    def _bound(self, own_id: str) -> str:
        """Return the id to which bytes belong. Empty if the server chooses the ids when it stores the jobs."""
        return own_id if self.declared.client_ids else ""


class SealedConsumer(ConsumerAround):
    """A consumer of a ``SealedBackend``."""

    def __init__(self, backend: SealedBackend, inner: Consumer) -> None:
        super().__init__(inner)
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet
            raise AttributeError(name)
        return getattr(self.inner, name)

    def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
        return [self._backend.opened(lease) for lease in super().reserve(limit, timeout, queues)]

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        return super().settle([self._backend.settled(verdict) for verdict in verdicts])

    def exchange(
        self, verdicts: Sequence[Verdict], limit: int, timeout: float, queues: Sequence[str] | None = None
    ) -> tuple[list[LeaseLost | None], list[Lease]]:
        sealed = [self._backend.settled(verdict) for verdict in verdicts]
        lost, found = super().exchange(sealed, limit, timeout, queues)
        return lost, [self._backend.opened(lease) for lease in found]
