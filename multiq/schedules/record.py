"""A schedule as it is stored. It is a note in the home of its target queue, so one step can change the note and the
jobs."""

from __future__ import annotations

import datetime as dt
import functools
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from multiq.backend import (
    DELAY_MAX,
    MAX_GATE_TEXT,
    MAX_GATES,
    MAX_KEY,
    MAX_STEPS,
    PRIORITY_MAX,
    TTR_MIN,
    Drop,
    Gate,
    Put,
    Terms,
    UniqueKey,
)
from multiq.control.flags import schedules_mark
from multiq.errors import PayloadInvalid
from multiq.formatting import shown

from .at import TIME_OF_DAY, TimesOfDay
from .cron import Cron, check_cron
from .every import Every
from .jitter import digest, with_jitter
from .timetable import SECOND, Milliseconds, Timetable, moment
from .zone_database import find_zone, zones_version

if TYPE_CHECKING:
    from multiq.backend import Enqueue, Note, Step

HOME = "multiq.schedules"
"""The home of these notes: ``BORN``, ``CHANGES``, and one note for each home that has schedules. Each change of a
schedule writes ``CHANGES``."""
CHANGES = "changes"
PREFIX = "schedule/"
BORN = "born"
"""The key of a note of ``HOME`` that is written once. If this note is gone or has changed, the store has lost its
data."""
AHEAD_MOST = 240.0  # an occurrence is made at most this number of seconds before its due time
# occurrences that misfire="all" makes in one call: fewer than MAX_JOBS, so future occurrences fit into the call, too
MOST_MISSED = 500
MAX_JOBS = MAX_STEPS - 100  # jobs of one call; the other steps are notes

MOST_FORMERS = 20  # more changes than this within a minute are not kept

_REMOVED = "removed/"
_REMOVED_FOR = 7 * 86400.0  # seconds; all workers that still know the schedule notice its removal much earlier
_HOMES = "home/"
_TOLERANCE = 60.0  # a correction of a server's clock by at most this number of seconds is ignored

Misfire: TypeAlias = Literal["skip", "once", "all"]
Overlap: TypeAlias = Literal["allow", "skip", "follow"]
Origin: TypeAlias = Literal["code", "stored"]

# Only the decoder checks these bounds. A note with other values would make every look of every scheduler fail.
_Moment: TypeAlias = Annotated[Milliseconds, Meta(ge=0, le=32_503_680_000_000)]  # until the year 3000
_Interval: TypeAlias = Annotated[Milliseconds, Meta(ge=0, le=1_000_000_000_000)]
_Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=DELAY_MAX)]
_TimeOfDay: TypeAlias = Annotated[str, Meta(pattern=rf"\A{TIME_OF_DAY}\Z")]


class Definition(msgspec.Struct, frozen=True, omit_defaults=True):
    """The options of a schedule that a user has chosen. All values are checked."""

    name: str
    queue: str
    task: str
    body: msgspec.Raw
    """The envelope of the schedule's jobs, without the headers of an occurrence."""
    priority: Annotated[int, Meta(ge=0, le=PRIORITY_MAX)]
    ttr: Annotated[float, Meta(ge=TTR_MIN, le=DELAY_MAX)]
    cron: str = ""
    every: _Interval = 0
    at: tuple[_TimeOfDay, ...] = ()
    zone: str = "UTC"
    misfire: Misfire = "once"
    most: Annotated[int, Meta(ge=1, le=MOST_MISSED)] = MOST_MISSED
    """For ``all``: the largest number of missed occurrences that are made."""
    grace: _Seconds | None = None
    """Seconds after which a missed occurrence is no longer made."""
    overlap: Overlap = "allow"
    jitter: _Seconds = 0.0
    """The longest delay of an occurrence's job, in seconds. All processes compute the same delay."""
    expires: _Seconds | None = None
    """A job must start within this number of seconds after its due time."""
    origin: Origin = "stored"
    gates: Annotated[tuple[Gate, ...], Meta(max_length=MAX_GATES)] = ()
    unique: UniqueKey | None = None
    """If another job has this key two seconds before an occurrence, the occurrence makes no job."""

    @property
    def terms(self) -> Terms | None:
        return Terms(unique=self.unique, gates=self.gates) if self.gates or self.unique is not None else None

    @property
    def timetable(self) -> Timetable:
        """Raises ``ScheduleInvalid`` if this machine does not know the zone."""
        return timetable(self.cron, self.every, self.at, self.zone)

    @property
    def when(self) -> str:
        """Return the due times of the schedule as text for people."""
        if self.every:
            return f"every {self.every / 1000:g} s"
        return f"at {', '.join(self.at)}" if self.at else self.cron

    def due(self, occurrence: Milliseconds) -> Milliseconds:
        """Return the time at which the occurrence's job is due: not before the occurrence, and at most ``jitter``
        later."""
        return with_jitter(self.name, self.jitter, occurrence)

    def is_due_like(self, other: Definition) -> bool:
        """Return whether the other definition has the same occurrences."""
        return (self.cron, self.every, self.at, self.zone) == (other.cron, other.every, other.at, other.zone)

    def is_like(self, other: Definition) -> bool:
        return _encoder.encode(self) == _encoder.encode(other)


