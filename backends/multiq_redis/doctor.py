"""The doctor checks whether a Redis server's persistence, eviction, access and replication suit jobs.

The doctor only reads. If the server refuses a command to this account, the finding is ``unknown``, never ``ok``.
"""

from __future__ import annotations

import contextlib
import ipaddress
import statistics
import time
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import hiredis

from multiq.backend import Finding

from .connection import OLDEST, pack
from .errors import FAILURES, explain
from .redis_py_import import redis_py
from .servers import format_address

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from multiq.bench.adapter import Survives
    from multiq.driverkit.net import Address

    from .connection import Connection, Word
    from .servers import Servers

_PINGS = 20
_SLOW = 0.010  # seconds; a worker makes one round trip per batch of jobs
_SKEW = 1.0  # seconds
_NEARLY_FULL = 0.9  # share of maxmemory
_SLOTS = "16384"
_UNBLOCK_FIXED = {
    "redis": (8, 2),
    "valkey": (9, 0),
}  # the first minor releases with the fix (some older patch releases have the fix, too)

_CONFIG_FORBIDDEN = "this account may not read it (CONFIG is forbidden)"
_ASK_ADMINISTRATOR = "ask the server's administrator, or allow this account +config|get"


def examine(servers: Servers) -> list[Finding]:
    """Return the findings on all servers of a URL. Raises ``BackendError`` if a server cannot be reached."""
    redis_py()  # imported now, because the import would slow down the first answer
    deadline = time.monotonic() + servers.timeout
    addresses = servers.all_addresses(deadline)
    found = {address: _examine(servers, address) for address in addresses}
    if len(found) == 1:
        return found[addresses[0]]
    return _merged(found)


def _merged(found: Mapping[Address, Sequence[Finding]]) -> list[Finding]:
    """Merge findings that are the same on all servers."""
    merged: list[Finding] = []
    everything = [(address, finding) for address, findings in found.items() for finding in findings]
    for what in dict.fromkeys(finding.what for _, finding in everything):
        same = [(address, finding) for address, finding in everything if finding.what == what]
        if len(same) == len(found) and len({finding.why for _, finding in same}) == 1:
            merged.append(same[0][1])
        else:
            merged += [
                Finding(finding.level, f"{what} ({format_address(address)})", finding.why, finding.advice)
                for address, finding in same
            ]
    return merged


class _Server(NamedTuple):
    connection: Connection
    host: str | None
    """None for a UNIX socket."""
    user: str
    timeout: float
    is_encrypted: bool
    is_cluster: bool

    def ask(self, *words: Word) -> Any:
        """The reply to one command. Raises ``hiredis.ReplyError`` for a refusal."""
        return self.connection.ask(pack(words), time.monotonic() + self.timeout)


def read_settings(servers: Servers) -> list[tuple[dict[str, str], dict[str, str] | None]]:
    """Return each server's ``INFO`` and settings that matter for jobs. The settings are None if CONFIG is forbidden.

    Raises ``BackendError``.
    """
    redis_py()
    found = []
    for address in servers.all_addresses(time.monotonic() + servers.timeout):
        with _session(servers, address) as server:
            found.append((_info(server), _config(server)))
    return found


def _examine(servers: Servers, address: Address) -> list[Finding]:
    with _session(servers, address) as server:
        return list(_findings(server))


@contextlib.contextmanager
def _session(servers: Servers, address: Address) -> Iterator[_Server]:
    try:
        connection = servers.open(address, time.monotonic() + servers.timeout)
        try:
            user, is_encrypted = servers.settings.user, servers.settings.tls is not None
            host = address[0] if isinstance(address, tuple) else None
            yield _Server(connection, host, user, servers.timeout, is_encrypted, servers.is_cluster)
        finally:
            connection.close()
    except (*FAILURES, hiredis.ReplyError) as exc:
        raise explain(exc, format_address(address), servers.timeout) from exc


def _findings(server: _Server) -> Iterator[Finding]:
    info = _info(server)
    config = _config(server)
    yield _latency(server)
    yield _clock(server)
    yield _version(info)
    yield from _persistence(info, config)
    yield from _memory(info, config)
    yield from _access(server)
    yield from _replication(info, config)
    if server.is_cluster:
        yield _cluster(server)
    yield _durability(info, config)


# --- the connection ---------------------------------------------------------------------------------------


def _latency(server: _Server) -> Finding:
    times = []
    for _ in range(_PINGS):
        start = time.perf_counter()
        server.ask("TIME")  # not PING, which a server that cannot save refuses
        times.append(time.perf_counter() - start)
    median = statistics.median(times)
    found = f"a round trip takes {median * 1000:.2f} ms, the slowest of {_PINGS} took {max(times) * 1000:.2f} ms"
    if median > _SLOW:
        return Finding("warn", "latency", found, "bring workers and server closer: each batch takes a round trip")
    return Finding("ok", "latency", found)


