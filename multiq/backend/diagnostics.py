"""What ``multiq doctor`` and ``multiq schema`` get from a driver: findings about a server, the state of its tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """One thing that ``doctor`` has checked, and whether it suits jobs.

    The levels:

    - ``ok``;
    - ``warn``: jobs work, with a weakness that the operator should know of;
    - ``bad``: jobs will be lost or stuck;
    - ``unknown``: ``doctor`` could not find it out, so nothing is promised.
    """

    level: Literal["ok", "warn", "bad", "unknown"]
    what: str
    """What was looked at, as the server's manual calls it: ``maxmemory-policy``."""
    why: str
    """What was found, and what follows from it."""
    advice: str = ""
    """What to do about it."""


class SchemaState(msgspec.Struct, frozen=True):
    """How the version of a store's tables compares with the one that this multiq needs."""

    state: Literal["ready", "missing", "older", "newer"]
    """``ready``: usable by this multiq, also if newer and declared compatible. ``newer``: unusable by this multiq."""
    found: int
    """The version of the tables; 0: there are none."""
    needed: int
    """The version that this multiq makes."""


class Schema(ABC):
    """A store's tables that change only by numbered migrations, which a person runs with ``multiq schema``."""

    @abstractmethod
    def check(self) -> SchemaState:
        """Read the state of the tables, and change nothing. Raises ``BackendError``."""

    @abstractmethod
    def up(self) -> list[str]:
        """Run the missing migrations, and return their names. Safe while workers run, and from two processes at once.

        Raises ``BackendError``; ``SchemaNotReady`` if this user of the database may not change the tables.
        """

    @abstractmethod
    def sql(self, since: int = 0) -> str:
        """An SQL script with the migrations that ``up`` would run on tables of version *since*. Needs no server."""
