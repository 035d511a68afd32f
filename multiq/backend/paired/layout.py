"""The data that a pair writes: the names and keys in the store, the bodies in the primary, and the notes about jobs."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

from multiq.backend.effects import Arrive, Drop, Enqueue, Put
from multiq.errors import BackendCorrupt, NameInvalid, OptionInvalid, PayloadTooLarge
from multiq.ids import new_id

if TYPE_CHECKING:
    from multiq.backend.effects import Note, Step, Version
    from multiq.backend.types import NewJob

HOME_MARK = "+"
"""The first character of the names of a pair's queues in the store. A name that a user chooses cannot begin with this
character."""

KEY_MARK = "~"
"""The first character of the keys of a pair's own notes. If a user's key begins with this character, the pair doubles
it."""

MOVE_TTR = 10.0
"""Seconds after which another process puts a released job to the primary, if the process that was about to do so has
died."""

ENDED_FOR = 7 * 86400.0
"""Seconds for which the store keeps the information that a job has ended. During this time, a copy of the job is not
run."""

HEADER_ROOM = 1024
"""The number of bytes that a pair reserves for itself within the primary's limit for bodies."""

_CONTROL = "multiq."  # begins the names of the queues of control flags

_NAME_MAX = 127  # characters; MySQL's column has room for 128 with the mark
_KEY_MAX = 150  # characters; a longer id cannot be its own key
_DOOM_MAX = 400  # bytes; every header has room for a reason of this size

_MAGIC = b"\x00multiq+"
_SIZE = 2  # bytes of the header's length


# --- names -----------------------------------------------------------------------------------------------


def home_of(queue: str) -> str:
    """Return the name that a queue, or a home of notes, has in the store. Raises ``NameInvalid``."""
    if len(queue) > _NAME_MAX:
        raise NameInvalid(
            f"a queue name must have at most {_NAME_MAX} characters on a backend with a store, got {len(queue)}"
        )
    return HOME_MARK + queue


def queue_of(home: str) -> str | None:
    """Return the queue of a name in the store. None: the name does not belong to a pair."""
    return home[len(HOME_MARK) :] if home.startswith(HOME_MARK) else None


def is_control(queue: str) -> bool:
    """Whether the queue is a control queue: its pause is a signal to workers, and its jobs are not run."""
    return queue.startswith(_CONTROL)


JOB_KEYS = f"{KEY_MARK}j/"
HISTORY_KEYS = f"{KEY_MARK}h/"


def job_key(job_id: str) -> str:
    """Return the key of the note about a job."""
    return JOB_KEYS + _short(job_id)


def kick_key(job_id: str) -> str:
    """Return the key of the note which says that a held job was kicked. The delay of a kicked job does not count."""
    return f"{KEY_MARK}k/{_short(job_id)}"


def outcome_key(job_id: str) -> str:
    return f"{KEY_MARK}o/{_short(job_id)}"


def own_key(key: str) -> str:
    """Return the key in the store of a user's note."""
    return KEY_MARK + key if key.startswith(KEY_MARK) else key


def user_key(key: str) -> str | None:
    """Return the user's key of a note in the store. None: the note belongs to the pair itself."""
    if not key.startswith(KEY_MARK):
        return key
    return key[len(KEY_MARK) :] if key.startswith(KEY_MARK * 2) else None


def _short(job_id: str) -> str:
    if len(job_id) <= _KEY_MAX and job_id.isascii() and job_id.isprintable() and not job_id.startswith("="):
        return job_id.replace(" ", "=20") if " " in job_id else job_id
    return "=" + hashlib.sha256(job_id.encode("utf-8", "surrogatepass")).hexdigest()


# --- bodies ----------------------------------------------------------------------------------------------


class Header(msgspec.Struct, array_like=True, frozen=True):
    """The beginning of a tracked job's body. A tracked job has been in the store, and keeps its own id."""

    id: str
    nonce: str
    """Each enqueue has a different nonce. A later enqueue has a greater nonce."""
    once: str
    """If a verdict's step is carried out again, the step has the same value here. Empty: the job does not come from a
    verdict's step."""
    ttr: float
    delay: float
    doomed: str = ""
    age: float = 0.0
    """The job's age in seconds when it was put to the primary."""


class Tracked(msgspec.Struct, frozen=True):
    """A body with its header."""

    header: Header
    body: bytes


def read_body(body: bytes) -> Tracked | bytes:
    """Return the body of a job in the primary or in the store. Bytes: the job is not tracked."""
    if not body.startswith(_MAGIC):
        return body
    at = len(_MAGIC) + _SIZE
    size = int.from_bytes(body[len(_MAGIC) : at])
    if not size:
        return body[at:]
    try:
        header = _header.decode(body[at : at + size])
    except msgspec.MsgspecError:
        return body  # a body of another program that happens to begin like this
    return Tracked(header, body[at + size :])


def plain_body(body: bytes) -> bytes:
    """Return the body for the primary of a job that is not tracked. The bytes stay the same, unless they look like a
    header."""
    return _MAGIC + bytes(_SIZE) + body if body.startswith(_MAGIC) else body


