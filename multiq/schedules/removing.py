"""Removes schedules, and deletes the jobs that were made in advance when a schedule is paused or removed."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec

from multiq.backend import State, Version
from multiq.errors import JobNotFound, JobReserved, PayloadInvalid, ScheduleInvalid

from . import record as records
from .record import occurrence_id
from .stored import carry_on, homes
from .timetable import SECOND

if TYPE_CHECKING:
    from multiq.backend import Backend, Note

    from .record import Record

_TRIES = 20  # attempts to remove schedules whose occurrences are being made


def delete_coming(backend: Backend, record: Record) -> None:
    """Delete the jobs of a schedule that are not due yet, also those of its former times and in its former queues.

    No scheduler makes these jobs again, because the note of the schedule has changed. A job that was due and waits for
    its next attempt stays.
    """
    now = int(backend.now(record.home) * SECOND)
    all_times = (record.as_former(), *record.formers)
    carry_on(backend, {former.queue for former in all_times})
    for former in all_times:
        try:
            coming = former.coming(record.definition.name, now)
        except ScheduleInvalid:  # this machine cannot compute the occurrences during the pause, so they run
            continue
        for at in coming:
            with contextlib.suppress(JobNotFound, JobReserved):
                job_id = occurrence_id(record.definition.name, at)
                # due_in may be rounded down to 0
                if backend.peek(former.queue, job_id).state is State.DELAYED:
                    backend.delete(former.queue, job_id)


def remove(backend: Backend, home: str, note: Note) -> bool:
    """Remove a schedule and its coming jobs. Returns False if another process has changed the schedule.

    The schedule is paused while its jobs are deleted. If it were removed first, another process could add it again, and
    the jobs of the new schedule would be deleted.
    """
    try:
        record = records.decode(note)
    except PayloadInvalid:  # its occurrences are not known
        record = None
    version = note.version
    if record is not None:
        record = msgspec.structs.replace(record, is_paused=True)
        if not backend.carry_out(
            [records.put(record), *records.announce(home)], when=[Version(home, note.key, version)]
        ):
            return False
        stored = backend.note(home, note.key)
        if stored is None or bytes(stored.value) != records.encode(record):
            return False
        version = stored.version
        delete_coming(backend, record)
    steps = [*records.drop(home, note.key.removeprefix(records.PREFIX), record), *records.announce(home)]
    return backend.carry_out(steps, when=[Version(home, note.key, version)])


def remove_copies(backend: Backend, name: str, home: str, *, keeps_own: bool) -> bool:
    """Leave one schedule of a name. If the name is stored in other homes, too, either *home* or the others keep it.

    Returns whether *home* has kept it.
    """
    for _ in range(_TRIES):
        found = [(at, note) for at in homes(backend) if (note := backend.note(at, records.key_of(name))) is not None]
        if len(found) < 2 or home not in dict(found):
            break
        removed = [remove(backend, at, note) for at, note in found if (at == home) is not keeps_own]
        if all(removed):
            break
    return backend.note(home, records.key_of(name)) is not None
