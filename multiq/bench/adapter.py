"""The bench's driver interface: start a server, read its settings and counters, and measure a baseline on it.

A driver registers a subclass of ``Bench`` under the entry-point group ``multiq.bench``, with the backend's name. A
driver without one can still be measured by its URL, with fewer figures.
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
    """Which failures a server's jobs survive, with its current settings."""

    survives: Survives
    settings: dict[str, str]
    """The settings that decide it, under their names in the server's manual: ``{"appendfsync": "always"}``."""


class Counters(msgspec.Struct, frozen=True):
    """What a server has counted since its start. The difference of two readings is the cost of the time between.

    None: this server does not count it.
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
        """The difference to an earlier reading; for the memory, the bytes that are used now."""
        return Counters(
            commands=_difference(self.commands, before.commands),
            received=_difference(self.received, before.received),
            sent=_difference(self.sent, before.sent),
            memory=self.memory,
            cpu=_difference(self.cpu, before.cpu),
        )


class Baseline(ABC):
    """The fastest loops that the store and its client library allow, with one client.

    They do only what cannot be left out: write a job as durably as the server's settings say, mark it taken, delete
    it. No lease token is checked, and there are no delays and no counters. The loops use keys or tables of their own,
    which ``close`` removes.
    """

    @abstractmethod
    def put_one_by_one(self, count: int) -> float:
        """Jobs per second, each with a round trip of its own."""

    @abstractmethod
    def put_in_batches(self, count: int) -> float:
        """Jobs per second, ``PUT_BATCH`` in one go."""

    @abstractmethod
    def take_in_batches(self) -> float:
        """Jobs per second: delete the last ``TAKE_BATCH`` jobs and take the next, in one go, until none is left."""

    @abstractmethod
    def close(self) -> None:
        """Remove the keys or tables that it created, and disconnect."""


class Adapter(ABC):
    """A server or file that a run measures: its URL, and what the driver can read of it."""

    url: str
    """What ``multiq.App`` takes. Shown masked."""

    @abstractmethod
    def version(self) -> str:
        """The server's name and version: ``redis 7.0.15``."""

    @abstractmethod
    def durability(self) -> Durability:
        """Which failures its jobs survive, read from the server's current settings."""

    def counters(self) -> Counters:
        """The counts now. Must be cheap: it is called around every measured part."""
        return Counters()

    def baseline(self, body: bytes) -> Baseline | None:  # noqa: ARG002 - a hook
        """The baseline on this server for jobs of this *body*, or None if the driver has no baseline."""
        return None

    def sweep(self, queue: str) -> None:  # noqa: B027 - a hook
        """Remove what an empty *queue* leaves in the store, unless the store removes it by itself."""


class Bench(ABC):
    """What a driver registers for its backend. Importing the module of a ``Bench`` may import the client library."""

    @classmethod
    @abstractmethod
    def throwaway(cls, folder: Path, profile: Profile) -> AbstractContextManager[Adapter]:
        """Run a server in *folder*, on a free loopback port or a UNIX socket, until the end of the ``with``.

        Raises ``ServerMissing``, which names the program and how to install it.
        """

    @classmethod
    @abstractmethod
    def at(cls, url: str) -> AbstractContextManager[Adapter]:
        """The user's server at *url*. Changes none of its settings."""


def _difference(now: _Number | None, before: _Number | None) -> _Number | None:
    return None if now is None or before is None else now - before
