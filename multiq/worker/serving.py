"""Health and metrics over HTTP: three pages for probes and for Prometheus, and nothing else.

They are served beside the jobs, from the keeper's process, so no task keeps them waiting. Nothing of a request is
used but its method and its path. There is no login: what is shown has no job's arguments in it, and the address is
this host's own unless somebody says otherwise.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import logging
import socket
import threading
import time
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import msgspec

from multiq.errors import ExtraNotInstalled, OptionInvalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from wsgiref.types import StartResponse, WSGIEnvironment

    from .vitals import Vitals

_log = logging.getLogger("multiq.keeper")

_LOOPBACK = "127.0.0.1"
_PATIENCE = 3.0  # seconds: when a worker rolls, the one of before gives its address up when it notices
_AGAIN = 0.05  # seconds
_THREADS = 2
_CONNECTIONS = 100
_IDLE = 3  # seconds, after which a connection without a request is closed: a probe that came behind it still has time
_HEADER_ROOM = 8192  # bytes
_BODY_ROOM = 1024  # bytes: requests have no body
_TEXT = "text/plain; version=0.0.4; charset=utf-8"


class Address(NamedTuple):
    """Where to listen."""

    host: str
    port: int


def parse_address(text: str) -> Address:
    """``HOST:PORT``, ``[::1]:PORT``, or ``:PORT`` for this host only. Raises ``OptionInvalid``."""
    try:
        parts = urlsplit(f"//{text}")
        port = parts.port
    except ValueError:
        port = None
    if port is None or parts.netloc != text or "@" in text:
        raise OptionInvalid(f"http {text!r} is no address: write HOST:PORT, or :PORT for this host only")
    return Address(parts.hostname or _LOOPBACK, port)


def check_libraries() -> None:
    """Raises ``ExtraNotInstalled``."""
    for name in ("prometheus_client", "waitress"):
        try:
            importlib.import_module(name)
        except ImportError as exc:
            raise ExtraNotInstalled(f"http needs {exc.name or name}: pip install 'multiq[metrics]'") from exc


def listen(address: Address) -> socket.socket:
    """A socket that is bound there. Raises ``OptionInvalid``."""
    give_up_at = time.monotonic() + _PATIENCE
    while True:
        try:
            return socket.create_server(
                address, family=socket.AF_INET6 if ":" in address.host else socket.AF_INET, backlog=_CONNECTIONS
            )
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE or time.monotonic() > give_up_at:
                raise OptionInvalid(f"http {address.host}:{address.port} cannot be listened on: {exc}") from exc
            time.sleep(_AGAIN)


class Pages:
    """The three pages, as a WSGI application."""

    def __init__(self, vitals: Vitals, metrics: Callable[[], bytes]) -> None:
        self._vitals = vitals
        self._metrics = metrics

    def __call__(self, request: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        status, kind, body = self._answer(request["REQUEST_METHOD"], request["PATH_INFO"])
        headers = [
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
        ]
        start(status, headers)
        return [] if request["REQUEST_METHOD"] == "HEAD" else [body]

    def _answer(self, method: str, path: str) -> tuple[str, str, bytes]:
        if path not in {"/healthz", "/readyz", "/metrics"}:
            return "404 Not Found", _TEXT, b"/healthz, /readyz and /metrics are here\n"
        if method not in {"GET", "HEAD"}:
            return "405 Method Not Allowed", _TEXT, b"GET or HEAD\n"
        if path == "/metrics":
            return "200 OK", _TEXT, self._metrics()
        report = self._vitals.report()
        is_fine = report.is_well if path == "/healthz" else report.is_ready
        status = "200 OK" if is_fine else "503 Service Unavailable"
        return status, "application/json", msgspec.json.encode(report) + b"\n"


class Server:
    """Serves *pages* on *listener*, from threads of its own."""

    def __init__(self, listener: socket.socket, pages: Pages) -> None:
        from waitress.server import create_server

        host, port, *_ = listener.getsockname()
        self._listener = listener
        self._server = create_server(
            pages,
            sockets=[listener],
            threads=_THREADS,
            connection_limit=_CONNECTIONS,
            channel_timeout=_IDLE,
            cleanup_interval=1,
            max_request_header_size=_HEADER_ROOM,
            max_request_body_size=_BODY_ROOM,
            ident=None,
            log_socket_errors=False,
        )
        logging.getLogger("waitress.queue").setLevel(logging.ERROR)  # a probe that waits for another is no news
        threading.Thread(target=self._serve, name="multiq-http", daemon=True).start()
        _log.info("health and metrics are on http://%s:%d", f"[{host}]" if ":" in host else host, port)

    def close(self) -> None:
        """Leave the address to others, at once: closing alone takes effect when the thread that waits there wakes."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _serve(self) -> None:
        try:
            self._server.run()
        except OSError:  # its socket was closed under it
            return
