"""The doctor checks whether a beanstalkd's log, limits, access and tubes suit jobs.

The doctor sends only commands that read, and puts no job. The server's replies do not show most of its options. If the
server runs on this machine, its options are read from its command line. If not, the options are reported as
``unknown``, never as ``ok``.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from multiq.backend import Finding

from .local_process import is_loopback, listening_on, options_of_process

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from multiq.bench.adapter import Survives

Ask: TypeAlias = Callable[[bytes], bytes | None]
"""Sends a command. Returns the body of an ``OK`` reply, or None for ``NOT_FOUND``. Raises ``BackendError``."""

_OLDEST = (1, 8)  # the first version with kick-job
_TRIED = (1, 12)  # the version that multiq is tested with, and the first that syncs its log by default
_CRASHES_UP_TO = (1, 13)  # the newest release; all releases have a bug that crashes the server
_PINGS = 20
_SLOW = 0.010  # seconds; a worker makes one round trip per batch of jobs
_TUBES = 1000  # the largest number of tubes that are examined
_NAMED = 5  # the largest number of tubes that a finding names
_LARGE_LOG = 100  # files of a log; more files give a warning

_ASK_OPERATOR = "ask the operator of the server"


class Server(NamedTuple):
    """One server's stats and command line."""

    stats: Mapping[str, str]
    later: Mapping[str, str]
    """The server's stats, read some round trips after the first stats."""
    options: Mapping[str, str] | None
    """The options of the command line, ``{"b": "/var/lib/beanstalkd", "F": ""}``. None: the command line cannot be
    read."""
    address: tuple[str, int] | str

    @property
    def has_log(self) -> bool:
        return _number(self.stats, "binlog-current-index") > 0


def examine(ask: Ask, address: tuple[str, int] | str) -> list[Finding]:
    """Return the findings on one server. *address* is a host and port or a socket's path. Raises ``BackendError``."""
    stats = pairs(ask(b"stats"))
    latency = _latency(ask)
    server = read_server(ask, address, stats)
    return [latency, *_findings(server), *_tubes(ask, stats), _promise(server)]


def read_server(ask: Ask, address: tuple[str, int] | str, stats: Mapping[str, str]) -> Server:
    """Read the server once more. *stats* are from the first read. Raises ``BackendError``."""
    options = None
    if isinstance(address, str) or is_loopback(address[0]):
        options = options_of_process(_number(stats, "pid"), stats.get("hostname"))
    return Server(stats, pairs(ask(b"stats")), options, address)


def _findings(server: Server) -> Iterator[Finding]:
    yield _version(server.stats)
    yield _draining(server.stats)
    if server.has_log:
        yield Finding("ok", "-b", "it writes a log, and reads it when it starts")
        yield _sync(server)
        yield _log(server)
        yield _size_of_log(server.stats)
    else:
        yield Finding(
            "bad",
            "-b",
            "no: a restart or a crash of the server loses all jobs",
            "start it with -b and a folder, and with -f0",
        )
    yield from _restart(server.stats)
    yield _largest_body(server)
    yield _access(server)


# --- version, latency, limits ------------------------------------------------------------------------------


def _latency(ask: Ask) -> Finding:
    times = []
    for _ in range(_PINGS):
        start = time.perf_counter()
        ask(b"stats")
        times.append(time.perf_counter() - start)
    median = statistics.median(times)
    found = f"a round trip takes {median * 1000:.2f} ms, the slowest of {_PINGS} took {max(times) * 1000:.2f} ms"
    if median > _SLOW:
        return Finding(
            "warn", "latency", found, "bring workers and server closer together: each batch costs a round trip"
        )
    return Finding("ok", "latency", found)


def _version(stats: Mapping[str, str]) -> Finding:
    shown = stats.get("version", "")
    version = _version_of(stats)
    if version is None:
        return Finding(
            "unknown",
            "version",
            f"it must be a number, got {shown or 'none'}",
            f"it must be {_dotted(_OLDEST)} or newer",
        )
    if version < _OLDEST:
        return Finding("bad", "version", f"{shown}: it lacks kick-job", f"use {_dotted(_TRIED)} or newer")
    if version < _TRIED:
        return Finding(
            "warn",
            "version",
            f"{shown}: multiq is not tested with it, and without -f it never syncs its log",
            f"use {_dotted(_TRIED)} or newer",
        )
    return Finding("ok", "version", shown)


