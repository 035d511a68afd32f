"""The undocumented parts of PyMySQL that the driver uses.

===========================  ============================================================================  ============
name                         what for                                                                      used in
===========================  ============================================================================  ============
``connect(sock)``            PyMySQL sends over the driver's own socket, which has a deadline              opening.py
``_sock``                    that socket, or the TLS socket that has replaced it                           here
``_rfile``                   the socket's reader, which a forked child does not close                      here
``_force_close()``           closes the socket and sends nothing                                           here
``ctx``, ``wrap_socket``     the TLS context; PyMySQL calls only this method of the context                opening.py
``_secure``                  whether a password may be sent in the clear; read at the login                tls.py
``_auth_plugin_name``        the plugin that the greeting names; read at the login                         tls.py
``server_public_key``        set when the server sends a key to encrypt the password with                  tls.py
``auth_plugin_map``          plugin's name in bytes -> class whose ``authenticate`` is called first        opening.py
``query()``                  sends a statement, or several, and reads the first result                     connection.py
``_result``                  the result read last, with ``rows``, ``affected_rows`` and ``has_next``;      connection.py
                             PyMySQL's cursors read it, too, and copy the rows
``next_result()``            reads the next result                                                         connection.py
===========================  ============================================================================  ============

tests/drivers/mysql/test_pymysql.py fails if a version of PyMySQL lacks one of these names or gives it another meaning.
It also fails if the driver uses a name that is not listed here. test_hostile_server.py tests the names that are used at
the login.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from multiq.driverkit.timed_socket import DeadlineSocket

if TYPE_CHECKING:
    import pymysql


def socket_of(opened: Any) -> DeadlineSocket | None:
    """Return the connection's socket. None if the connection is closed, or if the class of the socket is not the
    driver's."""
    sock = opened._sock  # noqa: SLF001 - PyMySQL replaces it when TLS begins
    return sock if isinstance(sock, DeadlineSocket) else None


def limit_each_call(opened: pymysql.connections.Connection[Any], seconds: float) -> None:
    """Limit each later statement with its whole reply to this many *seconds*."""
    sock = socket_of(opened)
    if sock is not None:
        sock.period = seconds


def set_deadline(opened: pymysql.connections.Connection[Any], deadline: float) -> None:
    """Set one deadline for all later statements together. *deadline* is a time of the monotonic clock."""
    sock = socket_of(opened)
    if sock is not None:
        sock.deadline, sock.period = deadline, None


def leave_to_parent(opened: Any) -> None:
    """In a forked child, close the child's copy of the socket. PyMySQL's reader on the socket is not closed.

    At the fork, a thread of the parent may have been in a read. The reader's lock then stays locked in the child for
    ever. Closing the reader would wait for that lock.
    """
    sock, opened._sock, opened._rfile = opened._sock, None, None  # noqa: SLF001 - its own way out closes the reader
    if sock is not None:
        with contextlib.suppress(OSError):
            os.close(sock.detach())


def drop(opened: pymysql.connections.Connection[Any]) -> None:
    """Close the socket without sending COM_QUIT.

    COM_QUIT would wait for a hung server. In a forked child it would end the parent's session.
    """
    with contextlib.suppress(Exception):
        opened._force_close()  # type: ignore[attr-defined]  # noqa: SLF001 - close() sends COM_QUIT
