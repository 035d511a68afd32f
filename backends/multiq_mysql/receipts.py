"""Receipts and tickets: rows that show, after a lost reply, whether a transaction was carried out.

A job that is gone proves nothing: another consumer may have acked or deleted it meanwhile. So if the effect of a
transaction cannot be read from the jobs, the transaction also changes a row that no other connection changes. Such a
row has changed exactly if the transaction was committed. There are two kinds of these rows:

- A receipt is a row with the number of the call. The transaction writes it with a statement of its own.
- A ticket is a row that was written before. The DELETE of acked jobs deletes their ticket, too. Tickets exist because
  nearly all verdicts are acks: for an ack, one more statement would be a tenth to a half of the cost.

====================  ======================================================================  =======================
guarantee             how                                                                     cost
====================  ======================================================================  =======================
one writer per row    each connection has its own rows, each call a number or a row           one row changed
not overwritten       after a lost reply the connection writes into new rows                  a row
not read too early    the reader first locks the jobs of the verdicts                         none
a ticket that is      the first row of its stock is never used: while it is there, the stock  one INSERT for up to 128
gone was used         was not deleted                                                         acks
not kept for ever     rows over a day old are deleted                                         a range now and then
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
"""The number of rows that the statement before has changed."""

_KEPT = 24 * 60  # minutes: receipts and tickets that are older are deleted
_RENEWED = 60  # minutes after which a connection writes to a new row, so that a row in use is never old
_FEWEST, _MOST = 8, 128  # tickets of a stock
_SHIFT = 38  # a writer's number has so many random bits at its lower end, and 25 bits of minutes above them
_SLICE = 1_000  # rows that are deleted at a time


class Receipt(NamedTuple):
    """The proof of one transaction: a row that it writes."""

    writer: int
    number: int

    def sql(self, done: int | Sql) -> str:
        """The statement that writes the receipt."""
        return render("receipt", writer=self.writer, number=self.number, done=done)

    @property
    def writers(self) -> tuple[int, ...]:
        """The keys of the rows that have to be read."""
        return (self.writer,)

    def done(self, rows: Mapping[int, tuple[int, int]]) -> int | None:
        """How much was done, by the rows that were found; None: the transaction was not committed."""
        number, done = rows.get(self.writer, (None, 0))
        return done if number == self.number else None


class Ticket(NamedTuple):
    """The proof of one transaction: a row that it deletes."""

    stock: int
    writer: int

    @property
    def writers(self) -> tuple[int, ...]:
        """The keys of the rows that have to be read."""
        return self.stock, self.writer

    def done(self, rows: Mapping[int, tuple[int, int]]) -> int | None:
        """1: the ticket's row is gone, and its stock's first row is there. None: the transaction was not committed."""
        return 1 if self.stock in rows and self.writer not in rows else None


Proof: TypeAlias = "Receipt | Ticket"


class ReceiptBook:
    """The receipts and tickets of one connection. *minute*: returns the server's time in minutes since 1970."""

    def __init__(self, minute: Callable[[], int]) -> None:
        self._minute = minute
        self._last: Receipt | None = None
        self._stock = range(0)
        """The keys of the tickets, without the first row of the stock, which is never used."""
        self._used = 0
        self._good_until = 0.0
        self.is_used = False
        """Whether this session has written receipts or tickets."""

    def receipt(self) -> Receipt:
        """The receipt of the next transaction."""
        if self._last is None or abs(self._minute() - (self._last.writer >> _SHIFT)) > _RENEWED:
            self._last = Receipt(self._writer(), secrets.randbits(48))  # an older row of this key has another one
        else:
            self._last = Receipt(self._last.writer, self._last.number + 1)
        self.is_used = True
        return self._last

    def ticket(self) -> Ticket | None:
        """A ticket that was never given out; None: a new stock has to be written first."""
        used, stock = self._used, self._stock
        if used == len(stock) or time.monotonic() > self._good_until:
            return None
        self._used = used + 1
        return Ticket(stock.start - 1, stock[used])

    def new_stock(self) -> range:
        """The keys of the rows of a new stock. The first stock is small, as most connections send few acks."""
        first = self._writer()
        return range(first, first + 1 + min(max(_FEWEST, 4 * len(self._stock)), _MOST))

    def rest(self) -> range:
        """The keys of all rows of the stock, to be deleted. The rows of its used tickets are gone already.

        None of them is an unconfirmed ticket: after a lost reply no ticket of that stock is used any more.
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
    """The statement that writes tickets."""
    return render("stock", rows=Sql("),(".join([f"{key},0,0" for key in keys])))


def discard(keys: range) -> list[str]:
    """The statement that deletes the rest of a stock, if there was one."""
    return [render("tidy", writers=keys)] if keys else []


def asked(proofs: Iterable[Proof]) -> str:
    """The statement that looks for the rows of these proofs."""
    return render("receipts", writers=sorted({writer for proof in proofs for writer in proof.writers}))


def found(proofs: Iterable[Proof], answer: Reply) -> dict[Proof, int]:
    """The proofs of the transactions that were committed, each with how much was done."""
    rows = {writer: (number, done) for writer, number, done in answer.rows}
    return {proof: done for proof in proofs if (done := proof.done(rows)) is not None}


def old(minute: int) -> str:
    """The statement that finds rows so old that no connection reads them any more."""
    return render("old_receipts", writer=max(minute - _KEPT, 0) << _SHIFT, limit=_SLICE)


def has_more(answer: Reply) -> bool:
    """Whether there may be more old rows than ``old`` has found."""
    return len(answer.rows) == _SLICE


def tidy(answer: Reply) -> str | None:
    """The statement that deletes what ``old`` has found."""
    return render("tidy", writers=sorted(writer for (writer,) in answer.rows)) if answer.rows else None
