"""Checks how a MySQL or MariaDB server is set up for jobs: durability, speed, limits and access.

The checks only read. The server may refuse a statement to an account that lacks a privilege. Such a check is reported
as unknown, never as ok.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import statistics
import time
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import pymysql

from multiq.backend import Finding
from multiq.errors import BackendCorrupt

from . import schema
from .errors import explain
from .opening import open_connection
from .records import body_limit
from .waiting import IDLE_POLL

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pymysql.connections import Connection

    from multiq.bench.adapter import Survives

    from .dsn import Dsn

_PINGS = 20
_SLOW = 0.010  # seconds; a worker makes a few round trips per batch of jobs
_SKEW = 1.0  # seconds
_LONG_HISTORY = 100_000  # transactions in InnoDB's history list, which are not purged yet
_OLD_SNAPSHOT = 60  # seconds
_SMALL_PACKET = 1 << 20  # bytes
_NEARLY_ALL = 0.9  # share of max_connections
_OLDEST_MARIADB = (10, 6)
_OLDEST_MYSQL = (8, 0, 1)

_ASK_ADMIN = "ask who runs the server, or GRANT this user PROCESS"
_ON = frozenset({"1", "ON", "YES"})


class Examinable(Protocol):
    dsn: Dsn
    timeout: float


def examine(backend: Examinable) -> list[Finding]:
    """Return the findings about the server, the database and the connection. Raises ``BackendError``."""
    dsn = backend.dsn
    try:
        with contextlib.closing(open_connection(dsn, backend.timeout, autocommit=True)) as connection:
            return list(_findings(_Server(connection, dsn)))
    except (pymysql.MySQLError, OSError) as exc:
        raise explain(exc, dsn.place, backend.timeout) from exc


class _Server(NamedTuple):
    connection: Connection[Any]
    dsn: Dsn

    def rows(self, text: str) -> tuple[tuple[Any, ...], ...]:
        with self.connection.cursor() as cursor:
            cursor.execute(text)
            return tuple(cursor.fetchall())

    def rows_or_none(self, text: str) -> tuple[tuple[Any, ...], ...] | None:
        """Return the rows. None if this user may not run the statement, or if this kind of server does not know it."""
        try:
            return self.rows(text)
        except (pymysql.OperationalError, pymysql.ProgrammingError, pymysql.InternalError):
            if not self.connection.open:
                raise
            return None


def _findings(server: _Server) -> Iterator[Finding]:
    settings = {str(name).lower(): str(value) for name, value in server.rows("SHOW GLOBAL VARIABLES")}
    yield _latency(server)
    yield _clock(server)
    yield _version(settings)
    yield from _tables(server)
    yield from _durability(settings)
    yield from _writable(settings)
    yield from _sessions(settings)
    yield from _purge(server)
    yield from _limits(server, settings)
    yield _polling()
    yield from _access(server)
    yield _durability_summary(settings)


# --- the connection ---------------------------------------------------------------------------------------


def _latency(server: _Server) -> Finding:
    times = []
    for _ in range(_PINGS):
        start = time.perf_counter()
        server.rows("SELECT 1")
        times.append(time.perf_counter() - start)
    median = statistics.median(times)
    found = f"a round trip takes {median * 1000:.2f} ms, the slowest of {_PINGS} took {max(times) * 1000:.2f} ms"
    if median > _SLOW:
        return Finding("warn", "latency", found, "bring workers and server closer: each batch takes a few round trips")
    return Finding("ok", "latency", found)


def _clock(server: _Server) -> Finding:
    before = time.time()
    ((theirs,),) = server.rows("SELECT UNIX_TIMESTAMP(SYSDATE(6))")
    after = time.time()
    skew = float(theirs) - (before + after) / 2
    if abs(skew) > _SKEW + (after - before) / 2:
        return Finding(
            "warn",
            "clock",
            f"the server's is {abs(skew):,.1f} s {'ahead of' if skew > 0 else 'behind'} this machine's: delays and "
            "leases are not affected, but a time given with at= is off by as much",
            "run NTP on both",
        )
    return Finding("ok", "clock", f"within {_SKEW:g} s of this machine's")


def name_and_version(settings: Mapping[str, str]) -> str:
    """The server's name and version, such as ``MariaDB 10.11.6-MariaDB-0``."""
    text = settings.get("version", "")
    return f"{'MariaDB' if 'mariadb' in text.lower() else 'MySQL'} {text}"


