"""Standard streams that are closed or full, a deleted current folder, an early Ctrl-C, and long listings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from servers.process import until
from shell import Done, Shell

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MULTIQ = f"{sys.executable} -m multiq"


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    shell.app.queue("mail").enqueue_many(range(3))
    yield shell
    shell.app.close()


def run(shell: Shell, line: str) -> Done:
    done = subprocess.run(
        ["bash", "-c", line.replace("multiq", MULTIQ, 1)],
        cwd=shell.folder,
        env=shell.all_environment(),
        capture_output=True,
        timeout=60,
        check=False,
    )
    return Done(done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.mark.one_row
@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("multiq stats >&-", 0, "on sqlite"),
        ("multiq jobs mail >&- 2>&- <&-", 0, ""),
        ("multiq stats --json <&-", 0, ""),
        ("multiq top --once >&-", 0, ""),
        ("multiq stats >/dev/full", 1, "error: standard output cannot be written to: No space left on device"),
        ("multiq jobs mail --json >/dev/full", 1, "standard output cannot be written to"),
        ("multiq --help >/dev/full", 1, "standard output cannot be written to"),
        ("multiq stats 2>/dev/full", 0, ""),
        ("multiq stat 2>/dev/full", 2, ""),
        ("multiq stat 2>&-", 2, ""),
        ("multiq enqueue -q mail --bytes - <&-", 2, "standard input is closed"),
        ("multiq enqueue -q mail --body - <&-", 2, "standard input is closed"),
        ("multiq purge mail <&-", 2, "standard input is closed: there is no terminal to ask; --yes"),
        ("multiq worker shop.tasks:app -q none --once >&- 2>&- <&-", 0, ""),
    ],
)
def test_closed_or_full_standard_streams_are_reported(shell: Shell, line: str, code: int, says: str) -> None:
    done = run(shell, line)
    assert done.code == code, done
    assert says in done.err
    assert "this should not happen" not in done.err
    assert "Traceback" not in done.err
    # no job was enqueued without input, and none was purged without an answer
    assert shell.app.queue("mail").stats().ready == 3


@pytest.mark.one_row
@pytest.mark.parametrize("command", ["stats", "worker shop.tasks:app --once", "enqueue shop.tasks:app mail.reset"])
def test_a_deleted_current_folder_is_reported(shell: Shell, command: str) -> None:
    gone = shell.folder / "gone"
    gone.mkdir()
    shell.environment["MULTIQ_URL"] = "sqlite:///here.db"
    line = f"cd {gone}; rmdir {gone}; PYTHONPATH={os.getcwd()} multiq {command}"  # noqa: PTH109 - a word of a line
    done = run(shell, line)
    assert done.code == 1, done
    assert done.err.startswith("error: the current folder is not there any more")
    assert "Traceback" not in done.err


def test_characters_that_the_locale_lacks_are_printed_as_escapes(shell: Shell) -> None:
    # Given a body with characters that ISO-8859-1 lacks, and one that it has
    shell.app.queue("raw").enqueue("ä\u2603\U0001f600")
    # When standard output has this encoding
    shell.environment["PYTHONIOENCODING"] = "latin-1"
    done = subprocess.run(
        [sys.executable, "-m", "multiq", "jobs", "raw"], env=shell.all_environment(), capture_output=True, check=True
    )
    # Then a listing has escapes for them, and JSON is the same document as elsewhere
    assert 'ä\\u2603\\U0001f600"'.encode("latin-1") in done.stdout
    raw = subprocess.run(
        [sys.executable, "-m", "multiq", "jobs", "raw", "--json"],
        env=shell.all_environment(), capture_output=True, check=True,
    ).stdout  # fmt: skip
    assert "ä".encode("latin-1") in raw
    assert json.loads(raw.decode("latin-1"))["jobs"][0]["body"] == "ä\u2603\U0001f600"


def test_a_second_ctrl_c_ends_a_scheduler_whose_app_is_being_imported(tmp_path: Path) -> None:
    # Given an app whose import takes long
    (tmp_path / "slow.py").write_text("import pathlib, time; pathlib.Path('importing').touch(); time.sleep(600)")
    process = subprocess.Popen(
        [sys.executable, "-m", "multiq", "scheduler", "slow:app"], cwd=tmp_path, stderr=subprocess.PIPE
    )
    until((tmp_path / "importing").exists, "it is imported")
    # When it gets two signals
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    # Then it ends
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err.strip()) == (130, b"stopped")


def test_ctrl_c_while_the_program_is_imported_ends_it_silently(tmp_path: Path) -> None:
    # Given an import that takes long
    (tmp_path / "msgspec.py").write_text("import pathlib, time; pathlib.Path('importing').touch(); time.sleep(60)")
    process = subprocess.Popen(
        [sys.executable, "-c", "import multiq_start; multiq_start.main()"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stderr=subprocess.PIPE,
    )
    until((tmp_path / "importing").exists, "it is imported")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    assert err == b""


@pytest.mark.long
def test_a_long_listing_is_the_same_as_a_short_one_and_is_printed_page_by_page(shell: Shell) -> None:
    shell.app.queue("mail").enqueue_many([{"number": number} for number in range(1500)])
    shell.app.queue("mail").enqueue(1, delay=3600)
    whole = shell.run("jobs", "mail", "-n", "5000")
    assert whole.code == 0
    assert len(whole.out.splitlines()) == 1 + 1504
    long, short = (shell.run("jobs", "mail", "ready", "-n", number).out.splitlines() for number in ("1100", "900"))
    assert long[:901] == short
    part = shell.run("jobs", "mail", "ready", "-n", "1200")
    assert len(part.out.splitlines()) == 1201
    assert "there are more: multiq jobs mail ready --after=" in part.err
    assert shell.run("jobs", "none", "-n", "5000").out == "queue none has no jobs\n"
