"""What a connection needs beside an address: who logs in, to which database, and over what kind of TLS."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from multiq.settings.passwords import password_of_environment, password_of_file

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator

    from .connection import Word


class Login(NamedTuple):
    """How a session begins."""

    username: str | None = None
    fixed_password: str | None = None
    database: int = 0
    tls: ssl.SSLContext | None = None
    password_file: str | None = None
    password_env: str | None = None

    def __repr__(self) -> str:
        """Without the password."""
        tls = ", tls" if self.tls is not None else ""
        return f"Login({self.username or 'default'}/{self.database}{tls})"

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        """For ``rich``, which else goes by the fields."""
        yield "username", self.username
        yield "database", self.database

    @property
    def password(self) -> str | None:
        """Read at this moment, so that one that was changed is found. Raises ``UrlInvalid`` if there is none."""
        if self.password_file is not None:
            return password_of_file(self.password_file)
        if self.password_env is not None:
            return password_of_environment(self.password_env)
        return self.fixed_password

    @property
    def greetings(self) -> list[tuple[Word, ...]]:
        """The commands that a session begins with, sent in one go."""
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
    def hello_at(self) -> int:
        """Which of them tells who the server is."""
        has_password = any(one is not None for one in (self.fixed_password, self.password_file, self.password_env))
        return 1 if has_password or self.username is not None else 0