def _version(settings: Mapping[str, str]) -> Finding:
    text, shown = settings.get("version", ""), name_and_version(settings)
    numbers = tuple(map(int, re.findall(r"\d+", text.removeprefix("5.5.5-"))[:3]))
    name = shown.partition(" ")[0]
    oldest = _OLDEST_MARIADB if name == "MariaDB" else _OLDEST_MYSQL
    if not numbers:
        return Finding(
            "unknown", "version", "the server does not report its version", "it must be MySQL 8.0.1 or MariaDB 10.6"
        )
    if numbers < oldest:
        needed = ".".join(map(str, oldest))
        return Finding("bad", "version", f"{shown} lacks SKIP LOCKED", f"upgrade to {name} {needed} or newer")
    if re.search(r"tidb|vitess|singlestore", text, re.IGNORECASE):
        return Finding(
            "warn", "version", f"{shown} speaks MySQL's protocol but is not MySQL: multiq was never run on it"
        )
    return Finding("ok", "version", shown)


# --- the tables ------------------------------------------------------------------------------------------


def _tables(server: _Server) -> Iterator[Finding]:
    try:
        found, needed = schema.look(server.connection), len(schema.shipped())
    except BackendCorrupt as exc:
        yield Finding("bad", "tables", str(exc))
        return
    if not found.version:
        yield Finding(
            "unknown", "tables", "multiq has not made its tables here yet", "run multiq schema up, then this command"
        )
        return
    if found.version < needed:
        yield Finding(
            "bad", "tables", f"version {found.version}: this multiq needs {needed}, and refuses to work",
            "run multiq schema up",
        )  # fmt: skip
    elif found.oldest > needed:
        yield Finding(
            "bad", "tables", f"version {found.version}, usable only with a multiq for version {found.oldest} or newer",
            "upgrade multiq here",
        )  # fmt: skip
    else:
        yield Finding("ok", "tables", f"version {found.version}; this multiq needs {needed}")
    yield _engine(server)


def _engine(server: _Server) -> Finding:
    others = server.rows(
        "SELECT table_name, engine FROM information_schema.tables WHERE table_schema = DATABASE() "
        "AND table_name LIKE 'multiq\\_%' AND engine <> 'InnoDB'"
    )
    if others:
        shown = ", ".join(f"{name} is {engine}" for name, engine in others)
        return Finding(
            "bad", "engine", f"{shown}: without transactions, jobs get lost or run twice",
            "ALTER TABLE each to ENGINE=InnoDB",
        )  # fmt: skip
    return Finding("ok", "engine", "InnoDB")


# --- durability ------------------------------------------------------------------------------------------


def _durability(settings: Mapping[str, str]) -> Iterator[Finding]:
    flush = settings.get("innodb_flush_log_at_trx_commit")
    if flush is None:
        yield Finding("unknown", "innodb_flush_log_at_trx_commit", "the server does not report it", _ASK_ADMIN)
    elif flush in {"1", "3"}:
        yield Finding("ok", "innodb_flush_log_at_trx_commit", f"{flush}: each commit is on the disk")
    else:
        lost = {"0": "or a killed server loses", "2": "loses"}.get(flush, "loses")
        yield Finding(
            "warn",
            "innodb_flush_log_at_trx_commit",
            f"{flush}: a power failure {lost} the last second's jobs and verdicts",
            "set it to 1, unless these jobs may be lost",
        )
    if settings.get("innodb_doublewrite", "ON").upper() not in {*_ON, "DETECT_AND_RECOVER"}:
        yield Finding(
            "warn",
            "innodb_doublewrite",
            f"{settings['innodb_doublewrite']}: a power failure can leave torn pages and make the tables unusable",
            "switch it on, unless the file system never tears a page",
        )
    if settings.get("log_bin", "OFF").upper() in _ON:
        yield from _binlog(settings)


