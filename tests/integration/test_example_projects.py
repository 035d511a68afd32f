"""The projects in ``examples`` that show a framework: a page's files and commands, carried out as the page has them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

import pytest
from doc_blocks import ROOT, blocks_of
from pythons import python_of_django_6
from servers.process import free_port, until
from servers.redis import RedisServer

import multiq

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from doc_blocks import Block

PROJECTS = ["django", "fastapi", "flask", "sqlalchemy"]

PATIENCE = 60  # seconds for a command's output to be as the page shows it
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")


@pytest.mark.parametrize("name", PROJECTS)
def test_a_project_has_the_files_of_its_page(name: str) -> None:
    folder = ROOT / "examples" / name
    of_page = {block.file: block.code for block in blocks_of(ROOT / f"docs/{name}.md") if block.file}
    files = {str(path.relative_to(folder)): path.read_text("utf-8") for path in folder.rglob("*.py")}
    of_project = {name: text for name, text in files.items() if text}
    assert of_project
    assert {file: of_page.get(file) for file in of_project} == of_project


@pytest.mark.parametrize("name", PROJECTS)
def test_a_project_requires_what_its_page_installs(name: str) -> None:
    install = next(block for block in blocks_of(ROOT / f"docs/{name}.md") if block.language == "console")
    _pip, _install, *packages = shlex.split(install.code.removeprefix("$ "))
    assert packages == (ROOT / "examples" / name / "requirements.txt").read_text("utf-8").split()


class Shell:
    """Runs the commands of a page in a folder, and compares what they print with what the page shows."""

    def __init__(self, folder: Path, environment: dict[str, str], redis: str) -> None:
        self._folder = folder
        self.redis = redis
        self._environment = environment
        self.port = free_port()
        self._ids: dict[str, str] = {}  # shown -> actual
        self._background: list[subprocess.Popen[bytes]] = []

    def run(self, code: str) -> None:
        """Run a console block."""
        for part in re.split(r"^\$ ", code, flags=re.MULTILINE)[1:]:
            command, _, shown = part.partition("\n")
            self._run(command, [line for line in shown.splitlines() if line])

    def begin(self, command: str) -> subprocess.Popen[bytes]:
        """Start a server in the background, and wait until it listens."""
        self._run(f"{command} &", [])
        return self._background[-1]

    def close(self) -> None:
        for process in self._background:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    @property
    def log(self) -> str:
        path = self._folder / "log"
        return path.read_text("utf-8", "replace") if path.exists() else ""  # no page has a block in the background

    def _run(self, command: str, shown: list[str]) -> None:
        for known, actual in self._ids.items():
            command = command.replace(known, actual)
        command = re.sub(r"\b(8000|5000)\b", str(self.port), command)
        if command.startswith("export "):
            name, _, value = command.removeprefix("export ").partition("=")
            self._environment[name] = value.replace("redis://localhost", self.redis)
        elif command.endswith("&"):
            self._begin(command)
        elif not shown:
            subprocess.run(["bash", "-c", command], cwd=self._folder, env=self._environment, check=True, timeout=300)
        else:
            self._repeat(command, shown)

    def _begin(self, command: str) -> None:
        with (self._folder / "log").open("ab") as log:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command.removesuffix('&')}"],
                cwd=self._folder, env=self._environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self._background.append(process)
        give_up_at = time.monotonic() + PATIENCE
        while str(self.port) in command:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert process.poll() is None, self.log
            assert time.monotonic() < give_up_at, self.log
            time.sleep(0.05)

    def _repeat(self, command: str, shown: list[str]) -> None:
        """Run a command until it prints what the page shows. A command that changes something runs once."""
        give_up_at = time.monotonic() + PATIENCE
        while True:
            done = subprocess.run(
                ["bash", "-c", command], cwd=self._folder, env=self._environment,
                capture_output=True, text=True, check=True, timeout=300,
            )  # fmt: skip
            lines = [line for line in done.stdout.splitlines() if line]
            if [_UUID.sub("ID", line) for line in lines] == [_UUID.sub("ID", line) for line in shown]:
                self._ids.update(zip(_UUID.findall("\n".join(shown)), _UUID.findall(done.stdout), strict=True))
                return
            assert "POST" not in command, f"{command}\n{done.stdout}\n{self.log}"
            assert time.monotonic() < give_up_at, f"{command}\n{done.stdout}\n{self.log}"
            time.sleep(0.1)


@pytest.fixture
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shell]:
    """An environment of its own, in which nothing is installed yet. Its parameter: whether it is one for Django 6."""
    python = python_of_django_6() if getattr(request, "param", False) else sys.executable
    subprocess.run([python, "-m", "venv", tmp_path / "venv"], check=True)
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("MULTIQ_", "PYTHON"))}
    with RedisServer() as server:
        shell = Shell(
            tmp_path / "project",
            {**mine, "PATH": f"{tmp_path}/venv/bin{os.pathsep}{mine['PATH']}"},
            server.url,
        )
        yield shell
        shell.close()


def install(name: str, shell: Shell, folder: Path, others: str = "") -> list[Block]:
    """Copy an example into a folder of its own, and install what its page installs, with this multiq. Returns the other
    blocks of commands of the page."""
    shutil.copytree(ROOT / "examples" / name, folder)
    install, *blocks = [block for block in blocks_of(ROOT / f"docs/{name}.md") if block.language == "console"]
    assert install.reason_not_to_run == "installs packages"
    here = re.sub(r"'multiq(\[.*?\])'", rf"'multiq\1 @ file://{ROOT}'", install.code)
    assert str(ROOT) in here
    shell.run(f"{here.replace('pip install', 'pip install -q').rstrip()} {others}")
    return blocks


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "shell"),
    [*((name, False) for name in PROJECTS), pytest.param("django", True, id="django-6")],
    indirect=["shell"],
)
def test_a_project_is_installed_and_does_what_its_page_says(name: str, shell: Shell, tmp_path: Path) -> None:
    # given the example in a folder of its own, and what the page installs
    # when the page's commands are carried out in their order, then each prints what the page shows
    for block in install(name, shell, tmp_path / "project"):
        shell.run(block.code)
    assert "Traceback" not in shell.log


class Site(NamedTuple):
    """A project on a server of several processes."""

    serve: str
    path: str
    """POST to this path places an order."""
    work: str
    before: str = ""
    """The module of the application that the server loads before it forks. It has enqueued a job, so there is a
    connection that a child could inherit."""


SITES = {
    "django": Site(
        "gunicorn --preload -w 3 -b 127.0.0.1:8000 before:web",
        "/orders/teapot/",
        "python manage.py multiq worker",
        """
