"""Which queues and which app ``multiq worker`` serves without arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from shell import Shell

import multiq

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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


def test_without_any_app_it_says_how_to_name_one(shell: Shell) -> None:
    done = shell.run("worker")
    assert (done.code, done.out) == (2, "")
    assert "missing argument 'APP'" in done.err
    assert "set app in multiq.toml" in done.err
