"""One connection to a database. It replaces a lost connection, and sends several statements in one packet.

====================  ======================================================================  =======================
guarantee             how                                                                     cost
====================  ======================================================================  =======================
few round trips       statements that do not need each other's replies go in one packet       none
no half-done call     one transaction per call, which any exception rolls back                one fsync per commit
no deadlock error     after errors 1213, 1205 and 1020 the whole transaction is run again     a pause of milliseconds
                      (deadlock_retry.py)
no mixed-up replies   an exception before the full reply is read closes the connection        a reconnect
bounded calls         the whole reply must arrive before the call's deadline                  one Python ``recv_into``
                      (driverkit/timed_socket.py)                                             per read
safe forks            a child drops its parent's connections as soon as it is forked          none
====================  ======================================================================  =======================
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import pymysql

from multiq.errors import MultiqError

from . import receipts
from .deadlock_retry import AttemptFailed, DeadlockRetry
from .errors import GARBLED, is_lost, malformed
from .lost_session import is_same_server, kill_lost_session, session_id
from .pymysql_private import drop, leave_to_parent, socket_of
from .receipts import ReceiptBook

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiq.driverkit.timed_socket import DeadlineSocket

    from .pool import Pool
    from .receipts import Proof, Ticket
    from .statements import Sql

_T = TypeVar("_T")

SHORTEST_TIMEOUT = 0.05  # seconds. The timeout of a packet is at least this long, even if the call's time is over.

_COMMAND = 16  # bytes that a packet may have in addition to the statements


class Reply(NamedTuple):
    """The reply to one statement."""

    rows: tuple[Any, ...]
    affected: int


class Session:
    """A connection during one attempt of a call's transaction."""

    __slots__ = (
        "_book",
        "_opened",
        "_packet",
        "_socket",
        "_ticket",
        "deadline",
        "in_transaction",
        "is_broken",
        "proof",
        "unconfirmed",
    )

    def __init__(
        self,
        opened: pymysql.connections.Connection[Any],
        deadline: float,
        *,
        socket: DeadlineSocket | None,
        packet: int,
        book: ReceiptBook,
        unconfirmed: list[Proof],
    ) -> None:
        """Parameters:
        opened: PyMySQL's connection.
        deadline: the deadline of the whole call, by the monotonic clock.
        socket: the connection's socket.
        packet: bytes of the largest packet that the server takes.
        book: the connection's receipts.
        unconfirmed: the receipts and tickets of earlier attempts of the call.
        """
        self._opened = opened
        self._socket = socket
        self._packet = packet
        self._book = book
        self._ticket: Proof | None = None
        """The receipt or ticket that a statement of the transaction has already written or deleted."""
        self.deadline = deadline
        self.unconfirmed = unconfirmed
        """The receipts and tickets of earlier attempts of this call. The attempts' replies were lost, so each attempt
        may have been committed.
        """
        self.is_broken = False
        self.in_transaction = False
        self.proof: Proof | None = None
        """The receipt or ticket of the transaction that is being committed."""

    def execute(self, *texts: str) -> list[Reply]:
        """Send statements and return their replies. Statements that fit into one packet are sent together.

        After the first error, the server does not run the remaining statements.
        """
        if not texts:
            return []
        text = ";".join(texts)
        if len(text) >= self._packet and len(texts) > 1:
            middle = len(texts) // 2
            return self.execute(*texts[:middle]) + self.execute(*texts[middle:])
        left = max(self.deadline - time.monotonic(), SHORTEST_TIMEOUT)
        opened: Any = self._opened
        self.is_broken = True  # until the last reply has arrived
        try:
            if self._socket is not None:
                self._socket.period = left
            opened.query(text)
            answers = [_read_reply(opened)]
            while opened._result.has_next:  # noqa: SLF001
                opened.next_result()
                answers.append(_read_reply(opened))
        except pymysql.MySQLError as exc:
            self.is_broken = is_lost(exc)
            raise
        except GARBLED as exc:
            raise malformed(exc) from exc
        self.is_broken = False
        return answers

    def begin(self, *texts: str) -> list[Reply]:
        """Begin a transaction with these statements."""
        self.in_transaction = True
        return self.execute("BEGIN", *texts)[1:]

    def take_ticket(self) -> Ticket:
        """Return a ticket for the next transaction. The statements of that transaction delete the ticket."""
        ticket = self._book.ticket()
        while ticket is None:
            keys = self._book.new_stock()
            try:
                self.execute(receipts.stock(keys), *receipts.discard(self._book.rest()))
            except pymysql.IntegrityError:  # Some of the numbers are in use.
                if time.monotonic() >= self.deadline:
                    raise
                continue
            self._book.stocked(keys)
            ticket = self._book.ticket()
        self._ticket = ticket
        return ticket

    def write_receipt(self, done: int) -> str:
        """Return the statement that writes the receipt of the next transaction. It must be the first statement of that
        transaction.

        Use this method if it is possible that the transaction locks no other row. After a lost reply, the next attempt
        calls ``done_before(waits=True)``. That call reads the receipt's row, and so waits for the end of the
        transaction.
        """
        self._ticket = receipt = self._book.receipt()
        return receipt.sql(done)

    def commit(self, *texts: str, done: int | Sql | None = None) -> list[Reply]:
        """End the transaction with these statements. If no transaction is open, each statement is a transaction by
        itself.

        With *done*, the statements are one transaction in any case. If that transaction has no ticket and no receipt
        yet, it also writes a receipt that holds the value of *done*.
        """
        self.proof, self._ticket = self._ticket, None
        if done is not None and self.proof is None:
            self.proof = receipt = self._book.receipt()
            texts = (*texts, receipt.sql(done))
        if self.in_transaction:
            answers = self.execute(*texts, "COMMIT")
        elif done is not None and len(texts) > 1:
            answers = self.begin(*texts, "COMMIT")
        else:
            answers = self.execute(*texts)
        self.in_transaction, self.proof = False, None
        return answers

    def roll_back(self) -> None:
        """Undo all changes since ``begin``."""
        self.execute("ROLLBACK")
        self.in_transaction, self._ticket = False, None

    def done_before(self, *, waits: bool = False) -> int | None:
        """Return the number of rows that earlier attempts of this call have changed. None if no attempt was committed.

        The caller must have locked the jobs' rows. The server grants these locks only after the attempts have ended. If
        the attempts used ``write_receipt``, pass *waits* instead. The receipts' rows are then locked.
        """
        if not self.unconfirmed:
            return None
        (answer,) = self.execute(receipts.asked(self.unconfirmed, waits=waits))
        found = receipts.found(self.unconfirmed, answer)
        return sum(found.values()) if found else None


