"""``multiq worker``, as a process."""

from __future__ import annotations

import json
import signal
import time
from typing import TYPE_CHECKING

import pytest
from shell import Shell

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell.app.close()


def enqueue(shell: Shell, *addresses: str) -> None:
    task = shell.app.task(name="mail.reset", queue="mail")(lambda address: None)
    task.enqueue_many([(address,) for address in addresses])


def until(true: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Wait for a condition. If the condition does not hold in time, fail with the process's output."""
    deadline = time.monotonic() + 30
    while not true():
        if time.monotonic() > deadline or process.poll() is not None:
            process.kill()
            raise AssertionError(process.communicate())
        time.sleep(0.02)


def test_the_worker_runs_the_jobs_of_its_queues_and_ends_when_they_are_empty(shell: Shell) -> None:
    enqueue(shell, "ann", "bob")
    done = shell.run("worker", "shop.tasks:app", "-q", "mail", "--stop-when-empty")
    assert done.code == 0
    assert done.out.splitlines() == ["sent to ann", "sent to bob"]
    assert shell.app.queue("mail").stats().ready == 0
    assert f"runs shop.tasks:app, 1 task, on {shell.url}" in done.err


def test_a_failing_job_is_buried_with_its_reason(shell: Shell) -> None:
    enqueue(shell, "bad")
    assert shell.run("worker", "shop.tasks:app", "-q", "mail", "--stop-when-empty").code == 0
    assert "ValueError: 550 no such mailbox" in shell("jobs", "mail", "buried").out


@pytest.mark.one_row
@pytest.mark.parametrize("limit", [["--once"], ["--max-jobs", "1"]])
def test_the_worker_ends_after_so_many_jobs(shell: Shell, limit: list[str]) -> None:
    enqueue(shell, "ann", "bob")
    done = shell.run("worker", "shop.tasks:app", "-q", "mail", *limit)
    assert (done.code, done.out) == (0, "sent to ann\n")
    assert shell.app.queue("mail").stats().ready == 1


def test_queues_come_in_their_order_by_commas_or_options(shell: Shell) -> None:
    for form in (["-q", "high,low"], ["-q", "high", "-q", "low"]):
        task = shell.app.task(name="mail.reset", queue="low")(lambda address: None)
        task.enqueue("later")
        task.options(queue="high").enqueue("sooner")
        done = shell.run("worker", "shop.tasks:app", *form, "--stop-when-empty")
        assert done.out == "sent to sooner\nsent to later\n"
        shell.app.tasks.clear()


def test_settings_hold_where_the_command_line_is_silent(shell: Shell) -> None:
    (shell.folder / "multiq.toml").write_text('[worker]\nqueues = ["mail"]\n[log]\nformat = "json"\n')
    enqueue(shell, "ann")
    done = shell.run("worker", "shop.tasks:app", "--stop-when-empty")
    assert done.out == "sent to ann\n"
    assert all("time" in json.loads(line) for line in done.err.splitlines())


def test_processes_and_threads_share_the_work(shell: Shell) -> None:
    addresses = [f"a{number}" for number in range(50)]
    enqueue(shell, *addresses)
    done = shell.run("worker", "shop.tasks:app", "-q", "mail", "-p", "2", "-t", "3", "--stop-when-empty")
    assert done.code == 0
    assert sorted(done.out.splitlines()) == sorted(f"sent to {address}" for address in addresses)


@pytest.mark.one_row
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_idle_worker_with_0(shell: Shell, number: signal.Signals) -> None:
    enqueue(shell, "ann")
    process = shell.start("worker", "shop.tasks:app", "-q", "mail")
    until(lambda: shell.app.queue("mail").stats().ready == 0, process)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "Traceback" not in err


@pytest.mark.one_row
@pytest.mark.parametrize(
    ("options", "lines", "level"),
    [((), 0, ""), (("--log-jobs",), 2, " info "), (("--log-level", "debug"), 2, " debug ")],
)
def test_a_line_for_each_job_is_logged_on_request_only(
    shell: Shell, options: tuple[str, ...], lines: int, level: str
) -> None:
    enqueue(shell, "ann", "bob")
    done = shell.run("worker", "shop.tasks:app", "-q", "mail", "--stop-when-empty", *options)
    told = [line for line in done.err.splitlines() if " done      mail." in line]
    assert len(told) == lines, done.err
    assert all(level in line for line in told)
    (summary,) = [line for line in done.err.splitlines() if " summary " in line]
    assert " 2 jobs in " in summary
    assert "done 2 retried 0 buried 0" in summary


def test_no_log_has_the_arguments_of_a_job(shell: Shell) -> None:
    enqueue(shell, "ann@secret.example")
    done = shell.run("worker", "shop.tasks:app", "-q", "mail", "--stop-when-empty", "--log-level", "debug")
    assert "ann@secret.example" in done.out  # the task itself prints this line
    assert "ann@secret.example" not in done.err


def test_the_memory_backend_is_warned_of(shell: Shell) -> None:
    done = shell.run("worker", "shop.tasks:app", "-c", "memory://", "--stop-when-empty")
    assert "the memory backend lives in this process: no other process can enqueue" in done.err


@pytest.mark.one_row
@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["shop.tasks:app", "-t", "0"], 2, "threads must be a whole number from 1"),
        (["shop.tasks:app", "-p", "-1"], 2, "processes must be a whole number from 0"),
        (["shop.tasks:app", "--prefetch", "0"], 2, "prefetch must be a whole number from 1"),
        (["shop.tasks:app", "--max-jobs", "0"], 2, "max_jobs must be a whole number from 1"),
        (["shop.tasks:app", "--grace", "nan"], 2, "grace must be a number of seconds, got nan"),
        (["shop.tasks:app", "-t", "many"], 2, "'many' is not a valid int"),
        (["shop.tasks:app", "-q", "a b"], 2, "a queue name must have"),
        (["shop.tasks:app", "-q", "a,,b"], 2, "a queue name must have"),
        (["shop.tasks:app", "--once", "--max-jobs", "2"], 2, "give one of the two"),
        (["shop.tasks:app", "--log-level", "loud"], 2, "'loud' is not one of"),
        (["shop.tasks:empty"], 2, "has no tasks, so every job would be buried"),
        (["shop.tasks:app", "-p", "2", "-c", "memory://"], 5, "does not support shared"),
        ([], 2, "missing argument 'APP'"),
    ],
)
def test_an_app_that_no_worker_can_run_is_refused(shell: Shell, arguments: list[str], code: int, says: str) -> None:
    enqueue(shell, "ann")
    before = shell.everything()
    done = shell.run("worker", *arguments)
    assert (done.code, done.out) == (code, "")
    assert says in done.err
    assert "Traceback" not in done.err
    assert shell.everything() == before


def test_a_worker_of_an_unreachable_store_keeps_asking_until_it_is_told_to_stop(shell: Shell) -> None:
    process = shell.start("worker", "shop.tasks:app", "-c", "sqlite:///no/such/folder/x.db")
    assert process.stderr is not None
    lines = [process.stderr.readline() for _ in range(3)]
    process.terminate()
    _, rest = process.communicate(timeout=30)
    assert "no/such/folder" in "".join(lines) + rest
    assert "Traceback" not in rest


@pytest.mark.one_row
@pytest.mark.parametrize("option", ["--threads", "--processes", "--prefetch"])
def test_a_worker_that_does_not_fit_into_memory_is_refused(shell: Shell, option: str) -> None:
    done = shell.run("worker", "shop.tasks:app", option, "2147483647", "--once")
    assert (done.code, "a worker must fit into memory, got processes=" in done.err) == (2, True), done
