"""The health file, and the probe that reads it: with real processes and a real server that goes away."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
from processes import until, worker
from servers.redis import RedisServer
from shell import Shell
from worker_app import app, nap, quick

import multiq
from multiq.backend import Ack, Lease
from multiq.settings.process_range import ProcessRange
from multiq.worker.monitoring.health import Health, HealthReport
from multiq.worker.monitoring.health_file import HealthFile
from multiq.worker.processes.inflight import Held, InflightWriter
from multiq.worker.processes.process import ProcessSettings
from multiq.worker.processes.shared_state import SharedState

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        app.connect(server.url)
        yield server
        app.close()


def read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
    return document


def test_a_worker_says_how_it_is_until_it_ends(tmp_path: Path, server: RedisServer) -> None:
    file = tmp_path / "health"
    shell = Shell(tmp_path)
    with worker(tmp_path, server.url, f"processes=2, health_file={str(file)!r}") as process:
        # Given a worker that has run a job, and runs another one
        process.wait_until_working()
        quick.enqueue(1)
        nap.enqueue(2, 60)
        until(lambda: (read(file).get("jobs"), read(file).get("running")) == (1, 1))
        # Then the file shows both jobs, and the probe agrees
        document = read(file)
        assert (document["state"], document["is_well"], document["is_ready"]) == ("working", True, True)
        assert document["pid"] == process.process.pid
        assert len(document["children"]) == 2
        assert document["waits_for"] == []
        assert file.stat().st_mode & 0o777 == 0o600
        done = shell.run("health", str(file))
        assert (done.code, done.out) == (0, f"{document['worker']} is working\n")
        # When the worker is paused, and a child dies, then it is still healthy, and the file shows both: the file is
        # written every five seconds
        process.send(signal.SIGUSR2)
        until(lambda: "paused" in process.log)
        os.kill(document["children"][0], signal.SIGKILL)
        until(lambda: (read(file)["waits_for"], read(file)["crashed"]) == (["it is paused"], 1))
        assert "it waits: it is paused" in shell.run("health", str(file)).out
        # When the worker ends, then the file is gone
        process.send(signal.SIGTERM)
        until(lambda: "stopping" in process.log)  # the system merges two equal signals if the first is still pending
        process.send(signal.SIGTERM)
        process.wait()
        assert not file.exists()
        done = shell.run("health", str(file), "--json")
        assert (done.code, done.json) == (1, {"well": False, "age": None, "report": None})


def test_a_worker_that_was_killed_is_not_well_for_long(tmp_path: Path, server: RedisServer) -> None:
    file = tmp_path / "health"
    with worker(tmp_path, server.url, f"processes=1, health_file={str(file)!r}") as process:
        process.wait_until_working()
        until(file.exists)
        process.kill()
    shell = Shell(tmp_path)
    until(lambda: shell("health", str(file), "--max-age", "1s").code == 1)
    assert "was last well" in shell("health", str(file), "--max-age", "1s").out


@pytest.mark.long
def test_a_reload_keeps_the_health_file(tmp_path: Path, server: RedisServer) -> None:
    file = tmp_path / "health"
    with worker(tmp_path, server.url, f"processes=1, health_file={str(file)!r}") as process:
        process.wait_until_working()
        until(lambda: read(file).get("children"))
        before = read(file)
        process.send(signal.SIGHUP)
        until(lambda: read(file)["children"] not in ([], before["children"]))
        assert read(file)["pid"] == before["pid"] == process.process.pid


def report(tmp_path: Path, shared_state: SharedState) -> HealthReport:
    return Health(shared_state, ProcessSettings(queues=("q",)), ProcessRange(2, 2)).report()


@pytest.fixture
def shared_state() -> SharedState:
    """The state of a healthy worker that was started ten minutes ago."""
    shared_state = SharedState(2, 4)
    shared_state.worker.started_at -= 600
    shared_state.worker.contact = shared_state.worker.supervisor_beat
    shared_state.worker.childless_since = 0
    for number, row in enumerate(shared_state.children):
        row.table = number
        row.pid, row.beat = 10**7 + number, shared_state.worker.supervisor_beat
    return shared_state


def test_status_reports_faults_of_a_worker(tmp_path: Path, shared_state: SharedState) -> None:
    def wrong() -> tuple[list[str], bool, bool]:
        now = report(tmp_path, shared_state)
        return now.waits_for, now.is_well, now.is_ready

    start = shared_state.worker.contact
    assert wrong() == ([], True, True)
    shared_state.worker.contact = start - 20
    assert wrong() == (["the backend has not answered for 20 s"], True, False)
    shared_state.worker.contact = start - 61
    assert wrong() == (["the backend has not answered for 61 s"], False, False)
    shared_state.worker.contact = start
    shared_state.children[1].beat -= 31
    assert wrong() == (["process 10000001 has been stuck for 31 s"], False, False)
    shared_state.children[1].beat = start
    shared_state.worker.supervisor_beat -= 11
    assert wrong() == (["the supervisor has been stuck for 11 s"], False, False)
    shared_state.worker.supervisor_beat = start
    shared_state.children[0].pid = shared_state.children[1].pid = 0
    assert wrong() == (["no process works: one is about to start"], True, False)
    shared_state.worker.childless_since = start - 4
    assert wrong() == (["no process works: one is about to start"], True, False)
    shared_state.worker.childless_since = start - 6
    assert wrong() == (["no process has worked for 6 s: see the worker's log"], False, False)
    shared_state.worker.stops = 1
    assert wrong() == (["it is draining"], True, False)


def test_a_process_that_runs_a_job_need_not_make_turns(tmp_path: Path, shared_state: SharedState) -> None:
    row = shared_state.children[0]
    shared_state.tables[int(row.table)].assign()
    inflight = InflightWriter(shared_state.tables[int(row.table)])
    lease = Lease("q", "1", "token", b"", 1024, 60.0, 1, 0, 0, 0.0)
    held = Held(lease, None, 20.0, 60.0, began_at=1.0)
    inflight.hold([held])
    inflight.begin(held)
    row.beat -= 300
    assert report(tmp_path, shared_state).is_well
    held.verdict = Ack(lease)
    inflight.end(held)
    assert not report(tmp_path, shared_state).is_well


def test_the_health_file_s_time_is_when_the_worker_was_last_well(tmp_path: Path, shared_state: SharedState) -> None:
    file = HealthFile(tmp_path / "health")
    shared_state.worker.supervisor_beat -= 60
    file.write(report(tmp_path, shared_state))
    assert (tmp_path / "health").stat().st_mtime == 0
    shell = Shell(tmp_path)
    assert "has not been well yet: the supervisor" in shell("health", str(tmp_path / "health")).out
    shared_state.worker.supervisor_beat += 60
    file.write(report(tmp_path, shared_state))
    well_at = (tmp_path / "health").stat().st_mtime
    assert well_at > 0
    shared_state.worker.supervisor_beat -= 60
    file.write(report(tmp_path, shared_state))
    assert (tmp_path / "health").stat().st_mtime == well_at
    assert read(tmp_path / "health")["is_well"] is False


def test_health_file_needs_a_supervisor_and_a_folder(tmp_path: Path, server: RedisServer) -> None:
    with pytest.raises(multiq.OptionInvalid, match="need a process beside the jobs"):
        multiq.Worker(app, processes=0, health_file=tmp_path / "health")
    with pytest.raises(multiq.OptionInvalid, match="must be in a folder that exists"):
        multiq.Worker(app, processes=1, health_file=tmp_path / "nowhere" / "health")
    with pytest.raises(multiq.OptionInvalid, match="must be a file, got the folder"):
        multiq.Worker(app, processes=1, health_file=tmp_path)