class Connection:
    """A connection that opens when it is used. It opens again after a fork or an error.

    Only one thread uses it at a time.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.idle_since = 0.0
        self._book = ReceiptBook(lambda: pool.minute)
        self._opened: pymysql.connections.Connection[Any] | None = None
        self._socket: DeadlineSocket | None = None
        self._lock = threading.Lock()
        self._is_stale = False
        self._server_identity: tuple[Any, ...] = ()
        self._lost_session: int | None = None
        """The id of a session whose connection was lost. Its locks stay until the server notices the loss."""

    def run(self, work: Callable[[Session], _T], deadline: float | None = None) -> _T:
        """Run *work* and return its result. After an error, ``deadlock_retry`` decides whether *work* is run again.

        After a lost reply, ``session.unconfirmed`` has the receipts and tickets of the earlier attempts. If *work* is
        only a part of a call, *deadline* is the deadline of the whole call. Raises ``BackendError``, and the errors of
        *work*.
        """
        deadline = time.monotonic() + self._pool.timeout if deadline is None else deadline
        with self._lock:
            try:
                return self.attempt(work, deadline, [])
            except AttemptFailed as exc:
                failed = exc
            return DeadlockRetry(self, self._pool, deadline).run(work, failed)

    def attempt(self, work: Callable[[Session], _T], deadline: float, unconfirmed: list[Proof]) -> _T:
        """Run *work* once and return its result. *unconfirmed*: the receipts and tickets of earlier attempts of the
        call.

        The caller has this connection's lock. Raises ``AttemptFailed`` for an error of the server or of the connection.
        """
        session = None
        try:
            while True:
                opened = self._opened
                if opened is None or self._is_stale:
                    opened = self._open(deadline)
                packet = (self._pool.max_packet or 0) - _COMMAND
                session = Session(
                    opened, deadline, socket=self._socket, packet=packet, book=self._book, unconfirmed=unconfirmed
                )
                if self._clean_up_receipts(session):
                    return work(session)
                session = None
        except MultiqError:
            self._clean_up(session)
            raise
        except (pymysql.MySQLError, OSError) as exc:
            proof = session.proof if session is not None and session.is_broken else None
            self._clean_up(session)
            is_broken = session is not None and session.is_broken
            raise AttemptFailed(exc, proof, is_connected=session is not None, is_broken=is_broken) from exc
        except BaseException:
            self._drop()  # The rest of a reply may still arrive.
            raise

    def _clean_up_receipts(self, session: Session) -> bool:
        """Delete old receipts and arrivals if the clean-up is due. Returns False if the session is lost.

        The clean-up runs before the work of a call. An interrupt during the clean-up therefore cannot lose a reply of
        that call.
        """
        if not self._book.is_used or not self._pool.is_cleanup_due():
            return True
        try:
            (found,) = session.execute(receipts.old(self._pool.minute))
            if statement := receipts.tidy(found):
                session.execute(statement)
            if receipts.has_more(found):
                self._pool.clean_up_again_soon()
            self._clean_up_arrivals(session)
        except (pymysql.MySQLError, OSError):
            self._clean_up(session)
        return not session.is_broken

    def _clean_up_arrivals(self, session: Session) -> None:
        cleanup = self._pool.arrivals
        (found,) = session.execute(cleanup.find())
        statement = cleanup.drop(found)
        dropped = session.execute(statement)[0].affected if statement else 0
        if cleanup.has_more(dropped):
            self._pool.clean_up_again_soon()

    def select(self, text: str) -> tuple[Any, ...]:
        """Run one statement that reads, outside a transaction. Returns the rows."""
        return self.run(lambda session: session.execute(text))[0].rows

    def close(self) -> None:
        """Close the connection until its next use. If another thread is in a call, the connection is closed after that
        call.
        """
        if self._lock.acquire(blocking=False):
            try:
                self._drop()
            finally:
                self._lock.release()
        else:
            self._is_stale = True

    def start_over_in_child(self) -> None:
        """After a fork, drop the parent's session. Sends nothing on the session's socket."""
        self._lock = threading.Lock()
        opened, self._opened = self._opened, None
        if opened is not None:
            leave_to_parent(opened)

    def __del__(self) -> None:
        if getattr(self, "_opened", None) is not None:
            self._drop()

    def _open(self, deadline: float) -> pymysql.connections.Connection[Any]:
        """Open the connection. If it is open and stale, replace it."""
        self._is_stale = False
        self._drop()
        self._book.close()
        self._opened = self._pool.open(deadline - time.monotonic())
        self._socket = socket_of(self._opened)
        lost, self._lost_session = self._lost_session, None
        before, self._server_identity = self._server_identity, self._pool.server_identity
        if lost is not None and is_same_server(before, self._server_identity):
            kill_lost_session(self._opened, lost)
        return self._opened

    def _clean_up(self, session: Session | None) -> None:
        """After an error, roll the transaction back. If the session is broken, close the connection instead."""
        if session is None:
            return
        if session.is_broken:
            if self._opened is not None:
                self._lost_session = session_id(self._opened)
            self._drop()
        elif session.in_transaction:
            try:
                session.roll_back()
            except (pymysql.MySQLError, OSError):
                self._drop()

    def _drop(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            drop(opened)


def _read_reply(opened: Any) -> Reply:
    """Return the last result that PyMySQL has read. A cursor would copy the result."""
    result = opened._result  # noqa: SLF001 - PyMySQL's cursors take it from there, too
    return Reply(result.rows or (), result.affected_rows)
