"""One backend that consists of a primary, which stores only jobs, and a store beside it."""

from __future__ import annotations

import contextlib
import functools
import time
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import msgspec

from multiq.backend.base import Diagnosis, Holds, Inspection, Management, Migrations, Notes, Outcomes, Pausing, Purging
from multiq.backend.capabilities import Gap
from multiq.backend.diagnostics import Finding
from multiq.backend.effects import NotePage, Put, Version
from multiq.backend.types import JobRecord, NewJob, Page, State, check_state, check_states
from multiq.errors import BackendError, DriverInvalid, JobHeld, JobNotFound, JobReserved

from . import outcomes
from .consumer import PairedConsumer
from .layout import (
    HEADER_ROOM,
    JOB_KEYS,
    JobNote,
    Tracked,
    attempts,
    check_size,
    decode_note,
    fingerprint,
    held_job,
    home_of,
    is_control,
    job_key,
    kick_key,
    moving_queues,
    own_key,
    plain_body,
    put_note,
    queue_of,
    read_body,
    size_of,
    stored_step,
    stored_version,
    user_key,
)
from .moving import Mover, is_there

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Self

    from multiq.backend.base import Backend
    from multiq.backend.capabilities import Capabilities, Claim
    from multiq.backend.diagnostics import Schema
    from multiq.backend.effects import After, Note, Outcome, OutcomeKind, OutcomePage, Step
    from multiq.backend.types import QueueStats
    from multiq.settings.url import BackendUrl

_P = ParamSpec("_P")
_R = TypeVar("_R")

_PAGE = 500
_KICKED_FOR = 86400.0  # seconds for which a kick of a held job is remembered
_MOVING = 2.0  # seconds for which a call waits for a job that another process is putting to the primary
_PAUSE = 0.01
_ATTEMPTS = 20  # attempts to change a note that other processes change at the same time

_TWO_SYSTEMS = (
    "the server and the store are two systems: the store is written before the job is deleted; "
    "if the worker dies in between, the job is reserved again"
)


def paired_capabilities(primary: Capabilities, store: Capabilities) -> Capabilities:
    """Return the capabilities of a pair, computed from the capabilities of its two backends."""
    is_shared: Claim = store.shared if primary.shared else primary.shared
    limits = [declared.max_body for declared in (primary, store) if declared.max_body is not None]
    return msgspec.structs.replace(
        primary,
        backend=f"{primary.backend}+store",
        max_body=min(limits) - HEADER_ROOM if limits else None,
        shared=is_shared,
        persistent=store.persistent if primary.persistent else primary.persistent,
        reasons=True,
        memos=True,
        outcomes=True,
        holds=True,
        notes=True,
        unique=Gap("cannot today", "a put to the server and a key in the store are not one step"),
        limits=Gap(
            "cannot today", "the store does not see the leases; workers ask for permits in the store after the reserve"
        ),
        total_order=Gap(
            "never", "a job that was held goes behind the jobs that were put to the server before its release"
        ),
        one_step_everywhere=Gap("never", _TWO_SYSTEMS),
        one_step=Gap("never", _TWO_SYSTEMS),
        schema=store.schema,
        diagnosis=True,
    )


