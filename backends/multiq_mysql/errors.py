"""Classifies errors of the server and of PyMySQL, and translates them into multiq's exceptions."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pymysql
from pymysql.constants.CR import CR_MALFORMED_PACKET

from multiq.driverkit.call_retry import Failure
from multiq.driverkit.resolver import NameTimeoutError
from multiq.errors import BackendCorrupt, BackendError, BackendFull, BackendTimeout, BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.errors import MultiqError

DEADLOCK, LOCK_WAIT, CHANGED, REFUSED_BY_GROUP = 1213, 1205, 1020, 3101
_LOCKED = frozenset({DEADLOCK, LOCK_WAIT, CHANGED})
"""Another transaction's lock or change prevented the statement. InnoDB ends a transaction to break a deadlock. Galera
reports 1213 at COMMIT, too.
"""
CONFLICTS = _LOCKED | {REFUSED_BY_GROUP}
"""The errors after which the whole transaction is run again. Group Replication reports 3101 for a conflict with another
node's transaction.
"""
NOT_PREPARED = 1047
"""The error of a Galera node that is joining its cluster."""

_LOST = frozenset(
    {
        0,  # PyMySQL: already closed
        2003,  # cannot connect
        2006,  # gone away
        2013,  # lost during the query
        2014,  # out of sync
        2026,  # TLS
        2027,  # malformed
        2055,  # lost, with the system's error
        1053,  # shutting down
        1080,  # forced close
        1158, 1159, 1160, 1161,  # the server's own network errors
        1927,  # killed (MariaDB)
        3169,  # killed (MySQL)
        4031,  # idle for too long (MySQL)
    }
)  # fmt: skip

_UNSENT = frozenset({0, 2006})

READ_ONLY = frozenset({1290, 1792, 1836})
"""Errors of a server that is a replica."""

_UNAVAILABLE = {
    1040: "takes no more connections: raise max_connections, or use fewer processes",
    1047: "takes no commands: this node is not in its Galera cluster, or has left it; name another node",
    1129: "has blocked this host after too many failed connections: run FLUSH HOSTS on it",
    1203: "allows this user no more connections: raise max_user_connections",
    1226: "allows this user no more connections or queries for now: raise its limits",
    1290: "is read-only: name the primary, not a replica",
    1317: "has ended the query because of a KILL QUERY",
    1792: "is read-only: name the primary, not a replica",
    1836: "is read-only: name the primary, not a replica",
    1969: "ended a query that took longer than its max_statement_time",
    3101: "rolled the transaction back each time, as Group Replication does when another node has changed the same "
    "rows: let all workers use one node",
    3024: "ended a query that took longer than its max_execution_time",
}

_REFUSED = {
    1044: "does not let this user into the database: GRANT it SELECT, INSERT, UPDATE and DELETE there",
    1045: "refuses this user or its password",
    1049: "has no such database: CREATE DATABASE it first",
    1142: "does not let this user do this: GRANT it SELECT, INSERT, UPDATE and DELETE on the database",
    1143: "does not let this user do this: GRANT it SELECT, INSERT, UPDATE and DELETE on the database",
    1227: "does not let this user do this",
    1130: "accepts no connections from this host: CREATE USER for it, or use another host",
    1251: "requires an authentication method that PyMySQL does not know",
    1524: "requires an authentication plugin that is not loaded in it",
    1598: "writes its binary log by statement, which READ COMMITTED does not allow: set binlog_format to ROW or MIXED",
    1665: "writes its binary log by statement, which READ COMMITTED does not allow: set binlog_format to ROW or MIXED",
    1698: "refuses this user: it may only log in from its own account, over the UNIX socket",
    2061: "requires an authentication method that PyMySQL lacks: pip install 'PyMySQL[rsa]', or use TLS",
}

_FULL = {
    1021: "has a full disk",
    1037: "is out of memory",
    1038: "is out of memory for sorting",
    1041: "is out of memory",
    1114: "has no room left in its tables",
    1871: "has no room left for undo",
}

_TABLES_GONE = {
    1054: "lacks a column that multiq made: its tables were changed, or are of another version; "
    "run `multiq schema check`",
    1146: "lacks a table that multiq made: it was dropped or renamed; restore it, or make an empty one: run "
    "what `multiq schema show-sql` prints",
    1932: "cannot open a table of multiq's: look at the server's log",
}


GARBLED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,  # the server requests a local file (never sent), or a package is missing
    TypeError,
    ValueError,
    struct.error,
)
"""The exceptions that PyMySQL raises while it reads a malformed reply."""


def malformed(exc: BaseException) -> pymysql.OperationalError:
    """Return PyMySQL's own error for a malformed reply. The connection cannot be used after it."""
    return pymysql.OperationalError(CR_MALFORMED_PACKET, f"malformed reply: {repr(exc)[:200]}")


