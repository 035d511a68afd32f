"""``multiq doctor`` on beanstalkd servers that were started with the options in question."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import psutil
import pytest
from servers.beanstalk import BeanstalkServer
from servers.process import HOST

from multiq.backend import Ack, Bury, NewJob, Release
from multiq.backend.registry import open_backend
from multiq.errors import BackendUnavailable
from multiq.ids import new_id
from multiq_beanstalk import doctor, local_process

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from multiq.backend import Finding

    NewBeanstalk = Callable[..., BeanstalkServer]

QUEUE = "mail"


def found(url: str) -> dict[str, Finding]:
    with open_backend(url) as backend:
        return {finding.what: finding for finding in backend.doctor()}


def levels(url: str, *names: str) -> dict[str, str]:
    findings = found(url)
    return {name: findings[name].level for name in names}


def test_doctor_accepts_server_with_synced_log(new_beanstalk: NewBeanstalk) -> None:
    server = new_beanstalk(binlog=True, fsync_ms=0)
    findings = found(server.url)
    # Except for one: the doctor cannot know whether a service manager restarts the server
    assert {finding.what: finding.level for finding in findings.values() if finding.level != "ok"} == {
        "restart": "unknown"
    }
    assert "power failure" in findings["durability"].why
    with server.client() as client:
        assert client.stats()["total-jobs"] == "0", "nothing was put"


@pytest.mark.parametrize(
    ("options", "what", "level", "survives"),
    [
        ({"binlog": True, "fsync_ms": None}, "-f", "warn", "except for its last moments"),
        ({"binlog": True, "fsync_ms": 1000}, "-f", "warn", "except for its last moments"),
        ({}, "-b", "bad", "killed workers only"),
    ],
    ids=["as it comes", "-f1000", "no log"],
)
def test_doctor_derives_durability_from_options(
    new_beanstalk: NewBeanstalk, options: dict[str, int], what: str, level: str, survives: str
) -> None:
    findings = found(new_beanstalk(**options).url)
    assert findings[what].level == level
    assert findings["durability"].level == "warn"
    assert survives in findings["durability"].why


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["-l", "127.0.0.1", "-p", "11300"], {"l": "127.0.0.1", "p": "11300"}),
        (["-b", "/var/lib/b", "-f0"], {"b": "/var/lib/b", "f": "0"}),
        (["-VVf0", "-b/var"], {"V": "", "f": "0", "b": "/var"}),
        (["-f", "0", "-F"], {"f": "0", "F": ""}),
        (["-F", "-f", "7", "-f9"], {"F": "", "f": "9"}),
        (["-z"], {"z": ""}),
    ],
    ids=" ".join,
)
def test_command_line_is_parsed_as_by_the_server(words: list[str], options: dict[str, str]) -> None:
    assert list(local_process.options_of(words).items()) == list(options.items())


def test_doctor_reports_unknown_sync_for_remote_server(
    new_beanstalk: NewBeanstalk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = new_beanstalk(binlog=True, fsync_ms=0)
    monkeypatch.setattr(local_process, "PROC", tmp_path)  # a folder without the server's process
    findings = found(server.url)
    names = ("-f", "address", "durability")
    assert {findings[name].level for name in names} == {"unknown"}
    assert "killed server" in findings["durability"].why


def test_doctor_accepts_log_after_every_kind_of_change(new_beanstalk: NewBeanstalk) -> None:
    server = new_beanstalk(binlog=True, fsync_ms=1000, log_file_size=8192)
    with open_backend(server.url) as backend, backend.consumer([QUEUE]) as consumer:
        for _ in range(2):
            ids = backend.enqueue(QUEUE, [NewJob(b"x" * 500, new_id()) for _ in range(100)])
            backend.enqueue(QUEUE, [NewJob(b"x", new_id(), delay=3600)])
            leases = consumer.reserve(100, 0)
            consumer.settle([Ack(lease) for lease in leases[:90]])
            consumer.settle([Release(lease) for lease in leases[90:94]])
            consumer.settle([Bury(lease) for lease in leases[94:]])
            backend.kick(QUEUE, 3)
            backend.delete(QUEUE, ids[-1])
            findings = found(server.url)
            assert findings["binlog-records-written"].level == "ok"
            assert findings["binlog-oldest-index"].level == "ok"
            server.stop()
            server.start()  # the server's counters start at 0 again, and its jobs are still there


def test_doctor_warns_of_log_that_old_jobs_keep_growing(new_beanstalk: NewBeanstalk) -> None:
    server = new_beanstalk(binlog=True, fsync_ms=1000, log_file_size=4096)
    with open_backend(server.url) as backend:
        backend.enqueue(QUEUE, [NewJob(b"x" * 3000, new_id()) for _ in range(150)])
    finding = found(server.url)["binlog-oldest-index"]
    assert finding.level == "warn"
    assert "buried" in finding.advice


def test_doctor_reports_draining_server(new_beanstalk: NewBeanstalk) -> None:
    server = new_beanstalk()
    assert levels(server.url, "draining") == {"draining": "ok"}
    server.drain()
    assert levels(server.url, "draining") == {"draining": "bad"}


def test_doctor_names_unwatched_tubes(new_beanstalk: NewBeanstalk) -> None:
    server = new_beanstalk()
    with open_backend(server.url) as backend, backend.consumer(["watched"]) as consumer:
        assert consumer.reserve(1, 0) == []
        for queue in ("watched", "late", "lonely", "default"):
            backend.enqueue(queue, [NewJob(b"x", new_id(), delay=3600 if queue == "late" else 0)])
        finding = found(server.url)["current-watching"]
    assert finding.level == "warn"
    assert finding.why.endswith(": lonely")


def test_doctor_names_default_tube_without_any_worker(new_beanstalk: NewBeanstalk) -> None:
    server = new_beanstalk()
    with open_backend(server.url) as backend:
        backend.enqueue("default", [NewJob(b"x", new_id())])
    assert found(server.url)["current-watching"].why.endswith(": default")


def test_doctor_warns_of_server_that_listens_on_all_interfaces(new_beanstalk: NewBeanstalk) -> None:
    server = new_beanstalk(address="0.0.0.0")  # noqa: S104 - the point of it; gone in a moment
    finding = found(server.url)["address"]
    assert finding.level == "warn"
    assert "0.0.0.0" in finding.why  # noqa: S104
    own = _own_address()
    finding = found(f"beanstalk://{own}:{server.port}")["address"]
    assert finding.level == "warn"
    assert own in finding.why


def test_doctor_accepts_address_of_unix_socket() -> None:
    with BeanstalkServer(unix=True) as server:
        findings = found(server.url)
        assert findings["address"].level == "ok"
        assert findings["-b"].level == "bad"


def _own_address() -> str:
    """An address of this machine that is not loopback; the packets never leave it."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return str(address.address)
    pytest.skip("this machine has no address but loopback")


