"""The log of ``multiq worker`` beside an app's own logging: handlers, levels, and fields of the records."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
from shell import Shell
from test_cli_terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

APP = """
import logging, logging.config, sys
import multiq
{setup}
app = multiq.App()
log = logging.getLogger("shop.mail")

@app.task(name="mail.reset", max_attempts=2, backoff=0)
def reset(address: str) -> None:
    log.debug("looking up %s", address)
    log.info("writing to %s", address, extra={{"queue": "of the app", "task": 7}})
    if address == "bad":
        raise ValueError("550 no such mailbox")
"""

OWN = """
class Plain(logging.Formatter):
    def format(self, record):
        return f"MINE {record.name} {record.levelname} {record.multiq_job_id or '-'} {record.getMessage()}"

handler = logging.StreamHandler(sys.stderr)
handler.setFormatter(Plain())
logging.basicConfig(level=logging.WARNING, handlers=[handler])
"""


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell.app.close()


def work(shell: Shell, *options: str, setup: str = "", address: str = "ann") -> tuple[str, list[str]]:
    """Run one job. Returns its id, and the lines of the log."""
    job_id = prepare(shell, setup, address)
    done = shell.run("worker", "shop.tasks:app", "-q", "default", "--stop-when-empty", *options)
    assert done.code == 0, done
    return job_id, done.err.splitlines()


def prepare(shell: Shell, setup: str = "", address: str = "ann") -> str:
    (shell.folder / "shop" / "tasks.py").write_text(APP.format(setup=setup))
    shell.app.tasks.clear()
    return shell.app.task(name="mail.reset")(lambda address: None).enqueue(address).id


@pytest.mark.long
def test_an_app_s_own_records_are_seen_from_the_level_on_that_is_asked_for(shell: Shell) -> None:
    _, lines = work(shell, "--log-level", "info")
    assert len([line for line in lines if "shop.mail: writing to ann" in line]) == 1
    assert not [line for line in lines if "looking up" in line]
    _, lines = work(shell, "--log-level", "debug")
    assert [line for line in lines if "debug   shop.mail: looking up ann" in line]
    _, lines = work(shell, "--log-level", "warning")
    assert lines == []


def test_a_record_made_in_a_job_names_it(shell: Shell) -> None:
    job_id, lines = work(shell)
    line = next(line for line in lines if "writing to ann" in line)
    assert line.endswith(f"info    shop.mail: writing to ann (mail.reset [default] {job_id} attempt 1)")
    job_id, lines = work(shell, "--log-format", "json")
    records = [json.loads(line) for line in lines]
    record = next(record for record in records if record["logger"] == "shop.mail")
    assert record["message"] == "writing to ann"
    assert (record["task"], record["job_id"]) == ("mail.reset", job_id)
    assert (record["queue"], record["attempt"]) == ("default", 1)
    assert "job_id" not in records[0]  # the record of the worker's start


@pytest.mark.long
def test_lines_have_a_date(shell: Shell) -> None:
    _, lines = work(shell)
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} info ", line) for line in lines), lines


@pytest.mark.long
def test_an_app_s_own_logging_is_left_alone(shell: Shell) -> None:
    job_id, lines = work(shell, "--log-jobs", setup=OWN)
    assert all(line.startswith("MINE ") for line in lines), lines
    assert [line for line in lines if f"MINE multiq.worker INFO {job_id} done" in line]
    assert [line for line in lines if line.startswith("MINE multiq.cli INFO - multiq ")]
    assert not [line for line in lines if "writing to" in line]  # the app's root logger has the level WARNING


@pytest.mark.long
def test_log_format_with_an_app_s_own_logging_is_warned_of(shell: Shell) -> None:
    _, lines = work(shell, "--log-format", "json", setup=OWN)
    assert lines[0].startswith("MINE multiq.cli WARNING - --log-format has no effect: the app has set up logging")
    _, lines = work(shell, "--log-format", "text")
    assert not [line for line in lines if "has no effect" in line]


@pytest.mark.long
def test_levels_that_an_app_has_set_stay_unless_the_command_line_says_otherwise(shell: Shell) -> None:
    setup = "logging.getLogger('multiq').setLevel('ERROR')\nlogging.getLogger().setLevel('DEBUG')"
    _, lines = work(shell, "--log-jobs", setup=setup)
    assert [line for line in lines if "looking up ann" in line]
    assert not [line for line in lines if " done  " in line]
    _, lines = work(shell, "--log-jobs", "--log-level", "info", setup=setup)
    assert [line for line in lines if " done  " in line]


@pytest.mark.long
def test_a_configuration_that_disables_all_other_loggers_does_not_silence_the_worker(shell: Shell) -> None:
    setup = "logging.config.dictConfig({'version': 1})"
    _, lines = work(shell, "--log-jobs", setup=setup)
    assert [line for line in lines if " done  " in line]


@pytest.mark.long
def test_levels_have_colours_on_a_terminal_only(shell: Shell) -> None:
    prepare(shell, address="bad")
    arguments = "worker", "shop.tasks:app", "-q", "default", "--stop-when-empty"
    code, seen = Terminal(shell, *arguments, columns=200).end()
    assert code == 0
    assert "\x1b[31merror  \x1b[0m buried" in seen
    assert "\x1b[33mwarning\x1b[0m failed" in seen
    prepare(shell, address="bad")
    assert "\x1b" not in Terminal(shell, *arguments, columns=200, NO_COLOR="1").end()[1]
    assert not [line for line in work(shell)[1] if "\x1b" in line]
