"""Private, real servers for tests: a temporary folder each, ports that nobody else has, and gone when the tests are.

Nothing is shared with a server that runs on the machine anyway, and the usual ports are never used.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime as dt
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import pytest
import redis
import trustme
from redis.backoff import NoBackoff
from redis.retry import Retry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Self

HOST = "127.0.0.1"
SERVICE = "multiq"  # what the sentinels call their primary
SLOTS = 16384

_PATIENCE = 20.0  # seconds; guards against a hang, and no test waits for it
_PORTS = range(20000, 32000)  # below those that the kernel hands out by itself, and a cluster's bus (+10000) fits
_LOG_SHOWN = 3000  # characters

#: a server's program -> the Debian package that has it
_PACKAGES = {"redis-server": "redis-server"}

_SHEPHERD = """
import os, signal, sys
alive = set()
for line in sys.stdin:
    (alive.add if line[0] == "+" else alive.discard)(int(line[1:]))
for pid in alive:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


def require(program: str) -> str:
    """The path of a server's program. Missing, it skips the test, or under CI fails it, and says what to install."""
    found = shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
    if found is not None:
        return found
    message = f"{program} is not installed: run .ci/install-servers, or: apt-get install {_PACKAGES[program]}"
    if os.environ.get("CI", "").lower() in {"1", "true"}:
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


def free_port() -> int:
    """A TCP port of this machine that nobody listens on, its bus port included."""
    while True:
        port = random.choice(_PORTS)
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind((HOST, port))
            other.bind((HOST, port + 10000))
            return port


def until(condition: Callable[[], object], what: str) -> None:
    """Wait until a condition holds; a hang fails the test."""
    give_up_at = time.monotonic() + _PATIENCE
    while not condition():
        if time.monotonic() > give_up_at:
            raise AssertionError(f"waited {_PATIENCE:g} s in vain until {what}")
        time.sleep(0.01)


class _Shepherd:
    """Kills what is left when this process dies without a chance to tidy up, as by SIGKILL."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def tell(self, word: str) -> None:
        if self._process is None:
            command = [sys.executable, "-S", "-c", _SHEPHERD]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
            atexit.register(self._end, self._process)
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def _end(self, process: subprocess.Popen[str]) -> None:
        process.communicate()


_shepherd = _Shepherd()


class Server(ABC):
    """A server's process: started, waited for, paused, killed, started again, and always ended.

    In a session of its own, so that Ctrl-C reaches the tests only, which then end it.
    """

    program: ClassVar[str]

    def __init__(self) -> None:
        self._program = require(self.program)
        self._folder = tempfile.TemporaryDirectory(prefix="multiq-", ignore_cleanup_errors=True)
        self.folder = Path(self._folder.name)  # short: a UNIX socket's path takes 107 bytes
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> Sequence[str]:
        """What is run."""
        return [self._program, *self.arguments()]

    @abstractmethod
    def arguments(self) -> Sequence[str]:
        """What follows the program's name."""

    @abstractmethod
    def answers(self) -> bool:
        """Whether it serves."""

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server does not run"
        return self._process.pid

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, *, wait: bool = True) -> Self:
        """Start, and wait until it serves. A server that does not start fails the test with its log."""
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
            )
        _shepherd.tell(f"+{self.pid}")
        give_up_at = time.monotonic() + _PATIENCE
        while wait and not self.answers():
            if not self.is_running or time.monotonic() > give_up_at:
                shown = self.log[-_LOG_SHOWN:]
                self.kill()
                raise AssertionError(f"{self.program} did not start; the end of its log:\n{shown}")
            time.sleep(0.01)
        return self

    def stop(self) -> None:
        """A clean end, as by the system's service manager."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """``kill -9``, its own children included."""
        if self.is_running:
            os.killpg(self.pid, signal.SIGKILL)
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """SIGSTOP: the kernel goes on accepting and acknowledging, nobody answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """End it, and remove its folder."""
        self.kill()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self if self.is_running else self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _shepherd.tell(f"-{process.pid}")


# --- certificates ----------------------------------------------------------------------------------------


