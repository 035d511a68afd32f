"""Malformed records are rows that another program wrote and multiq cannot read. They are buried with a reason.

Records are not checked before they are read. A read that finds text in a number's column, or a missing body, raises
``MalformedRecord``. The driver then checks all records of the file once, buries the malformed ones, and repeats the
call.
"""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from multiq.backend import DELAY_MAX, PRIORITY_DEFAULT, TTR_DEFAULT
from multiq.driverkit.clock import SECOND

from .errors import MalformedRecord
from .records import as_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiq.driverkit.clock import Clock

    from .connection import Connection, Transaction
    from .pool import Pool

_T = TypeVar("_T")

_log = logging.getLogger("multiq.sqlite")

QUEUE = "unreadable"
"""The queue for jobs whose own queue cannot be read."""

_SLICE = 1_000  # records read by one statement, and changed in one transaction
_MAX_ATTEMPTS = 10  # another program may write such records again and again; this limit ends the call
_SHOWN = 40  # bytes that a log message shows of an id that is not text
_REASON = "reason is not text"
LONGEST_TTR = round(DELAY_MAX * SECOND)
MOST_COUNTED = 2**62


class _Suspect(NamedTuple):
    """A row that ``sql/suspects.sql`` has read. Texts are bytes. ``*_type`` is the type of the stored value."""

    seq: int
    queue: bytes
    queue_type: str
    id: bytes
    id_type: str
    reason: bytes | None
    reason_type: str
    state: int | None
    priority: int | None
    due_at: int | None
    ttr: int | None
    enqueued_at: int | None
    attempt: int | None
    crashes: int | None
    kicks: int | None
    token_type: str
    has_body: int
    has_terms: int


def bury_and_repeat(pool: Pool, clock: Clock, call: Callable[[], _T], failure: MalformedRecord) -> _T:
    """Bury the records that *call* could not read, repeat *call*, and return its result.

    *failure* is the exception that *call* raised. Raises ``MalformedRecord`` if the repetition does not help.
    """
    for _ in range(_MAX_ATTEMPTS):
        if not bury_malformed(pool, clock):
            raise failure
        try:
            return call()
        except MalformedRecord as exc:
            failure = exc
    raise failure


def bury_malformed(pool: Pool, clock: Clock) -> int:
    """Bury all records that cannot be read. Returns the number of changed records, pauses, outcomes and notes."""
    changed = 0
    with pool.borrowed() as connection:
        is_utf8 = connection.select("encoding") == [("UTF-8",)]
        after = -(2**63)
        while suspects := [_Suspect(*row) for row in connection.select("suspects", {"after": after, "limit": _SLICE})]:
            found = [suspect.seq for suspect in suspects if _faults(suspect, is_utf8)]
            changed += _change(connection, found, clock, is_utf8=is_utf8) if found else 0
            after = suspects[-1].seq
        changed += connection.write(lambda transaction: _forget_pauses(transaction, is_utf8))
        changed += _forget(connection, "outcome", is_utf8)
        changed += _forget(connection, "note", is_utf8)
    return changed


def _change(connection: Connection, seqs: list[int], clock: Clock, *, is_utf8: bool) -> int:
    def change(transaction: Transaction) -> int:
        changed = 0
        for seq in seqs:
            asked = {"after": seq - 1, "limit": 1}
            row = transaction.execute("suspects", asked).fetchone()
            suspect = _Suspect(*row) if row is not None else None
            if suspect is None or suspect.seq != seq or not (faults := _faults(suspect, is_utf8)):
                continue  # Another call has deleted or buried it.
            transaction.execute(*_correction(suspect, faults, clock(), is_utf8))
            if not suspect.has_body:
                transaction.execute("restore_body", {"seq": seq})
            changed += 1
            _log.warning("a job that could not be read was buried, number %d: %s", seq, "; ".join(faults))
        return changed

    return connection.write(change)


def _faults(suspect: _Suspect, is_utf8: bool) -> list[str]:
    """Return the faults of a record. Empty if the record is unusual but can be read."""
    faults = []
    if _text(suspect.queue, suspect.queue_type, is_utf8) is None:
        faults.append(f"queue is not text (x'{suspect.queue[:_SHOWN].hex()}')")
    if _text(suspect.id, suspect.id_type, is_utf8) is None:
        faults.append(f"id is not text (x'{suspect.id[:_SHOWN].hex()}')")
    for name, (low, high, _) in _RANGES.items():
        value = getattr(suspect, name)
        if value is None:
            faults.append(f"{name} is not a whole number")
        elif not low <= value <= high:
            faults.append(f"{name} is out of range ({value})")
    if suspect.token_type not in {"null", "integer"}:
        faults.append("token is not a whole number")
    if not suspect.has_body:
        faults.append("body is missing")
    if not suspect.has_terms:
        faults.append("what it waits for is missing")
    if suspect.reason is not None and _text(suspect.reason, suspect.reason_type, is_utf8) is None:
        faults.append(_REASON)
    return faults


