"""The outcomes of a pair. A pair's outcomes are notes in the store, because the steps of an ack must be able to store
them.

An outcome has two notes: one under its job's id, and one by which a history is sorted. The first note names the second
note. When an outcome is replaced, its old second note may stay. Readers ignore this old note, because no first note
names it any more. The second note is kept for a day longer than the first note, so that ``forget`` can count the
outcomes that have expired.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from multiq.backend.effects import Drop, Note, Outcome, OutcomePage, Put, Step, Version
from multiq.driverkit.paging import foreign_cursor
from multiq.errors import BackendCorrupt

from .layout import HISTORY_KEYS, home_of, outcome_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.backend.base import Backend
    from multiq.backend.effects import After, OutcomeKind

_LAST = 10**15  # milliseconds since 1970, tens of thousands of years from now
_PAGE = 200
_COUNTED_FOR = 86400.0  # seconds for which an expired outcome can be counted by forget
_FORGOTTEN_AT_ONCE = 400


class _Kept(msgspec.Struct, array_like=True):
    kind: str
    attempt: int
    keep: float
    listed: str
    """The key of the note in the history."""
    body: bytes


def keep_steps(queue: str, job_id: str, attempt: int, after: After) -> list[Step]:
    """Return the steps that keep an outcome. A history is sorted by this machine's clock."""
    home = home_of(queue)
    expires_at = int((time.time() + after.keep) * 1000)
    listed = f"{HISTORY_KEYS}{max(0, _LAST - expires_at):015}/{outcome_key(job_id)}"
    kept = _Kept(after.kind, attempt, after.keep, listed, after.outcome)
    return [
        Put(home, outcome_key(job_id), _encoder.encode((job_id, *msgspec.structs.astuple(kept))), after.keep),
        Put(home, listed, _encoder.encode((job_id, after.kind)), after.keep + _COUNTED_FOR),
    ]


def find(store: Backend, queue: str, ids: Sequence[str]) -> list[Outcome | None]:
    home = home_of(queue)
    found = {job_id: store.note(home, outcome_key(job_id)) for job_id in dict.fromkeys(ids)}
    return [None if (note := found[job_id]) is None else _outcome(queue, note)[0] for job_id in ids]


def page(store: Backend, queue: str, kind: OutcomeKind | None, limit: int, after: str | None) -> OutcomePage:
    """Return a page of the outcomes. The outcome that expires last comes first. Raises ``OptionInvalid``,
    ``BackendError``."""
    if after is not None and not after.startswith(HISTORY_KEYS):
        raise foreign_cursor(after)
    home, found, at = home_of(queue), list[Outcome](), after
    last = after
    while True:
        notes = store.notes(home, HISTORY_KEYS, limit=_PAGE, after=at)
        for note in notes.notes:
            job_id, own_kind = _decoded(note)[:2]
            if kind is not None and own_kind != kind:
                continue
            kept = store.note(home, outcome_key(job_id))
            if kept is None:
                continue
            outcome, listed = _outcome(queue, kept)
            if listed != note.key:
                continue
            if len(found) == limit:
                return OutcomePage(found, last)
            found.append(outcome)
            last = note.key
        if notes.after is None:
            return OutcomePage(found, None)
        at = notes.after


def forget(store: Backend, queue: str, ids: Sequence[str]) -> int:
    home, found = home_of(queue), list[tuple[Note, str]]()
    for job_id in dict.fromkeys(ids):
        note = store.note(home, outcome_key(job_id))
        if note is not None:
            found.append((note, _outcome(queue, note)[1]))
    count = 0
    for start in range(0, len(found), _FORGOTTEN_AT_ONCE):
        some = found[start : start + _FORGOTTEN_AT_ONCE]
        if _drop(store, home, some):
            count += len(some)
        else:  # another call has forgotten some of them
            count += sum(_drop(store, home, [one]) for one in some)
    return count


def forget_expired(store: Backend, queue: str, limit: int) -> int:
    """Delete the remaining notes of expired outcomes. Returns the number of these outcomes. The store itself deletes
    their values."""
    home, count = home_of(queue), 0
    for note in _expired(store, home, limit):
        count += store.carry_out([Drop(home, note.key)], when=[Version(home, note.key, note.version)])
    return count


def drop_expired(store: Backend, home: str, limit: int) -> list[Step]:
    """Return the steps that delete the remaining notes of up to *limit* expired outcomes."""
    return [Drop(home, note.key) for note in _expired(store, home, limit)]


def _expired(store: Backend, home: str, limit: int) -> list[Note]:
    begin = f"{HISTORY_KEYS}{max(0, _LAST - int(time.time() * 1000)):015}"
    notes = store.notes(home, HISTORY_KEYS, limit=limit, after=begin).notes
    return [note for note in notes if store.note(home, outcome_key(_decoded(note)[0])) is None]


def _drop(store: Backend, home: str, found: Sequence[tuple[Note, str]]) -> bool:
    steps: list[Step] = [Drop(home, key) for note, listed in found for key in (note.key, listed)]
    return store.carry_out(steps, when=[Version(home, note.key, note.version) for note, _ in found])


def _outcome(queue: str, note: Note) -> tuple[Outcome, str]:
    """Return an outcome, and the key of its note in the history."""
    job_id, *rest = _decoded(note)
    try:
        kept = msgspec.convert(rest, _Kept)
    except msgspec.ValidationError as exc:
        raise _corrupt(note, exc) from exc
    left = note.expires_in or 0.0
    kind: OutcomeKind = "cancelled" if kept.kind == "cancelled" else "done"
    outcome = Outcome(
        queue=queue,
        id=job_id,
        kind=kind,
        body=kept.body,
        attempt=kept.attempt,
        age=max(0.0, kept.keep - left),
        expires_in=left,
    )
    return outcome, kept.listed


def _decoded(note: Note) -> list[Any]:
    try:
        return _decoder.decode(note.value)
    except msgspec.MsgspecError as exc:
        raise _corrupt(note, exc) from exc


def _corrupt(note: Note, exc: Exception) -> BackendCorrupt:
    return BackendCorrupt(
        f"the note {note.key!r} in the store was not written by multiq, or was written by a newer multiq: {exc}"
    )


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Any])
