"""The command line on a real (pseudo) terminal: colours, widths, keys, questions."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from typing import TYPE_CHECKING

import pytest
from shell import Shell

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")


class Terminal:
    """A command on a terminal of its own, with the given numbers of columns and lines."""

    def __init__(self, shell: Shell, *arguments: str, columns: int = 80, lines: int = 24, **environment: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        env = {**shell.all_environment(TERM="xterm-256color"), **environment}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            if name not in environment:
                env.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "multiq", *arguments],
            cwd=shell.folder,
            env=env,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - Ctrl-C needs a terminal
        )
        os.close(theirs)
        self.seen = ""

    def read_until(self, text: str) -> str:
        """Wait until *text* is printed. Returns all that was printed."""
        deadline = time.monotonic() + 30
        while text not in self.seen:
            assert time.monotonic() < deadline, f"{text!r} did not come: {self.seen!r}"
            assert self._read(), f"{text!r} did not come before the end: {self.seen!r}"
        return self.seen

    def send(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def end(self) -> tuple[int, str]:
        """Wait for the end. Returns the exit code, and all that was printed."""
        while self._read():
            pass
        code = self.process.wait(30)
        os.close(self._ours)
        return code, self.seen

    def _read(self) -> bool:
        ready, _, _ = select.select([self._ours], [], [], 30)
        assert ready, f"nothing came for 30 s after {self.seen!r}"
        try:
            data = os.read(self._ours, 65536)
        except OSError:  # the other side was closed
            return False
        self.seen += data.decode()
        return bool(data)


def plain(text: str) -> str:
    return _CODES.sub("", text).replace("\r", "")


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    mail = shell.app.queue("mail")
    mail.enqueue({"a": "x" * 300})
    mail.enqueue(1, delay=3600)
    mail.enqueue(2, priority=0)
    with mail.reserve() as job:
        job.bury("a long reason, " * 20)
    yield shell
    shell.app.close()


@pytest.mark.one_row
@pytest.mark.few_rows
@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize(
    "command",
    [
        ["stats"],
        ["jobs", "mail"],
        ["jobs", "mail", "buried"],
        ["backends"],
        ["backends", "sqlite"],
        ["top", "--once"],
        [],
    ],
    ids=" ".join,
)
def test_no_table_is_wider_than_the_terminal(shell: Shell, command: list[str], columns: int) -> None:
    _, out = Terminal(shell, *command, columns=columns).end()
    table = [line for line in plain(out).splitlines() if shell.url not in line]  # a path may be longer than any line
    assert max(map(len, table)) <= columns


def test_ids_are_whole_even_on_a_narrow_terminal(shell: Shell) -> None:
    _, out = Terminal(shell, "jobs", "mail", columns=80).end()
    assert re.findall(r"^[0-9a-f]{8}-[0-9a-f-]{27} ", plain(out), re.MULTILINE) == [
        f"{job.id} " for state in ("ready", "delayed", "buried") for job in shell.app.queue("mail").jobs(state)
    ]


@pytest.mark.long
def test_a_terminal_has_colours_unless_they_are_declined(shell: Shell) -> None:
    assert "\x1b[31m" in Terminal(shell, "stats").end()[1]  # a buried job is red
    assert "\x1b[31m" not in Terminal(shell, "stats", NO_COLOR="1").end()[1]
    assert "\x1b[31m" in Terminal(shell, "stat").end()[1]  # and an error is red, too


@pytest.mark.long
def test_a_message_is_broken_between_words(shell: Shell) -> None:
    _, out = Terminal(shell, "jobs", "a b").end()
    lines = plain(out).splitlines()
    assert len(lines) == 2
    assert max(map(len, lines)) <= 80
    assert " ".join(lines) == shell.run("jobs", "a b").err.strip()


@pytest.mark.long
def test_output_to_a_pipe_has_no_colours(shell: Shell) -> None:
    for command in (["stats"], ["jobs", "mail"], ["peek", "gone"], ["backends"], ["stat"], ["top"]):
        done = shell.run(*command)
        assert "\x1b" not in done.out + done.err


@pytest.mark.one_row
@pytest.mark.parametrize("key", ["q", "xq", "\x1b", "\x03"])
def test_top_draws_until_a_key_and_leaves_the_terminal_as_it_was(shell: Shell, key: str) -> None:
    terminal = Terminal(shell, "top", "-i", "100ms")
    terminal.read_until("+/-")  # the second frame
    shell.app.queue("other").enqueue_many(range(7))
    terminal.read_until("+7")
    terminal.send(key)
    code, out = terminal.end()
    assert code == (130 if key == "\x03" else 0)
    assert out.count("\x1b[?1049h") == out.count("\x1b[?1049l") == 1  # the alternate screen was left
    assert out.count("\x1b[?25l") == out.count("\x1b[?25h")  # the cursor is back
    assert "Traceback" not in out


@pytest.mark.long
def test_an_arrow_does_not_end_top(shell: Shell) -> None:
    terminal = Terminal(shell, "top", "-i", "100ms")
    terminal.read_until("+/-")
    terminal.send("\x1b[A")
    shell.app.queue("other").enqueue_many(range(7))
    terminal.read_until("+7")
    terminal.send("q")
    assert terminal.end()[0] == 0


def test_top_shows_the_busiest_queues_and_how_many_more_there_are(shell: Shell) -> None:
    for number in range(40):
        shell.app.queue(f"q{number:02}").enqueue_many(range(number + 2))
    terminal = Terminal(shell, "top", "-i", "100ms")
    screen = plain(terminal.read_until("more queues"))
    terminal.send("q")
    terminal.end()
    names = re.findall(r"^(q\d\d) ", screen.split("more queues")[0], re.MULTILINE)
    assert names[:3] == ["q39", "q38", "q37"]
    shown = re.search(r"and (\d+) more queues", screen)
    assert shown is not None
    assert len(names) + int(shown[1]) == 41


def test_purge_asks_on_the_terminal_and_an_answer_of_no_deletes_nothing(shell: Shell) -> None:
    before = shell.everything()
    terminal = Terminal(shell, "purge", "mail")
    terminal.read_until("[y/N]")
    terminal.send("n\n")
    code, out = terminal.end()
    assert code == 130
    assert "1 ready, 1 delayed, 1 buried" in plain(out).replace("\n", "")
    assert shell.everything() == before


def test_ctrl_c_at_the_question_changes_nothing(shell: Shell) -> None:
    before = shell.everything()
    terminal = Terminal(shell, "purge", "mail")
    terminal.read_until("[y/N]")
    time.sleep(0.3)  # Then Python waits in read(). A signal just before that would wait for a key.
    terminal.send("\x03")
    code, out = terminal.end()
    assert code == 130
    assert "Traceback" not in out
    assert shell.everything() == before
