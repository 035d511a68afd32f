"""The bench's driver interface starts a server, reads the server's settings and counters, and measures a baseline.

A driver registers a subclass of ``Bench`` in the entry-point group ``multiq.bench``, under the backend's name. The
bench can also measure a driver that has no ``Bench``, if it gets a URL. For a driver without a ``Bench``, the bench
reports fewer figures.
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
"""The durability of acknowledged jobs.

- ``fast``: no call waits for the disk. A crash of the server or the machine may lose jobs.
- ``durable``: every acknowledged job is on the disk.

The bench sets all its own servers to the same level. The bench and the baselines connect over loopback TCP.
"""

Survives: TypeAlias = Literal["nothing", "client crash", "server crash", "power loss", "unknown"]
"""The worst failure that an acknowledged job survives. If the backend has no server, ``server crash`` means that all
processes die.
"""

PUT_BATCH = 1000
"""The number of jobs that a baseline enqueues in one call. The compared workload of multiq enqueues the same number per
call."""

TAKE_BATCH = 100
"""The number of jobs that a baseline reserves in one call."""


class Durability(msgspec.Struct, frozen=True):
    """The failures that a server's jobs survive with the server's current settings."""

    survives: Survives
    settings: dict[str, str]
    """The settings that decide the durability, under their names in the server's manual: ``{"appendfsync": "always"}``.
    """


class Counters(msgspec.Struct, frozen=True):
    """A server's counts since its start. The difference of two readings is the cost of the work between the readings.

    A field is None if this server does not count the quantity.
    """

    commands: int | None = None
    """Requests of the server's clients, except requests that only read counters and settings. A Lua script counts as
    one request.
    """
    received: int | None = None
    """Bytes received from the server's clients."""
    sent: int | None = None
    """Bytes sent to the server's clients."""
    memory: int | None = None
    """Bytes that the server uses now."""
    cpu: float | None = None
    """CPU seconds of the server's processes, in user and in system mode."""

    def since(self, before: Counters) -> Counters:
        """The difference between this reading and the earlier reading *before*. ``memory`` is not a difference: it is
        the current number of bytes."""
        return Counters(
            commands=_difference(self.commands, before.commands),
            received=_difference(self.received, before.received),
            sent=_difference(self.sent, before.sent),
            memory=self.memory,
            cpu=_difference(self.cpu, before.cpu),
        )


class Baseline(ABC):
    """The fastest loops that the store and its client library allow, with one client.

    The loops write each job as durably as the server's settings say. The loops also mark the job as taken, and delete
    the job. The loops check no lease token, and have no delays and no counters. The loops use their own keys or tables.
    ``close`` removes the keys or tables.
    """

    @abstractmethod
    def put_one_by_one(self, count: int) -> float:
        """Enqueue jobs, each in a separate round trip. Returns jobs per second."""

    @abstractmethod
    def put_in_batches(self, count: int) -> float:
        """Enqueue jobs, ``PUT_BATCH`` in each call. Returns jobs per second."""

    @abstractmethod
    def take_in_batches(self) -> float:
        """Take jobs until no job is left. Each call deletes the jobs that the previous call took, and takes the next
        ``TAKE_BATCH``.

        Returns jobs per second.
        """

    @abstractmethod
    def close(self) -> None:
        """Remove the keys or tables that the baseline has created, and disconnect."""


class Adapter(ABC):
    """A server or file that a run measures, with the data that the driver can read from it."""

    url: str
    """The URL for ``multiq.App``. The results show it without its password."""

    @abstractmethod
    def version(self) -> str:
        """The server's name and version: ``redis 7.0.15``."""

    @abstractmethod
    def durability(self) -> Durability:
        """The failures that the server's jobs survive with the server's current settings."""

    def counters(self) -> Counters:
        """The current counts. This method must be fast, because it is called before and after every measured part."""
        return Counters()

    def baseline(self, body: bytes) -> Baseline | None:  # noqa: ARG002 - a hook
        """The baseline on this server for jobs of this *body*. Returns None if the driver has no baseline."""
        return None

    def sweep(self, queue: str) -> None:  # noqa: B027 - a hook
        """Remove the data that an empty *queue* leaves in the store. A driver needs this method only if its store does
        not remove everything by itself.
        """


class Bench(ABC):
    """The class that a driver registers for its backend. The module of the class may import the client library."""

    @classmethod
    @abstractmethod
    def throwaway(cls, folder: Path, profile: Profile) -> AbstractContextManager[Adapter]:
        """Run a server in *folder*, on a free loopback port or a UNIX socket, until the end of the ``with`` block.

        Raises ``ServerMissing``. If a program is missing, the error's message names the program and says how to install
        it.
        """

    @classmethod
    @abstractmethod
    def at(cls, url: str) -> AbstractContextManager[Adapter]:
        """The user's server at *url*. The bench does not change the settings of a user's server."""


def _difference(now: _Number | None, before: _Number | None) -> _Number | None:
    return None if now is None or before is None else now - before
