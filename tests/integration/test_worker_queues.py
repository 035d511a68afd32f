"""Which queues and which app ``multiq worker`` serves without arguments."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from shell import Shell

import multiq

if TYPE_CHECKING:
    from collections.abc import Iterator

TASKS = """
import multiq

app = multiq.App()

@app.task(queue="mail")
def send(n: int) -> None:
    print("sent", n, flush=True)

@app.task
def count(n: int) -> None:
    print("counted", n, flush=True)
"""


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    (tmp_path / "shop" / "tasks.py").write_text(TASKS)
    shell.app.task(name="send", queue="mail")(lambda n: None).enqueue_many([(n,) for n in range(20)])
    shell.app.task(name="count")(lambda n: None).enqueue_many([(n,) for n in range(20)])
    yield shell
    shell.app.close()


def test_without_queues_it_serves_those_of_all_tasks(shell: Shell) -> None:
    done = shell.run("worker", "shop.tasks:app", "--stop-when-empty")
    assert sorted(done.out.split()) == sorted(["sent", "counted"] * 20 + [str(n) for n in range(20)] * 2)
    assert " on mail, default" in done.err
    assert "not run here" not in done.err


def test_queues_that_are_not_named_do_not_starve(shell: Shell) -> None:
    done = shell.run("worker", "shop.tasks:app", "-p", "0", "--max-jobs", "20", "--prefetch", "1")
    assert 6 <= done.out.count("sent") <= 14
    done = shell.run("worker", "shop.tasks:app", "-p", "0", "--max-jobs", "6", "--prefetch", "1", "--policy", "strict")
    assert done.out.count("sent") == 6


@pytest.mark.long
def test_with_queues_it_warns_of_tasks_that_it_does_not_run(shell: Shell) -> None:
    done = shell.run("worker", "shop.tasks:app", "-q", "default", "--stop-when-empty")
    assert "counted" in done.out
    assert "sent" not in done.out
    (line,) = [line for line in done.err.splitlines() if "not run here" in line]
    assert " warning " in line
    assert line.endswith("send (mail)")
    done = shell.run("worker", "shop.tasks:app", "--stop-when-empty", MULTIQ_WORKER_QUEUES="mail,default")
    assert "not run here" not in done.err


def test_a_program_s_worker_serves_tasks_that_were_registered_after_it_was_made() -> None:
    app = multiq.App("memory://")
    worker = multiq.Worker(app, stop_when_empty=True)
    ran: list[int] = []
    app.task(name="append", queue="late")(ran.append).enqueue(1)
    assert worker.queues == ("late",)
    assert worker.run() == 0
    assert ran == [1]


@pytest.mark.one_row
@pytest.mark.parametrize("folder", [".", "shop/deep"])
def test_an_app_in_the_settings_is_enough(shell: Shell, folder: str) -> None:
    (shell.folder / "multiq.toml").write_text('app = "shop.tasks:app"\n')
    place = shell.folder / folder
    place.mkdir(exist_ok=True)
    root, shell.folder = shell.folder, place
    done = shell.run("worker", "--stop-when-empty")
    assert done.code == 0, done
    assert done.out.count("sent") == 20
    shell.folder = root
    assert shell.run("worker", "--stop-when-empty", MULTIQ_APP="shop.nothing:app").code == 2


def test_without_an_app_the_error_says_how_to_name_one(shell: Shell) -> None:
    done = shell.run("worker")
    assert (done.code, done.out) == (2, "")
    assert "missing argument 'APP'" in done.err
    assert "set app or include in multiq.toml" in done.err


@pytest.mark.long
def test_modules_with_tasks_in_the_settings_need_no_app(shell: Shell) -> None:
    (shell.folder / "multiq.toml").write_text('include = ["notes"]\n')
    (shell.folder / "notes.py").write_text(
        "import multiq\n\ntasks = multiq.Tasks(prefix='notes')\n\n\n"
        "@tasks.task(queue='notes')\ndef take(text):\n    print('noted', text)\n"
    )
    body = '{"multiq": 1, "task": "notes.take", "args": ["it"]}'
    assert shell.run("enqueue", "-q", "notes", "--body", body).code == 0
    done = shell.run("worker", "--stop-when-empty")
    assert done.code == 0, done
    assert "noted it" in done.out
    assert shell.run("worker", "--check", MULTIQ_INCLUDE="missing_module").code == 2


@pytest.mark.long
def test_commands_find_the_modules_of_the_settings_from_any_folder_below(shell: Shell) -> None:
    # given settings that name a module with a task and its schedule, and a folder below
    (shell.folder / "multiq.toml").write_text('include = ["notes"]\n')
    (shell.folder / "notes.py").write_text(
        "import multiq\n\ntasks = multiq.Tasks(prefix='notes')\n\n\n"
        "@tasks.schedule('0 7 * * *')\n@tasks.task(queue='notes')\ndef take(text='it'):\n    print('noted', text)\n"
    )
    below = shell.folder / "below"
    below.mkdir()

    # when the installed command runs, for which Python does not search the current folder
    environment = shell.all_environment()
    environment.pop("PYTHONPATH", None)

    def printed(*arguments: str, folder: Path) -> str:
        command = [str(Path(sys.executable).with_name("multiq")), *arguments]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=True, text=True).stdout

    printed("enqueue", "notes.take", "--args", '["more"]', folder=below)

    # then it finds the module
    assert "noted more" in printed("worker", "--stop-when-empty", folder=below)
    assert "made" in printed("tick", folder=below)
    assert "notes.take" in printed("schedules", "list", folder=below)
    assert "notes.take" in printed("schedules", "list", folder=shell.folder)


def test_an_enqueue_without_an_app_needs_settings_that_name_one(shell: Shell) -> None:
    done = shell("enqueue", "send", "--args", "[7]")
    assert done.code == 2
    assert "say what to enqueue: APP TASK" in done.err
    assert shell.run("enqueue", "send", "--args", "[7]", MULTIQ_APP="shop.tasks:app").code == 0
    assert shell("enqueue", "shop.tasks:app", MULTIQ_APP="shop.tasks:app").code == 2
