"""Foreign producers: jobs put by programs without multiq, and multiq's jobs as those programs see them."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import greenstalk
import pytest
from processes import worker
from servers.process import HOST
from worker_app import app, quick, read_diary

from multiq.backend import Bury, State
from multiq.backend.registry import open_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from servers.beanstalk import BeanstalkServer

    NewBeanstalk = Callable[..., BeanstalkServer]

EXAMPLES = Path(__file__).parents[3] / "examples" / "foreign_producer"
BODIES = ["plain", "h\u00e4llo \U0001f41f", "two\nlines\r\nand more", '{"any": "json"}', ""]


def shell(server: BeanstalkServer, queue: str, body: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("nc") is None:
        pytest.skip("netcat is not installed: apt-get install netcat-openbsd")
    command = ["sh", str(EXAMPLES / "enqueue.sh"), HOST, str(server.port), queue, body]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)


def php(server: BeanstalkServer, *words: str) -> str:
    if shutil.which("php") is None:
        pytest.skip("PHP is not installed: apt-get install php-cli")
    command = ["php", str(EXAMPLES / "enqueue.php"), HOST, str(server.port), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()


@pytest.fixture
def server(new_beanstalk: NewBeanstalk) -> Iterator[BeanstalkServer]:
    server = new_beanstalk()
    app.connect(server.url)
    yield server
    app.close()


def ran(server: BeanstalkServer, folder: Path) -> list[int]:
    """The numbers of the jobs that a real worker does until there are no more."""
    with worker(folder, server.url, "stop_when_empty=True") as process:
        assert process.wait(60) == 0, process.log
        return sorted(number for word, number, _, _ in read_diary(process.diary) if word == "end")


def test_task_put_by_a_shell_script_is_run(server: BeanstalkServer, tmp_path: Path) -> None:
    done = shell(server, "default", json.dumps({"multiq": 1, "task": "quick", "args": [7]}))
    assert done.returncode == 0, done.stderr
    assert app.queue().peek(done.stdout.strip()).state == State.READY
    assert ran(server, tmp_path) == [7]
    assert app.backend.queues() == []


@pytest.mark.parametrize("body", BODIES, ids=["plain", "not ASCII", "lines", "JSON", "nothing"])
def test_raw_bytes_put_by_a_shell_script_are_a_raw_job(server: BeanstalkServer, body: str) -> None:
    done = shell(server, "mail", body)
    assert done.returncode == 0, done.stderr
    with app.queue("mail").reserve(timeout=5) as job:
        assert (job.id, job.raw, job.attempt) == (done.stdout.strip(), body.encode(), 1)
    assert app.backend.queues() == []


def test_shell_script_reports_a_refusal(server: BeanstalkServer) -> None:
    refused = shell(server, "no@tube", "x")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "BAD_FORMAT" in refused.stderr
    server.drain()
    refused = shell(server, "mail", "x")
    assert refused.returncode == 1
    assert "DRAINING" in refused.stderr


def test_task_put_by_php_is_run(server: BeanstalkServer, tmp_path: Path) -> None:
    assert php(server, "mail", "--raw", "caf\u00e9")
    with app.queue("mail").reserve(timeout=5) as job:
        assert job.raw == "caf\u00e9".encode()
    php(server, "default", "quick", "8")
    assert ran(server, tmp_path) == []  # its argument is text, and the task wants a number
    assert app.queue().stats().buried == 1


def test_body_without_envelope_is_buried_not_dropped(server: BeanstalkServer, tmp_path: Path) -> None:
    with server.client() as client:
        job_id = client.put(b"\x00\xff no envelope", tube="default")
    quick.enqueue(1)
    assert ran(server, tmp_path) == [1]
    record = app.queue().peek(str(job_id))
    assert (record.state, record.body) == (State.BURIED, b"\x00\xff no envelope")


def test_foreign_client_can_read_a_multiq_job(server: BeanstalkServer) -> None:
    handle = quick.options(priority=7).enqueue(3)
    with greenstalk.Client((HOST, server.port), encoding=None) as client:
        job = client.reserve(timeout=0)
        assert (str(job.id), json.loads(job.body)) == (handle.id, {"multiq": 1, "task": "quick", "args": [3]})
        assert client.stats_job(job)["pri"] == 7
        client.delete(job)
    app.queue("mail").enqueue(b"\x00\r\n raw \xff")
    with server.client() as bare:
        bare.watch("mail")
        found = bare.reserve()
    assert found is not None
    assert found[1] == b"\x00\r\n raw \xff"


def test_foreign_ttr_below_the_minimum_is_kept(server: BeanstalkServer) -> None:
    with (
        server.client() as client,
        open_backend(server.url) as backend,
        backend.consumer(["mail"]) as consumer,
    ):
        job_id = client.put(b"x", tube="mail", ttr=1)
        (lease,) = consumer.reserve(1, 5)
        assert (lease.id, lease.ttr) == (str(job_id), 1.0)
        # the job is handed out again when its ttr of a second is over, even to the same consumer
        (again,) = consumer.reserve(1, 20)
        assert (again.id, again.attempt, again.crashes) == (str(job_id), 2, 1)


def test_foreign_tubes_do_not_disturb_queues(server: BeanstalkServer) -> None:
    with server.client() as client, open_backend(server.url) as backend:
        client.put(b"x", tube="laravel/(mail);$1")
        client.put(b"x", tube="mail")
        assert "mail" in backend.queues()
        with backend.consumer(["mail"]) as consumer:
            (lease,) = consumer.reserve(5, 0)
            assert consumer.settle([Bury(lease)]) == [None]