def _restart(stats: Mapping[str, str]) -> Iterator[Finding]:
    """Check whether a service manager restarts the server after a crash. No reply of the server shows this."""
    version = _version_of(stats)
    if version is None or version > _CRASHES_UP_TO:
        return
    yield Finding(
        "unknown",
        "restart",
        f"a bug of beanstalkd up to {_dotted(_CRASHES_UP_TO)} crashes it now and then (docs/beanstalk.md, "
        '"The server can crash"); whether a service manager restarts it is unknown',
        "run it under a service manager with restarts: Restart=always for systemd, which Debian's unit lacks",
    )


def _draining(stats: Mapping[str, str]) -> Finding:
    if stats.get("draining") == "true":
        return Finding(
            "bad", "draining", "yes: it refuses all new jobs until a restart", "restart it when its queues are empty"
        )
    return Finding("ok", "draining", "no: it takes new jobs")


def _largest_body(server: Server) -> Finding:
    limit = _number(server.stats, "max-job-size")
    if server.has_log:
        found = f"{limit:,} bytes; multiq uses all but two, as the server cannot read a larger body from its log"
    else:
        found = f"{limit:,} bytes: it refuses larger bodies, unless it is started with a larger -z"
    return Finding("ok", "max-job-size", found)


# --- its log ---------------------------------------------------------------------------------------------


def _sync(server: Server) -> Finding:
    """Check how often the server syncs its log (``-f``). No reply of the server shows this."""
    if server.options is None:
        return Finding(
            "unknown",
            "-f",
            "how often it syncs its log is unknown, and a power failure loses what was not synced",
            f"{_ASK_OPERATOR}: only -f0 syncs before each reply",
        )
    wait = _sync_ms(server)
    if wait == 0:
        return Finding("ok", "-f", "0: what was acknowledged survives a power failure")
    found = "never" if wait is None else f"at most every {wait:,} ms, and only while more is written"
    return Finding(
        "warn",
        "-f",
        f"it syncs its log {found}: a power failure loses the last jobs and verdicts; a killed server loses nothing",
        "start it with -f0 if that is too much",
    )


def _sync_ms(server: Server) -> int | None:
    """Return the milliseconds between two syncs of the log, or None if it is never synced.

    If the command line has several ``-f`` and ``-F``, the last one applies.
    """
    options = server.options or {}
    last = next((name for name in reversed(list(options)) if name in "fF"), None)
    if last == "f" and options["f"].isdigit():
        return int(options["f"])
    if last == "F" or (_version_of(server.stats) or _TRIED) < _TRIED:
        return None
    return 50


def _log(server: Server) -> Finding:
    """Check whether the server still writes its log. After a failed write, the server writes no records until it is
    restarted.

    The server counts the records of its log. Each put and each delete of a job makes one record. If the log has fewer
    records than there were puts and deletes, the log is off, or puts have buried jobs that are not in the log. Delayed
    releases, burials and kicks make records, too, but the server has no exact counts of these events. After N such
    events, a failed log is noticed only when N more records are missing.
    """
    missing = max(_missing(server.stats), _missing(server.later), _missing_since(server.stats, server.later))
    if missing > 0:
        return Finding(
            "bad",
            "binlog-records-written",
            f"at least {missing:,} changes are not in the log: it is off since a write to it failed, and a restart "
            "loses all jobs put since then",
            "look at its disk, let workers empty its queues, and restart it",
        )
    count = _number(server.later, "binlog-records-written")
    return Finding("ok", "binlog-records-written", f"{count:,} since it started, enough for its puts and deletes")


def _missing(stats: Mapping[str, str]) -> int:
    """Return the number of puts and deletes since the server's start that are certainly missing from the log."""
    put = _number(stats, "total-jobs")
    deleted = max(0, put - sum(_number(stats, f"current-jobs-{state}") for state in _STATES))
    return put + deleted - _records(stats)


def _missing_since(before: Mapping[str, str], after: Mapping[str, str]) -> int:
    """Return the number of puts between two reads of the stats that are certainly missing from the log."""
    put = _number(after, "total-jobs") - _number(before, "total-jobs")
    return put - (_records(after) - _records(before))


_STATES = ("ready", "reserved", "delayed", "buried")


def _records(stats: Mapping[str, str]) -> int:
    return _number(stats, "binlog-records-written") - _number(stats, "binlog-records-migrated")


def _size_of_log(stats: Mapping[str, str]) -> Finding:
    files = _number(stats, "binlog-current-index") - _number(stats, "binlog-oldest-index") + 1
    size = files * _number(stats, "binlog-max-size")
    found = f"{files:,} file{'s' if files > 1 else ''}, up to {size / 1e6:,.0f} MB"
    if files > _LARGE_LOG:
        return Finding(
            "warn",
            "binlog-oldest-index",
            f"{found}: a file stays while a job exists in it or in an older file",
            "look for old buried or long delayed jobs",
        )
    return Finding("ok", "binlog-oldest-index", found)


