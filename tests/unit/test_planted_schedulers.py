"""Schedulers with a planted bug each: random runs of several schedulers find every bug, and no fault in the scheduler
without a bug."""

from __future__ import annotations

import datetime as dt
import random
from typing import TYPE_CHECKING, Any

import pytest

import multiq
from multiq.backend import Ack, Enqueue, Put
from multiq.backend.memory import MemoryBackend
from multiq.driverkit.clock import SECOND, ManualClock
from multiq.envelope import decode_envelope
from multiq.errors import BackendUnavailable
from multiq.ids import new_id
from multiq.schedules import Scheduler, record
from multiq.schedules import scheduler as module

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from multiq.backend import Step, Version

_LENGTH = 400  # seconds of a run


class Stage(MemoryBackend):
    """A backend on which schedulers interleave: during a call of one of them, another one may look.

    A call may fail before or after it has been carried out, and its process may be dead then.
    """

    def __init__(self, clock: ManualClock, chance: random.Random) -> None:
        super().__init__(clock=clock)
        self.chance = chance
        self.others: list[Callable[[], object]] = []
        self.depth = 0

    def carry_out(self, steps: Sequence[Step], *, when: Sequence[Version] = ()) -> bool:
        if self.depth == 0 and self.others:
            self.depth += 1
            try:
                while self.chance.random() < 0.3:
                    self.others[self.chance.randrange(1, 3)]()
                if self.chance.random() < 0.1:
                    raise BackendUnavailable("the request was lost")
                is_done = super().carry_out(steps, when=when)
                if self.chance.random() < 0.1:
                    raise BackendUnavailable("the reply was lost")
                return is_done
            finally:
                self.depth -= 1
        return super().carry_out(steps, when=when)


def history(  # noqa: C901 - one story
    seed: int, monkeypatch: pytest.MonkeyPatch, scheduler_class: type[Scheduler] = Scheduler
) -> list[str]:
    """Run schedulers for some minutes. Returns the faults of the jobs that they have made."""
    clock, chance = ManualClock(), random.Random(seed)
    clock.advance(100 - clock() / SECOND % 100)
    began = clock() // SECOND
    monkeypatch.setattr("multiq.schedules.scheduler.time.monotonic", lambda: clock() / SECOND)
    # the local clock, which is wrong
    monkeypatch.setattr("multiq.schedules.scheduler.time.time", lambda: clock() / SECOND + 90)
    backend = Stage(clock, chance)
    app = multiq.App(backend=backend)

    @app.task(ttr=10_000)
    def work() -> None: ...

    names = {"a": 7, "b": 15}
    for name, every in names.items():
        app.schedules.add(name, work.s(), every=every, misfire="all")
    schedulers = [scheduler_class(app) for _ in range(3)]

    def looking(at: int) -> None:
        try:
            schedulers[at].look()
        except BackendUnavailable:
            if chance.random() < 0.3:  # the process is replaced
                schedulers[at] = scheduler_class(app)

    backend.others = [lambda at=at: looking(at) for at in range(3)]  # type: ignore[misc]
    consumer = backend.consumer(["default"])
    seen: dict[tuple[str, int], int] = {}
    faults = []
    for second in range(_LENGTH):
        if chance.random() < 0.2:
            looking(0)  # the other schedulers look during its calls
        clock.advance(1)
        for lease in consumer.reserve(1000, 0):
            headers = decode_envelope(lease.body).headers
            moment = dt.datetime.fromisoformat(headers["multiq-occurrence"])
            due = int(moment.timestamp()) - began
            if due > second + 1:
                faults.append(f"{headers['multiq-schedule']} at {due} was early, at {second}")
            key = headers["multiq-schedule"], due
            seen[key] = seen.get(key, 0) + 1
            consumer.settle([Ack(lease)])
    faults += [f"{key} ran {count} times" for key, count in seen.items() if count > 1]
    for name, every in names.items():
        made = sorted(due for key, due in seen if key == name)
        expected = [t for t in range(1, _LENGTH - 60) if (began + t) % every == 0]
        faults += [f"{name} at {due} is missing" for due in expected if due not in made]
    return faults