def _binlog(settings: Mapping[str, str]) -> Iterator[Finding]:
    sync = settings.get("sync_binlog", "1")
    if sync == "1":
        yield Finding("ok", "sync_binlog", "1: after a power failure, the binary log has all committed transactions")
    else:
        yield Finding(
            "warn",
            "sync_binlog",
            f"{sync}: after a power failure, the binary log and the replicas may lack committed transactions",
            "set it to 1",
        )
    form = settings.get("binlog_format", "ROW").upper()
    if form == "STATEMENT":
        yield Finding(
            "bad",
            "binlog_format",
            "STATEMENT: the server refuses all changes in READ COMMITTED, which multiq's sessions use",
            "set it to ROW or MIXED",
        )
    else:
        yield Finding("ok", "binlog_format", form)


def _writable(settings: Mapping[str, str]) -> Iterator[Finding]:
    names = ("read_only", "super_read_only", "innodb_read_only")
    closed = [name for name in names if settings.get(name, "OFF").upper() not in {"OFF", "0", "NO"}]
    if closed:
        yield Finding(
            "bad", "read_only", f"{', '.join(closed)} is on: a replica, or an operator has made the server read-only",
            "name the primary",
        )  # fmt: skip
    else:
        yield Finding("ok", "read_only", "off: the server accepts changes")
    if settings.get("wsrep_on", "OFF").upper() in _ON:
        yield Finding(
            "warn",
            "wsrep_on",
            "a Galera cluster: nodes do not see one another's row locks, so two consumers may reserve the same job and "
            "one of their commits fails; no job runs twice, but this is slow",
            "name the same node for all workers",
        )


# --- other sessions --------------------------------------------------------------------------------------


def _sessions(settings: Mapping[str, str]) -> Iterator[Finding]:
    isolation = settings.get("transaction_isolation") or settings.get("tx_isolation") or "unknown"
    yield Finding("ok", "isolation", f"READ COMMITTED in multiq's sessions; the server's default is {isolation}")


def _purge(server: _Server) -> Iterator[Finding]:
    length = _history(server)
    if length is None:
        yield Finding("unknown", "history list", "this user may not ask how far purge lags behind", _ASK_ADMIN)
    elif length > _LONG_HISTORY:
        yield Finding(
            "warn",
            "history list",
            f"{length:,} transactions wait to be purged: scans step over all rows that they deleted, finished jobs too",
            "end the oldest snapshot, if there is one; else give purge more threads (innodb_purge_threads)",
        )
    else:
        yield Finding("ok", "history list", f"{length:,} transactions wait to be purged")
    snapshots = server.rows_or_none(
        "SELECT trx_mysql_thread_id, TIMESTAMPDIFF(SECOND, trx_started, NOW()) FROM information_schema.innodb_trx "
        "WHERE trx_mysql_thread_id NOT IN (0, CONNECTION_ID()) ORDER BY trx_started LIMIT 1"
    )
    if snapshots is None:
        yield Finding("unknown", "oldest snapshot", "this user may not see others' transactions", _ASK_ADMIN)
        return
    if not snapshots:
        yield Finding("ok", "oldest snapshot", "no transaction is open")
        return
    ((thread, age),) = snapshots
    if age >= _OLD_SNAPSHOT:
        yield Finding(
            "warn",
            "oldest snapshot",
            f"connection {thread} has had a transaction open for {age:,} s: rows deleted since then cannot be purged",
            f"have that program commit, or KILL {thread}; run long reports on a replica",
        )
    else:
        yield Finding("ok", "oldest snapshot", f"the oldest open transaction is {age} s old")


