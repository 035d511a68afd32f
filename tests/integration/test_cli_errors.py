"""Errors on the command line: their exit codes and their form, and that they show no password."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from multiq import errors
from multiq.cli import SECTIONS, cli, exits
from multiq.worker.processes.exits import EXIT_MEMORY

if TYPE_CHECKING:
    from shell import Shell

CANARY = "S3CR3T-canary"
COMMANDS = [name for section in SECTIONS.values() for name in section]
OF_GROUPS = [f"failed {name}" for name in ("list", "show", "retry", "forget", "prune")]
DOCS = Path(__file__).parents[2] / "docs"


# --- exit codes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.BackendUnavailable("x"), 1),
        (errors.BackendTimeout("x"), 1),
        (errors.BackendFull("x"), 1),
        (errors.BackendCorrupt("x"), 1),
        (errors.EnqueuePartial({}, 2, "x"), 1),
        (errors.EnqueueUncertain("q", [], "x"), 7),
        (errors.NameInvalid("x"), 2),
        (errors.OptionInvalid("x"), 2),
        (errors.UrlInvalid("x"), 2),
        (errors.SettingsInvalid(["x"]), 2),
        (errors.ArgumentsInvalid("x"), 2),
        (errors.PayloadInvalid("x"), 2),
        (errors.PayloadTooLarge(2, 1, "x"), 2),
        (errors.TaskExists("x"), 2),
        (errors.BackendNotInstalled("x"), 2),
        (errors.JobNotFound("q", "x"), 3),
        (errors.TaskNotFound("x"), 3),
        (errors.JobReserved("q", "x"), 4),
        (errors.Unsupported("lists_jobs", "x", "why"), 5),
        (RuntimeError("x"), 1),
        (ValueError("a bug, not something that was asked wrongly"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_kind_of_error_has_its_code(error: Exception, code: int) -> None:
    assert exits.exit_code(error) == code


def test_the_table_of_exit_codes_is_documented() -> None:
    table = dict(re.findall(r"^\| (\d+) \| (.+?) \|$", (DOCS / "cli.md").read_text("utf-8"), re.MULTILINE))
    codes = [value for name, value in vars(exits).items() if type(value) is int and name[0] != "_"]
    assert set(table) == {*map(str, codes), str(EXIT_MEMORY)}  # a worker's


# --- form ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says", "see"),
    [
        (["stat"], "there is no command 'stat'; did you mean 'stats'?", "see: multiq --help"),
        (["frobnicate"], "there is no command 'frobnicate'", "see: multiq --help"),
        (["stats", "--jsno"], "no such option", "see: multiq stats --help"),
        (["--zebra"], "no such option", "see: multiq --help"),
        (["jobs"], "missing argument 'QUEUE'", "see: multiq jobs --help"),
        (["jobs", "mail", "done"], "'done' is not one of 'ready', 'delayed', 'reserved', 'buried'", "see: multiq jobs"),
        (["jobs", "mail", "--after", "x"], "name the state", "see: multiq jobs --help"),
        (["jobs", "mail", "-n", "0"], "0 is not in the range", "see: multiq jobs --help"),
        (["kick"], "say what to kick: QUEUE [N|all], or --id ID", "see: multiq kick --help"),
        (["kick", "mail", "3", "--id", "x"], "--id kicks one job", "see: multiq kick --help"),
        (["kick", "mail", "0"], "must be a number of jobs, or all, got '0'", "see: multiq kick --help"),
        (["delete", "a b"], "a job's id must be one word of ASCII, got 'a b'", "see: multiq delete --help"),
        (["delete", "1\r\nquit"], "a job's id must be one word of ASCII", "see: multiq delete --help"),
        (["delete", "x" * 1000], "a job's id must be one word of ASCII", "see: multiq delete --help"),
        (["reschedule", "x"], "say when it is due", "see: multiq reschedule --help"),
        (["pause", "mail"], "missing argument 'TIME'", "see: multiq pause --help"),
        (["pause", "mail", "soon"], "must be seconds (90, 1.5), or like", "see: multiq pause --help"),
        (["purge", "mail", "reserved"], "jobs that run cannot be purged", "see: multiq purge --help"),
        (["purge", "mail", "done"], "a job has no state 'done'", "see: multiq purge --help"),
        (["peek", "x", "--raw", "--json"], "choose one", ""),
        (["top", "-i", "inf"], "to a century, got 'inf'", "see: multiq top --help"),
        (["pause", "mail", "99999999999d"], "to a century, got", "see: multiq pause --help"),
        (["top", "-i", "0"], "must be 0.1 s or more", "see: multiq top --help"),
        (["backends", "--json", "--markdown"], "choose one", ""),
    ],
)
def test_a_wrong_call_is_reported_in_two_lines(shell: Shell, arguments: list[str], says: str, see: str) -> None:
    before = shell.everything()
    done = shell(*arguments)
    assert (done.code, done.out) == (2, "")
    if "--json" not in arguments:
        assert done.err.startswith("error: ")
        assert len(done.err.splitlines()) <= 2
        assert see in done.err.splitlines()[-1]
    assert says.lower() in done.err.lower()
    assert shell.everything() == before


@pytest.mark.parametrize(
    ("url", "code", "says"),
    [
        ("kafka://localhost", 2, "no backend 'kafka' is installed (there are: beanstalk, memory, "),
        ("sqlit:///x.db", 2, "did you mean 'sqlite'?"),
        ("sqlite:///x.db?timeuot=1", 2, "did you mean 'timeout'?"),
        ("sqlite:///no/such/folder/x.db", None, "no/such/folder"),
        ("sqlite:////", None, ""),
        ("sqlite:///x.db\r\n", 2, "begins or ends with a space or a line end"),
        ("nowhere", 2, "neither a URL"),
        ("", 2, "neither a URL"),
    ],
)
def test_a_connection_that_leads_nowhere_is_reported(shell: Shell, url: str, code: int | None, says: str) -> None:
    files = sorted(shell.folder.iterdir())
    done = shell("stats", "-c", url)
    assert done.code in ({1, 2} if code is None else {code})
    assert done.err.startswith("error: ")
    assert says in done.err
    assert "Traceback" not in done.err
    assert sorted(shell.folder.iterdir()) == files


@pytest.mark.parametrize(
    "command",
    [
        ["stats"], ["stats", "mail"], ["jobs", "mail"], ["peek", "x"], ["peek", "x", "-q", "mail"], ["top", "--once"],
        ["top", "--once", "--workers"], ["kick", "mail"], ["kick", "--id", "x"], ["delete", "x"],
        ["reschedule", "x", "--delay", "0"], ["purge", "mail"], ["purge", "mail", "--yes"], ["resume", "mail"], ["up"],
        ["restart"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_in_the_wrong_folder_nothing_is_made_and_the_error_names_the_way_out(shell: Shell, command: list[str]) -> None:
    files = sorted(shell.folder.iterdir())
    done = shell(*command, MULTIQ_URL="")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"error: there is no file {shell.folder}/multiq.db: nothing was enqueued there yet")
    assert "multiq -c sqlite:////" in done.err
    assert shell(*command, "--json", MULTIQ_URL="").error["type"] == "BackendUnavailable"
    assert sorted(shell.folder.iterdir()) == files


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["enqueue", "--body", "1"], id="enqueue"),
        pytest.param(
            ["enqueue", "shop.tasks:app", "mail.reset", "--args", '["a@x"]'], id="task", marks=pytest.mark.long
        ),
        pytest.param(["worker", "shop.tasks:app", "--stop-when-empty"], id="worker"),
        pytest.param(["pause", "mail", "1h"], id="pause", marks=pytest.mark.long),
        pytest.param(["down"], id="down", marks=pytest.mark.long),
    ],
)
@pytest.mark.long
def test_commands_that_write_make_the_store(shell: Shell, command: list[str]) -> None:
    assert shell.run(*command, MULTIQ_URL="").code == 0
    assert (shell.folder / "multiq.db").exists()
    assert shell.run("stats", MULTIQ_URL="").code == 0


def test_with_json_an_error_is_one_line_of_json_on_standard_error(shell: Shell) -> None:
    shell.make_store()
    done = shell("peek", "gone", "--json")
    assert done.out == ""
    assert json.loads(done.err) == {
        "error": {
            "type": "JobNotFound",
            "message": "no queue has job gone: it is done, was deleted, or was never there",
        }
    }
    assert shell("stats", "--zebra", "--json").error["type"] == "UsageError"
    assert shell("jobs", "a b", "--json").error["type"] == "NameInvalid"
    assert shell("enqueue", "no.such:app", "x", "--json").error["type"] == "AppNotFound"
    assert shell("purge", "mail", "--json", stdin="n\n").err.endswith(
        '{"error": {"type": "Stopped", "message": "stopped"}}\n'
    )


def test_a_long_message_is_cut_to_one_screen(shell: Shell) -> None:
    (shell.folder / "multiq.toml").write_text("".join(f"key{number} = 1\n" for number in range(100)))
    done = shell("stats")
    assert done.code == 2
    assert len(done.err.splitlines()) < 24
    assert "more lines" in done.err


def test_an_error_never_moves_the_cursor(shell: Shell) -> None:
    for arguments in (["jobs", "\x1b[2J"], ["\x1b[2J"], ["delete", "\x1b[2J"], ["stats", "-c", "\x1b[2J"]):
        assert "\x1b[2J" not in shell(*arguments).err


@pytest.mark.parametrize("how", [["--traceback"], []])
def test_a_traceback_is_shown_on_request_only(shell: Shell, how: list[str]) -> None:
    shell.make_store()
    assert "Traceback" not in shell("peek", "gone").err
    done = shell("peek", "gone", *how, **({} if how else {"MULTIQ_TRACEBACK": "1"}))
    assert done.code == 3
    assert "Traceback (most recent call last)" in done.err
    assert "Traceback" not in shell("peek", "gone", MULTIQ_TRACEBACK="0").err


def test_a_bug_is_reported_as_a_bug(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("oh")

    monkeypatch.setattr("multiq.cli.apps.open_app", broken)
    done = shell("stats")
    assert done.code == 1
    assert "this should not happen: RuntimeError: oh" in done.err
    assert "--traceback" in done.err


@pytest.mark.long
def test_a_reader_that_goes_away_causes_no_error(shell: Shell) -> None:
    shell.app.queue("mail").enqueue_many(range(1000))
    process = shell.start("jobs", "mail", "-n", "1000")
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=30)
    assert "Traceback" not in err
    assert "BrokenPipe" not in err


# --- configuration ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_mistakes_in_the_configuration_are_reported_and_leave_help_alone(shell: Shell) -> None:
    (shell.folder / "multiq.toml").write_text("[worker]\nthreads = 0\nthraeds = 1\n")
    done = shell.run("stats")
    assert done.code == 2
    assert "worker.threads: must be a whole number from 1 to 1024, got 0" in done.err
    assert "worker.thraeds: unknown key (did you mean worker.threads?)" in done.err
    for arguments in ([], ["--help"], ["--version"], ["worker", "--help"], ["backends"]):
        assert shell.run(*arguments).code == 0


def test_an_app_whose_configuration_is_wrong_says_so_as_well(shell: Shell) -> None:
    done = shell.run("worker", "shop.tasks:app", MULTIQ_WORKER_THREADS="many")
    assert done.code == 2
    assert "environment: MULTIQ_WORKER_THREADS" in done.err
    assert "Traceback" not in done.err


# --- help ------------------------------------------------------------------------------------------------


def test_multiq_alone_prints_its_help(shell: Shell) -> None:
    assert shell() == shell("--help")
    assert shell().out.startswith("Usage: multiq")


def test_the_shell_gets_its_completion_script(shell: Shell) -> None:
    done = shell.run(_MULTIQ_COMPLETE="bash_complete", COMP_WORDS="multiq re", COMP_CWORD="1")
    assert done.out.split() == ["plain,result", "plain,reschedule", "plain,resume", "plain,restart"]


@pytest.mark.parametrize("command", [*COMMANDS, *OF_GROUPS])
def test_every_command_has_help_that_fits_80_columns(shell: Shell, command: str) -> None:
    done = shell(*command.split(), "--help", COLUMNS="80")
    assert done.code == 0
    assert all(len(line) <= 80 for line in done.out.splitlines())
    assert "--traceback" in done.out


def test_the_overview_names_every_command_with_a_whole_sentence(shell: Shell) -> None:
    out = shell("--help").out
    for command in COMMANDS:
        (line,) = [line for line in out.splitlines() if line.startswith(f"  {command} ")]
        assert line.endswith(".")
        assert not line.endswith("...")
    assert all(f"{title}:" in out for title in SECTIONS)


@pytest.mark.parametrize("command", [*COMMANDS, *OF_GROUPS])
def test_every_command_and_option_is_documented(command: str) -> None:
    page = (DOCS / "cli.md").read_text("utf-8")
    assert f"multiq {command}" in page
    found: Any = cli
    for name in command.split():
        found = found.get_command(None, name)  # the method does not use the context
    assert found is not None
    for parameter in found.params:
        for name in parameter.opts:
            if name.startswith("--"):
                assert f"`{name}" in page or f" {name}" in page, name


def test_help_and_version_load_no_driver_and_no_worker() -> None:
    for arguments in (["--version"], ["--help"], ["worker", "--help"]):
        code = f"""
