"""``redis-server``: a single server, a primary with replicas and sentinels, and a cluster of masters."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from servers.process import HOST, Server, free_port, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Self

    from servers.certificate import Certificate

SERVICE = "multiq"  # the name of the primary in the sentinels' configuration
SLOTS = 16384

_OF_CONSUMERS = {"eval", "evalsha", "bzpopmin"}


class RedisServer(Server):
    """``redis-server`` on a TCP port and a UNIX socket; it writes to disk only if *config* says so.

    *config* are settings of ``redis.conf``: ``RedisServer(appendonly="yes", maxmemory="4mb")``, with underscores for
    dashes. With *certificate* the port accepts TLS only; the socket stays plain, for the tests themselves.
    """

    program = "redis-server"
    package = "redis-server"

    def __init__(self, *, certificate: Certificate | None = None, **config: str) -> None:
        super().__init__()
        self.port = free_port()
        self.socket = self.folder / "s.sock"
        self.certificate = certificate
        settings = {
            "bind": HOST,
            "port": str(self.port),
            "unixsocket": str(self.socket),
            "dir": str(self.folder),
            "save": "",
            "appendonly": "no",
            **(self._tls(certificate) if certificate else {}),
            **{name.replace("_", "-"): value for name, value in config.items()},
        }
        self.password = settings.get("requirepass", "")
        self._write(settings)

    @property
    def scheme(self) -> str:
        return "redis" if self.certificate is None else "rediss"

    @property
    def url(self) -> str:
        """The URL for multiq over TCP, or, with a certificate, over TLS with its authority."""
        ca = "" if self.certificate is None else f"?ca={self.certificate.authority}"
        password = f":{self.password}@" if self.password else ""
        return f"{self.scheme}://{password}{HOST}:{self.port}{ca}"

    @property
    def unix_url(self) -> str:
        return f"redis+unix://{self.socket}"

    @property
    def consumers_sent(self) -> int:
        """How many commands consumers have sent so far, not counting the commands inside their scripts."""
        stats = self.ask("INFO", "commandstats")
        return sum(stat["calls"] for name, stat in stats.items() if name.removeprefix("cmdstat_") in _OF_CONSUMERS)

    @property
    def listens(self) -> bool:
        """Whether the server's socket accepts connections. If not, redis-py 5 would leave its own socket open."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(self.socket))
            return True
        return False

    @contextlib.contextmanager
    def client(self, **options: Any) -> Iterator[redis.Redis]:
        """A plain client on the UNIX socket, without multiq."""
        made = redis.Redis(
            unix_socket_path=str(self.socket),
            password=self.password or None,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            **options,
        )
        with contextlib.closing(made):
            yield made

    def ask(self, *command: str | bytes | int, raw: bool = False) -> Any:
        """The reply to one command; *raw*: as the server sends it, without redis-py's conversion."""
        with self.client() as client:
            if raw:
                client.response_callbacks.clear()
            execute: Any = client.execute_command  # redis-py does not annotate it
            return execute(*command)

    def set(self, name: str, value: str) -> None:
        """``CONFIG SET``: it holds until the next restart."""
        self.ask("CONFIG", "SET", name, value)

    def arguments(self) -> Sequence[str]:
        return [str(self.folder / "redis.conf")]

    def answers(self) -> bool:
        with contextlib.suppress(redis.RedisError):
            return self.listens and bool(self.ask("PING"))
        return False

    def _tls(self, certificate: Certificate) -> dict[str, str]:
        return {
            "port": "0",
            "tls-port": str(self.port),
            "tls-cert-file": str(certificate.pair),
            "tls-key-file": str(certificate.pair),
            "tls-ca-cert-file": str(certificate.authority),
            "tls-auth-clients": "no",
        }

    def _write(self, settings: dict[str, str]) -> None:
        lines = [f"{name} {value}" if value else f'{name} ""' for name, value in settings.items()]
        (self.folder / "redis.conf").write_text("\n".join(lines) + "\n")


class _Sentinel(RedisServer):
    """One of the three sentinels that choose the primary."""

    def __init__(self, primary_port: int) -> None:
        self._primary_port = primary_port
        super().__init__()

    def arguments(self) -> Sequence[str]:
        return [*super().arguments(), "--sentinel"]

    def _write(self, settings: dict[str, str]) -> None:
        kept = {name: value for name, value in settings.items() if name in {"bind", "port", "unixsocket", "dir"}}
        super()._write(
            {
                **kept,
                "sentinel monitor": f"{SERVICE} {HOST} {self._primary_port} 2",
                "sentinel down-after-milliseconds": f"{SERVICE} 500",
                "sentinel failover-timeout": f"{SERVICE} 3000",
            }
        )


