"""Certificates for a server's TLS, signed by an authority that is made for the test."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, NamedTuple

import trustme

from servers.process import HOST

if TYPE_CHECKING:
    from pathlib import Path


class Certificate(NamedTuple):
    """PEM files: the certificate with its key, and the authority that signed it."""

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