import sys
from multiq.cli import cli
try: cli.main({arguments!r})
except SystemExit: pass
heavy = ("multiq.worker", "multiq.backend.memory", "multiq_sqlite", "sqlite3", "stevedore", "rich", "asyncio", "pytest")
print([name for name in heavy if name in sys.modules], file=sys.stderr)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stderr == "[]\n"


# --- passwords -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        f"redis://ann:{CANARY}@127.0.0.1:1/0",
        f"sqlite://ann:{CANARY}@host/x.db",
        f"sqlite:///no/such/folder/x.db?password={CANARY}",
        f"memory://ann:{CANARY}@here/",
        f"kafka://:{CANARY}@127.0.0.1",
        f"redis://ann:a/{CANARY}@host",
        f"redis://ann:a?{CANARY}@host",
        f"ann:{CANARY}@host",
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        ["stats"], ["top", "--once"], ["jobs", "mail"], ["peek", "x"], ["delete", "x"], ["purge", "mail"],
        ["enqueue", "--body", "1"], ["pause", "mail", "1"], ["stats", "--json"], ["stats", "--traceback"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_no_output_has_a_password(shell: Shell, command: list[str], url: str) -> None:
    for done in (shell(*command, "-c", url), shell("-c", url, *command), shell(*command, MULTIQ_URL=url)):
        assert CANARY not in done.out
        assert CANARY not in done.err.replace(f'  File "{CANARY}', "")


def test_no_log_of_a_worker_has_a_password(shell: Shell) -> None:
    url = f"memory://ann:{CANARY}@here/"
    for log_format in ("text", "json"):
        done = shell.run(
            "worker",
            "shop.tasks:app",
            "-c",
            url,
            "--stop-when-empty",
            "--log-level",
            "debug",
            "--log-format",
            log_format,
        )
        assert CANARY not in done.out + done.err