def tracked_body(tracked: Tracked) -> bytes:
    header = _encoder.encode(tracked.header)
    return _MAGIC + len(header).to_bytes(_SIZE) + header + tracked.body


def doomed_body(tracked: Tracked, doomed: str, age: float, limit: int) -> bytes:
    """Return a doomed job's body for the primary. A reason that does not fit is cut."""
    room = max(_DOOM_MAX, limit - len(tracked.body) - HEADER_ROOM // 2)
    kept = doomed.encode("utf-8", "backslashreplace")[:room].decode("utf-8", "ignore")
    return tracked_body(Tracked(msgspec.structs.replace(tracked.header, doomed=kept, age=age), tracked.body))


def held_job(job: NewJob, once: str = "") -> NewJob:
    """Return the job for the store. This job has a header, but no delay, because the delay begins in the primary.

    Raises ``OptionInvalid``.
    """
    if job.id.isdecimal():
        raise OptionInvalid(
            f"the id of a held job or of a step's job must not be a number on a backend with a store, got {job.id!r}: "
            "numbers are the primary's ids"
        )
    header = Header(job.id, new_id(), once, job.ttr, job.delay)
    body = tracked_body(Tracked(header, job.body))
    return msgspec.structs.replace(job, body=body, delay=0.0, ttr=MOVE_TTR)


def check_size(size: int, limit: int | None, what: str = "a body, an outcome, a memo, a detail or a note") -> None:
    """Raise ``PayloadTooLarge`` if *size* bytes are more than the pair takes."""
    if limit is not None and size > limit:
        raise PayloadTooLarge(
            size, limit, f"it is {what} on a backend with a store; keep the data elsewhere and store its address"
        )


def fingerprint(body: bytes) -> str:
    """Return a text that shows whether a note belongs to a job. A restarted primary may use a job's number again, so
    the number is not enough."""
    return hashlib.sha256(body).hexdigest()[:16]


# --- notes about jobs ------------------------------------------------------------------------------------


class JobNote(msgspec.Struct, array_like=True, frozen=True):
    """The store's data about one job."""

    nonce: str
    """For a tracked job: the fingerprint in its header. For any other job: the fingerprint of its body."""
    number: str
    """The job's id in the primary."""
    once: str = ""
    ended: bool = False
    """Whether the job was acked or deleted. If it was, a copy of the job is deleted and not run."""
    token: str = ""
    """The token of the lease that wrote the note last."""
    memo: bytes = b""
    detail: bytes = b""
    reason: str | None = None
    restarted: bool = False
    """Whether the job was rescheduled. If it was, the age and the doom in its header no longer count."""
    uncounted: int = 0
    """The number of reservations that are not attempts, because the job was given back with ``After.is_uncounted``."""


def attempts(counted: int, note: JobNote | None) -> int:
    """Return the number of attempts, from the number of reservations that the primary has counted."""
    return counted if note is None or counted < note.uncounted else counted - note.uncounted


def recounted(note: JobNote, counted: int) -> JobNote:
    """Return the note about a reserved job without ``uncounted``, if the primary has begun to count again.

    A restarted primary counts from 0. A primary that was not restarted has counted this reservation and the uncounted
    ones.
    """
    return msgspec.structs.replace(note, uncounted=0) if note.uncounted >= counted else note


def decode_note(note: Note) -> JobNote:
    """Return the note about a job. Raises ``BackendCorrupt``."""
    try:
        return _notes.decode(note.value)
    except msgspec.MsgspecError as exc:
        raise BackendCorrupt(
            f"the note {note.key!r} in the store was not written by multiq, or was written by a newer multiq: {exc}"
        ) from exc


def put_note(home: str, job_id: str, note: JobNote) -> Put:
    """Return the step that stores a note about a job. The note expires only if the job has ended."""
    return Put(home, job_key(job_id), _encoder.encode(note), ENDED_FOR if note.ended else None)


# --- steps -----------------------------------------------------------------------------------------------


def stored_step(step: Step, once: str = "") -> Step:
    """Return a step in the form for the store. *once*: see ``Header``. Raises ``NameInvalid``, ``OptionInvalid``."""
    if isinstance(step, Enqueue):
        return Enqueue(home_of(step.queue), held_job(step.job, once))
    if isinstance(step, Arrive):
        return msgspec.structs.replace(step, queue=home_of(step.queue))
    if isinstance(step, Put):
        return msgspec.structs.replace(step, home=home_of(step.home), key=own_key(step.key))
    return Drop(home_of(step.home), own_key(step.key))


def stored_version(version: Version) -> Version:
    return msgspec.structs.replace(version, home=home_of(version.home), key=own_key(version.key))


def moving_queues(steps: tuple[Step, ...] | list[Step]) -> list[str]:
    """Return the queues in which these steps may have made a job ready."""
    return list(dict.fromkeys(step.queue for step in steps if isinstance(step, Enqueue | Arrive)))


def size_of(step: Step) -> int:
    """Return the size of the body or note that a step stores."""
    if isinstance(step, Enqueue):
        return len(step.job.body)
    return len(step.value) if isinstance(step, Put) else 0


_encoder = msgspec.msgpack.Encoder()
_header = msgspec.msgpack.Decoder(Header)
_notes = msgspec.msgpack.Decoder(JobNote)
