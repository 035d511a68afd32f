"""The pool of connections to a database: session settings, packets of several statements, and retried transactions.

====================  ======================================================================  =======================
guarantee             how                                                                     cost
====================  ======================================================================  =======================
nothing depends on    READ COMMITTED, SQL mode, time zone and lock waits are set by the       one round trip when a
the server's          session itself                                                          connection opens
defaults
few round trips       statements that need no answer in between go in one packet              none
no half-done verb     a transaction each; any exception rolls back or closes                  one fsync per commit
no deadlock error     the whole transaction is run again on 1213, 1205 and 1020               a pause of milliseconds
no mixed-up replies   any exception between sending and the full reply closes                 a reconnect
bounded calls         the whole reply has to be read within what is left of the call's time   one ``recv_into`` of ours
                      (timed_socket.py)                                                       per read
safe forks            a child drops its parent's connections as soon as it is forked          none
====================  ======================================================================  =======================
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import pymysql
from pymysql.constants import CLIENT

from multiq.driverkit.call_retry import Attempts
from multiq.driverkit.fork import forks
from multiq.errors import MultiqError

from . import receipts, schema
from .errors import GARBLED, READ_ONLY, classify, code_of, explain, is_lost, malformed
from .receipts import ReceiptBook
from .statements import NOW, TRUE_NOW, Sql
from .timed_socket import limit_each_call, set_deadline
from .waiting import shared_poller

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from multiq.driverkit.clock import Clock

    from .dsn import Dsn
    from .receipts import Proof, Ticket
    from .waiting import Poller

_T = TypeVar("_T")

_IDLE_FOR = 60.0  # seconds that an unused connection is kept open for the next caller
_SHORTEST_TIMEOUT = 0.05  # seconds: the timeout of a packet even if the call's time is over
_LOCK_WAIT = 2  # seconds that a statement waits for a row before the server gives up, and the transaction is run again

_SERVER_INFO = "SELECT @@max_allowed_packet, @@hostname, @@port, UNIX_TIMESTAMP(); SHOW GLOBAL STATUS LIKE 'Uptime'"
_COMMAND = 16  # bytes of a packet beside the statements, at most
_KILL_CHECKS, _KILL_CHECK_PAUSE = 50, 0.004  # checks, and seconds between them, until a killed session has ended
_CLEANUP_INTERVAL = 3600.0  # seconds
_CLEANUP_AGAIN = 1.0  # seconds until the next clean-up if there were more old receipts than one deletes
_IDLE_TRANSACTION = 10  # seconds that a transaction may stand idle: the driver's never do
_IDLE_SESSION = 600  # seconds until the server ends the session of a process that died, and releases its locks

#: READ COMMITTED needs a statement of its own: the variable has different names in MySQL and in MariaDB
_SESSION = (
    "SET SESSION time_zone = '+00:00', SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', "
    f"SESSION innodb_lock_wait_timeout = {_LOCK_WAIT}, SESSION lock_wait_timeout = 10, "
    "SESSION completion_type = 0, SESSION sql_safe_updates = 0, SESSION sql_select_limit = DEFAULT, "
    # MariaDB can end sessions that are idle inside a transaction sooner; for MySQL this is a comment
    f"SESSION wait_timeout = LEAST(@@wait_timeout, {_IDLE_SESSION}) "
    f"/*M!100300 , SESSION idle_transaction_timeout = {_IDLE_TRANSACTION} */"
    # MariaDB would make a temporary table of a long IN (...), and read all jobs to join them with it
    "/*M!100308 , SESSION in_predicate_conversion_threshold = 0 */"
    # MariaDB would also not read a range for more than 32,000 numbers in one IN (...)
    "/*M!100600 , SESSION optimizer_max_sel_arg_weight = 0 */;"
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE"
)


class Reply(NamedTuple):
    """The reply to one statement."""

    rows: tuple[Any, ...]
    affected: int


class Pool:
    """The connections to one database. Does no I/O before the first call."""

    def __init__(self, dsn: Dsn, *, timeout: float, clock: Clock | None = None) -> None:
        self.dsn = dsn
        self.timeout = timeout
        """Seconds that a call waits for the server."""
        self.create = True
        """Whether tables are created in a database that has none."""
        self.max_packet: int | None = None
        """Bytes of the largest statement that the server takes; None until the first connection."""
        self.server_identity: tuple[Any, ...] = ()
        """Host name, port and start time of the server that was connected to last."""
        self._clock = clock
        self._server_began = 0.0
        """The server's time, about, when this process's monotonic clock was zero."""
        self._cleaned_up_at = float("-inf")
        self._idle: deque[Connection] = deque()  # its methods are atomic
        """Unused connections. The one that was used last is used next."""
        self._connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._poller: tuple[int, Poller] | None = None
        forks.watch(self)

    @property
    def poller(self) -> Poller:
        """The poller that all users of the database in this process share."""
        if self._poller is None or self._poller[0] != forks.generation:
            self._poller = (forks.generation, shared_poller((self.dsn.place, self.dsn.database)))
        return self._poller[1]

    @property
    def now(self) -> Sql:
        """The present in microseconds, as SQL: the server's clock, or a test's."""
        return NOW if self._clock is None else Sql(self._clock() // 1000)

    @property
    def true_now(self) -> Sql:
        """As ``now``, for a session of the caller's, whose clock may be stopped."""
        return TRUE_NOW if self._clock is None else self.now

    def open(self, timeout: float) -> pymysql.connections.Connection[Any]:
        """Open a session with the driver's settings, and check or create the tables.

        Raises PyMySQL's errors, ``OSError``, ``MultiqError``.
        """
        ours: dict[str, Any] = {"init_command": _SESSION, "client_flag": CLIENT.MULTI_STATEMENTS, "autocommit": True}
        timeout = max(timeout, _SHORTEST_TIMEOUT)
        deadline = time.monotonic() + timeout
        opened = self.dsn.connect(timeout, **ours)
        try:
            set_deadline(opened, deadline)
            schema.ensure(opened, create=self.create)
            self._read_server_info(opened)
        except BaseException:
            _drop(opened)
            raise
        return opened

    def _read_server_info(self, opened: pymysql.connections.Connection[Any]) -> None:
        with opened.cursor() as cursor:
            cursor.execute(_SERVER_INFO)
            ((self.max_packet, *where, now),) = cursor.fetchall()
            cursor.nextset()
            ((_, uptime),) = cursor.fetchall()
        self.server_identity = (*where, int(now) - int(uptime))
        self._server_began = float(now) - time.monotonic()

    @property
    def minute(self) -> int:
        """Minutes since 1970 by the server's clock, as read when a connection was opened. Orders receipts by age."""
        return int((self._server_began + time.monotonic()) // 60)

    def is_cleanup_due(self) -> bool:
        """Whether old receipts were last deleted over an hour ago. True once, for the caller that then deletes them."""
        now = time.monotonic()
        if now - self._cleaned_up_at < _CLEANUP_INTERVAL:
            return False
        self._cleaned_up_at = now
        return True

    def clean_up_again_soon(self) -> None:
        """More old receipts are left: delete again soon, and not in an hour."""
        self._cleaned_up_at = time.monotonic() - _CLEANUP_INTERVAL + _CLEANUP_AGAIN

    def connection(self) -> Connection:
        """A connection for the caller alone, opened when it is first used."""
        connection = Connection(self)
        with self._lock:
            self._connections.add(connection)
        return connection

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[Connection]:
        """Borrow a connection for a ``with`` block."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self.connection()
        try:
            yield connection
        finally:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)
            self._close_surplus()

    def _close_surplus(self) -> None:
        """Close the connection that has been unused longest, if for over ``_IDLE_FOR`` seconds.

        The pool keeps as many open as were in use at one time lately, so callers that take turns do not reconnect.
        """
        with contextlib.suppress(IndexError):  # another thread took the last one
            if time.monotonic() - self._idle[0].idle_since > _IDLE_FOR:
                self._idle.popleft().close()

    def close(self) -> None:
        """Close all connections; each opens again if it is used again."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.close()

    def start_over_in_child(self) -> None:
        """After a fork: make new locks, which no other thread holds, and drop the parent's connections."""
        self._lock = threading.Lock()
        self._idle = deque()
        for connection in list(self._connections):
            connection.start_over_in_child()


class Session:
    """A connection during one attempt of a verb's transaction."""

    __slots__ = (
        "_book",
        "_opened",
        "_packet",
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
        packet: int,
        book: ReceiptBook,
        unconfirmed: list[Proof],
    ) -> None:
        """*packet*: bytes of the largest packet that the server takes."""
        self._opened = opened
        self._packet = packet
        self._book = book
        self._ticket: Ticket | None = None
        self.deadline = deadline
        self.unconfirmed = unconfirmed
        """The proofs of earlier attempts of this call whose replies were lost: they may have been committed."""
        self.is_broken = False
        self.in_transaction = False
        self.proof: Proof | None = None
        """The proof of the transaction that is being committed."""

    def execute(self, *texts: str) -> list[Reply]:
        """Run statements, sent in one packet if they fit, and return their replies. The first error ends it."""
        text = ";".join(texts)
        if len(text) >= self._packet and len(texts) > 1:
            middle = len(texts) // 2
            return self.execute(*texts[:middle]) + self.execute(*texts[middle:])
        left = max(self.deadline - time.monotonic(), _SHORTEST_TIMEOUT)
        opened: Any = self._opened
        self.is_broken = True  # until the last reply is here
        try:
            limit_each_call(opened, left)
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
        """A ticket for the next transaction, whose statements delete it."""
        ticket = self._book.ticket()
        while ticket is None:
            keys = self._book.new_stock()
            try:
                self.execute(receipts.stock(keys), *receipts.discard(self._book.rest()))
            except pymysql.IntegrityError:  # some of the numbers are taken
                if time.monotonic() >= self.deadline:
                    raise
                continue
            self._book.stocked(keys)
            ticket = self._book.ticket()
        self._ticket = ticket
        return ticket

    def commit(self, *texts: str, done: int | Sql | None = None) -> list[Reply]:
        """End the transaction with these statements. Outside a transaction, each statement is a transaction by itself.

        With *done* and without a ticket, the transaction leaves a receipt with the value of *done*; then statements
        outside a transaction are one transaction together.
        """
        self.proof, self._ticket = self._ticket, None
        if done is not None and self.proof is None:
            self.proof = receipt = self._book.receipt()
            texts = (*texts, receipt.sql(done))
            if not self.in_transaction:
                answers = self.begin(*texts, "COMMIT")
                self.in_transaction, self.proof = False, None
                return answers
        answers = self.execute(*texts, "COMMIT") if self.in_transaction else self.execute(*texts)
        self.in_transaction, self.proof = False, None
        return answers

    def roll_back(self) -> None:
        """Undo what was done since ``begin``."""
        self.execute("ROLLBACK")
        self.in_transaction, self._ticket = False, None

    def done_before(self) -> int | None:
        """The number of rows that earlier attempts of this call have changed; None if none of them was committed.

        The rows in question must be locked.
        """
        if not self.unconfirmed:
            return None
        (answer,) = self.execute(receipts.asked(self.unconfirmed))
        found = receipts.found(self.unconfirmed, answer)
        return sum(found.values()) if found else None


class Connection:
    """A connection that opens when it is used, and again after a fork or an error. One thread at a time."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.idle_since = 0.0
        self._book = ReceiptBook(lambda: pool.minute)
        self._opened: pymysql.connections.Connection[Any] | None = None
        self._lock = threading.Lock()
        self._is_stale = False
        self._server_identity: tuple[Any, ...] = ()
        self._lost_session: int | None = None
        """The id of a session whose connection was lost. It keeps its locks until the server notices."""

    def run(self, work: Callable[[Session], _T], deadline: float | None = None) -> _T:
        """Run *work* and return its result. It is run again as multiq.driverkit.call_retry says: after a deadlock, say.

        After a lost reply, *work* finds the earlier attempts' proofs in ``session.unconfirmed``. *deadline*: that of
        the call that this is part of, if the call has begun before. Raises ``BackendError``, and what *work* raises.
        """
        timeout = self._pool.timeout
        deadline = time.monotonic() + timeout if deadline is None else deadline
        attempts: Attempts | None = None
        unconfirmed: list[Proof] = []
        with self._lock:
            while True:
                session = None
                try:
                    opened = self._open(deadline)
                    packet = (self._pool.max_packet or 0) - _COMMAND
                    session = Session(opened, deadline, packet=packet, book=self._book, unconfirmed=unconfirmed)
                    if not self._clean_up_receipts(session):
                        continue
                    result = work(session)
                except MultiqError:
                    self._clean_up(session)
                    raise
                except (pymysql.MySQLError, OSError) as exc:
                    if session is not None and session.is_broken and session.proof is not None:
                        unconfirmed.append(session.proof)
                    self._clean_up(session)
                    if code_of(exc) in READ_ONLY:
                        self._pool.close()  # the address may lead to another server by now
                    failure = classify(
                        exc, is_connected=session is not None, is_broken=session is not None and session.is_broken
                    )
                    attempts = attempts or Attempts(deadline)
                    if attempts.again(failure):
                        continue
                    raise explain(exc, self._pool.dsn.place, timeout) from exc
                except BaseException:
                    self._drop()  # half a reply may be on its way
                    raise
                return result

    def _clean_up_receipts(self, session: Session) -> bool:
        """Delete old receipts if that is due, before a call, so that an interrupt loses no answer.

        False: the session is lost.
        """
        if not self._book.is_used or not self._pool.is_cleanup_due():
            return True
        try:
            (found,) = session.execute(receipts.old(self._pool.minute))
            if statement := receipts.tidy(found):
                session.execute(statement)
            if receipts.has_more(found):
                self._pool.clean_up_again_soon()
        except (pymysql.MySQLError, OSError):
            self._clean_up(session)
        return not session.is_broken

    def select(self, text: str) -> tuple[Any, ...]:
        """The rows of one statement that reads, outside a transaction."""
        return self.run(lambda session: session.execute(text))[0].rows

    def close(self) -> None:
        """Close until the next use. If another thread is in a call, that call ends first."""
        if self._lock.acquire(blocking=False):
            try:
                self._drop()
            finally:
                self._lock.release()
        else:
            self._is_stale = True

    def start_over_in_child(self) -> None:
        """After a fork: drop the parent's session without sending anything on its socket."""
        self._lock = threading.Lock()
        opened, self._opened = self._opened, None
        if opened is not None:
            _leave_to_parent(opened)

    def __del__(self) -> None:
        if getattr(self, "_opened", None) is not None:
            self._drop()

    def _open(self, deadline: float) -> pymysql.connections.Connection[Any]:
        if self._is_stale:
            self._is_stale = False
            self._drop()
        if self._opened is None:
            self._book.close()
            self._opened = self._pool.open(deadline - time.monotonic())
            self._kill_lost_session(self._opened)
        return self._opened

    def _kill_lost_session(self, opened: pymysql.connections.Connection[Any]) -> None:
        """Kill the lost session, which needs no privilege: else its locked jobs are skipped until the server notices.

        Only on the same server without a restart since: else another session may have its id. Ids rise.
        """
        lost, self._lost_session = self._lost_session, None
        before, self._server_identity = self._server_identity, self._pool.server_identity
        if lost is None or _session_id(opened) <= lost or not _is_same_server(before, self._server_identity):
            return
        with contextlib.suppress(pymysql.MySQLError), opened.cursor() as cursor:
            cursor.execute(f"KILL {lost:d}")
            for _ in range(_KILL_CHECKS):
                cursor.execute(f"SELECT 1 FROM information_schema.PROCESSLIST WHERE ID = {lost:d}")  # noqa: S608
                if not cursor.fetchall():
                    break
                time.sleep(_KILL_CHECK_PAUSE)

    def _clean_up(self, session: Session | None) -> None:
        """After an error: roll the transaction back, or close the connection if that is not certain to work."""
        if session is None:
            return
        if session.is_broken:
            if self._opened is not None:
                self._lost_session = _session_id(self._opened)
            self._drop()
        elif session.in_transaction:
            try:
                session.roll_back()
            except (pymysql.MySQLError, OSError):
                self._drop()

    def _drop(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            _drop(opened)


def _read_reply(opened: Any) -> Reply:
    """The result that PyMySQL has read last, without a cursor, which would copy it."""
    result = opened._result  # noqa: SLF001 - PyMySQL's cursors take it from there, too
    return Reply(result.rows or (), result.affected_rows)


def _session_id(opened: Any) -> int:
    """The server's id of a session."""
    return int(opened.thread_id())


def _is_same_server(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    """Whether it is the same server, and running since the same second or so."""
    return before[:-1] == now[:-1] and abs(before[-1] - now[-1]) <= 1


def _leave_to_parent(opened: Any) -> None:
    """In a forked child: close the child's copy of the socket, and leave PyMySQL's reader on it alone.

    A thread of the parent may have been in a read at the fork: in the child the reader's lock stays locked for ever,
    and closing the reader would wait for it.
    """
    sock, opened._sock, opened._rfile = opened._sock, None, None  # noqa: SLF001 - its own way out closes the reader
    if sock is not None:
        with contextlib.suppress(OSError):
            os.close(sock.detach())


def _drop(opened: pymysql.connections.Connection[Any]) -> None:
    """Close the socket without COM_QUIT: that would wait for a hung server, or in a child end the parent's session."""
    with contextlib.suppress(Exception):
        opened._force_close()  # type: ignore[attr-defined]  # noqa: SLF001 - close() sends COM_QUIT