class Former(msgspec.Struct, frozen=True, omit_defaults=True):
    """The times and the queue of a schedule before a change. The queue may still have jobs of these times."""

    queue: str
    through: _Moment
    """All occurrences until this time were made or left out."""
    cron: str = ""
    every: _Interval = 0
    at: tuple[_TimeOfDay, ...] = ()
    zone: str = "UTC"
    jitter: _Seconds = 0.0

    @property
    def ends(self) -> Milliseconds:
        """The latest time at which a job of these occurrences is due."""
        return self.through + int(self.jitter * SECOND)

    def coming(self, name: str, now: Milliseconds) -> list[Milliseconds]:
        """Return the occurrences that were made, and whose jobs are due at *now* or later. *name*: the schedule's name.

        Raises ``ScheduleInvalid`` if this machine does not know the zone.
        """
        times = timetable(self.cron, self.every, self.at, self.zone)
        after = now - int(self.jitter * SECOND) - 1
        made = times.between(after, self.through, int(AHEAD_MOST + self.jitter) + 1)
        return [at for at in made if with_jitter(name, self.jitter, at) >= now]


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """A schedule: its definition, and the progress of its occurrences."""

    definition: Definition
    through: _Moment
    """All occurrences until this time have been made or left out. The time is by the clock of the queue's server."""
    is_paused: bool = False
    last: _Moment | None = None
    """The last occurrence that has been made."""
    late: float = 0.0
    """The number of seconds between the due time of the last occurrence and the time at which it was made. 0: it was
    made in advance."""
    left_out: int = 0
    """The number of occurrences that were left out because the previous occurrence was not done (overlap)."""
    is_waiting: bool = False
    """Whether an occurrence waits for the end of the previous occurrence (overlap="follow")."""
    zones: str = ""
    """The version of the time zones of the process that made the last occurrence."""

    former: str = ""
    """The queue of the last occurrence's job before the schedule was moved to its present queue. Empty: the schedule
    was not moved. An occurrence later than ``former_through`` is in the present queue."""
    former_through: _Moment = 0
    formers: tuple[Former, ...] = ()
    """The times and queues that the schedule had before its last changes, the latest first. They are kept while jobs of
    these times may still be delayed."""

    @property
    def home(self) -> str:
        return self.definition.queue

    @property
    def has_other_zones(self) -> bool:
        """Whether the last occurrence was made by a process whose version of the time zones differs from this
        process's.

        False if the times do not depend on the version.
        """
        is_fixed = self.definition.every or self.definition.zone == "UTC"
        return not is_fixed and bool(self.zones) and self.zones != zones_version()

    def queue_of(self, occurrence: Milliseconds) -> str:
        """Return the queue in which the job of the last occurrence was made."""
        return self.former if self.former and occurrence <= self.former_through else self.home

    def as_former(self) -> Former:
        """Return the present times and queue of this schedule, in the form in which ``formers`` keeps them after a
        change."""
        own = self.definition
        return Former(self.home, self.through, own.cron, own.every, own.at, own.zone, own.jitter)

    def is_beyond(self, now: Milliseconds) -> bool:
        """Return whether some of the made occurrences are too far in the future. If so, the server's clock has been set
        back."""
        return self.through > now + int((AHEAD_MOST + _TOLERANCE) * SECOND)

    def going_on(self, now: Milliseconds) -> Milliseconds:
        """Return the time after which a changed or resumed schedule is due. Occurrences that were made are not made
        again."""
        return now if self.is_beyond(now) else max(self.through, now)

    @property
    def key(self) -> str:
        return key_of(self.definition.name)


