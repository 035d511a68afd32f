"""TLS to a server: contexts, and a handshake that is safe while other threads fork."""

from __future__ import annotations

import selectors
import ssl
import threading
import warnings
from typing import TYPE_CHECKING

from multiq.errors import UrlInvalid

from .fork import forks
from .net import time_left

if TYPE_CHECKING:
    import socket

openssl_lock = threading.RLock()
"""A thread holds this lock while it calls OpenSSL for a handshake, and while it forks.

During a handshake, OpenSSL fills process-wide tables, each under a lock. A child that is forked at this moment inherits
the held lock, but not the thread that would release it. The child's own first handshake would hang for ever. In a test
without this lock, 13 of 1,500 children hung, while two threads connected and a third one forked.
"""

forks.hold(openssl_lock)


def tls_context(
    ca: str | None,
    cert: str | None,
    key: str | None,
    *,
    skip_verification: bool,
    prefix: str = "",
    ca_path: str | None = None,
    key_password: str | None = None,
    ciphers: str | None = None,
) -> ssl.SSLContext:
    """Return a context that verifies the server's certificate and host name.

    Parameters:
        ca: file with the authority's certificate. None: the system's authorities.
        cert: file with the client's certificate, if the server requires one.
        key: file with the private key of *cert*, if the key is not in *cert*.
        skip_verification: accept any certificate, and log a warning.
        prefix: the beginning of the names of *ca*, *cert* and *key* in the URL, for messages.
        ca_path: folder with authorities' certificates, instead of *ca* or in addition to it.
        key_password: the password of the private key, if it is encrypted.
        ciphers: the allowed ciphers, as OpenSSL lists them. None: Python's list. Ciphers of TLS 1.3 are always allowed.

    Raises ``UrlInvalid`` for files that cannot be used.
    """
    try:
        with openssl_lock:
            context = ssl.create_default_context(cafile=ca, capath=ca_path)
            if cert is not None:
                context.load_cert_chain(cert, key, key_password)
            if ciphers is not None:
                context.set_ciphers(ciphers)
    except OSError as exc:  # SSLError, too
        named = (("ca", ca), ("cert", cert), ("key", key))
        files = ", ".join(
            [f"{prefix}{name}={path}" for name, path in named if path]
            + [f"ssl_{name}={value}" for name, value in (("ca_path", ca_path), ("ciphers", ciphers)) if value]
        )
        raise UrlInvalid(f"the certificates cannot be used ({files}): {exc}") from exc
    if skip_verification:
        warnings.warn(
            "dangerously_skip_tls_verification is set: the connection is encrypted, but an attacker in between can "
            f"read and change every job; name the server's authority with ?{prefix}ca= instead",
            stacklevel=2,
        )
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def handshake(context: ssl.SSLContext, sock: socket.socket, name: str, deadline: float) -> ssl.SSLSocket:
    """Return a TLS socket for the connection of *sock*, verified for the host *name*. *sock* cannot be used afterwards.

    A forked child closes its copy of the new socket. If another thread forks during the handshake, the fork waits while
    OpenSSL computes. It does not wait until the server answers. Raises ``ssl.SSLError``, ``OSError``, and
    ``TimeoutError`` at *deadline*.
    """
    sock.settimeout(0)
    with openssl_lock:
        secured = context.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)
        forks.close_in_child(secured)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(secured, selectors.EVENT_READ)
            while (wanted := _step(secured)) is not None:
                selector.modify(secured, wanted)
                selector.select(time_left(deadline))
        secured.settimeout(time_left(deadline))
    except BaseException:
        secured.close()
        raise
    return secured


def _step(sock: ssl.SSLSocket) -> int | None:
    """Continue the handshake as far as possible. Returns the event to wait for, or None if the handshake is done."""
    try:
        with openssl_lock:
            sock.do_handshake()
    except ssl.SSLWantReadError:
        return selectors.EVENT_READ
    except ssl.SSLWantWriteError:
        return selectors.EVENT_WRITE
    return None
