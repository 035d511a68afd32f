"""The soak's nemesis counts a fault only if its effect was seen, on real processes, servers and connections."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from servers.redis import RedisServer

from multiq.backend import NewJob
from multiq.backend.registry import open_backend
from multiq.errors import OptionInvalid
from multiq.fault_proxy import Proxy
from multiq.ids import new_id
from multiq.soak import crew as crew_module
from multiq.soak import nemesis as module
from multiq.soak.history import Recorder, read
from multiq.soak.load import Load
from multiq.soak.nemesis import Nemesis, has_ended
from multiq.soak.site import Site
from multiq.soak.staging import Harm, RestartFailed, site_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Crew:
    """A crew with a single process that has all roles."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.workers = {"-p 1": process}
        self.clients = {("consume", "3"): process}

    def children(self, _options: str | None = None) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return [psutil.Process(self.workers["-p 1"].pid)]
        return []


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield started
    started.kill()
    started.wait()


@pytest.fixture
def struck(
    tmp_path: Path, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, list[str]]]:
    """Try one fault. Returns what the history has about the fault."""
    monkeypatch.setattr(module, "TTR", 0.1)
    monkeypatch.setattr(module, "_STALLS", (0.1, 0.1, 0.1))
    monkeypatch.setattr(module, "_SEEN_WITHIN", 0.5)

    def strike(name: str, site: Site | None = None) -> dict[str, list[str]]:
        recorder = Recorder(tmp_path, "nemesis")
        site = site or Site("redis", "", list, bool)
        crew: Any = Crew(process)
        nemesis = Nemesis(crew, site, recorder, random.Random(7), [name])
        nemesis.strike()
        recorder.close()
        found = {f: [event.err for event in read(tmp_path) if event.f == f] for f in ("struck", "missed")}
        assert nemesis.count == len(found["struck"])
        assert len(found["struck"]) + len(found["missed"]) == 1
        return found

    return strike


@pytest.mark.parametrize("name", ["kill job process", "kill consumer", "kill worker"])
@pytest.mark.parametrize("is_gone", [False, True])
def test_a_kill_counts_if_the_process_ended_by_it(
    struck: Callable[..., Any], process: subprocess.Popen[bytes], name: str, is_gone: bool
) -> None:
    if is_gone:
        process.terminate()
        psutil.Process(process.pid).wait(10) if name == "kill job process" else process.wait()
    assert bool(struck(name)["struck"]) is not is_gone


@pytest.mark.parametrize("name", ["stop job process", "stop consumer"])
@pytest.mark.parametrize("is_gone", [False, True])
def test_a_stop_counts_if_the_process_stood_still(
    struck: Callable[..., Any], process: subprocess.Popen[bytes], name: str, is_gone: bool
) -> None:
    if is_gone:
        process.terminate()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # has ended, and its exit code is not read yet
    assert bool(struck(name)["struck"]) is not is_gone
    if not is_gone:
        assert psutil.Process(process.pid).status() != psutil.STATUS_STOPPED


@pytest.mark.parametrize(
    "name", ["cut", "freeze links", "swallow", "slow down", "lose replies", "lose requests", "lose acks"]
)
@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.long
def test_a_fault_of_a_link_counts_if_something_went_through_it(
    struck: Callable[..., Any], name: str, is_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_used:
        # so long that it is enough for the client on a busy machine
        monkeypatch.setattr(module, "_STALLS", (1.0, 1.0, 1.0))
    with RedisServer() as server, Proxy(("127.0.0.1", server.port)) as proxy, contextlib.ExitStack() as stack:
        site = Site("redis", "", list, bool, proxy, acks=b"PING")
        if is_used:
            asks = [sys.executable, "-c", _ASKS.format(proxy.port)]
            client = stack.enter_context(subprocess.Popen(asks))
            stack.callback(client.kill)
            give_up_at = time.monotonic() + 30
            while proxy.replied < 100 and time.monotonic() < give_up_at:
                time.sleep(0.01)
        assert bool(struck(name, site)["struck"]) is is_used


_ASKS = """
import socket, time
while True:
    try:
        with socket.create_connection(("127.0.0.1", {}), timeout=0.1) as connection:
            while True:
                connection.sendall(b"PING\\r\\n")
                if not connection.recv(100):
                    break
                time.sleep(0.002)
    except OSError:
        time.sleep(0.01)
"""


def refuse() -> object:
    raise ConnectionRefusedError("planted")


@pytest.mark.parametrize(
    ("do", "why"), [(lambda: 3, ""), (lambda: 0, "did not confirm it"), (refuse, "ConnectionRefusedError: planted")]
)
def test_a_fault_of_a_server_counts_if_it_says_so(
    struck: Callable[..., Any], do: Callable[[], object], why: str
) -> None:
    found = struck("its own", Site("redis", "", list, bool, own_faults={"its own": do}))
    assert bool(found["struck"]) is (not why)
    assert why in "".join(found["missed"])


@pytest.mark.parametrize(
    ("does", "is_told"),
    [
        ("raise KeyError(7)", True),
        ("sys.exit(0)", True),
        ("sys.exit('error: this should not happen: KeyError: 7')", True),
        ("sys.exit('error: cannot connect')", False),
        ("from multiq.errors import BackendUnavailable; raise BackendUnavailable('refused')", False),
        ("import os; os.kill(os.getpid(), 9)", False),
    ],
)
def test_a_process_that_ends_by_itself_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, is_told: bool
) -> None:
    # Given a crew whose workers end right after their start, by a signal or with an exit code
    monkeypatch.setattr(crew_module, "WORKERS", ("-p 1",))
    monkeypatch.setattr(crew_module, "CLIENTS", ())
    (tmp_path / "planted_end.py").write_text(f"import sys\n{does}\n")
    monkeypatch.syspath_prepend(tmp_path)
    load = Load(folder=str(tmp_path), seed=7, timeout=1.0)
    crew = crew_module.Crew(load, Site("redis", "memory://", list, bool), 1.0, plant="planted_end")
    try:
        assert crew.keep_up() == {}
        crew.workers["-p 1"].wait(30)
        # When they are started again
        told = crew.keep_up()
    finally:
        crew.kill_all()
    # Then each end is reported, unless a signal killed the worker, or its log names the store as unavailable
    assert bool(told) is is_told