class SentinelTrio:
    """A primary, its replicas, and three sentinels, which take the primary for dead after half a second of silence."""

    def __init__(self, *, replicas: int = 1, **config: str) -> None:
        quick: dict[str, Any] = {"repl_diskless_sync_delay": "0", "repl_timeout": "3", **config}
        self.primary = RedisServer(**quick)
        self.replicas = [RedisServer(replicaof=f"{HOST} {self.primary.port}", **quick) for _ in range(replicas)]
        self.replica = self.replicas[0]
        self.sentinels = [_Sentinel(self.primary.port) for _ in range(3)]

    @property
    def url(self) -> str:
        return f"redis+sentinel://{','.join(f'{HOST}:{one.port}' for one in self.sentinels)}/{SERVICE}"

    @property
    def primary_port(self) -> int:
        """The port of the server that the first sentinel takes for the primary."""
        _, port = self.sentinels[0].ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
        return int(port)

    def start(self) -> Self:
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            for server in (self.primary, *self.replicas, *self.sentinels):
                server.start()
            until(self._is_complete, "the sentinels know each other and the replica")
            on_failure.pop_all()
        return self

    def close(self) -> None:
        for server in (*self.sentinels, *self.replicas, self.primary):
            server.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_complete(self) -> bool:
        if any(one.ask("INFO", "replication")["master_link_status"] != "up" for one in self.replicas):
            return False
        return all(self._knows_all(sentinel) for sentinel in self.sentinels)

    def _knows_all(self, sentinel: RedisServer) -> bool:
        flat = [_text(word) for word in sentinel.ask("SENTINEL", "MASTER", SERVICE, raw=True)]
        state = dict(zip(flat[::2], flat[1::2], strict=True))
        return (state["num-slaves"], state["num-other-sentinels"], state["flags"]) == (
            str(len(self.replicas)),
            "2",
            "master",
        )


class RedisCluster:
    """Three masters on loopback with a third of the slots each, and no replicas."""

    def __init__(self, **config: str) -> None:
        settings: dict[str, Any] = {
            "cluster_enabled": "yes",
            "cluster_node_timeout": "1000",
            "cluster_require_full_coverage": "no",
            **config,
        }
        self.nodes = [RedisServer(**settings) for _ in range(3)]

    @property
    def url(self) -> str:
        return f"redis+cluster://{','.join(f'{HOST}:{node.port}' for node in self.nodes)}"

    def start(self) -> Self:
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            for index, node in enumerate(self.nodes):
                node.start()
                node.ask("CLUSTER", "ADDSLOTS", *range(SLOTS * index // 3, SLOTS * (index + 1) // 3))
                node.ask("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
            for node in self.nodes[1:]:
                self.nodes[0].ask("CLUSTER", "MEET", HOST, node.port)
            until(lambda: all(map(self._is_complete, self.nodes)), "every node knows all slots")
            on_failure.pop_all()
        return self

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def slot_of(self, key: str | bytes) -> int:
        return int(self.nodes[0].ask("CLUSTER", "KEYSLOT", key))

    def owner(self, slot: int) -> RedisServer:
        """The node that serves a slot."""
        for start, end, (_, port, *_), *_ in self._slots():
            if start <= slot <= end:
                return next(node for node in self.nodes if node.port == port)
        raise AssertionError(f"no node serves slot {slot}")

    def move(self, slot: int, to: RedisServer, *, between: Callable[[], object] = lambda: None) -> None:
        """Move a slot with all its keys to another node, one key at a time; *between* is called after each."""
        source = self.owner(slot)
        to.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", _name(source))
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", _name(to))
        while keys := source.ask("CLUSTER", "GETKEYSINSLOT", slot, 1):
            source.ask("MIGRATE", HOST, to.port, keys[0], 0, 5000)
            between()
        for node in (to, source, *self.nodes):
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", _name(to))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _slots(self) -> list[Any]:
        alive = next(node for node in self.nodes if node.is_running)
        found: list[Any] = alive.ask("CLUSTER", "SLOTS", raw=True)
        return found

    def _is_complete(self, node: RedisServer) -> bool:
        info = _text(node.ask("CLUSTER", "INFO", raw=True))
        return "cluster_state:ok" in info and f"cluster_slots_ok:{SLOTS}" in info and "cluster_known_nodes:3" in info


def _name(node: RedisServer) -> str:
    return _text(node.ask("CLUSTER", "MYID"))


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