@functools.lru_cache(maxsize=4096)
def timetable(cron: str, every: Milliseconds, at: tuple[str, ...], zone: str) -> Timetable:
    """Return the timetable of checked options.

    Raises ``ScheduleInvalid`` if this machine does not know the zone, or if its cron library refuses the expression.
    """
    if every:
        return Every(every)
    place = find_zone(zone)
    if at:
        return TimesOfDay(at, place)
    check_cron(cron)  # a process with another version of the library may have stored the expression
    return Cron(cron, dt.UTC if zone == "UTC" else place)  # dt.UTC is ten times as fast


def key_of(name: str) -> str:
    return f"{PREFIX}{name}"


def removed_key(name: str) -> str:
    """Return the key of the note by which a worker sees that a schedule was removed, and not lost by the server."""
    return f"{_REMOVED}{name}"


def occurrence_id(name: str, occurrence: Milliseconds) -> str:
    """Return the id of an occurrence's job: a UUID of version 8 (RFC 9562), from the name and the time in UTC."""
    digits = bytearray(digest("occurrence", name, occurrence)[:16])
    digits[6] = 0x80 | digits[6] & 0x0F
    digits[8] = 0x80 | digits[8] & 0x3F
    text = digits.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def timestamp(occurrence: Milliseconds) -> str:
    """Return a time as a text in UTC, like ``2027-01-31T09:00:00Z``."""
    at = moment(occurrence)
    return at.isoformat(timespec="milliseconds" if at.microsecond else "seconds").replace("+00:00", "Z")


def encode(record: Record) -> bytes:
    return _encoder.encode(record)


def decode(note: Note) -> Record:
    """Return the schedule in a note. Raises ``PayloadInvalid``."""
    try:
        found = _decoder.decode(note.value)
        _check(found.definition, note.key)
    except (ValueError, msgspec.DecodeError) as exc:
        raise PayloadInvalid(
            f"the schedule {note.key.removeprefix(PREFIX)} cannot be read: {exc}; it was written by a newer multiq, or "
            "by another program"
        ) from exc
    return found


def _check(definition: Definition, key: str) -> None:
    """Check what the decoder does not. *key*: the key of the note. Raises ``ValueError``."""
    if key_of(definition.name) != key:
        raise ValueError(f"it must have the name of its note, got {shown(definition.name)}")
    if any(len(text) > MAX_GATE_TEXT for gate in definition.gates for text in (gate.limit, gate.key)):
        raise ValueError(f"the texts of a limit must have at most {MAX_GATE_TEXT} characters")
    unique = definition.unique
    if unique is None:
        return
    if not 1 <= len(unique.key) <= MAX_KEY:
        raise ValueError(f"a unique key must have 1 to {MAX_KEY} bytes, got {len(unique.key)}")
    for seconds in (unique.hold, unique.max_wait or 0.0):
        if not 0 <= seconds <= DELAY_MAX:
            raise ValueError(f"the seconds of a unique key must be from 0 to {DELAY_MAX:.0f}, got {seconds!r}")


def drop(home: str, name: str, record: Record | None) -> list[Step]:
    """Return the steps that remove a schedule from its home. *record*: None if its note cannot be read."""
    steps: list[Step] = [Drop(home, key_of(name))]
    if record is None or record.definition.origin == "code":  # workers store only schedules in code again after a loss
        steps.append(Put(home, removed_key(name), b"", ttl=_REMOVED_FOR))
    return steps


def put(record: Record) -> Put:
    return Put(record.home, record.key, encode(record))


def announce(home: str) -> list[Step]:
    """Return the steps by which all schedulers notice a change in this home."""
    mark: Enqueue = schedules_mark()
    return [Put(HOME, f"{_HOMES}{home}", b""), Put(HOME, CHANGES, b""), mark]


def home_in(note: Note) -> str | None:
    """Return the home that a note of ``HOME`` names. None: the note is of another kind."""
    return note.key.removeprefix(_HOMES) if note.key.startswith(_HOMES) else None


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)