import os
os.environ["DJANGO_SETTINGS_MODULE"] = "mysite.settings"
from django.core.wsgi import get_wsgi_application
web = get_wsgi_application()
from django.db import connection
from shop.models import Order
from shop.tasks import send_receipt
send_receipt.enqueue(Order.objects.create(item="cup").pk)
connection.close()
""",
    ),
    "fastapi": Site("uvicorn --workers 3 --port 8000 main:web", "/orders/7", "multiq worker shop:jobs"),
    "flask": Site(
        "gunicorn --preload -w 3 --threads 4 -b 127.0.0.1:8000 before:web",
        "/orders/7",
        "flask --app shop multiq worker",
        """
from shop import create_app, send_receipt
web = create_app()
with web.app_context():
    send_receipt.enqueue(0)
""",
    ),
}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SITES)
def test_a_server_of_several_processes_has_stored_what_it_answers(name: str, shell: Shell, tmp_path: Path) -> None:
    # given an example on a server of several processes
    site = SITES[name]
    install(name, shell, tmp_path / "project", "gunicorn")
    (tmp_path / "project/before.py").write_text(site.before, "utf-8")
    for variable in ("MULTIQ_URL", "FLASK_MULTIQ_URL"):
        shell.run(f"$ export {variable}=redis://localhost\n")
    if name == "django":
        shell.run("$ python manage.py makemigrations shop\n$ python manage.py migrate\n")
    server = shell.begin(site.serve)

    # when it gets SIGTERM while many clients place orders
    answers: list[str] = []

    def place_orders() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):  # the server takes no more requests
            while True:
                with contextlib.closing(http.client.HTTPConnection("127.0.0.1", shell.port, timeout=60)) as connection:
                    connection.request("POST", site.path, headers={"X-User": "ann"})
                    answer = connection.getresponse()
                    assert answer.status == 202, answer.read()
                    answers.append(json.load(answer)["job"])

    clients = [threading.Thread(target=place_orders) for _ in range(8)]
    for client in clients:
        client.start()
    until(lambda: len(answers) > 40, "the server has answered 40 orders")
    server.terminate()
    for client in clients:
        client.join()
    server.wait(PATIENCE)

    # then each job of an answer is stored, once, and runs
    shell.run(f"$ {site.work} --stop-when-empty\n")
    assert "Traceback" not in shell.log
    assert len(set(answers)) == len(answers)
    with contextlib.closing(multiq.App(shell.redis)) as app:
        jobs = [app.job(ref if "~" in ref else f"mail~{ref}") for ref in answers]
        assert {job.status() for job in jobs} == {"done"}
