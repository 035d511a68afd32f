"""The results of ``multiq doctor`` and ``multiq schema``: findings about a server, and the state of its tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """The result of one check of ``doctor``.

    The levels:

    - ``ok``;
    - ``warn``: jobs work, but a setting has a weakness;
    - ``bad``: jobs will be lost or stuck;
    - ``unknown``: the check was not possible.
    """

    level: Literal["ok", "warn", "bad", "unknown"]
    what: str
    """The checked setting by its name in the server's manual, such as ``maxmemory-policy``."""
    why: str
    """The result of the check, and its consequence."""
    advice: str = ""
    """What the operator should do."""


class SchemaState(msgspec.Struct, frozen=True):
    """The version of a store's tables, compared with the version that multiq needs."""

    state: Literal["ready", "missing", "older", "newer"]
    """``ready``: usable, even if the tables are newer and declared compatible. ``newer``: unusable."""
    found: int
    """The version of the tables. 0: there are no tables."""
    needed: int
    """The version that this version of multiq creates."""


class Schema(ABC):
    """A store's tables. An operator migrates the tables with ``multiq schema``."""

    @abstractmethod
    def check(self) -> SchemaState:
        """Return the state of the tables. Changes nothing. Raises ``BackendError``."""

    @abstractmethod
    def up(self) -> list[str]:
        """Run the missing migrations, and return their names. A call is safe while workers run, and while another
        process makes the same call.

        Raises ``BackendError``. Raises ``SchemaNotReady`` if the database user may not change the tables.
        """

    @abstractmethod
    def sql(self, since: int = 0) -> str:
        """Return an SQL script with the migrations after version *since*. Needs no server."""
