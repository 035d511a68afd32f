"""A process forks while another thread opens a connection: the child keeps no copy of the connection's socket."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading

import pytest

from multiq.backend.registry import open_backend
from multiq.conformance.forks import fork
from multiq.conformance.threads import HANGS
from multiq.errors import BackendTimeout

HOST = "127.0.0.1"


@pytest.mark.parametrize(
    "url",
    [
        "redis://:secret@{}?timeout=0.5",
        "rediss://{}?timeout=0.5",
        "mysql://ann:secret@{}/jobs?timeout=0.5",
        "beanstalk://{}?timeout=0.5",
    ],
    ids=["redis", "redis, TLS", "mysql", "beanstalk"],
)
def test_child_forked_during_a_login_keeps_no_copy_of_the_socket(url: str) -> None:
    with socket.create_server((HOST, 0)) as listener, contextlib.ExitStack() as stack:
        backend = stack.enter_context(open_backend(url.format(f"{HOST}:{listener.getsockname()[1]}")))
        errors: list[type[BaseException]] = []

        def look() -> None:
            try:
                backend.stats("mail")
            except Exception as exc:
                errors.append(type(exc))

        # Given a thread that logs in to a server that never answers
        looker = threading.Thread(target=look)
        looker.start()
        server, _ = listener.accept()
        stack.enter_context(server)
        server.settimeout(HANGS)
        if not url.startswith("mysql"):  # MySQL's server sends the first message
            assert server.recv(65536)
        # When the process forks, and the parent ends the login early
        child = fork(signal.pause)
        try:
            looker.join()
            # Then the server sees the connection's end, although the child lives
            with contextlib.suppress(ConnectionResetError):
                while server.recv(65536):
                    pass
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert errors == [BackendTimeout]
