"""The examples run as in the documentation, and the demo reports faults."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from examples.report import Check, Counts, Outcome, report
from examples.reset_mail.letter import reset_letter

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "dev", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)


SINGLE = [pytest.param(name, marks=pytest.mark.long) for name in ("reset_mail", "order_timeout", "alarm")]


@pytest.mark.parametrize("name", ["demo", *SINGLE])  # the demo runs all of them
def test_an_example_runs_and_its_checks_pass(name: str) -> None:
    done = run("-m", f"examples.{name}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all is as it should be" in done.stdout
    # With -X dev, asyncio logs each step that takes a tenth of a second, which happens on a busy machine.
    assert [line for line in done.stderr.splitlines() if not line.startswith("Executing <")] == []
    assert "\x1b" not in done.stdout  # readable when piped


@pytest.mark.long
def test_the_demo_notices_a_mail_that_arrives_twice() -> None:
    # Given a mail server that hands every mail over twice
    sabotage = """
import sys
from examples.reset_mail.mail_server import MailServer
from examples.stage import run
take = MailServer.handle_DATA
async def take_twice(self, *args):
    await take(self, *args)
    return await take(self, *args)
MailServer.handle_DATA = take_twice
sys.exit(run("reset_mail"))
"""
    done = run("-c", sabotage)
    # Then the demo fails, and reports the fault
    assert done.returncode == 1
    assert "\u2717 reset_mail     everybody got exactly one mail" in done.stdout
    assert "not as it should be: reset_mail" in done.stdout


@pytest.mark.long
def test_the_demo_shows_the_worker_s_log_when_it_cannot_go_on() -> None:
    # Given a worker whose settings are wrong
    sabotage = """
import sys
from examples.stage import BaseStory, run
BaseStory.environment = lambda self: {"MULTIQ_LOG_LEVEL": "nonsense"}
sys.exit(run("alarm"))
"""
    done = run("-c", sabotage)
    # Then the demo fails at once, with the worker's own error message
    assert done.returncode == 1
    assert "the worker ended with code 2 before" in done.stdout
    assert "MULTIQ_LOG_LEVEL" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


GOOD = Counts(queued=3, delayed=1, retried=0, cancelled=0, worked_off=3, buried=0)


@pytest.mark.parametrize(
    ("seen", "holds", "code"),
    [(GOOD, True, 0), (GOOD._replace(worked_off=2), True, 1), (GOOD, False, 1)],
)
def test_the_verdict_is_red_and_the_exit_code_1_when_anything_differs(seen: Counts, holds: bool, code: int) -> None:
    paper = io.StringIO()
    console = Console(file=paper, force_terminal=True, color_system="standard", width=100)
    outcome = Outcome("mail", expected=GOOD, seen=seen, checks=[Check("no mail is missing", holds)])
    assert report([outcome], 1.0, console) == code
    bold_red = "\x1b[1;31m"
    assert (bold_red in paper.getvalue()) == (code == 1)
    assert (f"{bold_red}not as it should be: mail" in paper.getvalue()) == (code == 1)


def test_a_letter_shows_names_as_text_and_never_as_markup() -> None:
    letter = reset_letter("ann@example.com", "<b>Ann</b> & $link", "https://shop.example/1", "<1@shop.example>")
    plain, html = letter.iter_parts()
    assert "Hello <b>Ann</b> & $link," in plain.get_content()
    assert "&lt;b&gt;Ann&lt;/b&gt; &amp; $link," in html.get_content()


def test_a_letter_cannot_be_given_further_headers_by_its_address() -> None:
    with pytest.raises(ValueError, match="linefeed or carriage return"):
        reset_letter("ann@example.com\r\nBcc: all@example.com", "Ann", "https://shop.example/1", "<1@shop.example>")