def _clock(server: _Server) -> Finding:
    before = time.time()
    seconds, microseconds = server.ask("TIME")
    after = time.time()
    skew = int(seconds) + int(microseconds) / 1e6 - (before + after) / 2
    if abs(skew) > _SKEW + (after - before) / 2:
        return Finding(
            "warn",
            "clock",
            f"the server's is {abs(skew):,.1f} s {'ahead of' if skew > 0 else 'behind'} this machine's: delays and "
            "leases are not affected, but a time given with at= is off by as much",
            "run NTP on both",
        )
    return Finding("ok", "clock", f"within {_SKEW:g} s of this machine's")


def _version(info: Mapping[str, str]) -> Finding:
    name = info.get("server_name", "redis")
    text = info.get(f"{name}_version") or info.get("redis_version", "")
    parts = text.split(".")
    if len(parts) < 2 or not all(part.isdigit() for part in parts[:2]):
        return Finding("unknown", "version", "the server does not report its version", "it must be 6.2 or newer")
    if tuple(map(int, parts[:2])) < OLDEST:
        return Finding("bad", "version", f"{name} {text} lacks what multiq's scripts need", "upgrade to 6.2 or newer")
    number = tuple(int(part) for part in parts if part.isdigit())
    fixed = _UNBLOCK_FIXED.get(name)
    if fixed is None or number >= fixed:
        return Finding("ok", "version", f"{name} {text}")
    return Finding(
        "ok",
        "version",
        f"{name} {text}; versions before {name} {'.'.join(map(str, fixed))} may crash (SIGABRT) when a client sends "
        "CLIENT UNBLOCK while a failover or CLIENT PAUSE holds up writes (redis PR 14164, valkey PR 2117, 2025). "
        "multiq never sends it",
        "let no other program send CLIENT UNBLOCK to this server, or upgrade",
    )


# --- persistence and memory ---------------------------------------------------------------------------------------


def _persistence(info: Mapping[str, str], config: Mapping[str, str] | None) -> Iterator[Finding]:
    if config is None:
        yield Finding("unknown", "appendonly", _CONFIG_FORBIDDEN, _ASK_ADMINISTRATOR)
    elif config.get("appendonly") == "yes":
        yield Finding("ok", "appendonly", "yes: every change goes to a log")
        yield _appendfsync(config.get("appendfsync", ""))
    elif config.get("save"):
        yield Finding(
            "warn",
            "appendonly",
            f"no: there are only snapshots (save {config['save']}); a crash loses all that came after the last one",
            "set appendonly yes",
        )
    else:
        yield Finding(
            "bad",
            "appendonly",
            "no, and there are no snapshots: a restart of the server loses all jobs",
            "set appendonly yes",
        )
    for name, log in (("aof_last_write_status", "log"), ("rdb_last_bgsave_status", "last snapshot")):
        if info.get(name, "ok") != "ok":
            yield Finding(
                "bad", name, f"{info[name]}: the {log} could not be written, and the server may refuse all changes",
                "look at its disk and its log",
            )  # fmt: skip


def _appendfsync(setting: str) -> Finding:
    if setting == "always":
        return Finding("ok", "appendfsync", "always: acknowledged jobs and verdicts survive a power failure")
    lost = {"everysec": "the last second's jobs and verdicts", "no": "those of about the last 30 s"}
    return Finding(
        "warn",
        "appendfsync",
        f"{setting}: a power failure loses {lost.get(setting, 'some jobs and verdicts')}; a killed server loses none",
        "set appendfsync always, unless these jobs may be lost",
    )


def _memory(info: Mapping[str, str], config: Mapping[str, str] | None) -> Iterator[Finding]:
    policy = info.get("maxmemory_policy") or (config or {}).get("maxmemory-policy")
    if policy is None:
        yield Finding("unknown", "maxmemory-policy", _CONFIG_FORBIDDEN, "it must be noeviction")
    elif policy == "noeviction":
        yield Finding("ok", "maxmemory-policy", "noeviction: a full server refuses new jobs, and evicts none")
    else:
        yield Finding(
            "bad",
            "maxmemory-policy",
            f"{policy}: a full server evicts jobs, or parts of them, silently",
            "set maxmemory-policy noeviction",
        )
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    if limit and used > limit * _NEARLY_FULL:
        yield Finding(
            "warn", "maxmemory", f"{used / 1e6:,.0f} of {limit / 1e6:,.0f} MB are used", "drain queues, or raise it"
        )


# --- access -----------------------------------------------------------------------------------


