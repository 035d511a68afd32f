"""Host names that are resolved late or never: a call ends at its deadline, on each backend with servers.

The system's resolver cannot be slowed down for a test, so ``socket.getaddrinfo`` is replaced by one that can.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from multiq.backend.registry import open_backend
from multiq.driverkit import resolver
from multiq.errors import BackendTimeout, BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "queues.example"
URLS = [
    "redis://{}",
    "redis+cluster://{}",
    "redis+sentinel://{}/jobs",
    "beanstalk://{}",
    "mysql://somebody@{}/jobs",
]


class SlowResolver:
    """The system's resolver, which answers for one name only after an event."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.asked = 0
        self._system = socket.getaddrinfo

    def __call__(self, host: str, port: int, **options: Any) -> Any:
        if host != NAME or options.get("flags"):
            return self._system(host, port, **options)
        self.asked += 1
        self.go.wait(60)
        return self._system("127.0.0.1", port, **options)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowResolver]:
    slow = SlowResolver()
    monkeypatch.setattr(socket, "getaddrinfo", slow)
    yield slow
    slow.go.set()


# Each test has ports of its own. Otherwise it could get the answer to the query of the test before.


@pytest.mark.parametrize(("port", "url"), list(enumerate(URLS, 10)))
def test_slow_name_is_a_timeout(slow: SlowResolver, url: str, port: int) -> None:
    with (
        open_backend(url.format(f"{NAME}:{port}") + "?timeout=0.2") as backend,
        pytest.raises(BackendTimeout, match="DNS"),
    ):
        backend.stats("mail")


@pytest.mark.parametrize(("port", "url"), list(enumerate(URLS, 20)))
def test_slow_name_is_resolved_once_for_all_waiting_calls(slow: SlowResolver, url: str, port: int) -> None:
    # Given calls that have timed out before the name is resolved
    url = url.format(f"{NAME}:{port}")
    for _ in range(3):
        with open_backend(f"{url}?timeout=0.1") as backend, pytest.raises(BackendTimeout):
            backend.stats("mail")
    assert slow.asked == 1
    # When the name is resolved while another call waits
    threading.Timer(0.2, slow.go.set).start()
    # Then that call uses the address, where no server listens
    with open_backend(f"{url}?timeout=5") as backend, pytest.raises(BackendUnavailable) as caught:
        backend.stats("mail")
    assert "DNS" not in str(caught.value)


@pytest.mark.parametrize("url", URLS)
def test_unknown_name_is_unavailable(url: str) -> None:
    with (
        open_backend(url.format("no-such-host.invalid") + "?timeout=5") as backend,
        pytest.raises(BackendUnavailable, match=r"no-such-host\.invalid"),
    ):
        backend.stats("mail")


def test_forked_child_resolves_for_itself(slow: SlowResolver) -> None:
    # Given a parent process with a thread that resolves a name
    with pytest.raises(resolver.NameTimeoutError):
        resolver.resolve(NAME, 4, time.monotonic() + 0.1)
    pid = os.fork()
    if pid == 0:  # pragma: no cover - in the child
        try:
            slow.go.set()
            found = resolver.resolve(NAME, 4, time.monotonic() + 30)
            os._exit(0 if found and slow.asked == 2 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_numeric_address_needs_no_thread(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "_start", None)
    assert resolver.resolve(host, 1, time.monotonic() + 1)[0][4][0] == host


def test_name_is_resolved_without_a_thread_if_none_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert resolver.resolve("localhost", 1, time.monotonic() + 1)
