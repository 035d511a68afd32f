"""A subscriber that never returns prevents neither the end of a ``multiq worker`` nor the replacement of a process."""

from __future__ import annotations

import contextlib
import signal
import time
from typing import TYPE_CHECKING

import pytest
from hanging_app import app, deaf, nap, work
from modes import ALONE, SUPERVISED, worker_of
from processes import until
from worker_app import read_diary

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from processes import WorkerProcess

#: In supervised modes, the supervisor also limits the time. These modes are run with ``make test-long``.
in_all_modes = pytest.mark.parametrize(
    "modes",
    [pytest.param(ALONE, id="alone"), pytest.param(SUPERVISED, id="supervised", marks=pytest.mark.long)],
)
ENDS = ["WorkerStopped", "WorkerStopping", "WorkerStopping WorkerStopped"]
ENDS_LONG = [ENDS[0], *[pytest.param(names, marks=pytest.mark.long) for names in ENDS[1:]]]


@contextlib.contextmanager
def workers(
    folder: Path, names: str, modes: dict[str, str], monkeypatch: pytest.MonkeyPatch, *, owns_process: bool = True
) -> Iterator[dict[str, WorkerProcess]]:
    """A worker in each of the modes, each on a store of its own, where subscribers of the events *names* hang."""
    monkeypatch.setenv("HANGING_EVENTS", names)
    with contextlib.ExitStack() as stack:
        running = {}
        for name, arguments in modes.items():
            place = folder / name
            place.mkdir()
            running[name] = stack.enter_context(
                worker_of("hanging_app", place, f"sqlite:///{place}/jobs.db", arguments, owns_process=owns_process)
            )
        yield running


def words(process: WorkerProcess) -> list[str]:
    return [word for word, _, _, _ in read_diary(process.diary)]


def until_hanging(process: WorkerProcess) -> None:
    until(lambda: any(word.startswith("hangs") for word in words(process)))


def until_started(process: WorkerProcess, jobs: int) -> None:
    until(lambda: words(process).count("start") == jobs, timeout=30)


def with_arguments(modes: dict[str, str], more: str) -> dict[str, str]:
    return {name: f"{arguments}, {more}" for name, arguments in modes.items()}


@in_all_modes
@pytest.mark.parametrize("names", ENDS_LONG)
@pytest.mark.long
def test_the_end_of_the_grace_ends_a_worker_whose_subscriber_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modes: dict[str, str], names: str
) -> None:
    # Given workers in each mode, with a subscriber that never returns
    with workers(tmp_path, names, with_arguments(modes, "grace=0.5"), monkeypatch) as running:
        for process in running.values():
            process.wait_until_working()
        # When the workers get one stop signal
        for process in running.values():
            process.send(signal.SIGTERM)
        # Then they end, and log the subscribers for which they have not waited; WorkerStopping alone does not cut the
        # end short
        codes = {name: process.wait(20) for name, process in running.items()}
        assert codes == dict.fromkeys(running, 0 if names == "WorkerStopping" else 130)
        assert all(f"hangs:{names.split(maxsplit=1)[0]}" in words(process) for process in running.values())


@in_all_modes
@pytest.mark.parametrize("names", ENDS)
@pytest.mark.long
def test_a_second_signal_ends_a_worker_whose_subscriber_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modes: dict[str, str], names: str
) -> None:
    # Given workers in each mode that have got a stop signal and hang in a subscriber, with a grace of minutes
    with workers(tmp_path, names, with_arguments(modes, "grace=200"), monkeypatch) as running:
        for process in running.values():
            process.wait_until_working()
        for process in running.values():
            process.send(signal.SIGTERM)
        for process in running.values():
            until_hanging(process)
        # When the workers get a second stop signal
        for process in running.values():
            process.send(signal.SIGTERM)
        # Then they end
        assert {name: process.wait(20) for name, process in running.items()} == dict.fromkeys(running, 130)


