"""A worker's exit codes: each row of the table in ``docs/worker.md``, in every mode of the command line."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from modes import ALONE
from processes import HERE, until, worker
from worker_app import anap, app, endless, fail, leave, nap, quick, read_diary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE = Path(__file__).parents[2] / "docs/worker.md"
MODES = ["-p 0", "-p 1 -t 3", "-p 0 -t 3", "-p 0 --concurrency 3", "-p 1", "-p 1 --concurrency 3"]


class Row(NamedTuple):
    """A line of the table."""

    given: str
    options: str
    then: str
    code: int
    began: str
    left: str


def _rows() -> list[Row]:
    _, _, table = PAGE.read_text("utf-8").partition("| in the queue |")
    lines = table.partition("\n\n")[0].splitlines()[2:]
    cells = ([cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines)
    return [Row(given, options, then, int(code), began, left) for given, options, then, code, began, left in cells]


ROWS = _rows()


class Run:
    """``multiq worker`` on a store of its own."""

    def __init__(self, folder: Path, mode: str, row: Row) -> None:
        self.mode = mode
        self.row = row
        self.folder = folder / re.sub(r"\W", "", mode)
        self.folder.mkdir()
        self.url = f"sqlite:///{self.folder}/jobs.db"
        self.process: subprocess.Popen[bytes]

    def __repr__(self) -> str:
        return f"multiq worker {self.mode} {self.row.options}; its log:\n{self.log}"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def words(self, word: str) -> list[int]:
        return [number for said, number, _, _ in read_diary(self.folder / "diary") if said == word]

    def start(self) -> None:
        environment = {
            **os.environ,
            "MULTIQ_URL": self.url,
            "WORKER_TEST_DIARY": str(self.folder / "diary"),
            "PYTHONPATH": str(HERE),
        }
        options = [option for option in self.row.options.split() if option not in {"-p", "0", "1"}]
        with (self.folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "multiq", "worker", "worker_app:app", *self.mode.split(), *options],
                env=environment,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
            )

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def send_all(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def until(self, condition: Callable[[], object]) -> None:
        until(condition, timeout=30, what=lambda: f"{condition}: {self}")


# --- the queue ---------------------------------------------------------------------------------------------


def _six(seconds: float) -> None:
    """Enqueue six jobs, functions and coroutines in turn."""
    for number in range(0, 6, 2):
        nap.enqueue(number, seconds)
        anap.enqueue(number + 1, seconds)


GIVEN: dict[str, Callable[[], Any]] = {
    "no jobs": lambda: None,
    "six short jobs": lambda: quick.enqueue_many([(number,) for number in range(6)]),
    "six jobs of a second": lambda: _six(1.0),
    "six jobs of minutes": lambda: _six(300),
    "a job due tomorrow": lambda: quick.options(delay=86400).enqueue(0),
    "a job that fails for good": lambda: fail.options(max_attempts=1).enqueue(0),
    "a job that ends its process with 0": lambda: leave.enqueue(0, "exit 0"),
    "a job that ends its process with 3": lambda: leave.enqueue(0, "exit 3"),
    "a job that ignores its time limit": lambda: endless.options(max_attempts=1).enqueue(0, "deaf"),
}

# --- signals -----------------------------------------------------------------------------------------------


def _once_it_works(*numbers: signal.Signals) -> Callable[[Run], None]:
    def send(run: Run) -> None:
        run.until(lambda: " working " in run.log)
        if run.row.given != "no jobs":
            run.until(lambda: run.words("start"))
        for at, number in enumerate(numbers):
            if at:
                run.until(lambda: " stopping " in run.log)
            run.send(number)

    return send


def _to_all(run: Run) -> None:
    run.until(lambda: run.words("start"))
    run.send_all(signal.SIGTERM)


def _pause(run: Run) -> None:
    run.until(lambda: " working " in run.log)
    run.send(signal.SIGUSR2)
    run.until(lambda: " paused " in run.log)
    _enqueue(run)


def _pause_and_end(run: Run) -> None:
    _pause(run)
    time.sleep(0.5)
    run.send(signal.SIGTERM)


def _pause_and_go_on(run: Run) -> None:
    _pause(run)
    run.send(signal.SIGCONT)
    run.until(lambda: len(run.words("end")) == 6)
    run.send(signal.SIGTERM)


THEN: dict[str, Callable[[Run], None]] = {
    "": lambda _: None,
    "SIGTERM": _once_it_works(signal.SIGTERM),
    "SIGINT": _once_it_works(signal.SIGINT),
    "SIGTERM twice": _once_it_works(signal.SIGTERM, signal.SIGTERM),
    "SIGINT twice": _once_it_works(signal.SIGINT, signal.SIGINT),
    "SIGTERM to the whole group": _to_all,
    "SIGUSR2 before the jobs come, SIGTERM": _pause_and_end,
    "SIGUSR2 before the jobs come, SIGCONT, SIGTERM": _pause_and_go_on,
}

# --- jobs left ---------------------------------------------------------------------------------------------


def _left(run: Run) -> str:
    """Return which jobs are left, in the words of the table."""
    app.connect(run.url)
    stats = app.queue().stats()
    counts = {
        state: getattr(stats, state) for state in ("ready", "delayed", "reserved", "buried") if getattr(stats, state)
    }
    if run.row.left == "the others ready":
        assert counts == {"ready": 6 - len(run.words("end"))}, run
    if run.row.code == 130 or run.row.left == "the others ready":  # a job that was given back has no attempt
        assert {info.attempt for info in app.queue().jobs("ready")} <= {0}, run
    if run.row.left == "the others ready":
        return run.row.left
    return ", ".join(f"{count} {state}" for state, count in counts.items()) or "nothing"


def _began(run: Run) -> str:
    began = run.words("start")
    assert len(began) == len(set(began)), run
    if run.row.began == "some, to their end":
        assert sorted(began) == sorted(run.words("end")), run
        return run.row.began if 0 < len(began) < 6 else str(len(began))
    return run.row.began if run.row.began == "some" and 0 < len(began) < 6 else str(len(began))


def _enqueue(run: Run) -> None:
    app.connect(run.url)
    GIVEN[run.row.given]()


def _cases() -> Iterator[Any]:
    """Every fourth row in one mode, the modes in turn; with ``make test-long`` the other rows, and in all modes."""
    for number, row in enumerate(ROWS):
        (wanted,) = [words for words in ("-p 0", "-p 1") if words in row.options] or ["-p"]
        modes = [mode for mode in MODES if mode.startswith(wanted)]
        here = modes[number % len(modes)]
        name = f"{row.given}, {row.options} {row.then}"
        # 1: these rows have one signal, two signals, a pause, --once, --stop-when-empty and a time limit
        yield pytest.param(row, [here], id=f"{name}, {here}", marks=() if number % 4 == 1 else pytest.mark.long)
        yield pytest.param(
            row, [mode for mode in modes if mode != here], id=f"{name}, other modes", marks=pytest.mark.long
        )


@pytest.mark.one_row
@pytest.mark.parametrize(("row", "modes"), list(_cases()))
def test_a_worker_ends_with_the_documented_exit_code(tmp_path: Path, row: Row, modes: list[str]) -> None:
    runs = [Run(tmp_path, mode, row) for mode in modes]
    try:
        # Given a store and a worker for each mode
        for run in runs:
            if "before the jobs come" not in row.then:
                _enqueue(run)
            run.start()
        # When the event of the row happens to each of them
        for run in runs:
            THEN[row.then](run)
        # Then each worker ends as the row describes
        for run in runs:
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.process.wait(30)
            assert run.process.returncode == row.code, run
            assert (_began(run), _left(run)) == (row.began, row.left), run
    finally:
        for run in runs:
            run.kill()
        app.close()


def test_the_table_has_all_that_can_be_given_and_happen() -> None:
    assert {row.given for row in ROWS} == set(GIVEN)
    assert {row.then for row in ROWS} == set(THEN)


@pytest.mark.one_row
@pytest.mark.parametrize("way", ["the end of the grace", "a second signal"])
@pytest.mark.parametrize("mode", ALONE.values(), ids=ALONE.keys())
def test_a_hook_that_hangs_does_not_outlast_the_end(tmp_path: Path, mode: str, way: str) -> None:
    # Given a worker without a supervisor, with middleware whose before_fetch never returns
    code = (
        "import sys, time, multiq, worker_app\n"
        "class Hang(multiq.Middleware):\n"
        "    def before_fetch(self, worker):\n"
        "        worker_app.note('hook', 0)\n"
        "        time.sleep(300)\n"
        "worker_app.app.middleware(Hang())\n"
        f"worker = multiq.Worker(worker_app.app, {mode}, grace={0.5 if 'grace' in way else 200})\n"
        "worker.owns_process = True; sys.exit(worker.run())"
    )
    with worker(tmp_path, f"sqlite:///{tmp_path}/jobs.db", code=code) as process:
        until(lambda: read_diary(process.diary))
        # When it is stopped
        process.send(signal.SIGTERM)
        if "second" in way:
            time.sleep(0.2)
            process.send(signal.SIGTERM)
        # Then it ends
        assert process.wait(20) == 130
