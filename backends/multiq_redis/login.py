"""What a connection needs beside an address: who logs in, to which database, and over what kind of TLS."""

from __future__ import annotations

import ssl
import warnings
from typing import TYPE_CHECKING, NamedTuple

from multiq.errors import UrlInvalid

if TYPE_CHECKING:
    from .wire import Word


class Login(NamedTuple):
    """How a session begins."""

    username: str | None = None
    password: str | None = None
    database: int = 0
    tls: ssl.SSLContext | None = None

    @property
    def greetings(self) -> list[tuple[Word, ...]]:
        """The commands that a session begins with, sent in one go."""
        words: list[tuple[Word, ...]] = []
        if self.password is not None or self.username is not None:
            user = (self.username,) if self.username else ()
            words.append(("AUTH", *user, self.password or ""))
        words.append(("HELLO", "2"))
        if self.database:
            words.append(("SELECT", self.database))
        return words

    @property
    def hello_at(self) -> int:
        """Which of them tells who the server is."""
        return 0 if self.password is None and self.username is None else 1


def tls_context(ca: str | None, cert: str | None, key: str | None, *, unchecked: bool) -> ssl.SSLContext:
    """TLS that checks the server's certificate and name, against *ca* or the system's authorities.

    Raises ``UrlInvalid`` for files that cannot be used.
    """
    try:
        context = ssl.create_default_context(cafile=ca)
        if cert is not None:
            context.load_cert_chain(cert, key)
    except OSError as exc:  # SSLError, too
        files = ", ".join(f"{name}={path}" for name, path in (("ca", ca), ("cert", cert), ("key", key)) if path)
        raise UrlInvalid(f"the certificates cannot be used ({files}): {exc}") from exc
    if unchecked:
        warnings.warn(
            "dangerously_skip_tls_verification is set: the connection is encrypted, but whoever sits in between can "
            "read and change every job; name the server's authority with ?ca= instead",
            stacklevel=2,
        )
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