def _access(server: _Server) -> Iterator[Finding]:
    if server.host is None or _is_loopback(server.host):
        yield Finding("ok", "address", "this URL leads to this machine")
        return
    if not server.is_encrypted:
        yield Finding(
            "warn", "encryption", "jobs and the password cross the network unencrypted", "use rediss://, or a tunnel"
        )
    is_open = _needs_no_password(server)
    if is_open is None:
        yield Finding(
            "unknown",
            "password",
            "this account may not read it (ACL is forbidden)",
            "user default must have a password",
        )
    elif is_open:
        yield Finding(
            "bad",
            "password",
            "user default has no password: any host that reaches the address can read, change and delete all jobs",
            "set requirepass, or ACL SETUSER default off",
        )
    else:
        yield Finding("ok", "password", f"required; this URL uses the user {server.user}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _needs_no_password(server: _Server) -> bool | None:
    try:
        rules = [_text(rule) for rule in server.ask("ACL", "LIST")]
    except hiredis.ReplyError:
        return None
    words = next((rule.split() for rule in rules if rule.startswith("user default ")), [])
    return "on" in words and "nopass" in words


# --- replication ----------------------------------------------------------------------------------------------


def _replication(info: Mapping[str, str], config: Mapping[str, str] | None) -> Iterator[Finding]:
    if info.get("role") == "slave":
        yield Finding("bad", "role", "a replica: it refuses all changes", "name the primary, or use redis+sentinel://")
        return
    replicas = int(info.get("connected_slaves", 0))
    if not replicas:
        yield Finding("ok", "replication", "a primary without replicas: there is nothing to fail over to")
    elif config is None:
        yield Finding("unknown", "min-replicas-to-write", _CONFIG_FORBIDDEN, _ASK_ADMINISTRATOR)
    elif config.get("min-replicas-to-write", "0") == "0":
        yield Finding(
            "warn",
            "min-replicas-to-write",
            f"0, with replicas: {replicas}; a primary that is cut off still acknowledges jobs, and a failover loses "
            "these jobs",
            "set min-replicas-to-write 1; it narrows the gap to min-replicas-max-lag seconds",
        )
    else:
        yield Finding(
            "ok",
            "min-replicas-to-write",
            f"{config['min-replicas-to-write']}: a failover loses some seconds' jobs at most",
        )


def _cluster(server: _Server) -> Finding:
    try:
        info = pairs(_text(server.ask("CLUSTER", "INFO")))
    except hiredis.ReplyError:
        return Finding("unknown", "cluster_state", "this account may not read it", "allow it +cluster|info")
    state, covered = info.get("cluster_state"), info.get("cluster_slots_ok")
    found = f"{state}: {covered} of {_SLOTS} slots are served"
    if (state, covered) == ("ok", _SLOTS):
        return Finding("ok", "cluster_state", found)
    return Finding("bad", "cluster_state", found, "look at its nodes: queues in the other slots are unreachable")


# --- durability ----------------------------------------------------------------------------------------


def survives(config: Mapping[str, str] | None) -> Survives:
    """The worst event that an enqueued job survives on a server with these settings."""
    if config is None:
        return "unknown"
    if config.get("appendonly") != "yes":
        return "client crash"
    return "power loss" if config.get("appendfsync") == "always" else "server crash"


def _durability(info: Mapping[str, str], config: Mapping[str, str] | None) -> Finding:
    """The row of ``docs/durability.md`` that applies to the server's settings, as a finding."""
    if config is None:
        return Finding(
            "unknown", "durability", "what survives a crash depends on settings that cannot be read", _ASK_ADMINISTRATOR
        )
    survived = survives(config)
    if survived == "client crash":
        kept = (
            "killed workers and a clean restart, not a killed server" if config.get("save") else "killed workers only"
        )
    elif survived == "power loss":
        kept = "a killed server and a power failure"
    else:
        kept = "a killed server, but a power failure loses the last jobs"
    failover = "; a failover may lose some, as replication lags" if int(info.get("connected_slaves", 0)) else ""
    level: Literal["ok", "warn"] = "ok" if survived == "power loss" and not failover else "warn"
    return Finding(level, "durability", f"acknowledged jobs survive {kept}{failover}")


# --- reading ----------------------------------------------------------------------------------------------


def _info(server: _Server) -> dict[str, str]:
    try:
        return pairs(_text(server.ask("INFO")))
    except hiredis.ReplyError:
        return {}


def _config(server: _Server) -> dict[str, str] | None:
    """The settings that matter for jobs, or None if CONFIG is forbidden."""
    wanted = ("appendonly", "appendfsync", "save", "maxmemory-policy", "min-replicas-to-write")
    found: dict[str, str] = {}
    for name in wanted:
        try:
            answer = server.ask("CONFIG", "GET", name)
        except hiredis.ReplyError:
            return None
        words = [_text(word) for word in answer]
        found.update(zip(words[::2], words[1::2], strict=True))
    return found


def pairs(text: str) -> dict[str, str]:
    """Parse the ``name:value`` lines of ``INFO`` and of ``CLUSTER INFO``."""
    lines = (line.partition(":") for line in text.splitlines() if ":" in line)
    return {name: value.strip() for name, _, value in lines}


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