class _NoCondition(Scheduler):
    """Does not compare the version of the note."""

    def _carry_out(self, home: str, group: Any, clock: Any) -> Any:
        for entry, _ in group:
            found = self._backend.note(home, entry.key)
            entry.version = found.version if found else ""
        return super()._carry_out(home, group, clock)


class _NewIds(_NoCondition):
    """It has no id for each occurrence, either."""


class _TwoSteps(Scheduler):
    """Stores the note first, and enqueues the jobs after it."""

    def _carry_out(self, home: str, group: Any, clock: Any) -> Any:
        backend = self._backend

        class InTwo:
            def __getattr__(self, name: str) -> Any:
                return getattr(backend, name)

            def carry_out(self, steps: Sequence[Step], *, when: Sequence[Version] = ()) -> bool:
                if not backend.carry_out([step for step in steps if isinstance(step, Put)], when=when):
                    return False
                return backend.carry_out([step for step in steps if isinstance(step, Enqueue)])

        self._backend = InTwo()  # type: ignore[assignment]
        try:
            return super()._carry_out(home, group, clock)
        finally:
            self._backend = backend


class _JobsFirst(Scheduler):
    """Enqueues the jobs, and stores the note after it, with new ids."""

    def _carry_out(self, home: str, group: Any, clock: Any) -> Any:
        backend = self._backend

        class InTwo:
            def __getattr__(self, name: str) -> Any:
                return getattr(backend, name)

            def carry_out(self, steps: Sequence[Step], *, when: Sequence[Version] = ()) -> bool:
                backend.carry_out([step for step in steps if isinstance(step, Enqueue)])
                return backend.carry_out([step for step in steps if isinstance(step, Put)], when=when)

        self._backend = InTwo()  # type: ignore[assignment]
        try:
            return super()._carry_out(home, group, clock)
        finally:
            self._backend = backend


class _LocalClock(Scheduler):
    """Counts delays from its own clock."""

    def _make(self, home: str, entries: Any) -> None:
        backend = self._backend

        class Wrong:
            def __getattr__(self, name: str) -> Any:
                return getattr(backend, name)

            def now(self, _home: str) -> float:
                return module.time.time()  # type: ignore[attr-defined, no-any-return]

        self._backend = Wrong()  # type: ignore[assignment]
        try:
            super()._make(home, entries)
        finally:
            self._backend = backend


class _ForgetsAfterErrors(Scheduler):
    """Does not plan again what an error has interrupted."""

    def look(self) -> float:
        before = {place: entry.wake for place, entry in self._entries.items()}
        try:
            return super().look()
        except BackendUnavailable:
            self._queue = [item for item in self._queue if item[0] != 0]
            assert before is not None
            raise


class _SkipsWhatIsLate(Scheduler):
    """Begins with the present time, and not with the last occurrence that was made."""

    def _plan(self, entry: Any, clock: Any) -> Any:
        import msgspec

        now = int(clock.now() * 1000)
        entry.record = msgspec.structs.replace(entry.record, through=max(entry.record.through, now))
        return super()._plan(entry, clock)


PLANTED: dict[str, tuple[type[Scheduler], str]] = {
    "no condition, and new ids": (_NewIds, "times"),
    "note first": (_TwoSteps, "missing"),
    "jobs first, with new ids": (_JobsFirst, "times"),
    "local clock": (_LocalClock, "early"),
    "forgets after errors": (_ForgetsAfterErrors, "missing"),
    "skips what is late": (_SkipsWhatIsLate, "missing"),
}


@pytest.mark.parametrize("seed", range(5))
def test_honest_schedulers_make_each_occurrence_once_and_in_time(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert history(seed, monkeypatch) == []


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler_class, fault = PLANTED[name]
    if "new ids" in name:
        monkeypatch.setattr(module, "occurrence_id", lambda _name, _occurrence: new_id())
    for seed in range(20):
        if any(fault in text for text in history(seed, monkeypatch, scheduler_class)):
            return
    pytest.fail("no run has found it")


def test_new_ids_alone_are_no_bug_as_the_condition_prevents_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "occurrence_id", lambda _name, _occurrence: new_id())
    assert history(1, monkeypatch) == []
    assert record.occurrence_id("a", 1) == record.occurrence_id("a", 1)
