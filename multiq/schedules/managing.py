"""``app.schedules``: makes and changes the schedules of a connection at run time."""

from __future__ import annotations

import datetime as dt  # noqa: TC003 - a type of a field
import itertools
from typing import TYPE_CHECKING, Literal, NamedTuple, ParamSpec, TypeVar

import msgspec

from multiq.async_calls import iterate, run
from multiq.backend import NewJob, Version
from multiq.enqueue import put_jobs
from multiq.envelope import decode_envelope, encode_envelope
from multiq.errors import (
    MultiqError,
    OptionInvalid,
    ScheduleExists,
    ScheduleInvalid,
    ScheduleNotFound,
)
from multiq.ids import new_id
from multiq.limits import limits_of, store_limits
from multiq.permit_notes import by_permits
from multiq.validation import check_name

from . import record as records
from .adding import alone
from .defining import check_timing, define
from .occurrence_job import HEADER_NAME
from .record import Record, key_of, occurrence_id
from .removing import delete_coming, remove, remove_copies
from .stored import changes_of, homes, notes_of, store
from .timetable import SECOND, moment
from .zone_database import find_zone

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from typing import Unpack

    from multiq.app import App
    from multiq.backend import Backend, Note
    from multiq.envelope import Envelope
    from multiq.flows.signature import Signature
    from multiq.job import JobHandle

    from .defining import ScheduleOptions
    from .record import Definition
    from .timetable import Milliseconds

P = ParamSpec("P")
R = TypeVar("R")

_TRIES = 100  # attempts to change a schedule whose occurrences are being made
_SHOWN_NEXT = 5


class NextRun(NamedTuple):
    """An occurrence in the future."""

    utc: dt.datetime
    local: dt.datetime
    """The time in the zone of the schedule."""


class ScheduleInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule, as ``Schedules.get`` and ``Schedules.list`` return it. Durations are in seconds."""

    name: str
    task: str
    queue: str
    when: str
    """The cron expression, ``every 300 s``, or ``at 07:00, 19:30``."""
    zone: str
    misfire: str
    grace: float | None
    overlap: str
    jitter: float
    origin: Literal["code", "stored"]
    """``code``: made by ``App.schedule``. ``stored``: made by ``Schedules.add``, or on the command line."""
    is_vanished: bool
    """Whether the schedule was made in code, but this app's code no longer has it. False for an app without tasks."""
    is_paused: bool
    last: dt.datetime | None
    """The last occurrence whose job was made."""
    last_id: str | None
    """The id of the last occurrence's job."""
    last_queue: str | None
    """The queue of the last occurrence's job. It differs from ``queue`` if the schedule was moved since."""
    late: float
    """Seconds between the due time of the last occurrence and the moment when its job was made. 0: the job was made in
    advance."""
    left_out: int
    """The number of occurrences that were left out because the previous job was not done (``overlap="skip"``)."""
    zones: str
    """The version of the time zones of the process that made the last occurrence. Empty: no occurrence was made."""
    next: list[NextRun]
    """The next five occurrences. Empty if the schedule is paused, or if this machine does not know the zone."""


