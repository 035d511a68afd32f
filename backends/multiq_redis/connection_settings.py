"""Connection settings other than the address."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from multiq.settings.password_sources import password_of_environment, password_of_file

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator, Mapping


class ConnectionSettings(NamedTuple):
    """The settings of one server's connections, without the address."""

    username: str | None = None
    fixed_password: str | None = None
    database: int = 0
    tls: ssl.SSLContext | None = None
    password_file: str | None = None
    password_env: str | None = None
    client_name: str | None = None
    credential_provider: Any = None
    """An object with redis-py's ``get_credentials()``, asked for each new connection.

    None: the user name and password are in the fields above.
    """
    connect_func: Callable[[Any], object] | None = None
    """redis-py's ``redis_connect_func``, which logs in instead of ``on_connect``."""
    keepalive: Mapping[int, int] | None = None
    """TCP options to set, in the form of redis-py's ``socket_keepalive_options``."""

    def __repr__(self) -> str:
        """The settings as text. The password and the provider are left out, because a provider's ``repr`` may contain a
        password."""
        tls = ", tls" if self.tls is not None else ""
        return f"ConnectionSettings({self.user}/{self.database}{tls})"

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        """The fields that ``rich`` prints, without the password."""
        yield "user", self.user
        yield "database", self.database

    @property
    def user(self) -> str:
        """The user's name, for error messages."""
        if self.credential_provider is not None:
            return f"that {type(self.credential_provider).__name__} names"
        return self.username or "default"

    @property
    def password(self) -> str | None:
        """The password, read at each access from its file or variable. Raises ``UrlInvalid``."""
        if self.password_file is not None:
            return password_of_file(self.password_file)
        if self.password_env is not None:
            return password_of_environment(self.password_env)
        return self.fixed_password
