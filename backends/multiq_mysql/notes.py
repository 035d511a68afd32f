"""Notes: bytes that are kept under a home and a key, and the conditions of ``carry_out``.

====================  ======================================================================  =======================
guarantee             how                                                                     cost
====================  ======================================================================  =======================
no version twice      a random number of 63 bits with each ``Put``                            none
one of many callers   a condition locks its note; the key of a note that is not there gets    one INSERT for a condition
succeeds              an expired row, so that it can be locked                                that there is no note
expired notes do not  each change deletes up to two expired notes of its home, and skips      one DELETE per home
add up                those that another transaction is deleting
====================  ======================================================================  =======================
"""

from __future__ import annotations

import secrets
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NamedTuple

from multiq.backend import Note, Put

from .records import SECOND, chunked, decode_text, microseconds
from .statements import Sql, literal, render

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from multiq.backend import Drop, Version

    from .connection import Reply
    from .pool import Pool

_DROPPED_PER_CHANGE = 2
_CHUNK = 1_000_000  # bytes
_NOW = Sql("@multiq_now")
_BEYOND_ALL = b"\xff"  # UTF-8 never has this byte


# --- changing --------------------------------------------------------------------------------------------


def changes(pool: Pool, steps: Sequence[Put | Drop], drops: Iterable[tuple[str, str]] = ()) -> list[str]:
    """Return the statements that carry out these steps, and delete expired notes of the same homes.

    *drops*: the homes and keys of additional notes to delete. A note that a step stores is not deleted.
    """
    last: dict[tuple[bytes, bytes], Put | None] = {(home.encode(), _key(key)): None for home, key in drops}
    for step in steps:
        last[step.home.encode(), _key(step.key)] = step if isinstance(step, Put) else None
    if not last:
        return []
    names: defaultdict[bytes, list[bytes]] = defaultdict(list)
    rows: list[str] = []
    for (home, name), put in sorted(last.items(), key=lambda change: change[0]):  # Transactions lock rows in one order.
        if put is None:
            names[home].append(name)
        else:
            rows.append(_row(home, name, put))
    chunk = min(_CHUNK, (pool.max_packet or 0) // 2)
    statements = [
        render("drop", home=home, names=Sql(",".join(some)))
        for home, own in names.items()
        for some in chunked(map(literal, own), chunk)
    ]
    statements += [f"SET {_NOW} = {pool.now}"] if rows else []
    statements += [_put(some) for some in chunked(rows, chunk)]
    homes = Counter(home for home, _ in last)
    return statements + [
        render("drop_expired_notes", home=home, now=pool.now, limit=_DROPPED_PER_CHANGE * count)
        for home, count in homes.items()
    ]


def _row(home: bytes, name: bytes, put: Put) -> str:
    expires_at = "NULL" if put.ttl is None else f"{_NOW}+{microseconds(put.ttl)}"
    return f"({literal(home)},{literal(name)},{_version()},{expires_at},{literal(put.value)})"


def _put(rows: list[str]) -> str:
    return render("put", row=Sql(",".join(rows)[1:-1]))


def _version() -> int:
    return secrets.randbits(63) | 1  # 0 is the version of a row that only locks a key


def _key(key: str) -> bytes:
    """Return a key as the table stores it. The bytes have the same order as the characters."""
    return key.encode("utf-8", "surrogatepass")


def _list(names: Iterable[bytes]) -> Sql:
    return Sql(",".join(map(literal, names)))


# --- conditions ------------------------------------------------------------------------------------------


class Conditions:
    """The conditions of a call: notes that must have certain versions. Makes the statements that lock these notes."""

    def __init__(self, pool: Pool, conditions: Sequence[Version]) -> None:
        self._conditions = conditions
        self.absent = sorted({(wanted.home, wanted.key) for wanted in conditions if not wanted.version})
        """The homes and keys of the notes that must not exist. After ``statements``, the table has rows that lock these
        keys."""
        self._homes: defaultdict[str, set[bytes]] = defaultdict(set)
        for wanted in conditions:
            self._homes[wanted.home].add(_key(wanted.key))
        self.statements = [
            *(render("claim_key", home=home.encode(), name=_key(key)) for home, key in self.absent),
            *(
                render("versions", home=home.encode(), names=_list(sorted(names)), now=pool.now)
                for home, names in sorted(self._homes.items())
            ),
        ]

    def hold(self, replies: Sequence[Reply]) -> bool:
        """Whether all notes have the versions of the conditions. *replies* are those to ``statements``."""
        found = {
            (home, name): str(version)
            for home, reply in zip(sorted(self._homes), replies[len(self.absent) :], strict=True)
            for name, version in reply.rows
        }
        return all(found.get((wanted.home, _key(wanted.key)), "") == wanted.version for wanted in self._conditions)


# --- reading ---------------------------------------------------------------------------------------------


class NoteRow(NamedTuple):
    name: bytes
    content: bytes
    version: int
    left: int | None

    def note(self) -> Note:
        return Note(
            key=decode_text(self.name),
            value=self.content,
            version=str(self.version),
            expires_in=None if self.left is None else self.left / SECOND,
        )


def asked(home: str, key: str, now: Sql) -> str:
    """Return the statement that reads a note."""
    return render("note", home=home.encode(), name=_key(key), now=now)


def page(home: str, prefix: str, limit: int, after: str | None, now: Sql) -> str:
    """Return the statement that reads a page of notes and one additional note. The additional note shows that another
    page follows."""
    start = _key(prefix)
    seen = None if after is None else _key(after)
    beyond = start[:-1] + bytes([start[-1] + 1]) if start else _BEYOND_ALL
    return render(
        "notes",
        home=home.encode(),
        first=max(start, seen or b""),
        after=_BEYOND_ALL if seen is None else seen,
        beyond=beyond,
        now=now,
        limit=limit + 1,
    )