def _correction(suspect: _Suspect, faults: list[str], now: int, is_utf8: bool) -> tuple[str, dict[str, Any]]:
    """Return the statement that makes a record readable. The statement also buries the job, unless the only fault is in
    the stored reason."""
    if faults == [_REASON]:
        return "reword", {"seq": suspect.seq, "reason": (suspect.reason or b"").decode("utf-8", "backslashreplace")}
    is_named = _text(suspect.id, suspect.id_type, is_utf8) is not None
    corrected: dict[str, Any] = {
        "seq": suspect.seq,
        "queue": QUEUE if _text(suspect.queue, suspect.queue_type, is_utf8) is None else None,
        "id": None if is_named else f"unreadable-{suspect.seq}-{secrets.token_hex(4)}",
        "reason": f"it could not be read: {'; '.join(faults)}",
        "enqueued_at": now if suspect.enqueued_at is None else suspect.enqueued_at,
    }
    for name in ("priority", "ttr", "attempt", "crashes", "kicks"):
        low, high, default = _RANGES[name]
        value = getattr(suspect, name)
        corrected[name] = value if value is not None and low <= value <= high else default
    return "bury_malformed", corrected


def _forget_pauses(transaction: Transaction, is_utf8: bool) -> int:
    """Delete pauses whose queue or end cannot be read. Returns their number."""
    rows = transaction.execute("suspect_pauses").fetchall()
    doomed = [row for row in rows if _text(row[0], row[1], is_utf8) is None or row[2] != "integer"]
    for name, kind, _ in doomed:
        transaction.execute("forget_pause", {"queue": name, "type": kind})
        _log.warning("a pause that could not be read was ended (queue x'%s')", name[:_SHOWN].hex())
    return len(doomed)


def _forget(connection: Connection, kind: str, is_utf8: bool) -> int:
    """Delete outcomes or notes that cannot be read. Returns their number."""
    suspects_of, forget_these = _FORGOTTEN[kind]

    def forget(transaction: Transaction) -> int:
        forgotten = 0
        for seq in doomed:
            row = transaction.execute(suspects_of, {"after": seq - 1, "limit": 1}).fetchone()
            if row is None or row[0] != seq or not _is_malformed(row, is_utf8):
                continue  # Another call has deleted or replaced it.
            transaction.execute(forget_these, {"seqs": as_json([seq])})
            forgotten += 1
            _log.warning("the %s number %d was deleted, because it could not be read", kind, seq)
        return forgotten

    doomed: list[int] = []
    after = -(2**63)
    while suspects := connection.select(suspects_of, {"after": after, "limit": _SLICE}):
        doomed += [row[0] for row in suspects if _is_malformed(row, is_utf8)]
        after = suspects[-1][0]
    return connection.write(forget) if doomed else 0


def _is_malformed(row: tuple[Any, ...], is_utf8: bool) -> bool:
    _, home, home_type, name, name_type, has_malformed_number = row
    return (
        bool(has_malformed_number) or _text(home, home_type, is_utf8) is None or _text(name, name_type, is_utf8) is None
    )


def _text(stored: bytes, kind: str, is_utf8: bool) -> str | None:
    if kind != "text":
        return None
    if not is_utf8:  # SQLite itself decodes UTF-16, even if it is invalid.
        return stored.decode("utf-16-le", "replace")
    try:
        return stored.decode()
    except UnicodeDecodeError:
        return None


#: The statements that find suspect records of other kinds, and that delete the malformed ones.
_FORGOTTEN = {"outcome": ("suspect_outcomes", "forget"), "note": ("suspect_notes", "forget_notes")}

#: The minimum and the maximum of each column, and the replacement for other values.
_RANGES = {
    "state": (0, 5, 3),
    "priority": (-(2**63), 2**63 - 1, PRIORITY_DEFAULT),
    "due_at": (-(2**63), 2**63 - 1, 0),
    "ttr": (1, LONGEST_TTR, round(TTR_DEFAULT * SECOND)),
    "enqueued_at": (-(2**63), 2**63 - 1, 0),
    "attempt": (0, MOST_COUNTED, 0),
    "crashes": (0, MOST_COUNTED, 0),
    "kicks": (0, MOST_COUNTED, 0),
}