# --- access ----------------------------------------------------------------------------------------------


def _access(server: Server) -> Finding:
    """Check who can reach the server. beanstalkd has no passwords, so any client can read, change and delete all
    jobs."""
    open_to_all = "any client can read, change and delete all jobs, as beanstalkd has no passwords"
    if isinstance(server.address, str):
        return Finding("ok", "address", "this URL reaches the server only from this machine")
    host, port = server.address
    if not is_loopback(host):
        return Finding(
            "warn",
            "address",
            f"{host} can be reached over the network: {open_to_all}",
            "use a firewall, or a tunnel with TLS",
        )
    listeners = listening_on(port)
    if not listeners:
        return Finding(
            "unknown",
            "address",
            "whether it also listens on other addresses than loopback is unknown",
            f"{_ASK_OPERATOR}: it needs -l 127.0.0.1, or a firewall",
        )
    exposed = [address for address in listeners if not is_loopback(address)]
    if exposed:
        return Finding(
            "warn",
            "address",
            f"it listens on {', '.join(exposed)}, not just on loopback: {open_to_all}",
            "start it with -l 127.0.0.1, or use a firewall",
        )
    return Finding("ok", "address", "this machine only: it listens on loopback")


# --- its tubes -------------------------------------------------------------------------------------------


def _tubes(ask: Ask, stats: Mapping[str, str]) -> Iterator[Finding]:
    names = [line[2:] for line in (ask(b"list-tubes") or b"").splitlines() if line.startswith(b"- ")]
    forgotten = [name.decode() for name in names[:_TUBES] if _is_forgotten(ask, name, stats)]
    looked_at = f"{min(len(names), _TUBES):,} tubes" + (f" (of {len(names):,})" if len(names) > _TUBES else "")
    if forgotten:
        shown = ", ".join(forgotten[:_NAMED]) + (", ..." if len(forgotten) > _NAMED else "")
        yield Finding(
            "warn",
            "current-watching",
            f"ready jobs but no consumer in {len(forgotten):,} of {looked_at}: {shown}",
            "start a worker for them, or purge them",
        )
    else:
        yield Finding("ok", "current-watching", f"all tubes with ready jobs have a consumer; examined {looked_at}")


def _is_forgotten(ask: Ask, name: bytes, stats: Mapping[str, str]) -> bool:
    tube = pairs(ask(b"stats-tube " + name))  # the tube may have been deleted meanwhile
    if not _number(tube, "current-jobs-ready"):
        return False
    if name == b"default":  # every new connection watches this tube
        return not _number(stats, "current-workers")
    return not _number(tube, "current-watching")


# --- durability ----------------------------------------------------------------------------------------


def survives(server: Server) -> Survives:
    """Return the worst event that an enqueued job survives."""
    if not server.has_log or _log(server).level != "ok":
        return "client crash"
    if server.options is None:
        return "unknown"
    return "power loss" if _sync_ms(server) == 0 else "server crash"


def _promise(server: Server) -> Finding:
    """Return a finding with the column of ``docs/durability.md`` that applies to the server's options."""
    if not server.has_log:
        return Finding("warn", "durability", "acknowledged jobs survive killed workers only")
    outlived = survives(server)
    if outlived == "client crash":
        return Finding("bad", "durability", "acknowledged jobs survive killed workers only, as the log is off")
    if outlived == "unknown":
        return Finding(
            "unknown",
            "durability",
            "acknowledged jobs survive a killed server; whether they survive a power failure is unknown",
            _ASK_OPERATOR,
        )
    if outlived == "power loss":
        return Finding("ok", "durability", "acknowledged jobs survive a killed server and a power failure")
    return Finding(
        "warn",
        "durability",
        "acknowledged jobs survive a killed server, and a power failure except for its last moments",
    )


# --- parsing ---------------------------------------------------------------------------------------------


def pairs(body: bytes | None) -> dict[str, str]:
    """Parse the body of ``stats`` and similar replies into a dictionary."""
    lines = (line.partition(": ") for line in (body or b"").decode(errors="replace").splitlines() if ": " in line)
    return {name: value.strip().strip('"') for name, _, value in lines}


def _number(stats: Mapping[str, str], name: str) -> int:
    value = stats.get(name, "0")
    return int(value) if value.isdigit() else 0


def _version_of(stats: Mapping[str, str]) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", stats.get("version", ""))
    return (int(found[1]), int(found[2])) if found else None


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
