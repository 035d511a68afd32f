"""Deletes the jobs that were made in advance, when a schedule is paused or removed."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from multiq.backend import State
from multiq.errors import JobNotFound, JobReserved, ScheduleInvalid

from .record import occurrence_id
from .scheduler import carry_on
from .timetable import SECOND

if TYPE_CHECKING:
    from multiq.backend import Backend

    from .record import Record


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
