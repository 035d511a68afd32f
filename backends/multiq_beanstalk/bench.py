"""beanstalkd as a place for ``multiq bench``: a server of our own, how a server was started, and what it counts."""

from __future__ import annotations

import time
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING

from multiq.bench.adapter import Adapter, Bench, Counters, Durability
from multiq.bench.servers import HOST, Server, free_port, resident_bytes
from multiq.ids import new_id
from multiq.settings.url import parse_url

from .backend import BeanstalkBackend, address_of
from .baseline import BeanstalkBaseline
from .connection import open_wire
from .doctor import look, pairs, survives
from .errors import FAILURES
from .pool import Wires

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from multiq.bench.adapter import Baseline, Profile

    from .doctor import Server as Looked

_LOOKING = "cmd-stats"  # what only looking at the counters sends


class BeanstalkServer(Server):
    """``beanstalkd`` on a port of loopback, with a log that is synced before each answer where *profile* is durable."""

    program = package = "beanstalkd"

    def __init__(self, folder: Path, profile: Profile) -> None:
        super().__init__(folder)
        self.port = free_port()
        self._arguments = ["-l", HOST, "-p", str(self.port)]
        if profile == "durable":
            log = folder / "log-of-jobs"
            log.mkdir()
            self._arguments += ["-b", str(log), "-f0"]

    @property
    def url(self) -> str:
        return f"beanstalk://{HOST}:{self.port}"

    def arguments(self) -> Sequence[str]:
        return self._arguments

    def answers(self) -> bool:
        with suppress(*FAILURES):
            deadline = time.monotonic() + 1
            wire = open_wire((HOST, self.port), deadline)
            try:
                return bool(wire.ask(b"stats\r\n", 1, deadline))
            finally:
                wire.close()
        return False


class BeanstalkAdapter(Adapter):
    """One server. It counts no bytes, and its memory shows only where it runs on this machine."""

    def __init__(self, url: str) -> None:
        self.url = url
        parsed = parse_url(url, BeanstalkBackend.options)
        self._wires = Wires(address_of(parsed), parsed.options["timeout"])

    def version(self) -> str:
        return f"beanstalkd {pairs(self._ask(b'stats'))['version']}"

    def durability(self) -> Durability:
        server = self._look()
        return Durability(survives(server), _told(server))

    def counters(self) -> Counters:
        server = self._look()
        stats = server.later
        return Counters(
            commands=sum(int(n) for name, n in stats.items() if name.startswith("cmd-") and name != _LOOKING),
            memory=None if server.options is None else resident_bytes(int(stats["pid"])),
            cpu=float(stats["rusage-utime"]) + float(stats["rusage-stime"]),
        )

    def baseline(self, body: bytes) -> Baseline:
        return BeanstalkBaseline(self._wires.open(self._wires.deadline()), f"multiq.bench.{new_id()}", body)

    def close(self) -> None:
        """Hang up."""
        self._wires.close()

    def _look(self) -> Looked:
        return look(self._ask, self._wires.address, pairs(self._ask(b"stats")))

    def _ask(self, command: bytes) -> bytes:
        ((_, body),) = self._wires.ask(command)
        return body


class BeanstalkBench(Bench):
    """``beanstalkd``."""

    @classmethod
    @contextmanager
    def throwaway(cls, folder: Path, profile: Profile) -> Iterator[Adapter]:
        with BeanstalkServer(folder, profile) as server, cls.at(server.url) as place:
            yield place

    @classmethod
    @contextmanager
    def at(cls, url: str) -> Iterator[Adapter]:
        with closing(BeanstalkAdapter(url)) as place:
            yield place


def _told(server: Looked) -> dict[str, str]:
    """Of how it was started, what durability follows from. The log's folder says nothing."""
    told = {"-b": "yes" if server.has_log else "no"}
    if server.has_log and server.options is not None:
        told |= {f"-{name}": value or "yes" for name, value in server.options.items() if name in "fF"}
    return told
