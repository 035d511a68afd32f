"""Real workers of an older multiq beside today's producers, and the other way round, on each store that holds jobs.

The older multiq is the commit before results and flows. Its code is taken out of the repository's history.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from servers.process import until
from soak.raw_effects import states
from stores import STORES

if TYPE_CHECKING:
    from collections.abc import Iterator

BEFORE_RESULTS = "3f51f5fc4c21a7a24d130118cdaa7da59b816da7"
HERE = Path(__file__).parent
STORES_THAT_HOLD = ["sqlite", *(pytest.param(name, marks=pytest.mark.long) for name in ("redis", "mysql"))]


@pytest.fixture(scope="session")
def old_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    archive = folder / "code.tar"
    git = ["git", "-C", str(HERE.parent.parent), "archive", "-o", str(archive), BEFORE_RESULTS, "multiq", "backends"]
    if subprocess.run(git, check=False, capture_output=True).returncode:
        pytest.skip(f"this checkout has no commit {BEFORE_RESULTS}: it is shallow, or not a repository")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder


class Programs:
    """Starts programs of the old multiq and of today's on one store."""

    def __init__(self, name: str, url: str, folder: Path, old_code: Path) -> None:
        self.name = name
        self.url = url
        self.folder = folder
        self._old_path = f"{old_code}:{old_code / 'backends'}:{HERE}"
        self._workers: list[subprocess.Popen[bytes]] = []

    def environment(self, *, old: bool) -> dict[str, str]:
        return {
            **os.environ,
            "MULTIQ_URL": self.url,
            "UPGRADE_DIARY": str(self.folder / "diary"),
            "PYTHONPATH": self._old_path if old else str(HERE),
        }

    def run(self, *arguments: str, old: bool = False, code: int = 0) -> str:
        """Run ``python ARGUMENTS`` to its end. Returns its output."""
        ended = subprocess.run(
            [sys.executable, *arguments],
            check=False,
            env=self.environment(old=old),
            cwd=self.folder,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == code, ended.stdout + ended.stderr
        return ended.stdout + ended.stderr

    def enqueue(self, what: str, *, old: bool = False) -> None:
        self.run(str(HERE / "upgrade_app.py"), what, old=old)

    def worker(self, *, old: bool) -> subprocess.Popen[bytes]:
        with (self.folder / ("old.log" if old else "new.log")).open("a") as log:
            started = subprocess.Popen(
                [sys.executable, "-m", "multiq", "worker", "upgrade_app:app", "-q", "home"],
                env=self.environment(old=old),
                cwd=self.folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._workers.append(started)
        return started

    def log(self, *, old: bool) -> str:
        return (self.folder / ("old.log" if old else "new.log")).read_text()

    def runs(self) -> Counter[str]:
        """How often each job ran, by the job's word and the version of multiq."""
        diary = self.folder / "diary"
        lines = diary.read_text().splitlines() if diary.exists() else []
        return Counter(f"{word} {version}" for word, _, version in map(str.split, lines))

    def states(self) -> Counter[str]:
        """How many jobs the store has, by their states."""
        return states(self.name, self.url)

    def upgrade(self) -> None:
        """What the manual says to do before the first new program."""
        if self.name == "mysql":
            self.run("-m", "multiq", "schema", "up")

    def close(self) -> None:
        for worker in self._workers:
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()


def end(worker: subprocess.Popen[bytes]) -> int:
    worker.send_signal(signal.SIGTERM)
    return worker.wait(60)


@pytest.fixture(params=STORES_THAT_HOLD)
def programs(request: pytest.FixtureRequest, tmp_path: Path, old_code: Path) -> Iterator[Programs]:
    with STORES[request.param](tmp_path) as url:
        made = Programs(request.param, url, tmp_path, old_code)
        yield made
        made.close()


FAILING = {f"fails-{number}" for number in range(3)}
OLD_JOBS = {f"{kind}-{number}" for kind in ("plain", "later") for number in range(10)} | FAILING
NEW_JOBS = {f"{kind}-{number}" for kind in ("second", "kept") for number in range(10)}
OF_FLOWS = {*(f"chain-{at}" for at in range(3)), *(f"member-{at}" for at in range(5)), "then"}


@pytest.mark.long
def test_old_worker_buries_or_leaves_the_jobs_of_flows_and_a_new_worker_runs_them(programs: Programs) -> None:
    # Given an old worker that has done an old producer's jobs, and still runs
    programs.enqueue("old", old=True)
    old = programs.worker(old=True)
    until(lambda: programs.runs() == {f"{one} old": 1 for one in OLD_JOBS}, "all ran")
    # When a new producer enqueues plain jobs, jobs whose result is to be kept, a chain and a batch
    programs.upgrade()
    programs.enqueue("new")
    # Then the old worker runs the jobs that it understands, buries those that it does not, and leaves the held ones
    until(lambda: programs.states() == {"buried": 3 + 1 + 5, "held": 2 + 1}, "the old worker has done what it can")
    assert programs.runs() == {f"{one} old": 1 for one in OLD_JOBS | NEW_JOBS}
    assert json.loads(programs.run("-m", "multiq", "history", "home", "--json"))["outcomes"] == []
    failed = json.loads(programs.run("-m", "multiq", "failed", "list", "--json"))
    reasons = Counter("version 2" in (job["reason"] or "") for job in _listed(failed))
    assert reasons == {True: 6, False: 3}
    assert old.poll() is None
    assert end(old) == 0
    # When a new worker follows, and the buried jobs are kicked
    new = programs.worker(old=False)
    programs.run("-m", "multiq", "kick", "home", "all")
    # Then all jobs of the flows ran once, by the new worker, and the jobs that fail have failed again
    until(lambda: programs.states() == {"buried": 3} and programs.runs()["then new"] == 1, "the flows are done")
    assert {one: n for one, n in programs.runs().items() if one.endswith("new")} == {
        f"{one} new": 1 for one in OF_FLOWS | FAILING
    }
    order = [line.split()[0] for line in (programs.folder / "diary").read_text().splitlines()]
    assert [one for one in order if one.startswith("chain")] == ["chain-0", "chain-1", "chain-2"]
    assert order.index("then") > max(order.index(f"member-{at}") for at in range(5))
    assert end(new) == 0
    assert programs.log(old=True).count("Traceback") == 3  # of the jobs that fail


def test_new_worker_goes_on_with_what_an_old_worker_has_left(programs: Programs) -> None:
    # Given jobs of an old producer: some buried, some delayed, and one that its worker was killed with
    programs.enqueue("hang", old=True)
    programs.enqueue("old", old=True)
    old = programs.worker(old=True)
    until(lambda: programs.runs()["hangs old"] == 1, "the job hangs")
    os.killpg(old.pid, signal.SIGKILL)
    old.wait()
    # When a new worker follows
    programs.upgrade()
    new = programs.worker(old=False)
    # Then it runs all of them, and the failed ones can be retried
    until(lambda: programs.states() == {"buried": 3}, "all ran")
    expected = {"hangs old": 1, "hangs new": 1, **{f"{one} new": 1 for one in OLD_JOBS}}
    assert programs.runs() == expected
    programs.run("-m", "multiq", "failed", "retry", "--yes")
    until(lambda: programs.runs()["fails-2 new"] == 2 and programs.states() == {"buried": 3}, "they failed again")
    assert end(new) == 0


@pytest.mark.long
def test_old_and_new_workers_side_by_side_run_no_job_wrongly(programs: Programs) -> None:
    # Given both kinds of workers, when both kinds of producers enqueue
    programs.upgrade()
    workers = [programs.worker(old=old) for old in (True, False)]
    programs.enqueue("new")
    programs.enqueue("old", old=programs.name != "sqlite")  # an old program that opens an upgraded file refuses it
    programs.enqueue("new")
    until(lambda: programs.states().keys() <= {"buried", "held"}, "the workers have done what they can")
    # And the old workers end, and the buried jobs are kicked
    assert end(workers[0]) == 0
    until(lambda: programs.states().keys() <= {"buried", "held"}, "nothing is ready")
    programs.run("-m", "multiq", "kick", "home", "all")
    until(lambda: programs.states() == {"buried": 3}, "the flows are done")
    # Then each job ran once, and no old worker ran a job of the flows
    ran = Counter[str]()
    for one, n in programs.runs().items():
        ran[one.split()[0]] += n
    assert {one: ran[one] for one in OF_FLOWS | NEW_JOBS} == dict.fromkeys(OF_FLOWS | NEW_JOBS, 2)
    assert [one for one in programs.runs() if one.endswith("old") and one.split()[0] in OF_FLOWS] == []
    assert end(workers[1]) == 0


@pytest.mark.parametrize("programs", ["sqlite"], indirect=True)
def test_old_program_refuses_a_file_that_a_new_one_has_upgraded(programs: Programs) -> None:
    programs.enqueue("old", old=True)
    programs.run("-m", "multiq", "stats", "home")
    said = programs.run("-m", "multiq", "stats", "home", old=True, code=1)
    assert "was made by a newer multiq" in said
    assert "Traceback" not in said


def _listed(failed: object) -> list[dict[str, str | None]]:
    jobs = failed["jobs"] if isinstance(failed, dict) else failed
    assert isinstance(jobs, list)
    return jobs
