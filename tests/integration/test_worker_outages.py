"""What a worker logs, and how long it waits, while its backend is unreachable, and afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from typing import TYPE_CHECKING

import pytest
from servers.beanstalk import BeanstalkServer
from servers.process import until
from servers.redis import RedisServer
from shell import Shell

import multiq
from multiq import events
from multiq.backend import Arrive, NewJob, Terms
from multiq.backend.paired.backend import Paired
from multiq.settings.url import with_store
from multiq.worker.processes import process

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell.app.close()


class Told:
    """The outages that a worker reports, with their times."""

    def __init__(self, app: multiq.App) -> None:
        self.downs: list[tuple[float, float]] = []  # the time, and the pause that was reported
        self.ups: list[float] = []
        app.on(events.BackendDown)(lambda event: self.downs.append((time.monotonic(), event.retry_in)))
        app.on(events.BackendUp)(lambda event: self.ups.append(time.monotonic()))


@pytest.mark.long
@pytest.mark.parametrize("threads", [1, 3])
def test_retry_in_is_the_pause_that_is_waited(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a worker with a job that runs when the server dies, and a job that ends during the outage
    monkeypatch.setattr(process, "_IDLE", 600.0)  # so that a later wait does not report "up"
    with BeanstalkServer() as server:
        app = multiq.App(server.url)
        told, running = Told(app), threading.Event()

        @app.task(ttr=4)
        def nap(seconds: float) -> None:
            running.set()
            time.sleep(seconds)

        nap.enqueue(1.5)
        nap.enqueue(2.5)
        worker = multiq.Worker(app, threads=threads)
        thread = threading.Thread(target=worker.run, daemon=True)
        thread.start()
        assert running.wait(30)
        server.kill()
        until(lambda: len(told.downs) >= 10, "the worker has tried ten times")
        # Then the worker does not report the server as back
        assert told.ups == []
        server.start()
        until(lambda: told.ups, "the worker tells that its server is back")
        worker.stop()
        thread.join(30)
        app.close()
    # And each pause was the one that the worker reported
    pairs = list(zip(told.downs, told.downs[1:], strict=False))
    late = [later - (at + pause) for (at, pause), (later, _) in pairs]
    assert min(late) > -0.02, late
    assert sorted(late)[2] < 0.15, late  # most pauses may end late on a busy machine, but not all
    assert len(told.ups) == 1


@contextlib.contextmanager
def listening(process: subprocess.Popen[str]) -> Iterator[list[str]]:
    """The lines of the worker's log as they come. After the block, the list has all lines."""
    lines: list[str] = []

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)  # noqa: PERF402 - each as it comes

    thread = threading.Thread(target=read, daemon=True)
    with process:
        thread.start()
        try:
            yield lines
        finally:
            process.terminate()
            thread.join(30)


def having(word: str, lines: list[str]) -> list[str]:
    return [line for line in lines if word in line]


@pytest.mark.long
def test_an_outage_is_logged_at_once_then_more_rarely_and_at_its_end(shell: Shell) -> None:
    server = BeanstalkServer()  # not started
    with listening(shell.start("worker", "shop.tasks:app", "-q", "mail", "-c", server.url)) as lines:
        until(lambda: having("still", lines), "the outage is told once more")
        down = having(" down ", lines)
        assert len(down) == 2, down
        assert "cannot be reached" in down[0]
        assert " error " in down[0]
        with server:
            until(lambda: having(" up ", lines), "the end of the outage is told")
    server.close()
    (up,) = having(" up ", lines)
    assert " warning " in up
    assert "again, after " in up
    assert "tries" in up


@pytest.mark.long
def test_a_wrong_password_is_logged_once(shell: Shell) -> None:
    with RedisServer(requirepass="right") as server:
        url = server.url.replace(":right@", ":wr0ng@")
        with listening(shell.start("worker", "shop.tasks:app", "-q", "mail", "-c", url)) as lines:
            until(lambda: having(" down ", lines), "the outage is told")
            time.sleep(2)
    assert len(having(" down ", lines)) == 1, lines
    assert not having("wr0ng", lines)


@pytest.mark.long
def test_unsettled_jobs_of_a_dead_child_are_logged_once(shell: Shell) -> None:
    (shell.folder / "shop" / "tasks.py").write_text(
        "import os, time, multiq\napp = multiq.App()\n@app.task(ttr=30)\ndef nap():\n"
        "    print(os.getpid(), flush=True)\n    time.sleep(300)\n"
    )
    with RedisServer() as server, multiq.App(server.url) as app:
        app.task(name="nap")(lambda: None).enqueue()
        process = shell.start("worker", "shop.tasks:app", "-q", "default", "-p", "1", "-c", server.url)
        with listening(process) as lines:
            assert process.stdout is not None
            pid = int(process.stdout.readline())
            server.kill()
            os.kill(pid, signal.SIGKILL)
            until(lambda: having("cannot be settled yet", lines), "the sidecar tells of it")
            time.sleep(2)
            assert len(having("cannot be settled yet", lines)) == 1, lines
            server.start()
            until(lambda: having(" up ", lines), "the worker is back")


@pytest.mark.long
def test_a_process_that_waits_for_the_backend_is_not_called_stuck(shell: Shell) -> None:
    # Given a worker process that runs a long job
    (shell.folder / "shop" / "tasks.py").write_text(
        "import time, multiq\napp = multiq.App()\n@app.task\ndef nap():\n"
        "    print('running', flush=True)\n    time.sleep(300)\n"
    )
    with RedisServer() as server, multiq.App(server.url) as app:
        app.task(name="nap", ttr=2)(lambda: None).enqueue()
        process = shell.start(
            "worker", "shop.tasks:app", "-q", "default", "-p", "1", "--grace", "0", "-c", f"{server.url}?timeout=1"
        )
        with listening(process) as lines:
            assert process.stdout is not None
            process.stdout.readline()
            # When the backend answers neither that process nor the sidecar
            server.pause()
            until(lambda: having("cannot renew them", lines), "the sidecar tells that it cannot touch leases either")
            server.go_on()
        # Then the log does not report the job as stuck, because this is unknown
        assert not having("stuck", lines), lines


@pytest.mark.parametrize("processes", ["0", "1"])
@pytest.mark.long
def test_a_worker_does_not_end_as_empty_while_the_store_of_its_pair_is_down(shell: Shell, processes: str) -> None:
    # Given a job that the store has released, and a store that does not run
    with (
        BeanstalkServer(binlog=True) as server,
        RedisServer(appendonly="yes", appendfsync="always") as store,
        multiq.App(with_store(server.url, store.url)) as app,
    ):
        assert isinstance(app.backend, Paired)
        body = b'{"multiq":1,"task":"mail.reset","args":["ann"],"keep":600}'
        app.backend.enqueue("mail", [NewJob(body, "held", terms=Terms(1))])
        assert app.backend.store.carry_out([Arrive("+mail", "held", "someone")])
        store.kill()
        # When a worker runs that ends when no job is due
        command = ("worker", "shop.tasks:app", "-p", processes, "--stop-when-empty", "-c", str(app.url))
        process = shell.start(*command)
        with listening(process) as lines:
            # Then it logs the outage, and does not end
            until(lambda: having("are tried again", lines), "the worker has logged the outage")
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1)
            # When the store is back, then the worker runs the job, and ends
            store.start()
            assert process.wait(60) == 0, lines
        assert app.job("mail", "held").result(0) is None
