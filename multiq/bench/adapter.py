"""The bench's driver interface: start a server, read its settings and counters, and measure a baseline on it.

A driver registers a subclass of ``Bench`` in the entry-point group ``multiq.bench``, under the backend's name. The
bench can also measure a driver without a ``Bench``, by a URL, but then reports fewer figures.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

import msgspec

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

GROUP = "multiq.bench"

_Number = TypeVar("_Number", int, float)

Profile: TypeAlias = Literal["fast", "durable"]
"""``fast``: no call waits for the disk, and a crash of the server or the machine may lose jobs; ``durable``: every
acknowledged job is on the disk. The bench sets its own servers to the same level, whatever their defaults, and
connects to them over loopback TCP, for the baselines too."""

Survives: TypeAlias = Literal["nothing", "client crash", "server crash", "power loss", "unknown"]
"""The worst failure that an acknowledged job survives. Without a server, ``server crash``: all processes die."""

PUT_BATCH = 1000
"""Jobs that a baseline enqueues in one call, as many as multiq in the same workload."""

TAKE_BATCH = 100
"""Jobs that it reserves in one call."""


class Durability(msgspec.Struct, frozen=True):
    """Which failures a server's jobs survive with the server's current settings."""

    survives: Survives
    settings: dict[str, str]
    """The settings that decide it, under their names in the server's manual: ``{"appendfsync": "always"}``."""


class Counters(msgspec.Struct, frozen=True):
    """What a server has counted since its start. The difference of two readings is the cost of the work in between.

    A count is None if this server does not count that.
    """

    commands: int | None = None
    """Requests of its clients, without those that only read counters and settings; a script's call counts as one."""
    received: int | None = None
    """Bytes from its clients."""
    sent: int | None = None
    """Bytes to its clients."""
    memory: int | None = None
    """Bytes that it uses now."""
    cpu: float | None = None
    """Seconds of the server's processes, user and system."""

    def since(self, before: Counters) -> Counters:
        """The difference from an earlier reading. Only ``memory`` stays as it is: the bytes that are used now."""
        return Counters(
            commands=_difference(self.commands, before.commands),
            received=_difference(self.received, before.received),
            sent=_difference(self.sent, before.sent),
            memory=self.memory,
            cpu=_difference(self.cpu, before.cpu),
        )


class Baseline(ABC):
    """The fastest loops that the store and its client library allow, with one client.

    The loops do only what cannot be left out: they write a job as durably as the server's settings say, mark the job
    as taken, and delete it. They check no lease token, and have no delays and no counters. The loops use keys or tables
    of their own, which ``close`` removes.
    """

    @abstractmethod
    def put_one_by_one(self, count: int) -> float:
        """Enqueue jobs, each in a round trip of its own. Returns jobs per second."""

    @abstractmethod
    def put_in_batches(self, count: int) -> float:
        """Enqueue jobs, ``PUT_BATCH`` in each call. Returns jobs per second."""

    @abstractmethod
    def take_in_batches(self) -> float:
        """Until no job is left: in one call, delete the jobs taken last, and take the next ``TAKE_BATCH``.

        Returns jobs per second.
        """

    @abstractmethod
    def close(self) -> None:
        """Remove the keys or tables that the baseline has created, and disconnect."""


class Adapter(ABC):
    """A server or file that a run measures: its URL, and what the driver can read of it."""

    url: str
    """What ``multiq.App`` takes. Shown masked."""

    @abstractmethod
    def version(self) -> str:
        """The server's name and version: ``redis 7.0.15``."""

    @abstractmethod
    def durability(self) -> Durability:
        """Which failures the server's jobs survive, by the server's current settings."""

    def counters(self) -> Counters:
        """The counts now. This must be fast, because it is called before and after every measured part."""
        return Counters()

    def baseline(self, body: bytes) -> Baseline | None:  # noqa: ARG002 - a hook
        """The baseline on this server for jobs of this *body*, or None if the driver has no baseline."""
        return None

    def sweep(self, queue: str) -> None:  # noqa: B027 - a hook
        """Remove what an empty *queue* leaves in the store, unless the store removes it by itself."""


class Bench(ABC):
    """The class that a driver registers for its backend. Its module may import the client library."""

    @classmethod
    @abstractmethod
    def throwaway(cls, folder: Path, profile: Profile) -> AbstractContextManager[Adapter]:
        """Run a server in *folder*, on a free loopback port or a UNIX socket, until the end of the ``with``.

        Raises ``ServerMissing``, which names the program and how to install it.
        """

    @classmethod
    @abstractmethod
    def at(cls, url: str) -> AbstractContextManager[Adapter]:
        """The user's server at *url*. The bench changes none of its settings."""


def _difference(now: _Number | None, before: _Number | None) -> _Number | None:
    return None if now is None or before is None else now - before
