"""``multiq demo``: a few seconds of multiq at work on a temporary SQLite file, checked at the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from multiq.formatting import safe

from .exits import FAILED, OK
from .options import json_option, traceback_option
from .output import Column, print_json, show, table

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiq.job import JobHandle

_DEADLINE = 30.0  # seconds: a guard against hanging; all of it takes about five
_PAUSE = 0.05
_LOG_LINES = 12
_GRACE = 10.0  # seconds
_DEATHS = 4  # of workers, after which something is wrong here; one is planned


class Run(NamedTuple):
    """One run of a job, as its task noted it."""

    name: str
    attempt: int
    outcome: str
    at: float


class Case(NamedTuple):
    """One promise of the show, and how to tell from the runs whether it was kept."""

    title: str
    promise: str
    expected: str
    happened: Callable[[list[Run]], str]


@click.command(short_help="Watch it work, for five seconds.")
@json_option
@traceback_option
def demo(as_json: bool) -> int:
    """Watch priorities, delays, retries, burials and a killed worker, on a temporary SQLite file.

    Takes about five seconds, needs nothing, leaves nothing behind, and checks what happened: exit code 1 if it was
    not as promised.
    """
    with tempfile.TemporaryDirectory(prefix="multiq-demo-") as folder, ExitStack() as stack:
        stage = Stage(Path(folder), speak=not as_json)
        stack.callback(stage.close)
        stage.play()
        results = [(case, case.happened(stage.runs)) for case in stage.cases]
        kept = all(happened == case.expected for case, happened in results)
        log = "" if kept else stage.worker_log()
    if as_json:
        print_json({"cases": [_document(case, happened) for case, happened in results]})
    else:
        _show(results)
        if log:
            click.echo(f"\nthe end of the worker's log:\n{log}", err=True)
    return OK if kept else FAILED


class Stage:
    """The folder, the app, the worker and what was seen."""

    def __init__(self, folder: Path, *, speak: bool) -> None:
        from .demo_tasks import make_app

        self._folder = folder
        self._speak = speak
        self._ledger = folder / "ledger"
        self._log = folder / "worker.log"
        self._url = f"sqlite:///{folder}/jobs.db"
        self._worker: subprocess.Popen[bytes] | None = None
        self._began = time.time()
        self._app = make_app(self._url)
        self._deaths = 0
        self.runs: list[Run] = []
        self.cases: list[Case] = []

    def play(self) -> None:
        """All of it, to the end or the deadline."""
        self._tell("a SQLite file in a temporary folder, a worker in its own process")
        broken = self._enqueue()
        self._start_worker()
        deadline = time.monotonic() + _DEADLINE
        repaired = False
        while not self._is_over() and time.monotonic() < deadline and self._deaths < _DEATHS:
            if not repaired and broken.state() == "buried":
                repaired = True
                self._tell("bounce     is buried: set aside, with its reason; repaired and kicked")
                self._repair(broken)
            self._look_after_worker()
            time.sleep(_PAUSE)
            self._read()
        self._read()
        self._stop_worker()

    def worker_log(self) -> str:
        """The last lines that the workers logged."""
        lines = self._log.read_text("utf-8", "replace").splitlines()
        return "\n".join(safe(line) for line in lines[-_LOG_LINES:])

    def close(self) -> None:
        """Leave no process and no connection."""
        if self._worker is not None and self._worker.poll() is None:
            self._worker.kill()
            self._worker.wait()
        self._app.close()

    # --- acts ---

    def _enqueue(self) -> JobHandle:
        """All jobs, with what is promised of each. Returns the one that will be buried."""
        greet, flaky, doomed, crash = map(self._app.find_task, ("greet", "flaky", "doomed", "crash"))
        for name in ("first", "second"):
            greet.enqueue(name)
        greet.options(priority=0).enqueue("urgent")
        self._promise("priority", "urgent came last and goes first", "urgent, first, second", _order)

        before = time.time()
        greet.options(delay=1.5).enqueue("later")
        self._promise("delay", "1.5 s later, not earlier", "once, in time", _not_before("later", before + 1.5))

        moved = greet.options(delay=3600).enqueue("moved")
        before = time.time()
        moved.reschedule(delay=1)
        self._promise("reschedule", "from in an hour to in 1 s", "once, in time", _not_before("moved", before + 1))

        greet.options(delay=0.5).enqueue("cancelled").cancel()
        self._promise("cancel", "a job taken back never runs", "never", _story("cancelled"))

        flaky.enqueue("flaky")
        self._promise("retry", "fails twice, then works", "failed, failed, done", _story("flaky"))

        broken = doomed.enqueue("bounce")
        self._promise("bury, kick", "buried after 2, repaired, works", "failed, failed, done", _story("bounce"))

        crash.options(delay=2.5).enqueue("killed")
        self._promise("kill -9", "another worker runs the job", "killed, done", _story("killed"))
        self._promise("in the end", "nothing is left over", "empty, worker ended with 0", self._remains)
        self._tell("8 jobs enqueued, one of them cancelled, one rescheduled")
        return broken

    def _promise(self, title: str, promise: str, expected: str, happened: Callable[[list[Run]], str]) -> None:
        self.cases.append(Case(title, promise, expected, happened))

    def _repair(self, job: JobHandle) -> None:
        from .demo_tasks import FIXED

        (self._folder / FIXED).touch()
        self._app.queue(job.queue).kick_job(job.id)

    def _is_over(self) -> bool:
        stats = self._app.queue("demo").stats()
        return not (stats.ready or stats.delayed or stats.reserved or stats.buried)

    # --- the worker ---

    def _start_worker(self) -> None:
        from .demo_tasks import LEDGER, URL

        environment = {name: value for name, value in os.environ.items() if not name.startswith("MULTIQ_")}
        environment |= {URL: self._url, LEDGER: str(self._ledger)}
        command = [sys.executable, "-m", "multiq", "worker", f"{__package__}.demo_tasks:app", "-q", "demo"]
        with self._log.open("ab") as log:
            self._worker = subprocess.Popen(command, cwd=self._folder, env=environment, stderr=log)  # noqa: S603 - us

    def _look_after_worker(self) -> None:
        if self._worker is not None and self._worker.poll() is not None:
            self._deaths += 1
            self._tell("the worker is dead; another one starts")
            self._start_worker()

    def _stop_worker(self) -> None:
        if self._worker is not None:
            self._worker.terminate()
            try:
                self._worker.wait(_GRACE)
            except subprocess.TimeoutExpired:
                self._worker.kill()
                self._worker.wait()

    def _remains(self, _runs: list[Run]) -> str:
        code = self._worker.returncode if self._worker is not None else None
        return f"{'empty' if self._is_over() else 'jobs left'}, worker ended with {code}"

    # --- what is seen ---

    def _read(self) -> None:
        """Read the new lines of the file in which the tasks record their runs, and print them."""
        if not self._ledger.exists():
            return
        lines = self._ledger.read_text("utf-8").split("\n")[:-1]  # without a line that is being written
        for line in lines[len(self.runs) :]:
            run = Run(**json.loads(line))
            self.runs.append(run)
            self._tell(f"{run.name:<10} attempt {run.attempt}: {run.outcome}", run.at)

    def _tell(self, sentence: str, at: float | None = None) -> None:
        if self._speak:
            click.echo(f"{(at or time.time()) - self._began:5.1f} s  {sentence}")


# --- telling from the runs -------------------------------------------------------------------------------


def _order(runs: list[Run]) -> str:
    return ", ".join(run.name for run in runs if run.name in {"first", "second", "urgent"})


def _story(name: str) -> Callable[[list[Run]], str]:
    return lambda runs: ", ".join(run.outcome for run in runs if run.name == name) or "never"


def _not_before(name: str, due_at: float) -> Callable[[list[Run]], str]:
    def judge(runs: list[Run]) -> str:
        times = [run.at for run in runs if run.name == name]
        if len(times) != 1:
            return f"{len(times)} times"
        return "once, in time" if times[0] >= due_at else f"{due_at - times[0]:.3f} s too early"

    return judge


def _document(case: Case, happened: str) -> dict[str, object]:
    return {
        "case": case.title,
        "promise": case.promise,
        "expected": case.expected,
        "happened": happened,
        "kept": happened == case.expected,
    }


def _show(results: list[tuple[Case, str]]) -> None:
    from rich.text import Text

    rows: list[list[str | Text]] = []
    for case, happened in results:
        kept = happened == case.expected
        verdict = Text("yes", style="green") if kept else Text("NO", style="bold red")
        rows.append([case.title, case.promise, happened if kept else f"{happened}; not: {case.expected}", verdict])
    columns = [Column("CASE"), Column("PROMISE", folds=True), Column("WHAT HAPPENED", folds=True), Column("KEPT")]
    show("", table(columns, rows))
