"""The report's data on the machine, and on how busy it was during a run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import psutil
import pytest

from multiq.bench import environment
from multiq.bench.environment import Meter, Reading, describe, file_system_of, is_volatile

if TYPE_CHECKING:
    from pathlib import Path


class Machine:
    """A simulated machine: how long work takes on it, its stolen time, and its load."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.004
        self.load = 0.0
        self.stolen = 0.0
        self.passed = 1000.0
        monkeypatch.setattr(environment, "_timed", lambda: self.seconds)
        monkeypatch.setattr(psutil, "getloadavg", lambda: (self.load, 0.0, 0.0))
        monkeypatch.setattr(psutil, "cpu_times", self._times)

    def run(self, meter: Meter, *slowness: float) -> list[float]:
        """Run repeats, each of them slower than the fastest one by this factor."""
        calms = []
        for times in slowness:
            before = meter.read()
            self.seconds = 0.004 * times
            calms.append(meter.calm([before, meter.read()]))
            self.seconds = 0.004
            self.passed += 10
        return calms

    def _times(self) -> Times:
        return Times(self.passed - self.stolen, self.stolen)


class Times(NamedTuple):
    """Part of the result of ``psutil.cpu_times``."""

    others: float
    steal: float


class Partition(NamedTuple):
    mountpoint: str
    fstype: str


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_an_idle_machine_causes_no_warning(machine: Machine) -> None:
    meter = Meter()
    assert machine.run(meter, 1, 1.1, 1, 1.2) == pytest.approx([1, 1.1, 1, 1.2])
    assert meter.reference == pytest.approx(0.004)
    assert meter.verdict() is None


def test_a_run_without_repeats_is_calm(machine: Machine) -> None:
    assert Meter().verdict() is None


def test_one_slow_moment_is_ignored_and_many_are_reported(machine: Machine) -> None:
    meter = Meter()
    machine.run(meter, 1, 1, 3, 1, 1)
    assert meter.verdict() is None
    machine.run(meter, 1.6)
    assert meter.verdict() == (
        "around 2 of 6 repeats a fixed piece of work took more than 1.25 times as long as at its fastest, up to 3.0 "
        "times: something else used this machine or its host, or its cores are not alike"
    )


def test_a_machine_that_gets_faster_resets_the_measure(machine: Machine) -> None:
    machine.seconds = 0.008
    meter = Meter()
    machine.seconds = 0.004
    assert meter.calm([meter.read()]) == 1.0
    assert meter.reference == 0.004


def test_stolen_time_is_reported(machine: Machine) -> None:
    meter = Meter()
    machine.run(meter, 1, 1)
    machine.stolen, machine.passed = 5.0, machine.passed + 80
    machine.run(meter, 1)
    assert meter.verdict() == "the machine's host gave 5% of its CPU time to others"


def test_a_busy_machine_is_reported(machine: Machine) -> None:
    machine.load = 64.0 * 16
    meter = Meter()
    machine.load = 0
    assert str(meter.verdict()).startswith("the machine was at work when the run began (load 1024.0)")


def test_a_reading_is_of_real_work() -> None:
    reading = Meter().read()
    assert isinstance(reading, Reading)
    assert 0 < reading.seconds < math.inf
    assert reading.passed > 0


def test_the_environment_names_what_figures_depend_on(tmp_path: Path) -> None:
    found = describe(tmp_path)
    assert {"CPU", "cores", "memory", "kernel", "disk", "Python", "SQLite", "msgspec", "load"} <= found.keys()
    assert all(found.values())


def test_a_folder_in_memory_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = [("/", "ext4"), (str(tmp_path / "mem"), "tmpfs"), (str(tmp_path / "mem" / "disk"), "xfs")]
    made = [Partition(point, kind) for point, kind in mounts]
    monkeypatch.setattr(psutil, "disk_partitions", lambda *, all: made)  # noqa: A006 - as it is called
    assert file_system_of(tmp_path) == "ext4"
    assert is_volatile(tmp_path / "mem" / "deeper")
    assert not is_volatile(tmp_path / "mem" / "disk")
    assert not is_volatile(tmp_path / "memory")