def code_of(exc: BaseException) -> int | None:
    """Return the error's number, which the server or the client library has set. None for an error without a number."""
    number = exc.args[0] if exc.args else None
    return number if isinstance(number, int) else None


def is_lost(exc: BaseException) -> bool:
    """Whether the connection cannot be used after this error.

    If so, it is unknown whether the server has carried out the request.
    """
    number = code_of(exc)
    return isinstance(exc, OSError) or number is None or number in _LOST


def is_unsent(exc: BaseException) -> bool:
    """Whether the server cannot have received the whole packet. PyMySQL uses these error numbers only for this case."""
    return code_of(exc) in _UNSENT


def classify(exc: BaseException, *, is_connected: bool, is_broken: bool) -> Failure:
    """Return the class of an error of the server or of PyMySQL. Transactions write receipts, so they may be repeated.

    *is_broken*: whether the connection cannot be used any more, because the reply was not read to its end.
    """
    number = code_of(exc)
    if number in CONFLICTS:
        return Failure.CONFLICT
    if number == NOT_PREPARED:
        return Failure.REJECTED
    if not is_connected:
        return Failure.UNREACHABLE
    if number in READ_ONLY:
        return Failure.STALE
    if is_broken:
        return Failure.STALE if is_unsent(exc) else Failure.REPLY_LOST
    return Failure.FINAL


def reason_of(errors: Sequence[BaseException]) -> BaseException:
    """Return the error that explains the failure of a call. *errors*: the errors of its attempts.

    If the last attempt got no reply in time, and an earlier attempt waited for a lock in vain, the last attempt most
    likely waited for the same lock.
    """
    last = errors[-1]
    waits = [exc for exc in errors if code_of(exc) == LOCK_WAIT]
    return waits[-1] if waits and _is_timeout(last) else last


def explain(exc: BaseException, place: str, timeout: float) -> MultiqError:
    """Return the ``MultiqError`` for an error of the server or of PyMySQL. *place* is the server's address."""
    number = code_of(exc)
    if isinstance(exc, NameTimeoutError):
        return BackendTimeout(f"{place} has a name that was not found within {timeout:g} s: look at this machine's DNS")
    if _is_timeout(exc):
        return BackendTimeout(
            f"{place} did not answer within {timeout:g} s ({exc}): look at the server's load, or wait longer with "
            "?timeout= in the URL"
        )
    if number in _LOCKED:
        return BackendTimeout(
            f"{place} could not get a lock within {timeout:g} s ({exc}): look for a transaction that is kept open, or "
            "wait longer with ?timeout= in the URL; if this program itself has the transaction open, pass the "
            "transaction's connection as connection=, or end the transaction first"
        )
    named: tuple[tuple[dict[int, str], type[BackendError]], ...] = (
        (_UNAVAILABLE, BackendUnavailable),
        (_REFUSED, BackendUnavailable),
        (_FULL, BackendFull),
        (_TABLES_GONE, BackendCorrupt),
    )
    for sentences, error in named:
        if number is not None and number in sentences:
            return error(f"{place} {sentences[number]} ({exc})")
    if is_lost(exc):
        return BackendUnavailable(f"{place} cannot be reached, or went away ({exc})")
    return BackendError(f"{place} failed: {exc}")


def _is_timeout(exc: BaseException) -> bool:
    return isinstance(exc, TimeoutError) or "timed out" in str(exc)
