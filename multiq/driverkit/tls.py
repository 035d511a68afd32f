"""TLS to a server: what is checked, and a handshake that no fork can interrupt."""

from __future__ import annotations

import os
import selectors
import ssl
import threading
import warnings
from typing import TYPE_CHECKING

from multiq.errors import UrlInvalid

from .net import time_left

if TYPE_CHECKING:
    import socket

_computing = threading.RLock()
"""Held while OpenSSL computes, and by whoever forks.

OpenSSL fills tables of the whole process during a handshake, each under a lock. A child that is forked at that moment
inherits the lock, but not the thread that would open it: its own first handshake hangs for ever. 13 of 1,500 did that
where two threads connected while a third one forked.
"""

if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(
        before=_computing.acquire, after_in_parent=_computing.release, after_in_child=_computing.release
    )


def tls_context(
    ca: str | None, cert: str | None, key: str | None, *, unchecked: bool, prefix: str = ""
) -> ssl.SSLContext:
    """TLS that checks the server's certificate and name, against *ca* or the system's authorities.

    *prefix* is what the names of the files begin with in the URL. Raises ``UrlInvalid`` for files that cannot be used.
    """
    try:
        with _computing:
            context = ssl.create_default_context(cafile=ca)
            if cert is not None:
                context.load_cert_chain(cert, key)
    except OSError as exc:  # SSLError, too
        named = (("ca", ca), ("cert", cert), ("key", key))
        files = ", ".join(f"{prefix}{name}={path}" for name, path in named if path)
        raise UrlInvalid(f"the certificates cannot be used ({files}): {exc}") from exc
    if unchecked:
        warnings.warn(
            "dangerously_skip_tls_verification is set: the connection is encrypted, but whoever sits in between can "
            f"read and change every job; name the server's authority with ?{prefix}ca= instead",
            stacklevel=2,
        )
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def handshake(context: ssl.SSLContext, sock: socket.socket, name: str, deadline: float) -> ssl.SSLSocket:
    """*sock* with TLS, to a server that has this *name*; *sock* itself is of no use after this.

    A process that forks meanwhile waits for the computing, not for the server. Raises ``ssl.SSLError``, ``OSError``,
    and ``TimeoutError`` at the *deadline*.
    """
    sock.settimeout(0)
    with _computing:
        secured = context.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(secured, selectors.EVENT_READ)
            while (awaited := _step(secured)) is not None:
                selector.modify(secured, awaited)
                selector.select(time_left(deadline))
        secured.settimeout(time_left(deadline))
    except BaseException:
        secured.close()
        raise
    return secured


def _step(sock: ssl.SSLSocket) -> int | None:
    """As much of the handshake as there is data for. Returns what to wait for, as ``selectors`` names it."""
    try:
        with _computing:
            sock.do_handshake()
    except ssl.SSLWantReadError:
        return selectors.EVENT_READ
    except ssl.SSLWantWriteError:
        return selectors.EVENT_WRITE
    return None
