"""Receipts: what tells, after a lost reply, whether a transaction was carried out.

"The job is gone" proves nothing: somebody else may have acked or deleted it meanwhile. So a transaction whose effect
cannot be asked for writes the number of its call into a row that nobody else writes, and that is there exactly if the
transaction was committed.

====================  ======================================================================  =======================
guarantee             how                                                                     cost
====================  ======================================================================  =======================
nobody else's         a row for each connection, a number for each call                       one row changed in place
not overwritten       after a lost reply the connection writes into another row               a row
not read too early    whoever asks has locked the jobs in question first                      none
not kept for ever     rows over a day old are deleted                                         a range now and then
====================  ======================================================================  =======================
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, NamedTuple

from .statements import Sql, render

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .connection import Answer

CHANGED = Sql("ROW_COUNT()")
"""How many rows the statement before has changed."""

_KEPT = 24 * 60  # minutes
_RENEWED = 60  # minutes; so a row in use is never old
_SHIFT = 38  # bits of chance in a writer's number, below 25 bits of minutes


class Receipt(NamedTuple):
    """The proof of one transaction."""

    writer: int
    number: int

    def sql(self, done: int | Sql) -> str:
        """The statement that leaves it."""
        return render("receipt", writer=self.writer, number=self.number, done=done)


class Book:
    """The receipts of one connection."""

    def __init__(self) -> None:
        self._last: Receipt | None = None
        self._minute = 0

    def next(self, minute: int) -> Receipt:
        """The next call's, in this minute of the server's clock."""
        if self._last is None or abs(minute - self._minute) > _RENEWED:
            self._minute = minute
            writer = minute << _SHIFT | secrets.randbits(_SHIFT)
            self._last = Receipt(writer, secrets.randbits(48))  # an old row of that writer would have another number
        else:
            self._last = Receipt(self._last.writer, self._last.number + 1)
        return self._last

    def close(self) -> None:
        """The last one may or may not be there, and must not be overwritten: begin another row."""
        self._last = None


def asked(receipts: Iterable[Receipt]) -> str:
    """The statement that looks for some."""
    return render("receipts", writers=sorted({receipt.writer for receipt in receipts}))


def found(answer: Answer) -> dict[Receipt, int]:
    """Those that were left, and what they say was done."""
    return {Receipt(writer, number): done for writer, number, done in answer.rows}


def tidy(minute: int) -> str:
    """The statement that deletes what is so old that nobody will ask for it."""
    return render("tidy", writer=max(minute - _KEPT, 0) << _SHIFT)
