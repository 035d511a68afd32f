"""Receipts and tickets: rows that show, after a lost reply, whether a transaction was carried out.

A missing job is not a proof of the commit, because another consumer may have acked or deleted the job. If the jobs
cannot show whether a transaction was committed, the transaction also changes a row that no other connection changes.
There are two kinds of these rows, and the code calls either of them a *proof*:

- A receipt is a row with the number of the call. The transaction writes it with a statement of its own.
- A ticket is a row that was written before the transaction. The statement that deletes acked jobs also deletes their
  ticket. So an ack needs no additional statement. An additional statement would take a tenth to a half of the time of
  the ack.

A *stock* is a group of tickets that one INSERT has written.

====================  ======================================================================  =======================
guarantee             how                                                                     cost
====================  ======================================================================  =======================
one writer per row    each connection has its own rows; each call has a number or a ticket    one row changed
not overwritten       after a lost reply the connection writes into new rows                  a row
not read too early    the reader first locks the jobs of the verdicts                         none
a missing ticket was  the first row of a stock is never used; it shows that the stock was     one INSERT for up to 128
used                  not deleted as a whole                                                  acks
deleted in the end    rows over a day old are deleted                                         one DELETE now and then
====================  ======================================================================  =======================
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from .statements import Sql, render

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from .connection import Reply

CHANGED = Sql("ROW_COUNT()")
"""The number of rows that the previous statement has changed."""

_KEPT = 24 * 60  # minutes after which receipts and tickets are deleted
_RENEWED = 60  # minutes after which a connection writes to a new row. So a row that is in use is never old.
_FEWEST, _MOST = 8, 128  # the size of a stock
_SHIFT = 38  # A writer's number has 38 random bits at its lower end, and 25 bits of minutes above them.
_SLICE = 1_000  # rows that one statement deletes


class Receipt(NamedTuple):
    """A row that the transaction writes."""

    writer: int
    number: int

    def sql(self, done: int | Sql) -> str:
        return render("receipt", writer=self.writer, number=self.number, done=done)

    @property
    def writers(self) -> tuple[int, ...]:
        """The keys of the rows that have to be read."""
        return (self.writer,)

    def done(self, rows: Mapping[int, tuple[int, int]]) -> int | None:
        """Return the number that the receipt stores, from the rows that were found. None if the transaction was not
        committed.
        """
        number, done = rows.get(self.writer, (None, 0))
        return done if number == self.number else None


class Ticket(NamedTuple):
    """A row that the transaction deletes."""

    stock: int
    writer: int

    @property
    def writers(self) -> tuple[int, ...]:
        """The keys of the rows that have to be read."""
        return self.stock, self.writer

    def done(self, rows: Mapping[int, tuple[int, int]]) -> int | None:
        """Return 1 if the ticket's row is gone and the first row of its stock exists. None if the transaction was not
        committed.
        """
        return 1 if self.stock in rows and self.writer not in rows else None


Proof: TypeAlias = "Receipt | Ticket"


class ReceiptBook:
    """The receipts and tickets of one connection. *minute* returns the server's time in minutes since 1970."""

    def __init__(self, minute: Callable[[], int]) -> None:
        self._minute = minute
        self._last: Receipt | None = None
        self._stock = range(0)
        """The keys of the tickets. The first row of the stock is left out, because it is never used."""
        self._used = 0
        self._good_until = 0.0
        self.is_used = False
        """Whether this session has written receipts or tickets."""

    def receipt(self) -> Receipt:
        """Return the receipt of the next transaction."""
        if self._last is None or abs(self._minute() - (self._last.writer >> _SHIFT)) > _RENEWED:
            self._last = Receipt(self._writer(), secrets.randbits(48))  # An older row with this key has another number.
        else:
            self._last = Receipt(self._last.writer, self._last.number + 1)
        self.is_used = True
        return self._last

    def ticket(self) -> Ticket | None:
        """Return a ticket that was never used. None if a new stock has to be written first."""
        used, stock = self._used, self._stock
        if used == len(stock) or time.monotonic() > self._good_until:
            return None
        self._used = used + 1
        return Ticket(stock.start - 1, stock[used])

    def new_stock(self) -> range:
        """Return the keys for a new stock. The first stock is small, because most connections send few acks."""
        first = self._writer()
        return range(first, first + 1 + min(max(_FEWEST, 4 * len(self._stock)), _MOST))

    def rest(self) -> range:
        """Return the keys of all rows of the stock, which are to be deleted.

        Acks have already deleted the rows of used tickets. None of the keys is an unconfirmed ticket, because a lost
        reply ends the use of a stock.
        """
        stock = self._stock
        return range(stock.start - 1, stock.stop) if stock else stock

    def stocked(self, keys: range) -> None:
        """Use these rows as the new stock. A separate transaction has written them."""
        self._stock, self._used, self._good_until = keys[1:], 0, time.monotonic() + 60 * _RENEWED
        self.is_used = True

    def close(self) -> None:
        """Forget the stock and the last receipt.

        The next session may be on another server, and must not overwrite a receipt of this session.
        """
        self._last = None
        self._stock, self._used = range(0), 0
        self.is_used = False

    def _writer(self) -> int:
        return self._minute() << _SHIFT | secrets.randbits(_SHIFT)


def stock(keys: range) -> str:
    return render("stock", rows=Sql("),(".join([f"{key},0,0" for key in keys])))


def discard(keys: range) -> list[str]:
    """Return the statement that deletes the rest of a stock. Returns an empty list if there was no stock."""
    return [render("tidy", writers=keys)] if keys else []


def asked(proofs: Iterable[Proof], *, waits: bool = False) -> str:
    """Return the statement that reads the rows of these receipts and tickets.

    *waits*: whether the statement waits for the end of transactions that have written or deleted these rows.
    """
    lock = Sql("FOR UPDATE" if waits else "")
    return render("receipts", writers=sorted({writer for proof in proofs for writer in proof.writers}), lock=lock)


def found(proofs: Iterable[Proof], answer: Reply) -> dict[Proof, int]:
    """Return the receipts and tickets of committed transactions. Each receipt or ticket comes with the number that its
    ``done`` returns."""
    rows = {writer: (number, done) for writer, number, done in answer.rows}
    return {proof: done for proof in proofs if (done := proof.done(rows)) is not None}


def old(minute: int) -> str:
    """Return the statement that finds rows so old that no connection reads them any more."""
    return render("old_receipts", writer=max(minute - _KEPT, 0) << _SHIFT, limit=_SLICE)


def has_more(answer: Reply) -> bool:
    """Whether there may be more old rows than ``old`` has found."""
    return len(answer.rows) == _SLICE


def tidy(answer: Reply) -> str | None:
    """Return the statement that deletes the rows that ``old`` has found."""
    return render("tidy", writers=sorted(writer for (writer,) in answer.rows)) if answer.rows else None