class Certificate(NamedTuple):
    """Files in PEM: the certificate with its key, and the authority that signed it."""

    pair: Path
    authority: Path

    @classmethod
    def make(cls, folder: Path, name: str, *, host: str = HOST, expired: bool = False) -> Certificate:
        """A certificate for *host*, signed by an authority of its own."""
        authority = trustme.CA()
        ended = dt.datetime.now(dt.UTC) - dt.timedelta(days=1) if expired else None
        leaf = authority.issue_cert(host, not_after=ended)
        made = cls(folder / f"{name}.pem", folder / f"{name}-ca.pem")
        leaf.private_key_and_cert_chain_pem.write_to_path(str(made.pair))
        authority.cert_pem.write_to_path(str(made.authority))
        return made


# --- redis -----------------------------------------------------------------------------------------------


class RedisServer(Server):
    """``redis-server`` on a TCP port and a UNIX socket; nothing is written to disk unless *config* says so.

    *config* is what stands in ``redis.conf``: ``RedisServer(appendonly="yes", maxmemory="4mb")``, with underscores
    for dashes. With *certificate* the port speaks TLS only; the socket stays plain, for the tests themselves.
    """

    program = "redis-server"

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
        """The URL for multiq over TCP; over TLS with the certificate's authority."""
        ca = "" if self.certificate is None else f"?ca={self.certificate.authority}"
        password = f":{self.password}@" if self.password else ""
        return f"{self.scheme}://{password}{HOST}:{self.port}{ca}"

    @property
    def unix_url(self) -> str:
        return f"redis+unix://{self.socket}"

    @property
    def aof_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.folder.glob("appendonlydir/*"))

    @contextlib.contextmanager
    def client(self, **options: Any) -> Iterator[redis.Redis]:
        """A plain client on the UNIX socket, behind multiq's back."""
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
        """The answer to one command; raw is as it comes, and not as redis-py arranges it."""
        with self.client() as client:
            if raw:
                client.response_callbacks.clear()
            execute: Any = client.execute_command  # not annotated there
            return execute(*command)

    def set(self, name: str, value: str) -> None:
        """``CONFIG SET``: for this run, a restart forgets it."""
        self.ask("CONFIG", "SET", name, value)

    def arguments(self) -> Sequence[str]:
        return [str(self.folder / "redis.conf")]

    def answers(self) -> bool:
        with contextlib.suppress(redis.RedisError):
            return bool(self.ask("PING"))
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
    """One of the three that decide who is the primary."""

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
    """A primary, a replica and three sentinels that take a primary silent for half a second for dead."""

    def __init__(self, **config: str) -> None:
        quick: dict[str, Any] = {"repl_diskless_sync_delay": "0", "repl_timeout": "3", **config}
        self.primary = RedisServer(**quick)
        self.replica = RedisServer(replicaof=f"{HOST} {self.primary.port}", **quick)
        self.sentinels = [_Sentinel(self.primary.port) for _ in range(3)]

    @property
    def url(self) -> str:
        return f"redis+sentinel://{','.join(f'{HOST}:{one.port}' for one in self.sentinels)}/{SERVICE}"

    @property
    def primary_port(self) -> int:
        """The port of whom the first sentinel takes for the primary."""
        _, port = self.sentinels[0].ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
        return int(port)

    def start(self) -> Self:
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            for server in (self.primary, self.replica, *self.sentinels):
                server.start()
            until(self._is_complete, "the sentinels know each other and the replica")
            on_failure.pop_all()
        return self

    def close(self) -> None:
        for server in (*self.sentinels, self.replica, self.primary):
            server.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_complete(self) -> bool:
        if self.replica.ask("INFO", "replication")["master_link_status"] != "up":
            return False
        return all(self._knows_all(sentinel) for sentinel in self.sentinels)

    def _knows_all(self, sentinel: RedisServer) -> bool:
        flat = [_text(word) for word in sentinel.ask("SENTINEL", "MASTER", SERVICE, raw=True)]
        told = dict(zip(flat[::2], flat[1::2], strict=True))
        return (told["num-slaves"], told["num-other-sentinels"], told["flags"]) == ("1", "2", "master")


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
        raise AssertionError(f"nobody serves slot {slot}")

    def move(self, slot: int, to: RedisServer, *, between: Callable[[], object] = lambda: None) -> None:
        """Hand a slot with all its keys to another node, a key at a time; *between* is called after each."""
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
        told = _text(node.ask("CLUSTER", "INFO", raw=True))
        return "cluster_state:ok" in told and f"cluster_slots_ok:{SLOTS}" in told and "cluster_known_nodes:3" in told


def _name(node: RedisServer) -> str:
    return _text(node.ask("CLUSTER", "MYID"))


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
