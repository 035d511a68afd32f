"""Reads back the leases of a reserve whose reply was lost. Otherwise, they would run out and count as crashes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from multiq.driverkit.fork import forks
from multiq.errors import MultiqError

from .statements import render

if TYPE_CHECKING:
    from multiq.backend import Lease

    from .connection import Connection, Session
    from .pool import Pool


class UnconfirmedLeases:
    """Leases of a transaction whose COMMIT had no reply. The server may or may not have carried out the transaction."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.leases: list[Lease] = []
        self.generation = 0
        """The process that has sent the COMMIT: ``forks.generation``."""

    def recover(self, connection: Connection, deadline: float) -> list[Lease]:
        """Return the leases, if the transaction was carried out. Afterwards, none is unconfirmed."""
        if not self.leases or self.generation != forks.generation:
            return []  # There are no such leases, or they belong to the parent process.
        if time.monotonic() >= deadline:
            return []
        try:
            leases = connection.run(self.read_back, deadline)
        except MultiqError:
            return []
        self.leases = []
        return leases

    def take(self, session: Session, limit: int) -> list[Lease]:
        """Return at most *limit* of the leases, if the transaction was carried out. The others stay unconfirmed."""
        if not self.leases:
            return []
        ours = self.read_back(session)
        self.leases = ours[limit:]
        return ours[:limit]

    def read_back(self, session: Session) -> list[Lease]:
        """Return those of the leases that the server has stored under their token."""
        fences = [lease.token.split(":") for lease in self.leases]
        token = int(fences[0][1])
        asked = render("read_back", seqs=[int(seq) for seq, _ in fences], token=token, now=self._pool.now)
        live = {seq for (seq,) in session.execute(asked)[0].rows}
        return [lease for lease, (seq, _) in zip(self.leases, fences, strict=True) if int(seq) in live]
