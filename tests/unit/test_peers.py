"""``benchmarks/peers`` notices every fault of a library, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import peers.__main__ as program
import psutil
import pytest
from click.testing import CliRunner
from peers import environments, marks, measure, report, results
from peers.catalogue import ENTRIES, Entry
from peers.chart import picture
from peers.client import Client, ProgramError
from peers.marks import Mark
from peers.measure import Account, Description, Size, Steps, Turn, account
from peers.stores import SqliteStore
from servers.process import until

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
TINY = Size(share=0.01, pickup_seconds=0.3, idle_seconds=0.05, delays=(0.2, 0.4))
ABOUT = Description({"fake": "1"}, bulk=10, later=True, settings="none", killed="lost", caveats=["a fake"])

#: a fake library, whose queue is a file; *run* decides what its worker does with each number
FAKE = """
import os, sys, time
from pathlib import Path
from peers.marks import mark
from peers.protocol import Peer

jobs = Path("jobs")

def one(number):
    with jobs.open("a") as file:
        file.write(f"{{number}}\\n")

def work():
    past = Path("past")
    done = int(past.read_text()) if past.exists() else 0  # the number of jobs that an earlier worker has run
    while True:
        for line in jobs.read_text().splitlines()[done:]:
            run(int(line))
            done += 1
            past.write_text(str(done))
        time.sleep(0.001)

def run(number):
    {run}

PEER = Peer(packages=["multiq"], workers=[["python", "-c", "import fake; fake.work()"]], one=one,
            later=lambda number, delay: {later})