def _names_the_queue(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """In errors about a job, replace the queue and id of the store or the primary by the queue and id of the pair."""

    @functools.wraps(method)
    def call(*arguments: _P.args, **options: _P.kwargs) -> _R:
        error: type[JobNotFound | JobReserved | JobHeld]
        try:
            return method(*arguments, **options)
        except (JobNotFound, JobReserved, JobHeld) as exc:
            error = type(exc)
        queue, job_id = arguments[1:3]
        raise error(str(queue), str(job_id))

    return call


class Paired(Inspection, Management, Pausing, Purging, Outcomes, Holds, Notes, Diagnosis):
    """``beanstalk://host?store=URL``. See the package's ``__init__``. ``paired_class`` makes the classes to use."""

    def __init__(self, primary: Backend, store: Backend) -> None:
        self.primary = primary
        self.store = store
        self._mover = Mover(primary, store)

    @classmethod
    def from_url(cls, url: BackendUrl) -> Self:
        raise DriverInvalid(f"{cls.__name__} is made of two backends, and not of the URL {url}")

    @property
    def capabilities(self) -> Capabilities:
        return paired_capabilities(self.primary.capabilities, self.store.capabilities)

    # --- producing ---

    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
        """Add jobs. A job with terms is held in the store, and keeps its id. Any other job goes to the primary
        unchanged."""
        home = home_of(queue)  # here, because it refuses a name that no consumer could use
        self._check_sizes(jobs)
        if connection is not None or not any(_awaits(job) for job in jobs):
            plain = [_plain(job) for job in jobs]
            return self.primary.enqueue(queue, plain, connection=connection)
        held = [held_job(job) for job in jobs if _awaits(job)]
        self.store.enqueue(home, held)
        others = [_plain(job) for job in jobs if not _awaits(job)]
        ids = iter(self.primary.enqueue(queue, others) if others else ())
        return [job.id if _awaits(job) else next(ids) for job in jobs]

    # --- consuming ---

    def consumer(self, queues: Sequence[str]) -> PairedConsumer:
        return PairedConsumer(self.primary, self.store, self._mover, queues, lambda: self.capabilities.max_body)

    # --- looking and managing ---

    @_names_the_queue
    def peek(self, queue: str, job_id: str) -> JobRecord:
        if job_id.isdecimal():
            return self._shown(self.primary.peek(queue, job_id))
        for _ in self._until_moved():
            number = self._number(queue, job_id)
            if number is not None:
                record = self._shown(self.primary.peek(queue, number))
                if record.id == job_id:
                    return record
                raise JobNotFound(queue, job_id)
            try:
                return _coming_record(self.store.peek(home_of(queue), job_id), queue)
            except JobNotFound:
                if self._number(queue, job_id) is None:
                    raise
        raise JobNotFound(queue, job_id)

    def jobs(self, queue: str, state: State, *, limit: int = 100, after: str | None = None) -> Page:
        state = check_state(state)
        if state is State.HELD:
            page = self.store.jobs(home_of(queue), State.HELD, limit=limit, after=after)
            return Page([_held_record(record, queue) for record in page.jobs], page.after)
        page = self.primary.jobs(queue, state, limit=limit, after=after)
        if not page.jobs and state in {State.READY, State.BURIED} and after is None:
            page = self.store.jobs(home_of(queue), state, limit=1)
            return Page([_held_record(record, queue) for record in page.jobs], page.after)
        return Page([self._shown(record) for record in page.jobs], page.after)

    @_names_the_queue
    def delete(self, queue: str, job_id: str) -> None:
        if job_id.isdecimal():
            record = self.primary.peek(queue, job_id)
            self.primary.delete(queue, job_id)
            self._forget(queue, record)
            return
        for _ in self._until_moved():
            stored = self.store.note(home_of(queue), job_key(job_id))
            note = None if stored is None else decode_note(stored)
            if note is not None and not note.ended:
                self._check_there(queue, job_id, note)
                self.primary.delete(queue, note.number)
                ended = msgspec.structs.replace(note, ended=True, memo=b"", detail=b"", reason=None)
                self.store.carry_out([put_note(home_of(queue), job_id, ended)])
                return
            try:
                self.store.delete(home_of(queue), job_id)
            except JobReserved:
                continue  # another process is putting it
            except JobNotFound:
                if self._number(queue, job_id) is None:
                    raise
            else:
                return
        raise JobReserved(queue, job_id)

    def delete_many(
        self, queue: str, ids: Sequence[str], *, after: After | None = None
    ) -> list[JobNotFound | JobReserved | None]:
        """Delete jobs one by one. An outcome is stored after the deletion, because a running job must not have an
        outcome."""
        if after is None or after.keep <= 0:
            return super().delete_many(queue, ids)
        check_size(len(after.outcome), self.capabilities.max_body)
        answers: list[JobNotFound | JobReserved | None] = []
        for job_id in ids:
            try:
                attempt = self.peek(queue, job_id).attempt
                self.delete(queue, job_id)
            except (JobNotFound, JobReserved) as exc:
                answers.append(exc)
                continue
            self.store.carry_out(outcomes.keep_steps(queue, job_id, attempt or 0, after))
            answers.append(None)
        return answers

    @_names_the_queue
    def reschedule(self, queue: str, job_id: str, delay: float) -> str:
        if job_id.isdecimal():
            record = self.primary.peek(queue, job_id)
            number = self.primary.reschedule(queue, job_id, delay)
            self._forget(queue, record, number)
            return number
        for _ in self._until_moved():
            stored = self.store.note(home_of(queue), job_key(job_id))
            note = None if stored is None else decode_note(stored)
            if note is not None and not note.ended:
                self._check_there(queue, job_id, note)
                record = self.primary.peek(queue, note.number)
                number = self.primary.reschedule(queue, note.number, delay)
                job = NewJob(record.body, job_id, record.priority, delay, record.ttr)
                self._note_rescheduled(queue, job, note, number)
                return job_id
            if self.store.peek(home_of(queue), job_id).state is State.HELD:
                raise JobHeld(queue, job_id)
        raise JobReserved(queue, job_id)

    def kick(self, queue: str, limit: int) -> int:
        kicked = self.primary.kick(queue, limit)
        if kicked < limit and (stuck := self.store.kick(home_of(queue), limit - kicked)):
            kicked += stuck
            self._mover.move([queue])
        return kicked

    @_names_the_queue
    def kick_job(self, queue: str, job_id: str) -> None:
        if job_id.isdecimal():
            self.primary.kick_job(queue, job_id)
            return
        for _ in self._until_moved():
            stored = self.store.note(home_of(queue), job_key(job_id))
            note = None if stored is None else decode_note(stored)
            if note is not None and not note.ended:
                self._check_there(queue, job_id, note)
                self.primary.kick_job(queue, note.number)
                return
            home = home_of(queue)
            try:
                record = self.store.peek(home, job_id)
                if record.state is State.HELD:
                    self.store.carry_out([Put(home, kick_key(job_id), b"", _KICKED_FOR)])
                self.store.kick_job(home, job_id)
            except JobReserved:
                continue  # another process is putting it
            except JobNotFound:
                if self._number(queue, job_id) is None:
                    raise
                continue
            self._mover.move([queue])
            return
        raise JobReserved(queue, job_id)

    def queues(self) -> list[str]:
        held = {name for home in self.store.queues() if (name := queue_of(home)) is not None}
        return sorted({*self.primary.queues(), *held})

    def stats(self, queue: str) -> QueueStats:
        """Return the numbers of jobs. A job that the store has released counts as ready, even if it is not put to the
        primary yet."""
        own, held = self.primary.stats(queue), self.store.stats(home_of(queue))
        moving = (held.ready or 0) + (held.delayed or 0) + (held.reserved or 0)
        ready = None if own.ready is None else own.ready + moving
        buried = None if own.buried is None else own.buried + (held.buried or 0)
        paused_for = own.paused_for if held.paused_for is None else held.paused_for
        return msgspec.structs.replace(own, ready=ready, buried=buried, held=held.held, paused_for=paused_for)

    def pause(self, queue: str, seconds: float) -> None:
        """Pause a queue. The pause of a control queue is a flag, and must outlive the process that sets it. The primary
        would forget the pause when that process ends."""
        self.primary.pause(queue, seconds)
        if is_control(queue):
            self.store.pause(home_of(queue), seconds)

    def resume(self, queue: str) -> None:
        self.primary.resume(queue)
        if is_control(queue):
            self.store.resume(home_of(queue))

    def purge(self, queue: str, states: Sequence[State]) -> int:
        asked = check_states(states)
        own = [state for state in asked if state is not State.HELD]
        held = [state for state in asked if state in {State.HELD, State.READY, State.BURIED}]
        purged = self.store.purge(home_of(queue), held) if held else 0
        if own:
            purged += self.primary.purge(queue, own)
            self._sweep(queue)
        return purged

    # --- outcomes ---

    def outcomes(self, queue: str, ids: Sequence[str]) -> list[Outcome | None]:
        return outcomes.find(self.store, queue, ids)

    def history(
        self, queue: str, *, kind: OutcomeKind | None = None, limit: int = 100, after: str | None = None
    ) -> OutcomePage:
        return outcomes.page(self.store, queue, kind, limit, after)

    def forget(self, queue: str, ids: Sequence[str] | None = None, *, limit: int = 1000) -> int:
        if ids is None:
            return outcomes.forget_expired(self.store, queue, limit)
        return outcomes.forget(self.store, queue, ids)

    # --- steps and notes ---

    def carry_out(self, steps: Sequence[Step], *, when: Sequence[Version] = ()) -> bool:
        if any(map(size_of, steps)):
            limit = self.capabilities.max_body
            for step in steps:
                check_size(size_of(step), limit)
        if not self.store.carry_out(
            [stored_step(step) for step in steps], when=[stored_version(version) for version in when]
        ):
            return False
        with contextlib.suppress(BackendError):  # the steps are carried out, and the relay goes on
            self._mover.move(moving_queues(list(steps)))
        return True

    def relay(self, queues: Sequence[str]) -> int:
        left = self.store.relay([home_of(queue) for queue in queues])
        self._mover.move(queues)
        return left

    def note(self, home: str, key: str) -> Note | None:
        note = self.store.note(home_of(home), own_key(key))
        return None if note is None else msgspec.structs.replace(note, key=key)

    def notes(self, home: str, prefix: str = "", *, limit: int = 100, after: str | None = None) -> NotePage:
        found: list[Note] = []
        at = None if after is None else own_key(after)
        while True:
            page = self.store.notes(home_of(home), own_key(prefix), limit=max(limit, 10), after=at)
            for note in page.notes:
                key = user_key(note.key)
                if key is None:
                    continue
                if len(found) == limit:
                    return NotePage(found, found[-1].key)
                found.append(msgspec.structs.replace(note, key=key))
            if page.after is None:
                return NotePage(found, None)
            at = page.after

    def now(self, home: str) -> float:
        """Return the time of the store. From this time on, the primary delays jobs by its own clock."""
        return self.store.now(home_of(home))

    # --- both ---

    def doctor(self) -> list[Finding]:
        findings = self.primary.doctor()
        try:
            findings += [
                msgspec.structs.replace(finding, what=f"store: {finding.what}") for finding in self.store.doctor()
            ]
            findings += self._stuck()
        except BackendError as exc:
            findings.append(Finding("bad", "store: reachable", str(exc), "flows and kept jobs do not run without it"))
        if not self.store.declared.persistent or not self.store.declared.shared:
            name = self.store.declared.backend
            findings.append(
                Finding("bad", "store", f"the {name} backend is in one process's memory", "use a store that persists")
            )
        return findings

    def close(self) -> None:
        self._mover.close()
        self.primary.close()
        self.store.close()

    # --- helpers ---

    def _check_sizes(self, jobs: Sequence[NewJob]) -> None:
        """Raise ``PayloadTooLarge`` for a body that is too large. The limit is read from the primary only if a body is
        nearly as large as the usual limit."""
        declared = self.declared.max_body
        if declared is not None and any(len(job.body) > declared - HEADER_ROOM or _awaits(job) for job in jobs):
            limit = self.capabilities.max_body
            for job in jobs:
                check_size(len(job.body), limit)

    def _stuck(self) -> list[Finding]:
        """Return a finding for each queue with released jobs that the primary refuses."""
        name = self.primary.declared.backend
        return [
            Finding(
                "bad",
                f"store: queue {queue}",
                f"{stats.buried} released jobs cannot be put to the {name} server",
                f"multiq jobs {queue} buried shows the first one and its reason: kick it later, or delete it",
            )
            for home in self.store.queues()
            if (queue := queue_of(home)) is not None and (stats := self.store.stats(home)).buried
        ]

    def _number(self, queue: str, job_id: str) -> str | None:
        """Return the number of a tracked job that was put to the primary and has not ended."""
        stored = self.store.note(home_of(queue), job_key(job_id))
        if stored is None:
            return None
        note = decode_note(stored)
        return None if note.ended else note.number

    def _check_there(self, queue: str, job_id: str, note: JobNote) -> None:
        """Raise ``JobNotFound`` if a note's number now belongs to another job. A primary that has lost its jobs numbers
        new jobs from 1 again."""
        if not is_there(self.primary, queue, note):
            raise JobNotFound(queue, job_id)

    def _until_moved(self) -> Iterator[None]:
        """Yield between attempts to find a job that another process is putting to the primary."""
        give_up_at = time.monotonic() + _MOVING
        yield
        while time.monotonic() < give_up_at:
            time.sleep(_PAUSE)
            yield

    def _shown(self, record: JobRecord) -> JobRecord:
        """Return a job of the primary with the id that the caller knows, and with the data that the store has about
        it."""
        found = read_body(record.body)
        if isinstance(found, Tracked):
            job_id, body, nonce, age = found.header.id, found.body, found.header.nonce, found.header.age
        else:
            job_id, body, nonce, age = record.id, found, fingerprint(found), 0.0
        stored = self.store.note(home_of(record.queue), job_key(job_id))
        note = None if stored is None else decode_note(stored)
        if note is None or note.nonce != nonce:
            note = JobNote(nonce, record.id)
        return msgspec.structs.replace(
            record,
            id=job_id,
            body=body,
            age=record.age if record.age is None or note.restarted else record.age + age,
            memo=note.memo,
            detail=note.detail,
            reason=note.reason,
            attempt=None if record.attempt is None else attempts(record.attempt, note),
        )

    def _note_rescheduled(self, queue: str, job: NewJob, before: JobNote, number: str) -> None:
        """Store the new number of a rescheduled job in its note. *before*: the note before the job was rescheduled.

        If the primary took longer than the delay, a consumer may have reserved the new job while the old job was still
        there. The consumer has then deleted the new job as a copy. So the job is put again.
        """
        home = home_of(queue)
        for _ in range(_ATTEMPTS):
            stored = self.store.note(home, job_key(job.id))
            note = None if stored is None else decode_note(stored)
            if stored is None or note is None or note.ended or note.nonce != before.nonce:
                return  # the job has run, or was deleted
            if note.number == number:
                if is_there(self.primary, queue, note):
                    return
                again = self.store.note(home, job_key(job.id))
                if again is None or again.version != stored.version:
                    continue  # the job has just ended
                number = self.primary.enqueue(queue, [job])[0]
            changed = JobNote(before.nonce, number, before.once, restarted=True)
            version = Version(home, stored.key, stored.version)
            self.store.carry_out([put_note(home, job.id, changed)], when=[version])
        raise BackendError(
            f"gave up after {_ATTEMPTS} attempts: each time, another process had changed the note about job {job.id} "
            "in the store"
        )

    def _forget(self, queue: str, record: JobRecord, number: str | None = None) -> None:
        """Change the note about a job that was deleted or rescheduled. *number*: the new number of a rescheduled job.
        None: the job was deleted."""
        home, found = home_of(queue), read_body(record.body)
        if isinstance(found, Tracked):
            header = found.header
            note = JobNote(header.nonce, number or "", header.once, ended=number is None, restarted=True)
            self.store.carry_out([put_note(home, header.id, note)])
        elif (stored := self.store.note(home, job_key(record.id))) is not None:
            self._drop(home, [stored.key])

    def _sweep(self, queue: str) -> None:
        """Drop the notes about jobs that are no longer in the primary."""
        home, after = home_of(queue), None
        while True:
            page = self.store.notes(home, JOB_KEYS, limit=_PAGE, after=after)
            gone = []
            for stored in page.notes:
                note = decode_note(stored)
                if not note.ended and not self._has(queue, note.number):
                    gone.append(stored)
            for stored in gone:
                self._drop(home, [stored.key], Version(home, stored.key, stored.version))
            if page.after is None:
                return
            after = page.after

    def _has(self, queue: str, number: str) -> bool:
        try:
            self.primary.peek(queue, number)
        except JobNotFound:
            return False
        return True

    def _drop(self, home: str, keys: Sequence[str], *when: Version) -> None:
        from multiq.backend.effects import Drop

        self.store.carry_out([Drop(home, key) for key in keys], when=when)


class _PairedWithTables(Paired, Migrations):
    """A pair whose store has tables that an operator migrates."""

    def schema(self) -> Schema:
        return self.store.schema()


@functools.cache
def paired_class(primary: type[Backend], store: type[Backend]) -> type[Paired]:
    """Return the class of a pair of backends of these classes."""
    declared = paired_capabilities(primary.declared, store.declared)
    return type("Paired", (_PairedWithTables if declared.schema else Paired,), {"declared": declared})


def _awaits(job: NewJob) -> bool:
    return job.terms is not None and job.terms.awaits > 0


def _plain(job: NewJob) -> NewJob:
    body = plain_body(job.body)
    return job if body is job.body else msgspec.structs.replace(job, body=body)


def _coming_record(record: JobRecord, queue: str) -> JobRecord:
    """Like ``_held_record``, but a job whose delay begins in the primary is shown as delayed."""
    shown = _held_record(record, queue)
    found = read_body(record.body)
    if shown.state is not State.READY or not isinstance(found, Tracked) or not found.header.delay:
        return shown
    return msgspec.structs.replace(shown, state=State.DELAYED, due_in=found.header.delay)


def _held_record(record: JobRecord, queue: str) -> JobRecord:
    """Return a job of the store as the pair shows it."""
    found = read_body(record.body)
    body, ttr = (found.body, found.header.ttr) if isinstance(found, Tracked) else (found, record.ttr)
    state = record.state if record.state in {State.HELD, State.BURIED} else State.READY
    due_in = record.due_in if state is not State.READY else 0.0
    return msgspec.structs.replace(record, queue=queue, body=body, ttr=ttr, state=state, due_in=due_in)
