"""``Dsn``: the connection settings of a URL, and how a connection is opened."""

from __future__ import annotations

import ipaddress
import ssl
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pymysql
from pymysql.constants.CR import CR_AUTH_PLUGIN_CANNOT_LOAD, CR_CONN_HOST_ERROR, CR_SSL_CONNECTION_ERROR

from multiq.driverkit.net import connect
from multiq.driverkit.timed_socket import TimedTlsContext, TimedTlsSocket, timed_socket
from multiq.driverkit.tls import tls_context
from multiq.errors import BackendUnavailable, MultiqError, UrlInvalid
from multiq.settings.password_sources import password_of_environment, password_of_file
from multiq.settings.url import Option, choice

from .errors import malformed
from .pymysql_private import limit_each_call, socket_of

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Mapping
    from typing import Self

    from pymysql.connections import Connection

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


class _Refusal:
    """Replaces the authentication plugins that send the password itself. A false server could ask for such a plugin."""

    def __init__(self, _connection: Connection[Any]) -> None: ...

    def authenticate(self, _packet: object) -> Any:
        raise pymysql.OperationalError(
            CR_AUTH_PLUGIN_CANNOT_LOAD,
            "the connection must be TLS with a checked certificate, or a UNIX socket, because the user's plugin "
            "(mysql_clear_password, dialog or mysql_old_password) reveals the password: use ?tls=yes or ?ssl_ca=, or "
            "another plugin for this user",
        )


_REFUSED_PLUGINS = {b"mysql_clear_password": _Refusal, b"dialog": _Refusal, b"mysql_old_password": _Refusal}


if TYPE_CHECKING:
    _PyMySQL = Connection[Any]
else:
    _PyMySQL = pymysql.connections.Connection


class _Connection(_PyMySQL):
    """A connection that does not reveal the password to a false server.

    A server can send a key with which the client encrypts the password. The key is used only if ``takes_keys``. The
    plain password is sent over TLS only if ``may_send_password``, because a false server can offer TLS, too.
    """

    takes_keys = True
    may_send_password = True
    _is_encrypted = False
    _greeted_with = ""

    @property
    def _secure(self) -> bool:
        return self._is_encrypted and self.may_send_password

    @_secure.setter
    def _secure(self, is_encrypted: bool) -> None:
        self._is_encrypted = is_encrypted

    @property
    def _auth_plugin_name(self) -> str:
        """The plugin that the server's greeting names.

        The name is empty if PyMySQL, with this plugin, would send the password itself over TLS with an unchecked
        certificate.
        """
        is_too_open = self._greeted_with == "sha256_password" and self.ssl and not self.may_send_password
        return "" if is_too_open else self._greeted_with

    @_auth_plugin_name.setter
    def _auth_plugin_name(self, name: str) -> None:
        self._greeted_with = name

    @property
    def server_public_key(self) -> bytes | None:
        return self._key

    @server_public_key.setter
    def server_public_key(self, key: bytes | None) -> None:
        if key and not self.takes_keys:
            raise pymysql.OperationalError(
                CR_AUTH_PLUGIN_CANNOT_LOAD,
                "the server sends a key to encrypt the password with, and its origin is not checked: use ?tls=yes "
                "or ?ssl_ca=, or name the file with the server's public key with ?server_public_key=",
            )
        self._key = key


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

    def connect(self, timeout: float, *, period: float | None = None, **more: Any) -> Connection[Any]:
        """Return a new connection that is connected and logged in within *timeout* seconds. *more*: arguments for
        ``pymysql.connect``.

        After the login, each statement with its whole reply may take at most *period* seconds. Default of *period*:
        *timeout*. Raises ``UrlInvalid`` for a password that cannot be read, ``pymysql.MySQLError``, and ``OSError`` for
        TLS.
        """
        deadline = time.monotonic() + timeout
        # Without ssl_disabled or a context, PyMySQL would try TLS without being asked. It would check no certificate,
        # and read all certificate authorities for each connection.
        tls: dict[str, Any] = {"ssl_disabled": True} if self.tls is None else {"ssl": self.tls}
        connection = _Connection(
            **{
                "host": self.host,
                "port": self.port,
                "unix_socket": self.unix_socket,
                "user": self.username,
                "password": self.password.encode(),  # PyMySQL would encode a string as Latin-1
                "database": self.database,
                "charset": "utf8mb4",
                "defer_connect": True,
                "auth_plugin_map": {} if self._may_send_password else _REFUSED_PLUGINS,
                "connect_timeout": timeout,
                "server_public_key": self.server_public_key,
                **tls,
                **more,
            }
        )
        connection.may_send_password = self._may_send_password
        connection.takes_keys = self._may_send_password or _is_loopback(self.host or "")
        inside: Any = connection
        inside._secure = self.unix_socket is not None  # noqa: SLF001 - as PyMySQL does for a socket that it opens itself
        if self.tls is not None:
            inside.ctx = TimedTlsContext(self.tls)
        sock = timed_socket(self._socket(deadline), deadline)
        try:
            connection.connect(sock)
        except (pymysql.MySQLError, OSError, MultiqError):
            raise
        except RuntimeError as exc:  # PyMySQL lacks a package for this authentication plugin.
            raise BackendUnavailable(f"{self.place} cannot be logged in to: {exc}") from exc
        except Exception as exc:  # A malformed greeting may raise any exception in PyMySQL.
            raise malformed(exc) from exc
        limit_each_call(connection, timeout if period is None else period)
        # the class shows whether TLS was negotiated
        if self.tls is not None and not isinstance(socket_of(connection), ssl.SSLSocket):
            connection.close()
            why = f"{self.place} offers no TLS, which tls=yes needs"
            raise pymysql.OperationalError(CR_SSL_CONNECTION_ERROR, why)
        return connection

    @property
    def _may_send_password(self) -> bool:
        """Whether the password itself may be sent. It may be sent if the server alone can read the data of the
        connection."""
        if self.unix_socket is not None:
            return True
        return self.tls is not None and self.tls.check_hostname and self.tls.verify_mode == ssl.CERT_REQUIRED

    def _socket(self, deadline: float) -> socket.socket:
        """Return a connected socket. PyMySQL itself would leak a socket that fails to connect, and would resolve names
        without a time limit."""
        address = (self.host, self.port) if self.host is not None else str(self.unix_socket)
        try:
            return connect(address, deadline)
        except TimeoutError:
            raise
        except OSError as exc:
            raise pymysql.OperationalError(CR_CONN_HOST_ERROR, f"cannot connect to {self.place}: {exc}") from exc


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


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