def test_listening_on_reads_ipv4_and_ipv6() -> None:
    with socket.create_server((HOST, 0)) as four, socket.create_server(("::1", 0), family=socket.AF_INET6) as six:
        assert local_process.listening_on(four.getsockname()[1]) == [HOST]
        assert local_process.listening_on(six.getsockname()[1]) == ["::1"]


@pytest.mark.parametrize(
    ("version", "level"),
    [("1.12", "ok"), ("1.13+3.gabc", "ok"), ("1.10", "warn"), ("1.4.6", "bad"), ("head", "unknown")],
)
def test_doctor_judges_server_version(version: str, level: str) -> None:
    stats = f'---\nversion: "{version}"\n'.encode()
    findings = doctor.examine(lambda command: stats if command == b"stats" else b"---\n", (HOST, 1))
    assert {finding.what: finding.level for finding in findings}["version"] == level


@pytest.mark.parametrize(
    ("version", "is_reported"), [("1.8", True), ("1.12", True), ("1.13+3.gabc", True), ("1.14", False), ("head", False)]
)
def test_doctor_advises_restarts_for_releases_that_crash(version: str, is_reported: bool) -> None:
    stats = f'---\nversion: "{version}"\n'.encode()
    findings = doctor.examine(lambda command: stats if command == b"stats" else b"---\n", (HOST, 1))
    restarts = [finding for finding in findings if finding.what == "restart"]
    assert [finding.level for finding in restarts] == ["unknown"] * is_reported
    assert all("Restart=always" in finding.advice for finding in restarts)
    (without_log,) = [finding for finding in findings if finding.what == "-b"]
    assert "crash" in without_log.why


def test_doctor_reports_largest_body_with_and_without_log(new_beanstalk: NewBeanstalk) -> None:
    assert found(new_beanstalk(max_job_size=1234).url)["max-job-size"].why.startswith("1,234 bytes:")
    assert "all but two" in found(new_beanstalk(binlog=True).url)["max-job-size"].why


def test_doctor_raises_for_unreachable_server(new_beanstalk: NewBeanstalk) -> None:
    server = new_beanstalk()
    server.stop()
    with open_backend(server.url) as backend, pytest.raises(BackendUnavailable):
        backend.doctor()
