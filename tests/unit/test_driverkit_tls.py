"""The TLS handshake with a server that does not reply: its deadline, and forks meanwhile."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from typing import TYPE_CHECKING

import pytest

from multiq.conformance.forks import ended_well, fork
from multiq.driverkit.tls import handshake, tls_context

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_handshake_ends_at_its_deadline(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = ends
    with pytest.raises(TimeoutError, match="did not answer"):
        handshake(ssl.create_default_context(), ours, "example.com", time.monotonic() + 0.2)
    assert ours.fileno() == -1, "a socket was left open"


def test_fork_does_not_wait_for_a_silent_server(ends: tuple[socket.socket, socket.socket]) -> None:
    # Given a thread in the middle of a handshake
    ours, theirs = ends
    raised: list[OSError] = []

    def shake_hands() -> None:
        try:
            handshake(ssl.create_default_context(), ours, "example.com", time.monotonic() + 600)
        except OSError as exc:
            raised.append(exc)

    thread = threading.Thread(target=shake_hands)
    thread.start()
    assert theirs.recv(1) == b"\x16"  # the client hello has been sent
    # When the process forks, then neither the process nor its child waits for the end of the handshake
    assert ended_well(fork(lambda: tls_context(None, None, None, skip_verification=False)))
    assert thread.is_alive()
    theirs.close()
    thread.join()
    assert len(raised) == 1
