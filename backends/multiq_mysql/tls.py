"""TLS and the password: refuses a server without TLS if the URL asks for TLS, and refuses to send the password over an
unprotected connection.

====================  ======================================================================  =======================
the connection        the password itself                                                     a key that it sends
====================  ======================================================================  =======================
UNIX socket           is sent                                                                 is used
TLS, checked          is sent                                                                 is used
TLS, unchecked        is never sent                                                           only of this machine
without TLS           is never sent                                                           only of this machine
====================  ======================================================================  =======================

A server can ask for the password itself. Or it can send a key with which the client encrypts the password. The key of
``?server_public_key=`` is used on every connection.
"""

from __future__ import annotations

import ipaddress
import ssl
from typing import TYPE_CHECKING, Any

import pymysql
from pymysql.constants.CR import CR_AUTH_PLUGIN_CANNOT_LOAD, CR_SSL_CONNECTION_ERROR

from .pymysql_private import socket_of

if TYPE_CHECKING:
    from pymysql.connections import Connection

    from .dsn import Dsn


def may_send_password(dsn: Dsn) -> bool:
    """Whether the password itself may be sent. It may be sent if the server alone can read the data of the
    connection."""
    if dsn.unix_socket is not None:
        return True
    return dsn.tls is not None and dsn.tls.check_hostname and dsn.tls.verify_mode == ssl.CERT_REQUIRED


def takes_keys(dsn: Dsn) -> bool:
    """Whether a key that the server sends may encrypt the password."""
    return may_send_password(dsn) or _is_loopback(dsn.host or "")


def require_tls(connection: Connection[Any], dsn: Dsn) -> None:
    """Raise PyMySQL's error if the URL asks for TLS, and the connection has none. The connection is then closed."""
    # the class shows whether TLS was negotiated
    if dsn.tls is not None and not isinstance(socket_of(connection), ssl.SSLSocket):
        connection.close()
        raise pymysql.OperationalError(CR_SSL_CONNECTION_ERROR, f"{dsn.place} offers no TLS, which tls=yes needs")


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


REFUSED_PLUGINS = {b"mysql_clear_password": _Refusal, b"dialog": _Refusal, b"mysql_old_password": _Refusal}


if TYPE_CHECKING:
    _PyMySQL = Connection[Any]
else:
    _PyMySQL = pymysql.connections.Connection


class GuardedConnection(_PyMySQL):
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


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
