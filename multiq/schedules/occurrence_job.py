"""The job of an occurrence: its envelope with the schedule's headers, its delay, and its terms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from multiq.backend import NewJob
from multiq.envelope import decode_envelope, encode_envelope
from multiq.job import HEADER_DELAY

from .overlap import DECIDE
from .record import occurrence_id, timestamp
from .timetable import SECOND

if TYPE_CHECKING:
    from multiq.backend import Terms
    from multiq.envelope import Envelope

    from .record import Definition
    from .timetable import Milliseconds

HEADER_NAME = "multiq-schedule"
HEADER_OCCURRENCE = "multiq-occurrence"

_EXPIRED = 1e-6  # seconds
_ROUNDING = 2e-6  # seconds; a time as a float is exact to a quarter of a microsecond


def job_of(definition: Definition, occurrence: Milliseconds, now: float, max_body: int) -> NewJob:
    """Return the job of an occurrence. *now*: the server's time, in seconds, or an earlier time.

    Raises ``PayloadInvalid``.
    """
    return encoded(definition, occurrence, now, envelope_of(definition, occurrence, now, max_body), max_body)


def envelope_of(definition: Definition, occurrence: Milliseconds, now: float, max_body: int) -> Envelope:
    ahead = definition.due(occurrence) / SECOND - now
    envelope = decode_envelope(bytes(definition.body), max_body=max_body)
    envelope.headers = envelope.headers | {
        HEADER_NAME: definition.name,
        HEADER_OCCURRENCE: timestamp(occurrence),
        HEADER_DELAY: f"{ahead:.6f}",
    }
    if definition.expires:
        # An expiry is counted from the enqueue. 0 means no expiry.
        envelope.expires = max(definition.expires + ahead, _EXPIRED)
    return envelope


def encoded(definition: Definition, occurrence: Milliseconds, now: float, envelope: Envelope, max_body: int) -> NewJob:
    ahead = definition.due(occurrence) / SECOND - now
    delay = ahead + _ROUNDING if ahead > 0 else 0.0
    body = encode_envelope(envelope, max_body=max_body)
    own_id = occurrence_id(definition.name, occurrence)
    return NewJob(body, own_id, definition.priority, delay, definition.ttr, _terms_of(definition, occurrence, delay))


def _terms_of(definition: Definition, occurrence: Milliseconds, delay: float) -> Terms | None:
    """Return the terms of an occurrence's job.

    The job may replace the previous occurrence's job before that job is due, because jobs are made ahead of their time.
    Then the due time of the previous job must not change. If it did, no job would ever become due.
    """
    terms = definition.terms
    if terms is None or terms.unique is None or terms.unique.on_conflict != "replace":
        return terms
    following = definition.timetable.next(occurrence)
    if following is None or following - occurrence > DECIDE + int(definition.jitter * SECOND):
        return terms
    longest = delay if terms.unique.max_wait is None else min(delay, terms.unique.max_wait)
    return msgspec.structs.replace(terms, unique=msgspec.structs.replace(terms.unique, max_wait=longest))
