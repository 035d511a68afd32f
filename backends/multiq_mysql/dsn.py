"""``Dsn``: the connection settings of a URL. Nothing here connects: see opening.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from multiq.driverkit.timed_socket import TimedTlsSocket
from multiq.driverkit.tls import tls_context
from multiq.errors import UrlInvalid
from multiq.settings.password_sources import password_of_environment, password_of_file
from multiq.settings.url import Option, choice

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator, Mapping
    from typing import Self

    from multiq.settings.url import BackendUrl

PORT = 3306
_SCHEMES = ("mysql", "mysql+pymysql")  # SQLAlchemy writes the same address in the second form.
_LONGEST_NAME = 64  # characters of a database's name

OPTIONS: Mapping[str, Option] = {
    "unix_socket": Option(str, None, "path of the server's UNIX socket, instead of a host"),
    "password_file": Option(str, None, "file with the password, read again for each connection"),
    "password_env": Option(str, None, "name of the environment variable that has the password"),
    "tls": Option(choice("yes", "no"), "no", "TLS; checks the server's certificate and name; ssl_ca implies yes"),
    "ssl_ca": Option(str, None, "file with the authority that signed the server's certificate; default: the system's"),
    "ssl_cert": Option(str, None, "file with this client's certificate, if the server requires one"),
    "ssl_key": Option(str, None, "file with that certificate's private key, if it is a separate file"),
    "server_public_key": Option(
        str, None, "file with the server's public key (PEM), to log in with caching_sha2_password or sha256_password"
    ),
    "dangerously_skip_tls_verification": Option(
        choice("yes", "no"), "no", "accept any certificate: a man in the middle can read and change every job"
    ),
}
"""The options of a URL that concern the connection to the server."""


class Dsn(NamedTuple):
    """The settings that are needed to open a connection."""

    database: str
    host: str | None = None
    """None for a UNIX socket."""
    port: int = PORT
    unix_socket: str | None = None
    username: str | None = None
    """None means the user that runs this process, as with MySQL's own clients."""
    fixed_password: str | None = None
    password_file: str | None = None
    password_env: str | None = None
    tls: ssl.SSLContext | None = None
    server_public_key: bytes | None = None

    @classmethod
    def from_url(cls, url: BackendUrl) -> Self:
        """Return the DSN of a URL. Reads the certificates, but does no network I/O. Raises ``UrlInvalid``."""
        given = url.options
        if url.scheme not in _SCHEMES:
            raise UrlInvalid(f"{url} cannot be used: the scheme must be mysql://")
        if len(url.hosts) > 1:
            raise UrlInvalid(f"{url} cannot be used: it names several hosts; name only the primary")
        if (url.host is None) == (given["unix_socket"] is None):
            raise UrlInvalid(
                f"{url} cannot be used: name a host, as in mysql://user@localhost/jobs, or a UNIX socket, as in "
                "mysql://user@/jobs?unix_socket=/run/mysqld/mysqld.sock, and not both"
            )
        sources = [url.password, given["password_file"], given["password_env"]]
        if sum(source is not None for source in sources) > 1:
            raise UrlInvalid(
                f"{url} cannot be used: the password is given twice; write it into the URL, or name a password_file "
                "or a password_env"
            )
        return cls(
            database=_database(url),
            host=url.host,
            port=url.port or PORT,
            unix_socket=given["unix_socket"],
            username=url.username,
            fixed_password=url.password,
            password_file=given["password_file"],
            password_env=given["password_env"],
            tls=_tls(url),
            server_public_key=_public_key(url),
        )

    def __repr__(self) -> str:
        return f"Dsn({self.username or ''}@{self.place}/{self.database})"

    def __rich_repr__(self) -> Iterator[str]:
        """For the library ``rich``, which would otherwise show all fields, including the password."""
        yield f"{self.username or ''}@{self.place}/{self.database}"

    @property
    def place(self) -> str:
        """The server's address, for messages."""
        return self.unix_socket or f"{self.host}:{self.port}"

    @property
    def password(self) -> str:
        """The password. It is read at each call, because it may have changed.

        Raises ``UrlInvalid`` if the password cannot be read.
        """
        if self.password_file is not None:
            return password_of_file(self.password_file)
        if self.password_env is not None:
            return password_of_environment(self.password_env)
        return self.fixed_password or ""


def _database(url: BackendUrl) -> str:
    name = url.path.removeprefix("/")
    if not name or "/" in name or len(name) > _LONGEST_NAME:
        raise UrlInvalid(f"{url} cannot be used: name a database, as in mysql://user@host/jobs")
    return name


def _public_key(url: BackendUrl) -> bytes | None:
    path = url.options["server_public_key"]
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as exc:
        raise UrlInvalid(f"server_public_key={path} cannot be read: {exc.strerror}") from exc


def _tls(url: BackendUrl) -> ssl.SSLContext | None:
    given = url.options
    ca, cert, key = given["ssl_ca"], given["ssl_cert"], given["ssl_key"]
    is_unchecked = given["dangerously_skip_tls_verification"] == "yes"
    if given["tls"] == "no" and not (ca or cert or key or is_unchecked):
        return None
    if given["unix_socket"] is not None:
        raise UrlInvalid(f"{url} cannot be used: a UNIX socket has no TLS; leave the TLS options out, or name a host")
    context = tls_context(ca, cert, key, skip_verification=is_unchecked, prefix="ssl_")
    context.sslsocket_class = TimedTlsSocket
    return context