QUEUES = ("multiq.soak.test.a",)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_restart_counts_if_the_server_is_another_one(
    struck: Callable[..., Any], tmp_path: Path, is_restarted: bool
) -> None:
    with RedisServer() as server:
        restart = f"kill -9 {server.pid} && sleep 0.1 && redis-server {server.folder}/redis.conf --daemonize yes"
        harm = Harm(restart_command=restart if is_restarted else "true")
        try:
            with site_at(server.url, QUEUES, 5.0, harm) as site:
                assert bool(struck("restart server", site)["struck"]) is is_restarted
                assert site.server is not None
                assert str(site.server.run_id()).startswith("run_id:")
        finally:
            if is_restarted:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", server.port)) as end:
                    end.sendall(b"SHUTDOWN NOSAVE\r\n")
                    end.recv(1)


def test_a_command_that_restarts_nothing_ends_the_soak_with_what_it_said(struck: Callable[..., Any]) -> None:
    with RedisServer() as server:
        harm = Harm(restart_command="echo no such unit >&2; exit 4")
        with (
            pytest.raises(RestartFailed, match="ended with 4: no such unit"),
            site_at(server.url, QUEUES, 5.0, harm) as site,
        ):
            struck("restart server", site)


def test_a_frozen_server_goes_on_and_an_ended_one_counts_as_no_fault(
    struck: Callable[..., Any], process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    with site_at(f"sqlite:///{tmp_path}/a.db", QUEUES, 5.0, Harm(freeze_pid=process.pid)) as site:
        assert struck("freeze server", site)["struck"]
        assert psutil.Process(process.pid).status() != psutil.STATUS_STOPPED
        process.send_signal(signal.SIGTERM)
        process.wait()
        for file in tmp_path.glob("*.jsonl"):
            file.unlink()
        assert struck("freeze server", site)["missed"]


@pytest.mark.parametrize("pid", [os.getpid(), os.getppid(), 2**22 - 1], ids=["own", "parent", "none"])
def test_a_process_that_must_not_be_frozen_is_refused_before_anything_begins(tmp_path: Path, pid: int) -> None:
    with (
        pytest.raises(OptionInvalid, match="process"),
        site_at(f"sqlite:///{tmp_path}/a.db", QUEUES, 5.0, Harm(freeze_pid=pid)),
    ):
        raise AssertionError("it was not refused")
    assert not (tmp_path / "a.db").exists()


@pytest.mark.parametrize("is_allowed", [True, False])
def test_a_flush_of_scripts_counts_if_the_server_obeys(struck: Callable[..., Any], is_allowed: bool) -> None:
    with RedisServer() as server:
        if not is_allowed:
            server.ask("ACL", "SETUSER", "default", "-script|flush")
        with site_at(server.url, QUEUES, 5.0, Harm(flush_scripts=True)) as site:
            assert bool(struck("flush scripts", site)["struck"]) is is_allowed


def test_a_process_that_was_being_started_is_killed_with_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted_end.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.syspath_prepend(tmp_path)
    load = Load(folder=str(tmp_path), seed=7, timeout=1.0)
    crew = crew_module.Crew(load, Site("redis", "memory://", list, bool), 1.0, plant="planted_end")
    started = crew._client("consume", "3")  # and the process id of this worker is not recorded
    crew.kill_all()
    assert has_ended(psutil.Process(started.pid)) if psutil.pid_exists(started.pid) else True
    started.wait()


def test_a_file_that_another_program_uses_stays(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    with site_at(url, QUEUES, 5.0, Harm()):
        assert (tmp_path / "a.db").exists()
    assert list(tmp_path.iterdir()) == []
    with site_at(url, QUEUES, 5.0, Harm()), open_backend(url) as theirs:
        (job_id,) = theirs.enqueue("orders", [NewJob(b"x", new_id())])
    with open_backend(url) as theirs:
        assert theirs.peek("orders", job_id).body == b"x"


@pytest.mark.long
@pytest.mark.parametrize("after", [1, 2])
def test_a_job_that_becomes_ready_during_the_audit_is_seen_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    # Given a job that is due between two of the listings
    with site_at(f"sqlite:///{tmp_path}/a.db", QUEUES, 5.0, Harm()) as site, open_backend(site.url) as backend:
        backend.enqueue(QUEUES[0], [NewJob(b"soak#7#", new_id(), delay=1.0)])
        listed = type(backend).jobs
        states = []

        def jobs(self: Any, queue: str, state: Any, **more: Any) -> Any:
            page = listed(self, queue, state, **more)
            states.append(state)
            if len(states) == after:
                time.sleep(1.1)
            return page

        monkeypatch.setattr(type(backend), "jobs", jobs)
        assert [number for number, _ in site.held()] == [7]
