"""Mistyped commands, narrow terminals, completion: the hints of the command line."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from shell import Shell
from test_cli_terminal import Terminal, plain

import multiq
from multiq.errors import OptionInvalid
from multiq.settings import WorkerSettings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path)
    mail = shell.app.queue("mail.notifications")
    for number in range(3):
        mail.enqueue({"recipient": "x" * 100, "number": number})
        with mail.reserve() as job:
            job.bury(f"ValueError: 550 no such mailbox {number}")
    yield shell
    shell.app.close()


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("retry", "multiq failed retry"),
        ("failures", "multiq failed list"),
        ("list", "multiq stats"),
        ("schedule", "multiq enqueue"),
        ("queues", "multiq stats"),
        ("workers", "multiq top"),
        ("jbos", "did you mean 'jobs'?"),
    ],
)
def test_command_names_of_other_tools_lead_to_the_command_that_is_meant(shell: Shell, word: str, hint: str) -> None:
    done = shell(word, "mail")
    assert (done.code, done.out) == (2, "")
    assert f"there is no command '{word}'" in done.err
    assert hint in done.err


def test_kick_takes_all_or_a_number_of_jobs(shell: Shell) -> None:
    done = shell("kick", "mail.notifications", "all")
    assert done.out == "kicked 3 jobs of queue mail.notifications\n"
    assert shell("kick", "mail.notifications", "all", "--json").json["kicked"] == 0
    done = shell("kick", "mail.notifications", "some")
    assert done.code == 2
    assert "must be a number of jobs, or all, got 'some'" in done.err


@pytest.mark.long
def test_top_names_its_queues_on_a_narrow_terminal(shell: Shell) -> None:
    _, out = Terminal(shell, "top", "--once", columns=40).end()
    assert "mail.notifications" in plain(out)
    shell.app.queue("default").enqueue(1)
    for state in ("ready", "buried"):
        shell.app.queue("mail.notifications").purge([state])
    assert "default " in plain(Terminal(shell, "top", "--once", columns=40).end()[1])  # the column is just wide enough
    shell.app.queue("mail.notifications").enqueue(1)
    terminal = Terminal(shell, "top", "-i", "100ms", "--no-workers", columns=40)
    for _ in range(3):  # later frames could show changes
        terminal.seen = ""
        terminal.read_until("mail.notifications")
    terminal.send("q")
    terminal.end()
    terminal = Terminal(shell, "top", "-i", "100ms", "--no-workers", columns=100)
    terminal.read_until("+/-")
    terminal.send("q")
    terminal.end()


@pytest.mark.one_row
@pytest.mark.parametrize("state", [[], ["buried"]])
def test_reasons_are_readable_at_80_columns(shell: Shell, state: list[str]) -> None:
    _, out = Terminal(shell, "jobs", "mail.notifications", *state, columns=80).end()
    lines = plain(out).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("ValueError: 550 no such mailbox" in line for line in lines) == 3
    assert len(re.findall(r'"recipient": "xxxxx', out)) == 3


def complete(shell: Shell, *words: str) -> list[str]:
    line = " ".join(["multiq", *words])
    done = shell.run(
        _MULTIQ_COMPLETE="bash_complete", COMP_WORDS=line, COMP_CWORD=str(len(words)), MULTIQ_URL=shell.url
    )
    assert done.err == ""
    return [row.partition(",")[2] for row in done.out.splitlines() if row]


@pytest.mark.long
def test_completion_knows_queues_and_connections(shell: Shell) -> None:
    (shell.folder / "multiq.toml").write_text(
        f'[connections]\nspare = "sqlite:///{shell.folder}/spare.db"\nspool = "memory://"\nmain = "{shell.url}"\n'
    )
    shell.app.queue("default").enqueue(1)
    assert complete(shell, "jobs", "m") == ["mail.notifications"]
    assert complete(shell, "stats", "") == ["default", "mail.notifications"]
    assert complete(shell, "worker", "shop.tasks:app", "-q", "mail") == ["mail.notifications"]
    assert complete(shell, "stats", "-c", "sp") == ["spare", "spool"]
    assert complete(shell, "-c", "spare", "jobs", "m") == []
    assert not (shell.folder / "spare.db").exists()


def test_completion_says_nothing_of_a_store_that_cannot_be_asked(shell: Shell) -> None:
    (shell.folder / "multiq.toml").write_text("a mistake")
    assert complete(shell, "jobs", "m") == []


def test_threads_and_concurrency_exclude_each_other(shell: Shell) -> None:
    done = shell.run("worker", "shop.tasks:app", "--concurrency", "2", "-t", "3", "--stop-when-empty")
    assert done.code == 2
    assert "threads=3 and concurrency=2 exclude each other" in done.err
    app = multiq.App("memory://")
    with pytest.raises(OptionInvalid, match="exclude each other"):
        multiq.Worker(app, threads=3, concurrency=2)
    multiq.Worker(app, threads=3, concurrency=0)


def test_an_explicit_thread_count_wins_over_a_configured_concurrency() -> None:
    settings = multiq.Settings(url="memory://", worker=WorkerSettings(concurrency=5))
    worker = multiq.Worker(multiq.App(settings=settings), threads=3)
    assert (worker._settings.threads, worker._settings.concurrency) == (3, 0)


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("retries", "max_attempts"),
        ("max_retries", "max_attempts"),
        ("time_limit", "timeout"),
        ("countdown", "options(delay=...)"),
        ("prioritty", "priority"),
        ("frobnicate", "there are: name, queue, priority"),
    ],
)
def test_an_unknown_option_of_a_task_names_the_one_that_is_meant(option: str, meant: str) -> None:
    app = multiq.App("memory://")
    with pytest.raises(OptionInvalid, match=re.escape(meant)) as caught:
        app.task(**{option: 3})(lambda: None)  # type: ignore[call-overload]  # a type checker says so, too
    assert f"{option}=" in str(caught.value)