def _history(server: _Server) -> int | None:
    for poll in (
        "SHOW GLOBAL STATUS LIKE 'Innodb_history_list_length'",  # MariaDB
        "SELECT name, count FROM information_schema.innodb_metrics WHERE name = 'trx_rseg_history_len'",
    ):
        rows = server.rows_or_none(poll)
        if rows:
            return int(rows[0][1])
    return None


def _limits(server: _Server, settings: Mapping[str, str]) -> Iterator[Finding]:
    packet = int(settings.get("max_allowed_packet", 0))
    found = f"{packet:,} bytes: a body may have {body_limit(packet):,}"
    if packet < _SMALL_PACKET:
        yield Finding("warn", "max_allowed_packet", found, "raise it to 16M: batches and large bodies need it")
    else:
        yield Finding("ok", "max_allowed_packet", found)
    most = int(settings.get("max_connections", 0))
    used = int(dict(server.rows("SHOW GLOBAL STATUS LIKE 'Threads_connected'")).get("Threads_connected", 0))
    if most and used > most * _NEARLY_ALL:
        yield Finding(
            "warn", "max_connections", f"{used} of {most} are in use; a worker process needs one or two",
            "raise it, or run fewer processes",
        )  # fmt: skip
    else:
        yield Finding("ok", "max_connections", f"{used} of {most} are in use")


def _polling() -> Finding:
    worst, often = round(IDLE_POLL * 1100), round(1 / IDLE_POLL)
    return Finding(
        "ok",
        "polling",
        f"the server cannot notify clients: an idle worker process polls about {often} times a second, so a job from "
        f"another process begins up to {worst} ms and a round trip late; a job from the same process begins at once",
    )


# --- access -----------------------------------------------------------------------------------


def _access(server: _Server) -> Iterator[Finding]:
    dsn = server.dsn
    if dsn.host is None or _is_loopback(dsn.host):
        yield Finding("ok", "address", "this URL leads to this machine")
        return
    cipher = server.rows_or_none("SHOW SESSION STATUS LIKE 'Ssl_cipher'")
    if not cipher or not cipher[0][1]:
        yield Finding(
            "warn", "encryption", "jobs cross the network unencrypted", "add ?tls=yes to the URL, or use a tunnel"
        )
    else:
        yield Finding("ok", "encryption", str(cipher[0][1]))
    if not dsn.password:
        yield Finding(
            "bad",
            "password",
            "this user has no password: anyone who reaches the address can read, change and delete all jobs",
            "ALTER USER ... IDENTIFIED BY a password",
        )
    else:
        yield Finding("ok", "password", "needed")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# --- consequences ----------------------------------------------------------------------------------------


def survives(settings: Mapping[str, str]) -> Survives:
    """Return the worst event that a job survives on a server with these settings, after the enqueue of the job has
    returned."""
    flush = settings.get("innodb_flush_log_at_trx_commit")
    if flush is None:
        return "unknown"
    if flush in {"1", "3"}:
        return "power loss"
    return "server crash" if flush == "2" else "client crash"


def _durability_summary(settings: Mapping[str, str]) -> Finding:
    """Return a finding with the statement of ``docs/durability.md`` about these settings."""
    if "innodb_flush_log_at_trx_commit" not in settings:
        return Finding(
            "unknown",
            "durability",
            "the server does not show what survives a crash",
            _ASK_ADMIN,
        )
    level: Literal["ok", "warn"] = "ok"
    outlived = survives(settings)
    if outlived == "power loss":
        kept = "a killed server and a power failure"
    elif outlived == "server crash":
        level, kept = "warn", "a killed server, but a power failure loses the last second's jobs"
    else:
        level, kept = "warn", "a killed worker, but a killed server or a power failure loses the last second's jobs"
    return Finding(level, "durability", f"acknowledged jobs survive {kept}; a failover loses jobs that replicas lack")