"""
LATER = "(time.sleep(delay), one(number))"


def take(folder: Path, run: str, later: str = LATER, *, long: int = 0) -> Turn:
    """Take a turn of the fake library. With a *long* run, the library also has a bulk enqueue."""
    bulk = ", many=lambda numbers: [one(number) for number in numbers])" if long else ")"
    (folder / "fake.py").write_text(FAKE.format(run=run, later=later).rstrip().removesuffix(")") + bulk)
    entry = Entry("Fake", "fake", "fake", "sqlite", 60, long)
    with Client(Path(sys.executable), "fake", "sqlite:///nowhere", folder, patience=60) as client:
        return Steps(entry, client, SqliteStore(), msgspec.structs.replace(TINY, delays=(0.01, 0.02))).take()


@pytest.fixture(autouse=True)
def _short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_STANDSTILL", 5.0)


def test_marks_are_read_as_they_were_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(marks.FOLDER, str(tmp_path))
    marks._handle.cache_clear()
    for number in (3, 1, 3):
        marks.mark(number)
    os.close(marks._handle())
    marks._handle.cache_clear()
    assert marks.count(tmp_path) == 3
    assert [mark.number for mark in marks.read(tmp_path)] == [3, 1, 3]


def test_lost_and_doubled_jobs_do_not_make_up_for_each_other() -> None:
    seen = [Mark(0, 10), Mark(1, 11), Mark(1, 12), Mark(1, 13), Mark(3, 14)]
    assert account(seen, range(4), early=0) == Account(jobs=4, lost=1, doubled=2, early=0)


@pytest.mark.long
def test_a_library_without_faults_has_no_faults_in_its_report(tmp_path: Path) -> None:
    turn = take(tmp_path, "mark(number)")
    assert turn.account.is_clean
    assert turn.account.jobs > 240  # the jobs of all steps: drain, pickup, delays
    assert (turn.bulk, turn.long_bulk, turn.long_drain) == (None, None, None)


@pytest.mark.long
def test_every_library_drains_as_many_jobs_and_a_long_run_comes_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drained: list[int] = []
    drain = Steps._drain

    def counting(steps: Steps) -> tuple[float, float]:
        before = len(marks.read(steps._client.marks))
        found = drain(steps)
        drained.append(len(marks.read(steps._client.marks)) - before)
        return found

    monkeypatch.setattr(Steps, "_drain", counting)
    for name, long in (("short", 0), ("long", 30_000)):
        (tmp_path / name).mkdir()
        turn = take(tmp_path / name, "mark(number)", long=long)
        assert turn.account.is_clean
        assert (turn.long_drain is not None) == bool(long)
    assert drained[:2] == [200, 200]
    assert drained[2:] == [350]  # 50 more jobs were run as a warm-up


@pytest.mark.long
@pytest.mark.parametrize(
    ("run", "later", "wrong"),
    [
        ("number == 7 or mark(number)", LATER, "lost"),
        ("[mark(number)] * (number != 7) or [mark(number), mark(number)]", LATER, "doubled"),
        ("mark(number)", "one(number)", "early"),
    ],
)
def test_faults_of_a_library_are_counted(tmp_path: Path, run: str, later: str, wrong: str) -> None:
    found = take(tmp_path, run, later).account
    assert {name for name in ("lost", "doubled", "early") if getattr(found, name)} == {wrong}


@pytest.mark.long
@pytest.mark.parametrize(
    ("run", "words"),
    [("sys.exit('I give up')", "no job began within 5 s.*I give up"), ("os._exit(3)", "It printed nothing")],
)
def test_workers_that_die_are_reported_with_their_last_output(tmp_path: Path, run: str, words: str) -> None:
    with pytest.raises(measure.NothingRanError, match=words):
        take(tmp_path, run)


def test_a_program_that_dies_is_reported_with_its_last_output(tmp_path: Path) -> None:
    (tmp_path / "fake.py").write_text("raise SystemExit('cannot begin')")
    with (
        Client(Path(sys.executable), "fake", "", tmp_path, patience=60) as client,
        pytest.raises(ProgramError, match=r"describe: the program ended.*cannot begin"),
    ):
        client.ask("describe")


@pytest.mark.long
def test_the_page_shows_figures_and_what_was_wrong() -> None:
    ours = results.Row("multiq-redis", [_turn(90_000), _turn(110_000)])
    wrong = results.Row("saq-redis", [_turn(2000, Account(100, lost=1, doubled=2, early=0))])
    missing = results.Row("rq-redis", [], "rq could not be installed")
    stores = {"redis": results.StoreRecord("Redis 7", "nothing on disk")}
    run = results.Run("2026-01-01", "2 cores", 2, stores, [missing, wrong, ours])
    page = report.markdown(run)
    names = re.findall(r"^\| (\S+)", page, re.MULTILINE)
    assert names == ["library", "**multiq**", "SAQ", "RQ"]
    assert "100,000 ±10%" in page
    assert "🔴 1 lost, 2 run twice (of 100)" in page
    assert "🔴 rq could not be installed" in page
    assert "drain 50.0 times SAQ" in page
    assert "100,000 ±10%" in report.include(run, f"# Peers\n{report._BEGIN}\nold\n{report._END}\nmore")
    with pytest.raises(ValueError, match="no place for figures"):
        report.include(run, f"{report._BEGIN}, and no end")
    assert [ours.is_clean, wrong.is_clean, missing.is_clean] == [True, False, False]
    assert {"multiq", "SAQ", "100,000", "failed"} <= set(re.findall(r">([^<>]+)<", picture(run)))


@pytest.mark.long
def test_a_library_that_cannot_be_installed_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = environments.interpreter

    def interpreter(library: str) -> Path:
        if library == "huey":
            raise environments.NotInstalledError("huey could not be installed")
        return installed(library)

    monkeypatch.setattr(program, "interpreter", interpreter)
    monkeypatch.setattr(program, "_QUICK", TINY)
    monkeypatch.setattr(measure, "_STANDSTILL", 15.0)  # a real worker may take a second to start
    done = CliRunner().invoke(program.main, ["--quick", "--only", "sqlite", "--into", str(tmp_path)])
    assert done.exit_code == 0, done.output
    run = msgspec.json.decode((tmp_path / "peers.json").read_bytes(), type=results.Run)
    ours, huey = run.rows_of("sqlite")
    assert ours.is_clean
    assert ours.account.jobs > 700
    assert ours.samples("late")
    assert huey.failure == "huey could not be installed"
    rendered = CliRunner().invoke(program.main, ["--render", "--into", str(tmp_path)])
    assert "🔴" in rendered.output


@pytest.mark.long
@pytest.mark.parametrize(("key", "code"), [("huey-redis", 0), ("multiq-redis", 1)])
def test_a_lost_job_of_a_peer_is_a_finding_and_one_of_multiq_an_error(tmp_path: Path, key: str, code: int) -> None:
    lossy = results.Row(key, [_turn(2000, Account(100, lost=1, doubled=0, early=0))])
    run = results.Run("2026-01-01", "2 cores", 1, {}, [lossy])
    (tmp_path / "peers.json").write_bytes(msgspec.json.encode(run))
    rendered = CliRunner().invoke(program.main, ["--render", "--into", str(tmp_path)])
    assert "1 lost" in rendered.output
    assert rendered.exit_code == code


@pytest.mark.long
@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, *(pytest.param(number, marks=pytest.mark.long) for number in (signal.SIGTERM, signal.SIGKILL))],
)
def test_no_process_of_an_interrupted_run_continues(number: signal.Signals, tmp_path: Path) -> None:
    path = f"{ROOT}/benchmarks{os.pathsep}{ROOT}/tests"
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "peers", "--only", "multiq-sqlite"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as runner:
        started: list[psutil.Process] = []
        until(_seen(runner.pid, started, 4), "the program, a supervisor and its children run")
        runner.send_signal(number)
        assert runner.wait(60) != 0
    until(lambda: not any(process.is_running() for process in started), "all have ended")


def test_no_two_rows_have_one_name() -> None:
    assert len({entry.key for entry in ENTRIES}) == len(ENTRIES)


def _turn(drain: float, found: Account = Account(1000, 0, 0, 0)) -> Turn:  # noqa: B008 - it is frozen
    return Turn(ABOUT, found, 5000.0, 20_000.0, drain, 2.0, 1.0, [1.0, 2.0], [3.0], 0.5)


def _seen(pid: int, found: list[psutil.Process], wanted: int) -> Callable[[], bool]:
    def look() -> bool:
        found[:] = psutil.Process(pid).children(recursive=True)
        return len(found) >= wanted

    return look
