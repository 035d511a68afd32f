"""Connection settings beside the address: user, password, database, TLS."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from multiq.settings.passwords import password_of_environment, password_of_file

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator

    from .connection import Word


class ConnectionSettings(NamedTuple):
    """User, password, database and TLS of a connection."""

    username: str | None = None
    fixed_password: str | None = None
    database: int = 0
    tls: ssl.SSLContext | None = None
    password_file: str | None = None
    password_env: str | None = None

    def __repr__(self) -> str:
        """Without the password."""
        tls = ", tls" if self.tls is not None else ""
        return f"ConnectionSettings({self.username or 'default'}/{self.database}{tls})"

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        """For ``rich``, which would print the fields otherwise."""
        yield "username", self.username
        yield "database", self.database

    @property
    def password(self) -> str | None:
        """The password, read now from its file or variable, as it may have changed. Raises ``UrlInvalid``."""
        if self.password_file is not None:
            return password_of_file(self.password_file)
        if self.password_env is not None:
            return password_of_environment(self.password_env)
        return self.fixed_password

    @property
    def setup_commands(self) -> list[tuple[Word, ...]]:
        """The commands that a connection begins with, sent together."""
        words: list[tuple[Word, ...]] = []
        password = self.password
        if password is not None or self.username is not None:
            user = (self.username,) if self.username else ()
            words.append(("AUTH", *user, password or ""))
        words.append(("HELLO", "2"))
        if self.database:
            words.append(("SELECT", self.database))
        return words

    @property
    def hello_index(self) -> int:
        """The index of HELLO in ``setup_commands``."""
        has_password = any(one is not None for one in (self.fixed_password, self.password_file, self.password_env))
        return 1 if has_password or self.username is not None else 0
