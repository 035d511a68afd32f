"""``multiq schedules``, ``multiq scheduler`` and ``multiq tick``, and workers that make the jobs of schedules."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from processes import until, worker
from shell import Shell

import multiq
from multiq.backend import Put

if TYPE_CHECKING:
    from pathlib import Path

CODE = """
import multiq

app = multiq.App()

@app.schedule("* * * * * *", name="secondly")
@app.task
def tick() -> None:
    print("tick", multiq.current_job().headers["multiq-occurrence"], flush=True)

@app.task
def other(number: int) -> None:
    print("other", number, flush=True)
"""


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path)
    (tmp_path / "timed.py").write_text(CODE)
    return shell


def command(*options: str) -> str:
    """A program that is ``multiq worker timed:app`` with these options."""
    return f"import sys; from multiq.cli import main; sys.argv[1:] = ['worker', 'timed:app', *{options!r}]; main()"


def add(shell: Shell, *options: str) -> None:
    done = shell.run("schedules", "add", "nightly", "timed:app", "other", "--args", "[7]", *options)
    assert done.code == 0, done.err


def test_a_schedule_is_added_listed_shown_paused_resumed_run_and_removed(shell: Shell) -> None:
    # Given a stored schedule
    add(shell, "--cron", "0 3 * * *", "--zone", "Europe/Berlin", "--overlap", "skip")
    (listed,) = shell("schedules", "list", "--json").json["schedules"]
    assert (listed["name"], listed["when"], listed["zone"], listed["origin"]) == (
        "nightly",
        "0 3 * * *",
        "Europe/Berlin",
        "stored",
    )
    assert "nightly" in shell("schedules", "list").out
    # When the schedule is shown, then its next five times are there, in its zone and in UTC
    document = shell("schedules", "show", "nightly", "--json").json
    assert [time["local"][11:16] for time in document["next"]] == ["03:00"] * 5
    assert all(time["utc"].endswith("+00:00") for time in document["next"])
    shown = shell("schedules", "show", "nightly").out
    assert "skip" in shown
    assert "NEXT (UTC)" in shown
    # And the schedule is paused, resumed and run now
    assert shell("schedules", "pause", "nightly", "--json").json["is_paused"] is True
    assert "paused" in shell("schedules", "list").out
    assert shell("schedules", "resume", "nightly", "--json").json["is_paused"] is False
    job = shell("schedules", "run", "nightly", "--json").json
    assert job["queue"] == "default"
    assert shell.app.queue().stats().ready == 1
    # And the schedule is changed and removed
    add(shell, "--every", "1h", "--replace")
    assert shell("schedules", "show", "nightly", "--json").json["when"] == "every 3600 s"
    assert shell("schedules", "remove", "nightly", "--json").json == {"removed": ["nightly"]}
    missing = shell("schedules", "show", "nightly")
    assert missing.code == 3
    assert "there is no schedule 'nightly'" in missing.err


def test_a_run_whose_unique_key_is_taken_says_that_no_job_was_added(shell: Shell) -> None:
    # Given a schedule of a unique task
    unique = CODE.replace("@app.task\ndef other", "@app.task(unique=multiq.Unique())\ndef other")
    (shell.folder / "timed.py").write_text(unique)
    add(shell, "--every", "1h")
    # When it is run twice, then the second run names the job of the first one, and adds none
    first = shell("schedules", "run", "nightly", "--json").json
    assert first["new"] is True
    second = shell("schedules", "run", "nightly")
    assert second.out.strip() == first["id"]
    assert "no job was added" in second.err
    assert shell("schedules", "run", "nightly", "--json").json == {**first, "new": False}
    assert shell.app.queue().stats().ready == 1


@pytest.mark.long
def test_an_impossible_schedule_is_refused_with_the_way_out(shell: Shell) -> None:
    for options, message in [
        (("--cron", "never"), "must have 5 fields"),
        (("--every", "5m", "--at", "07:00"), "must have one of a cron expression, every= and at="),
        (("--at", "25:00"), "must be a time of day like '07:30'"),
        (("--cron", "* * * * *", "--zone", "Mars"), "like Europe/Berlin"),
    ]:
        done = shell.run("schedules", "add", "x", "timed:app", "other", "--args", "[1]", *options)
        assert done.code == 2, done
        assert message in done.err


def test_a_schedule_without_a_task_is_refused_with_the_name_of_what_is_missing(shell: Shell) -> None:
    done = shell("schedules", "add", "nightly")
    assert (done.code, done.err.splitlines()[0]) == (2, "error: missing argument 'TASK'")


def test_a_schedule_is_replaced_although_another_one_cannot_be_read(shell: Shell) -> None:
    add(shell, "--every", "1h")
    shell.app.backend.carry_out([Put("default", "schedule/bad", b"{}")])
    add(shell, "--every", "2h", "--replace")
    assert shell("schedules", "show", "nightly", "--json").json["when"] == "every 7200 s"


def test_the_last_job_of_a_moved_schedule_is_shown_in_the_queue_where_it_is(shell: Shell, tmp_path: Path) -> None:
    # Given a schedule that has a job, and that is moved to another queue
    (tmp_path / "moved.py").write_text(CODE.replace("@app.task\ndef other", '@app.task(queue="new")\ndef other'))
    add(shell, "--every", "60")
    shell("tick")
    shell.run("schedules", "add", "nightly", "moved:app", "other", "--args", "[7]", "--every", "60", "--replace")
    # When the schedule is shown, then its job waits in the former queue
    document = shell("schedules", "show", "nightly", "--json").json
    assert (document["queue"], document["last_queue"], document["last_state"]) == ("new", "default", "delayed")
    assert f"{document['last_id']} in queue default, delayed" in shell("schedules", "show", "nightly").out


def test_a_backend_without_notes_exits_with_5(shell: Shell) -> None:
    for arguments in (["schedules", "list"], ["scheduler"], ["tick"]):
        done = shell(*arguments, "-c", "beanstalk://localhost:1")
        assert done.code == 5
        assert "?store=sqlite:///state.db in the URL" in done.err
        assert "these can: memory, mysql, redis, sqlite" in done.err


@pytest.mark.long
def test_a_tick_makes_the_jobs_of_the_next_ninety_seconds(shell: Shell) -> None:
    made = shell.run("tick", "timed:app", "--json").json["made"]
    assert 89 <= made <= 91
    assert shell.run("tick", "timed:app", "--json").json["made"] < 30
    assert shell.run("tick", "--ahead", "5m").code == 2


@pytest.mark.long
def test_prune_lists_what_vanished_and_removes_it_only_if_told(shell: Shell) -> None:
    # Given a schedule that code has declared, and that the code does not declare any more
    assert shell.run("tick", "timed:app").code == 0
    assert shell.run("schedules", "prune", "timed:app").code == 0
    (shell.folder / "timed.py").write_text(CODE.replace("secondly", "other-name"))
    # Then the schedule is listed
    listed = shell.run("schedules", "list", "--app", "timed:app")
    assert "vanished" in listed.out
    pruned = shell.run("schedules", "prune", "timed:app", "--json")
    assert (pruned.code, pruned.json) == (1, {"vanished": ["secondly"], "removed": []})
    # And it is removed with --yes
    assert shell.run("schedules", "prune", "timed:app", "--yes").code == 0
    assert shell("schedules", "list", "--json").json["schedules"] == []


@pytest.mark.parametrize("processes", ["1", pytest.param("0", marks=pytest.mark.long)])
def test_a_worker_makes_and_runs_the_jobs_of_its_schedules(shell: Shell, processes: str) -> None:
    with worker(shell.folder, shell.url, code=command("-p", processes)) as process:
        until(lambda: process.log.count("tick 2") >= 3)
    ticks = [line.split()[1] for line in process.log.splitlines() if line.startswith("tick 2")]
    assert len({*ticks}) == len(ticks)


@pytest.mark.long
def test_a_worker_notices_a_schedule_that_is_stored_while_it_runs(shell: Shell) -> None:
    (shell.folder / "timed.py").write_text(CODE.replace('@app.schedule("* * * * * *", name="secondly")', ""))
    with worker(shell.folder, shell.url, code=command("-p", "1")) as process:
        process.wait_until_working()
        add(shell, "--every", "1")
        until(lambda: process.log.count("other 7") >= 2)


@pytest.mark.long
def test_a_worker_with_no_schedule_makes_none(shell: Shell) -> None:
    with worker(shell.folder, shell.url, code=command("-p", "1", "--no-schedule")) as process:
        process.wait_until_working()
        add(shell, "--every", "1")
        multiq.App(shell.url).queue().enqueue(b"{}")
        until(lambda: "buried" in process.log)
        assert "tick" not in process.log


def test_a_scheduler_makes_jobs_until_it_is_told_to_end(shell: Shell) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "multiq", "scheduler", "timed:app"],
        cwd=shell.folder,
        env=shell.all_environment(),
    )
    try:
        with multiq.App(shell.url) as app:
            until(lambda: (app.queue().stats().delayed or 0) > 30)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
