"""How many processes a worker that scales needs: the decisions, without processes and without a clock."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from servers.process import until

import multiq
from multiq.backend import NewJob, QueueStats
from multiq.backend.memory import MemoryBackend
from multiq.ids import new_id
from multiq.settings.model import Settings, WorkerSettings
from multiq.settings.process_range import ProcessRange, read_process_range
from multiq.worker.processes.scaling import Needs, Scaling
from multiq.worker.processes.shared_state import SharedState

NO_RANGES = ["1:", ":8", "1:2:3", "a:b", "-1:4", "", "1.5:2", "\u0661:\u0668"]


class Simulation:
    """Calls ``Needs`` every half a second."""

    def __init__(self, least: int, most: int, *, at_a_time: int = 1, number: int = 0, **times: float) -> None:
        self.now = 1000.0
        self.taken = 0.0
        self.needs = Needs(
            ProcessRange(least, most), number, at_a_time=at_a_time, now=self.now,
            up_after=times.get("up_after", 1.0), down_after=times.get("down_after", 30.0),
        )  # fmt: skip

    def run(self, seconds: float, *, ready: int = 0, running: int = 0, rate: float = 0.0) -> list[int]:
        """The numbers of needed processes at each look, while *rate* jobs a second are taken."""
        found = []
        for _ in range(int(seconds / 0.5)):
            self.now += 0.5
            self.taken += rate * 0.5
            found.append(self.needs.note(self.now, ready=ready, running=running, taken=self.taken))
        return found


def test_the_number_doubles_while_jobs_wait() -> None:
    assert Simulation(1, 8).run(6.0, ready=100, running=1) == [1, 1, 2, 2, 2, 4, 4, 4, 8, 8, 8, 8]


def test_no_more_processes_are_needed_than_jobs_wait() -> None:
    assert Simulation(2, 8).run(2.0, ready=1, running=2) == [2, 2, 3, 3]
    assert Simulation(4, 8, at_a_time=10).run(2.0, ready=11, running=40)[-1] == 6


def test_a_short_burst_of_jobs_changes_nothing() -> None:
    simulation = Simulation(1, 8)
    for _ in range(50):
        simulation.run(1.0, ready=50, running=1)
        simulation.run(0.5, running=1)
    assert simulation.needs.number == 1


def test_a_busy_queue_whose_jobs_do_not_wait_long_needs_no_more_processes() -> None:
    # Given 30 jobs that wait at each look, and 100 jobs taken each second: each job waits for 0.3 s
    assert set(Simulation(1, 8).run(60.0, ready=30, running=1, rate=100)) == {1}
    # And if the jobs are taken ten times more slowly, each waits for 3 s
    assert Simulation(1, 8).run(60.0, ready=30, running=1, rate=10)[-1] == 8


def test_idle_processes_end_after_a_time() -> None:
    simulation = Simulation(1, 8, number=8)
    assert set(simulation.run(29.5)) == {8}
    assert simulation.run(0.5) == [1]


def test_as_many_processes_stay_as_jobs_run() -> None:
    simulation = Simulation(1, 8, number=8)
    simulation.run(15.0, running=5)
    assert simulation.run(15.0, running=1)[-1] == 5  # the largest number in the last 30 s
    assert simulation.run(30.0, running=1)[-1] == 2  # one process would always be busy


@pytest.mark.parametrize("at_a_time", [1, 10])
def test_processes_that_are_needed_for_most_of_the_time_stay(at_a_time: int) -> None:
    simulation = Simulation(1, 8, number=4, at_a_time=at_a_time)
    assert set(simulation.run(300.0, running=4 * at_a_time)) == {4}
    assert simulation.run(300.0, running=3 * at_a_time)[-1] == 4  # three processes would be busy all the time
    assert simulation.run(300.0, running=2 * at_a_time)[-1] == 3


def test_a_backlog_postpones_the_end_of_processes() -> None:
    simulation = Simulation(1, 8, number=8)
    simulation.run(29.0)
    simulation.run(2.0, ready=100)
    assert set(simulation.run(29.0)) == {8}
    assert simulation.run(2.0)[-1] == 1


@pytest.mark.parametrize("seed", range(20))
def test_the_number_does_not_flap_under_a_steady_load(seed: int) -> None:
    """A load of two and a half processes on average, with a backlog that comes and goes."""
    chance = random.Random(seed)
    simulation, numbers = Simulation(1, 8), [1]
    for _ in range(2000):
        running = min(simulation.needs.number, sum(chance.random() < 0.5 for _ in range(5)))
        is_short = running == simulation.needs.number
        numbers += simulation.run(0.5, ready=chance.randrange(3) if is_short else 0, running=running, rate=1)
    changes = sum(before != after for before, after in itertools.pairwise(numbers))
    assert changes <= 2000 * 0.5 / 30 + 8  # at most one change in each resting time, plus the first growth
    assert 3 <= numbers[-1] <= 8


def test_the_number_stays_within_its_limits() -> None:
    assert Simulation(2, 4, number=1).needs.number == 2
    assert Simulation(2, 4, number=9).needs.number == 4
    simulation = Simulation(2, 4, down_after=1)
    assert set(simulation.run(20.0, ready=1000, running=4)) == {2, 4}
    assert simulation.run(20.0)[-1] == 2


def test_an_outage_begins_the_measurement_anew() -> None:
    simulation = Simulation(1, 8)
    for _ in range(10):
        simulation.run(1.0, ready=100, running=1)
        simulation.needs.forget(simulation.now)
    assert simulation.needs.number == 1


@pytest.mark.parametrize("text", ["1:8", " 2 : 2 ", "1:1024"])
def test_a_range_of_processes_is_read(text: str) -> None:
    least, most = map(int, text.split(":"))
    assert read_process_range(text) == (least, most)
    assert read_process_range(text).scales == (least < most)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        *((text, "MIN <= MAX <= 1024") for text in ("0:8", "8:1", "1:1025")),
        *((text, "must be a whole number, or MIN:MAX like 1:8") for text in NO_RANGES),
    ],
)  # fmt: skip
def test_a_malformed_range_is_refused(text: str, rule: str) -> None:
    app = multiq.App("sqlite:///none.db")
    with pytest.raises(multiq.OptionInvalid, match=rule):
        multiq.Worker(app, processes=text)
    with pytest.raises(multiq.SettingsInvalid, match=rule):
        Settings(worker=WorkerSettings(processes=text))


@pytest.mark.parametrize("name", ["scale_up_after", "scale_down_after"])
def test_a_time_of_scaling_has_a_least_value(name: str) -> None:
    with pytest.raises(multiq.OptionInvalid, match=f"{name} must be 0.1 seconds or more, got 0"):
        multiq.Worker(multiq.App("sqlite:///none.db"), processes="1:2", **{name: 0})  # type: ignore[arg-type]
    with pytest.raises(multiq.SettingsInvalid, match=f"worker.{name}: must be a number of seconds from 0.1"):
        Settings(worker=WorkerSettings(**{name: 0}))  # type: ignore[arg-type]


@pytest.mark.parametrize("change", ["it gets a job", "it is stuck"])
def test_jobs_that_wait_although_a_process_is_idle_need_no_more_processes(change: str) -> None:
    class Watched(MemoryBackend):
        calls = 0

        def stats(self, queue: str) -> QueueStats:
            self.calls += 1
            return super().stats(queue)

    # given a process that takes jobs, an idle one, and jobs that wait at a limit
    backend, state = Watched(), SharedState(4)
    backend.enqueue("q", [NewJob(b"{}", new_id()) for _ in range(10)])
    busy, idle = state.children[:2]
    busy.pid, busy.table, busy.taken = 1, 0, 1
    idle.pid, idle.table, idle.waits_since, idle.beat = 2, 1, time.monotonic() - 10, time.monotonic()
    state.worker.wanted = 2
    scaling = Scaling(backend, ["q"], state, ProcessRange(1, 4), at_a_time=1, up_after=0.1, down_after=60)
    scaling.start()
    try:
        for _ in range(20):
            busy.taken += 1
            time.sleep(0.01)
        assert (state.worker.wanted, backend.calls) == (2, 0)

        # when the idle process gets a job, or was stopped a minute ago
        if change == "it gets a job":
            idle.waits_since = 0
        else:
            idle.beat -= 60

        # then more processes are needed
        def is_grown() -> bool:
            busy.taken += 1e-6
            return state.worker.wanted == 4

        until(is_grown, "all processes are needed")
    finally:
        scaling.stop()