class Schedules:
    """The schedules of an app's connection.

    Every method raises ``Unsupported`` on a backend that keeps no notes, and may raise ``BackendError``.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._backend = app.backend
        if not self._backend.declared.notes:
            raise self._backend.unsupported("notes")

    def add(
        self, name: str, call: Signature, cron: str | None = None, /, **options: Unpack[ScheduleOptions]
    ) -> ScheduleInfo:
        """Store a new schedule. Every worker and scheduler of the connection notices it within about 20 seconds.

        - *name*: a name that no other schedule of the connection has.
        - *call*: the task and its arguments, like ``task.s(1)``.
        - *cron* and the other options: as for ``App.schedule``.

        Raises ``ScheduleExists``, ``ScheduleInvalid``, and the errors of ``Task.enqueue`` about arguments.
        """
        definition = define(name, call, check_timing(cron, **options), origin="stored")
        self._check(definition, call)
        with alone(self._backend) as is_alone:
            is_done = self._find(name) is None and store(self._backend, definition, None)
            is_sure = is_alone()
        if is_done and not is_sure:  # this process stood still, and another one may have added the name meanwhile
            with alone(self._backend):
                is_done = remove_copies(self._backend, name, definition.queue, keeps_own=False)
        if is_done:
            return self.get(name)
        raise ScheduleExists(
            f"there is a schedule {name!r} already: change it with schedules.change, or take another name"
        )

    def change(
        self, name: str, call: Signature, cron: str | None = None, /, **options: Unpack[ScheduleOptions]
    ) -> ScheduleInfo:
        """Replace the call, the times and the options of a stored schedule. A paused schedule stays paused.

        Options that are not given get their defaults. Jobs that were already made, for the next minute, do not change.

        Raises ``ScheduleNotFound``, ``OptionInvalid`` for a schedule from code, and the errors of ``add``.
        """
        definition = define(name, call, check_timing(cron, **options), origin="stored")
        self._check(definition, call)
        for _ in range(_TRIES):
            record, version = self._stored(name)
            if record.definition.origin == "code":
                raise OptionInvalid(
                    f"schedule {name!r} must be changed in the code that defines it: it can be paused and removed here"
                )
            if store(self._backend, definition, (record, version)):
                return self.get(name)
        raise _busy(name)

    def pause(self, name: str) -> ScheduleInfo:
        """Make no occurrences until ``resume`` is called. Deletes the jobs that were made in advance and are not due
        yet.

        Raises ``ScheduleNotFound``.
        """
        record = self._change(name, lambda record, _: msgspec.structs.replace(record, is_paused=True))
        delete_coming(self._backend, record)
        return self.get(name)

    def resume(self, name: str) -> ScheduleInfo:
        """Make occurrences again. The occurrences during the pause do not run. Raises ``ScheduleNotFound``."""
        self._change(
            name,
            lambda record, now: (
                msgspec.structs.replace(record, is_paused=False, through=record.going_on(now), is_waiting=False)
                if record.is_paused
                else record
            ),
        )
        return self.get(name)

    def remove(self, name: str) -> None:
        """Remove a schedule, and delete its jobs that are not due yet.

        If the code of an app still has the schedule, the schedule is stored again when a worker of this app starts.
        Raises ``ScheduleNotFound``.
        """
        for _ in range(_TRIES):
            if remove(self._backend, *self._note(name)):
                return
        raise _busy(name)

    def run(self, name: str) -> JobHandle:
        """Enqueue the schedule's call once, now. The schedule does not change. Raises ``ScheduleNotFound``."""
        definition = self._stored(name)[0].definition
        envelope = decode_envelope(bytes(definition.body), max_body=self._app.settings.max_body)
        envelope.headers = envelope.headers | {HEADER_NAME: name}
        if not self._app.intercepts:
            return self._put(definition, envelope)
        from multiq.call_options import CallOptions
        from multiq.enqueue_with_middleware import around_occurrences

        options = CallOptions(
            queue=definition.queue, priority=definition.priority, ttr=definition.ttr, headers=envelope.headers
        )
        with around_occurrences(self._app, [(envelope, options)]) as (job,):
            handle = self._put(definition, envelope)
            job.id = handle.id
            return handle

    def _check(self, definition: Definition, call: Signature) -> None:
        """Store the limits of a call. Raises ``Unsupported`` if the backend does not support the terms of the call."""
        if definition.unique is not None and not self._backend.declared.unique:
            raise self._backend.unsupported("unique")
        if limits := limits_of(call.options):
            store_limits(self._backend, definition.queue, limits)

    def _put(self, definition: Definition, envelope: Envelope) -> JobHandle:
        body = encode_envelope(envelope, max_body=self._app.settings.max_body)
        job = NewJob(body, new_id(), definition.priority, 0.0, definition.ttr, definition.terms)
        if definition.gates:
            job = by_permits(self._backend, job, self._app.settings.max_body)
        return put_jobs(self._backend, definition.queue, [job], connection=None, is_one=True)[0]

    def get(self, name: str) -> ScheduleInfo:
        """Raises ``ScheduleNotFound``."""
        record, _ = self._stored(name)
        return self._info(record, self._backend.now(record.home))

    def list(self) -> Iterator[ScheduleInfo]:
        """Yield all schedules, in the order of their queues and names. A schedule that cannot be read raises
        ``PayloadInvalid``."""
        for home in homes(self._backend):
            now = self._backend.now(home)
            for note in notes_of(self._backend, home):
                yield self._info(records.decode(note), now)

    def vanished(self) -> Iterator[ScheduleInfo]:
        """Yield the schedules that were made in code, but that this app's code no longer has."""
        return (info for info in self.list() if info.is_vanished)

    # --- the same without blocking the event loop ---

    async def aadd(
        self, name: str, call: Signature, cron: str | None = None, /, **options: Unpack[ScheduleOptions]
    ) -> ScheduleInfo:
        """``add`` without blocking the event loop."""
        return await self._run(self.add, name, call, cron, **options)

    async def achange(
        self, name: str, call: Signature, cron: str | None = None, /, **options: Unpack[ScheduleOptions]
    ) -> ScheduleInfo:
        """``change`` without blocking the event loop."""
        return await self._run(self.change, name, call, cron, **options)

    async def apause(self, name: str) -> ScheduleInfo:
        """``pause`` without blocking the event loop."""
        return await self._run(self.pause, name)

    async def aresume(self, name: str) -> ScheduleInfo:
        """``resume`` without blocking the event loop."""
        return await self._run(self.resume, name)

    async def aremove(self, name: str) -> None:
        """``remove`` without blocking the event loop."""
        await self._run(self.remove, name)

    async def arun(self, name: str) -> JobHandle:
        """``run`` without blocking the event loop."""
        return await self._run(self.run, name)

    async def aget(self, name: str) -> ScheduleInfo:
        """``get`` without blocking the event loop."""
        return await self._run(self.get, name)

    async def alist(self) -> AsyncIterator[ScheduleInfo]:
        """``list`` without blocking the event loop: ``async for info in app.schedules.alist()``."""
        async for info in iterate(self._backend, self.list()):
            yield info

    async def avanished(self) -> AsyncIterator[ScheduleInfo]:
        """``vanished`` without blocking the event loop: ``async for info in app.schedules.avanished()``."""
        async for info in iterate(self._backend, self.vanished()):
            yield info

    async def _run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await run(self._backend, function, *args, **kwargs)

    # --- helpers ---

    def _find(self, name: str) -> tuple[str, Note] | None:
        """Return the home and the note of a schedule."""
        check_name(name, "schedule")
        before = changes_of(self._backend)
        for _ in range(_TRIES):
            for home in homes(self._backend):
                note = self._backend.note(home, key_of(name))
                if note is not None:
                    return home, note
            # another process may have moved the schedule to a queue that was read before
            now = changes_of(self._backend)
            if now == before:
                return None
            before = now
        raise _busy(name)

    def _note(self, name: str) -> tuple[str, Note]:
        found = self._find(name)
        if found is None:
            waiting = name in self._app.code_schedules
            raise ScheduleNotFound(
                f"there is no schedule {name!r}"
                + (": it is in the code, and is stored when a worker of the app starts" if waiting else "")
            )
        return found

    def _stored(self, name: str) -> tuple[Record, str]:
        _, note = self._note(name)
        return records.decode(note), note.version

    def _change(self, name: str, change: Callable[[Record, int], Record]) -> Record:
        for _ in range(_TRIES):
            record, version = self._stored(name)
            now = int(self._backend.now(record.home) * SECOND)
            changed = change(record, now)
            steps = [records.put(changed), *records.announce(record.home)]
            if changed is record or self._backend.carry_out(steps, when=[Version(record.home, record.key, version)]):
                return changed
        raise _busy(name)

    def _info(self, record: Record, now: float) -> ScheduleInfo:
        definition = record.definition
        return ScheduleInfo(
            name=definition.name,
            task=definition.task,
            queue=definition.queue,
            when=definition.when,
            zone=definition.zone,
            misfire=f"all({definition.most})" if definition.misfire == "all" else definition.misfire,
            grace=definition.grace,
            overlap=definition.overlap,
            jitter=definition.jitter,
            origin=definition.origin,
            is_vanished=(
                definition.origin == "code"
                and bool(self._app.tasks)
                and definition.name not in self._app.code_schedules
            ),
            is_paused=record.is_paused,
            last=None if record.last is None else moment(record.last),
            last_id=None if record.last is None else occurrence_id(definition.name, record.last),
            last_queue=None if record.last is None else record.queue_of(record.last),
            late=record.late,
            left_out=record.left_out,
            zones=record.zones,
            next=[] if record.is_paused else _next_runs(record, int(now * SECOND)),
        )


def others_zones(backend: Backend) -> set[str]:
    """Return the versions of time zones that the last occurrences were made with, except this machine's version."""
    notes = (note for home in homes(backend) for note in notes_of(backend, home))
    return {record.zones for record in map(records.decode, notes) if record.has_other_zones}


def _next_runs(record: Record, now: Milliseconds) -> list[NextRun]:
    try:
        zone, times = find_zone(record.definition.zone), record.definition.timetable
    except ScheduleInvalid:  # the list of schedules must not fail because of one schedule
        return []
    after = record.through if record.is_beyond(now) else now
    coming = itertools.islice(times.following(after), _SHOWN_NEXT)
    return [NextRun(moment(at), moment(at).astimezone(zone)) for at in coming]


def _busy(name: str) -> MultiqError:
    return OptionInvalid(
        f"only one process may change schedule {name!r} at a time, got {_TRIES} changes by others: try again"
    )
