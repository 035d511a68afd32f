"""Schedules as they are stored: their notes in the queues' homes, and the steps that change them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec

from multiq.backend import Drop, State, Version
from multiq.errors import BackendError, JobNotFound

from . import record as records
from .record import CHANGES, HOME, PREFIX, Record
from .timetable import SECOND

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from multiq.backend import Backend, Note, Step

    from .record import Definition
    from .timetable import Milliseconds

_PAGE = 1000  # notes that are read at once


def homes(backend: Backend) -> list[str]:
    """Return the queues that have schedules now, or had schedules before.

    If a process has died while it moved a schedule, the schedule is first stored in its new queue.
    """
    found = _noted_homes(backend)
    if not found or backend.declared.one_step_everywhere:
        return found
    carry_on(backend, found)
    return _noted_homes(backend)


def notes_of(backend: Backend, home: str, prefix: str = PREFIX) -> Iterator[Note]:
    """Yield all notes of a home whose keys begin with *prefix*: by default, its schedules."""
    after = None
    while True:
        page = backend.notes(home, prefix, limit=_PAGE, after=after)
        yield from page.notes
        after = page.after
        if after is None:
            return


def changes_of(backend: Backend) -> str:
    """Return a text that differs after each change of a definition."""
    found = backend.note(HOME, CHANGES)
    return "" if found is None else found.version


def store(backend: Backend, definition: Definition, known: tuple[Record, str] | None) -> bool:
    """Store a new or changed definition. *known*: the schedule as it is stored, and the version of its note.

    Returns False if the note has another version. If the times of a schedule have changed, the new times apply from now
    on, after the occurrences that have already been made.
    """
    return store_all(backend, [(definition, known)])


def store_all(backend: Backend, schedules: Sequence[tuple[Definition, tuple[Record, str] | None]]) -> bool:
    """Like ``store``, for several schedules of one queue. If they have a former queue, it must be the same for all.
    Stores either all schedules or none."""
    steps: list[Step] = []
    conditions: list[Version] = []
    home = schedules[0][0].queue
    now = int(backend.now(home) * SECOND)
    for definition, known in schedules:
        if known is None:
            record = Record(definition, now)
            conditions.append(Version(home, record.key, ""))
        else:
            before, version = known
            record = _changed(before, definition, now)
            conditions.append(Version(before.home, before.key, version))
            if before.home != home:
                steps += records.drop(before.home, before.definition.name, before)
        steps.append(records.put(record))
        if definition.origin == "code" and (known is None or known[0].home != home):
            steps.append(Drop(home, records.removed_key(definition.name)))
    return backend.carry_out([*steps, *records.announce(home)], when=conditions)


def is_there(backend: Backend, queue: str, job_id: str) -> bool:
    """Return whether a job waits or runs. A job that is gone or buried does neither."""
    try:
        found = backend.peek(queue, job_id)
    except JobNotFound:
        carry_on(backend, [queue])
        try:
            found = backend.peek(queue, job_id)
        except JobNotFound:
            return False
    return found.state is not State.BURIED


def carry_on(backend: Backend, queues: Iterable[str]) -> None:
    """Carry out the steps that dead processes have left in these queues.

    Without ``one_step_everywhere``, a process may die after it changed the note of a schedule, and before it enqueued
    the job in another partition, or stored the note in another queue. An error changes nothing: the next call repeats.
    """
    if not backend.declared.one_step_everywhere:
        with contextlib.suppress(BackendError):
            backend.relay(sorted({*queues}))


def _changed(before: Record, definition: Definition, now: Milliseconds) -> Record:
    # With the same times, the schedule goes on: occurrences that fell into a deployment count as missed.
    is_going_on = before.definition.is_due_like(definition) and not before.is_beyond(now)
    through = before.through if is_going_on else before.going_on(now)
    is_waiting = before.is_waiting and through == before.through
    record = msgspec.structs.replace(before, definition=definition, through=through, is_waiting=is_waiting)
    was = before.as_former()
    if msgspec.structs.replace(record.as_former(), through=was.through) != was:
        formers = (former for former in (was, *before.formers) if former.ends > now)
        record = msgspec.structs.replace(record, formers=tuple(formers)[: records.MOST_FORMERS])
    if before.home == record.home:
        return record
    of_last = before.home if before.last is None else before.queue_of(before.last)
    return msgspec.structs.replace(record, former=of_last, former_through=before.through)


def _noted_homes(backend: Backend) -> list[str]:
    return [home for note in notes_of(backend, HOME, "") if (home := records.home_in(note)) is not None]