@pytest.mark.long
@pytest.mark.parametrize("modes", [ALONE, SUPERVISED], ids=["alone", "supervised"])
@pytest.mark.parametrize("names", ENDS)
def test_a_worker_that_ends_by_itself_does_not_wait_for_a_subscriber_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modes: dict[str, str], names: str
) -> None:
    # Given workers in each mode that end after a job, with a subscriber that never returns
    with workers(tmp_path, names, with_arguments(modes, "grace=0.5, max_jobs=1"), monkeypatch) as running:
        # When the job is done
        for name in running:
            app.connect(f"sqlite:///{tmp_path}/{name}/jobs.db")
            work.enqueue(1)
            app.close()
        # Then they end with the code that they would have without the subscriber
        assert {name: process.wait(20) for name, process in running.items()} == dict.fromkeys(running, 0)
        assert all(words(process).count("start") == 1 for process in running.values())


@pytest.mark.long
@pytest.mark.parametrize("mode", SUPERVISED.values(), ids=SUPERVISED.keys())
def test_the_place_of_a_process_that_hangs_in_a_subscriber_is_filled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    # Given a process that is replaced after each job, with a subscriber that never returns
    arguments = {"recycled": f"{mode}, grace=0.2, recycle_jobs=1, prefetch=1"}
    with workers(tmp_path, "WorkerStopped", arguments, monkeypatch) as running:
        process = running["recycled"]
        app.connect(f"sqlite:///{tmp_path}/recycled/jobs.db")
        # When jobs for several such processes are enqueued, then all jobs are run
        for number in range(3):
            work.enqueue(number)
            until_started(process, number + 1)
        assert "has worked for long enough" in process.log
        assert "died" not in process.log
        app.close()


@pytest.mark.long
def test_a_program_is_not_ended_because_its_subscriber_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given programs of the user's own that run workers, and one that ends its process
    arguments = with_arguments(ALONE, "grace=0.1")
    with (
        workers(tmp_path, "WorkerStopped", arguments, monkeypatch, owns_process=False) as programs,
        workers(tmp_path, "WorkerStopped", {"command": "processes=0, grace=1"}, monkeypatch) as commands,
    ):
        running = [*programs.values(), *commands.values()]
        for process in running:
            process.wait_until_working()
        # When all get a stop signal, and the last one has ended
        for process in running:
            process.send(signal.SIGTERM)
        assert commands["command"].wait(20) == 130
        # Then the others wait for their subscribers
        assert all(process.process.poll() is None for process in programs.values())


@pytest.mark.long
def test_a_subscriber_of_overdue_jobs_that_hangs_costs_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a job that runs on beyond its time limit, and a subscriber to that event that never returns
    with workers(tmp_path, "JobOverdue", {"first": "processes=0"}, monkeypatch) as running:
        app.connect(f"sqlite:///{tmp_path}/first/jobs.db")
        handle = deaf.options(ttr=1).enqueue(1)
        until(lambda: "hangs:JobOverdue" in words(running["first"]))
        # When three times its ttr has passed
        time.sleep(3)
        # Then its worker still has the job
        assert handle.state() == "reserved"
        assert words(running["first"]).count("start") == 1
        app.close()


@pytest.mark.long
def test_a_subscriber_of_overdue_jobs_that_hangs_costs_no_neighbour_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a coroutine beside a job that ignores its time limit, and a subscriber that never returns
    arguments = {"shared": f"{SUPERVISED['coroutines-supervised']}, kill_after=0.5"}
    with workers(tmp_path, "JobOverdue WorkerStopped", arguments, monkeypatch) as running:
        app.connect(f"sqlite:///{tmp_path}/shared/jobs.db")
        neighbour = nap.enqueue(2)
        until(lambda: "start" in words(running["shared"]))
        overdue = deaf.enqueue(1)
        # When the job is ended with its process
        until(lambda: overdue.state() == "buried")
        # Then the coroutine's job is run again, and neither an attempt nor a crash was counted
        until_started(running["shared"], 3)
        assert (neighbour.peek().crashes, neighbour.peek().attempt) == (0, 1)
        app.close()
