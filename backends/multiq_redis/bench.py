"""The adapter of ``multiq bench`` for Redis."""

from __future__ import annotations

import time
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import hiredis

from multiq.bench.adapter import Adapter, Bench, Counters, Durability
from multiq.bench.servers import HOST, Server, free_port
from multiq.ids import new_id
from multiq.settings.url import parse_url

from . import keys
from .backend import RedisBackend
from .baseline import RedisBaseline
from .connection import pack
from .connection_settings import ConnectionSettings
from .doctor import pairs, read_settings, survives
from .dsn import servers_of
from .errors import FAILURES, explain
from .opening import open_connection
from .servers import format_address

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from multiq.bench.adapter import Baseline, Profile, Survives
    from multiq.driverkit.net import Address

    from .connection import Connection, Word

_PROFILES = {
    "fast": {"appendonly": "no"},
    "durable": {"appendonly": "yes", "appendfsync": "always"},
}
_SHOWN = ("appendonly", "appendfsync", "save")  # the settings that decide durability
_WEAKEST_FIRST: Sequence[Survives] = ("unknown", "client crash", "server crash", "power loss")

#: the commands that multiq sends (INFO also counts the commands inside scripts)
_SENT = frozenset({"evalsha", "eval", "bzpopmin", "hello", "select", "auth", "scan", "lpush"})
_CPU = frozenset({"used_cpu_user", "used_cpu_sys", "used_cpu_user_children", "used_cpu_sys_children"})
_SECTIONS = ("commandstats", "stats", "memory", "cpu")


class RedisServer(Server):
    """``redis-server`` on a loopback port, with the durability of *profile*."""

    program = package = "redis-server"

    def __init__(self, folder: Path, profile: Profile) -> None:
        super().__init__(folder)
        self.port = free_port()
        self._settings = {"bind": HOST, "port": str(self.port), "dir": str(folder), "save": "", **_PROFILES[profile]}

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}"

    def arguments(self) -> Sequence[str]:
        return [word for name, value in self._settings.items() for word in (f"--{name}", value)]

    def answers(self) -> bool:
        with suppress(*FAILURES, hiredis.ReplyError):
            deadline = time.monotonic() + 1
            connection = open_connection((HOST, self.port), ConnectionSettings(), deadline)
            try:
                return bool(connection.ask(pack(("PING",)), deadline))
            finally:
                connection.close()
        return False


class RedisAdapter(Adapter):
    """All servers of a URL. The counters are the sums over these servers."""

    def __init__(self, url: str) -> None:
        self.url = url
        parsed = parse_url(url, RedisBackend.options)
        self._servers = servers_of(parsed)
        self._prefix, self._partitions = parsed.options["prefix"], parsed.options["partitions"]
        self._connections: dict[Address, Connection] = {}

    def version(self) -> str:
        info, _ = read_settings(self._servers)[0]
        return f"{info.get('server_name', 'redis')} {info.get('redis_version', '')}".strip()

    def durability(self) -> Durability:
        configs = [config for _, config in read_settings(self._servers)]
        weakest = min(configs, key=lambda config: _WEAKEST_FIRST.index(survives(config)))
        shown = {name: value for name, value in (weakest or {}).items() if name in _SHOWN and value}
        if shown.get("appendonly") == "no":
            shown.pop("appendfsync", None)  # it has no effect without appendonly
        return Durability(survives(weakest), shown)

    def counters(self) -> Counters:
        """The counters. They are empty if the account may not run INFO (``+info`` in the ACL)."""
        try:
            infos = [self._info(address) for address in self._servers.all_addresses(self._deadline())]
        except hiredis.ReplyError:
            return Counters()
        return Counters(
            commands=sum(map(_commands, infos)),
            received=_total(infos, "total_net_input_bytes"),
            sent=_total(infos, "total_net_output_bytes"),
            memory=_total(infos, "used_memory"),
            cpu=sum(float(value) for info in infos for name, value in info.items() if name in _CPU),
        )

    def baseline(self, body: bytes) -> Baseline | None:
        """The baseline. In a cluster, the baseline runs on one node. None if this account may not run the baseline's
        commands."""
        partition = f"multiq.bench.{new_id()}"
        connection = self._open(self._servers.address(partition, self._deadline()))
        try:
            return RedisBaseline(connection, keys.base(self._prefix, partition), body)
        except hiredis.ReplyError:
            connection.close()
            return None

    def sweep(self, queue: str) -> None:
        """Delete the keys of a queue. Some keys stay if the queue still has jobs, or had several partitions."""
        for number in range(self._partitions):
            partition = keys.partition(queue, number)
            base = keys.base(self._prefix, partition)
            names = (keys.sequence(base), keys.hint(base), keys.partitions(base))
            with suppress(hiredis.ReplyError):  # the account may not have the right to delete keys
                self._ask(self._servers.address(partition, self._deadline()), "DEL", *names)

    def close(self) -> None:
        """Close all connections."""
        while self._connections:
            self._connections.popitem()[1].close()

    def _info(self, address: Address) -> dict[str, str]:
        sections = [
            self._ask(address, "INFO", section) for section in _SECTIONS
        ]  # only newer servers take several sections in one INFO
        return pairs(b"".join(sections).decode(errors="replace"))

    def _ask(self, address: Address, *words: Word) -> Any:
        connection = self._connections.get(address)
        if connection is None or not connection.is_free:
            connection = self._connections[address] = self._open(address)
        try:
            return connection.ask(pack(words), self._deadline())
        except FAILURES as exc:
            raise explain(exc, format_address(address), self._servers.timeout) from exc

    def _open(self, address: Address) -> Connection:
        try:
            return self._servers.open(address, self._deadline())
        except (*FAILURES, hiredis.ReplyError) as exc:
            raise explain(exc, format_address(address), self._servers.timeout) from exc

    def _deadline(self) -> float:
        return time.monotonic() + self._servers.timeout


class RedisBench(Bench):
    """A ``redis-server`` that the bench starts, or the servers of a multiq URL."""

    @classmethod
    @contextmanager
    def throwaway(cls, folder: Path, profile: Profile) -> Iterator[Adapter]:
        with RedisServer(folder, profile) as server, cls.at(server.url) as place:
            yield place

    @classmethod
    @contextmanager
    def at(cls, url: str) -> Iterator[Adapter]:
        with closing(RedisAdapter(url)) as place:
            yield place


def _total(infos: Sequence[Mapping[str, str]], name: str) -> int | None:
    """The sum over the servers. None if a server does not report the value, as some compatible servers do not."""
    return sum(int(info[name]) for info in infos) if all(name in info for info in infos) else None


def _commands(info: Mapping[str, str]) -> int:
    """Counts the calls of ``_SENT`` commands. A line of ``INFO`` is like ``cmdstat_evalsha:calls=3,usec=94,...``."""
    return sum(
        int(counted.partition("calls=")[2].partition(",")[0])
        for name, counted in info.items()
        if name.startswith("cmdstat_") and name.removeprefix("cmdstat_") in _SENT
    )
