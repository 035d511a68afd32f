"""Schedulers on the memory backend, with a clock that is moved by hand."""

from __future__ import annotations

import contextlib
import datetime as dt
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import pytest

import multiq
from multiq.backend import Ack, Bury, Drop, Enqueue, Gate, Put, Release, State, UniqueKey
from multiq.backend.memory import MemoryBackend
from multiq.driverkit.clock import ManualClock
from multiq.envelope import decode_envelope
from multiq.errors import (
    BackendUnavailable,
    OptionInvalid,
    PayloadTooLarge,
    ScheduleExists,
    ScheduleInvalid,
    ScheduleNotFound,
    Unsupported,
)
from multiq.ids import new_id
from multiq.schedules import Scheduler
from multiq.schedules.defining import check_timing, define
from multiq.schedules.managing import others_zones
from multiq.schedules.record import (
    CHANGES,
    HOME,
    MOST_FORMERS,
    Definition,
    Record,
    decode,
    encode,
    key_of,
    occurrence_id,
)
from multiq.schedules.stored import store
from multiq.worker.processes.scheduling import Scheduling

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from multiq.backend import Lease, Note, NotePage, Step, Version

_SECOND = 1_000_000_000


class Counting(MemoryBackend):
    """A backend that counts its calls."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls: list[str] = []

    def carry_out(self, steps: Sequence[Step], *, when: Sequence[Version] = ()) -> bool:
        self.calls.append("carry_out")
        return super().carry_out(steps, when=when)

    def note(self, home: str, key: str) -> Note | None:
        self.calls.append("note")
        return super().note(home, key)

    def notes(self, home: str, prefix: str = "", *, limit: int = 100, after: str | None = None) -> NotePage:
        self.calls.append("notes")
        return super().notes(home, prefix, limit=limit, after=after)

    def now(self, home: str) -> float:
        self.calls.append("now")
        return super().now(home)


class Shop:
    """An app, the time, and a record of what has run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = ManualClock()
        self.clock.advance(100 - self.clock() / _SECOND % 100)  # to a round time
        self.began = self.clock() // 1_000_000
        self.backend = Counting(clock=self.clock)
        self.app = multiq.App(backend=self.backend)
        self.runs: list[tuple[float, float]] = []
        """For each job that was reserved: its occurrence, and when it was reserved, in seconds from the beginning."""
        self.leases: list[Lease] = []
        self.consumer = self.backend.consumer(["default"])
        # the time between two looks passes by this clock
        monkeypatch.setattr("multiq.schedules.scheduler.time.monotonic", lambda: self.clock() / _SECOND)

        @self.app.task(ttr=10_000)
        def work(*args: int) -> None: ...

        self.work = work

    @property
    def now(self) -> float:
        return (self.clock() // 1_000_000 - self.began) / 1000

    def take(self) -> list[float]:
        """Reserve the due jobs. Returns the occurrences."""
        leases = self.consumer.reserve(1000, 0)
        self.leases += leases
        found = [self.occurrence(lease) for lease in leases]
        self.runs += [(occurrence, self.now) for occurrence in found]
        return found

    def occurrence(self, lease: Lease) -> float:
        headers = decode_envelope(lease.body).headers
        moment = dt.datetime.fromisoformat(headers["multiq-occurrence"])
        return round(moment.timestamp() - self.began / 1000, 3)

    def finish(self) -> None:
        self.consumer.settle([Ack(lease) for lease in self.leases])
        self.leases = []

    def pass_time(self, seconds: float, *schedulers: Scheduler, step: float = 1.0, ack: bool = True) -> list[float]:
        """Let time pass. Each scheduler looks at the times that it chooses. Returns the occurrences that were due."""
        end, found = self.now + seconds, []
        looks = dict.fromkeys(schedulers, 0.0)
        while self.now < end - 1e-9:
            for scheduler, at in looks.items():
                if self.now >= at:
                    looks[scheduler] = self.now + scheduler.look()
            self.clock.advance(min(step, end - self.now) + 1e-5 * (self.clock() % 1_000_000 == 0))
            found += self.take()
            if ack:
                self.finish()
        return found


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Shop:
    return Shop(monkeypatch)


def stored(shop: Shop, name: str) -> Record:
    """The schedule as its note has it."""
    home = shop.app.schedules.get(name).queue
    note = shop.backend.note(home, key_of(name))
    assert note is not None
    return decode(note)


# --- each occurrence once --------------------------------------------------------------------------------


def test_occurrences_are_made_a_minute_ahead_and_are_due_at_their_times(shop: Shop) -> None:
    # Given a schedule of every ten seconds
    shop.app.schedule("*/10 * * * * *", shop.work.s(7), name="ten")
    # When a scheduler has looked, then the jobs of a minute are delayed
    Scheduler(shop.app).look()
    assert shop.app.queue().stats().delayed == 6
    # And each job is due at its time, and not before
    shop.pass_time(60, step=0.5)
    assert shop.runs == [(float(at), float(at)) for at in range(10, 70, 10)]


def test_many_schedulers_make_each_occurrence_once(shop: Shop) -> None:
    shop.app.schedule(None, shop.work.s(), every=7, name="seven")
    schedulers = [Scheduler(shop.app) for _ in range(5)]
    found = shop.pass_time(700, *schedulers)
    assert found == [at for at in range(1, 701) if (at + shop.began // 1000) % 7 == 0]


def test_the_id_of_an_occurrence_is_a_uuid_of_version_8_from_its_name_and_time() -> None:
    assert occurrence_id("report", 1_790_000_000_000) == occurrence_id("report", 1_790_000_000_000)
    assert occurrence_id("report", 1_790_000_000_000) != occurrence_id("report", 1_790_000_001_000)
    assert occurrence_id("report", 1_790_000_000_000) != occurrence_id("reports", 1_790_000_000_000)
    first, _, third, fourth, _ = occurrence_id("report", 1_790_000_000_000).split("-")
    assert len(first) == 8
    assert third[0] == "8"
    assert fourth[0] in "89ab"


def test_a_look_that_is_repeated_after_an_error_makes_no_second_job(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a backend whose reply is lost after it has carried out the steps
    shop.app.schedule("*/10 * * * * *", shop.work.s(), name="ten")
    scheduler = Scheduler(shop.app)
    carry_out = MemoryBackend.carry_out
    lost: list[bool] = []

    def lose_reply(self: MemoryBackend, steps: Sequence[Step], *, when: Sequence[Version] = ()) -> bool:
        is_done = carry_out(self, steps, when=when)
        if any(type(step).__name__ == "Enqueue" and step.queue == "default" for step in steps) and not lost:  # type: ignore[union-attr]
            lost.append(True)
            raise BackendUnavailable("the reply was lost")
        return is_done

    monkeypatch.setattr(MemoryBackend, "carry_out", lose_reply)
    with pytest.raises(BackendUnavailable):
        scheduler.look()
    # When jobs of that look have run, and the scheduler looks again
    found = shop.pass_time(15)
    found += shop.pass_time(100, scheduler)
    # Then each occurrence has run once
    assert lost
    assert found == [float(at) for at in range(10, 120, 10)]


def test_a_scheduler_that_stood_still_for_long_makes_nothing_again(shop: Shop) -> None:
    shop.app.schedule("*/10 * * * * *", shop.work.s(), name="ten")
    stopped, other = Scheduler(shop.app), Scheduler(shop.app)
    stopped.look()
    found = shop.pass_time(300, other)
    found += shop.pass_time(50, stopped)
    assert found == [float(at) for at in range(10, 360, 10)]


def test_all_schedulers_compute_the_same_jitter(shop: Shop) -> None:
    shop.app.schedule("*/10 * * * * *", shop.work.s(), name="ten", jitter=5)
    (definition,) = shop.app.code_schedules.values()
    jitters = [definition.due(at) - at for at in range(0, 100_000, 1000)]
    assert [definition.due(at) - at for at in range(0, 100_000, 1000)] == jitters
    assert 0 <= min(jitters) < 500
    assert 4500 < max(jitters) < 5000
    # And no occurrence is due before its time, or later than the jitter
    shop.pass_time(200, Scheduler(shop.app), Scheduler(shop.app), step=0.1)
    assert [occurrence for occurrence, _ in sorted(shop.runs)] == [
        float(at) for at in range(10, len(shop.runs) * 10 + 1, 10)
    ]
    assert all(occurrence <= when <= occurrence + 5.1 for occurrence, when in shop.runs)


def definition_of(shop: Shop, queue: str, every: int = 3600) -> Definition:
    call = shop.work.options(queue=queue).s()
    return define("x", call, check_timing(every=every), origin="code")


def move(shop: Shop, home: str, queue: str, every: int = 3600) -> None:
    """Move schedule x as another process does that has other code."""
    note = shop.backend.note(home, key_of("x"))
    assert note is not None
    assert store(shop.backend, definition_of(shop, queue, every), (decode(note), note.version))


def test_a_schedule_that_is_moved_while_it_is_looked_for_is_found(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given schedule x in the second of two queues
    shop.app.schedules.add("other", shop.work.options(queue="a").s(), every=3600)
    assert store(shop.backend, definition_of(shop, "b"), None)
    # When another process moves it to the first queue, which was read already
    read, moves = shop.backend.note, [("b", "a"), ("b", "a")]

    def note(home: str, key: str) -> Note | None:
        found = read(home, key)
        if (home, key) == ("a", key_of("x")) and found is None and moves:
            move(shop, *moves.pop())
        return found

    monkeypatch.setattr(shop.backend, "note", note)
    # Then it is found there, and its name is not free
    assert shop.app.schedules.get("x").queue == "a"
    move(shop, "a", "b")
    with pytest.raises(ScheduleExists):
        shop.app.schedules.add("x", shop.work.options(queue="c").s(), every=3600)
    assert [(info.name, info.queue) for info in shop.app.schedules.list()] == [("other", "a"), ("x", "a")]


def test_a_schedule_in_code_that_is_moved_while_it_is_loaded_is_not_stored_twice(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given schedule x in the second of two queues, and code that has it in a third one
    shop.app.schedules.add("other", shop.work.options(queue="a").s(), every=3600)
    assert store(shop.backend, definition_of(shop, "b"), None)
    shop.app.schedule(None, shop.work.options(queue="c").s(), every=3600, name="x")
    # When other processes change it before it is stored, and move it while it is loaded again
    read, carry_out, changes = shop.backend.notes, shop.backend.carry_out, ["changed", "moved"]

    def store_late(steps: Sequence[Step], *, when: Sequence[Version] = ()) -> bool:
        if changes == ["changed", "moved"] and any(isinstance(step, Put) and step.home == "c" for step in steps):
            changes.remove("changed")
            move(shop, "b", "b", every=60)
        return carry_out(steps, when=when)

    def notes(home: str, prefix: str = "", *, limit: int = 100, after: str | None = None) -> NotePage:
        found = read(home, prefix, limit=limit, after=after)
        if home == "a" and changes == ["moved"]:
            changes.clear()
            move(shop, "b", "a", every=60)
        return found

    monkeypatch.setattr(shop.backend, "carry_out", store_late)
    monkeypatch.setattr(shop.backend, "notes", notes)
    Scheduler(shop.app).look()
    # Then the code's schedule is the only one
    assert not changes
    assert [(info.name, info.queue) for info in shop.app.schedules.list()] == [("other", "a"), ("x", "c")]


# --- misfires --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missed", [0, 1, 50])
@pytest.mark.parametrize("misfire", ["skip", "once", "all", "all(3)"])
def test_missed_occurrences_run_by_the_policy(shop: Shop, misfire: str, missed: int) -> None:
    # Given a schedule of every minute, whose jobs are made until 60 s
    shop.app.schedule("* * * * *", shop.work.s(), name="minutely", misfire=misfire)
    offset = shop.began // 1000 % 60
    scheduler = Scheduler(shop.app)
    scheduler.look()
    made = shop.app.schedules.get("minutely").last
    assert made is not None
    last = round(made.timestamp() - shop.began / 1000)
    # When no scheduler works until some more occurrences have passed, and 30 s more
    shop.pass_time(last + missed * 60 + 30)
    first = [occurrence for occurrence, _ in shop.runs]
    assert first == [float(last)]
    shop.runs.clear()
    scheduler.look()
    # Then as many of the missed occurrences run at once as the policy allows, the latest ones
    passed = [float(last + 60 * number) for number in range(1, missed + 1)]
    expected = {"skip": [], "once": passed[-1:], "all": passed, "all(3)": passed[-3:]}[misfire]
    assert shop.take() == expected
    # And later occurrences run in time
    shop.finish()
    assert shop.pass_time(60, scheduler) == [float(last + 60 * (missed + 1))]
    assert offset == round(-last % 60)


def test_an_occurrence_that_is_later_than_its_grace_does_not_run(shop: Shop) -> None:
    for grace in (100, 300):
        shop.app.schedule("*/10 * * * *", shop.work.s(grace), name=f"grace{grace}", grace=grace)
    scheduler = Scheduler(shop.app)
    scheduler.look()
    # Given ten minutes without schedulers, and an occurrence that is 200 s old
    now = shop.clock() // _SECOND
    shop.clock.advance(600 - now % 600 + 1200 + 200)
    scheduler.look()
    assert [decode_envelope(lease.body).args for lease in shop.consumer.reserve(9, 0)] == [[300]]


def test_a_new_schedule_has_no_missed_occurrences(shop: Shop) -> None:
    shop.app.schedule("* * * * * *", shop.work.s(), name="secondly", misfire="all")
    Scheduler(shop.app).look()
    assert shop.take() == []


# --- overlap ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("conflict", ["replace", "follow"])
@pytest.mark.parametrize(("every", "jitter"), [(1, 0), (2, 0), (3, 0), (3, 2)])
def test_the_next_occurrence_does_not_put_off_a_unique_job_for_ever(
    shop: Shop, conflict: Literal["replace", "follow"], every: float, jitter: float
) -> None:
    @shop.app.task(unique=multiq.Unique(by=[], on_conflict=conflict))
    def refresh() -> None: ...

    shop.app.schedules.add("refresh", refresh.s(), every=every, jitter=jitter)
    due = shop.pass_time(60, Scheduler(shop.app), step=0.1)
    # two runs are at most as far apart as the time from a job's enqueue to its due time, and one interval
    assert len(due) >= 60 / (2 + jitter + every) - 1
    assert all(at >= occurrence - 2 - jitter for occurrence, at in shop.runs)


def test_an_occurrence_that_replaces_an_older_job_does_not_run_before_its_time(shop: Shop) -> None:
    @shop.app.task(unique=multiq.Unique(by=[], on_conflict="replace"))
    def refresh() -> None: ...

    refresh.options(delay=1000).enqueue()
    shop.clock.advance(5)
    shop.app.schedules.add("refresh", refresh.s(), every=10)
    assert shop.pass_time(35, Scheduler(shop.app), step=0.1) == [10, 20, 30, 40]
    assert all(at >= occurrence for occurrence, at in shop.runs)


def test_an_occurrence_is_left_out_while_the_job_before_is_there(shop: Shop) -> None:
    # Given a schedule of every 30 s, whose first job takes 70 s
    shop.app.schedule("*/30 * * * * *", shop.work.s(), name="half", overlap="skip")
    scheduler = Scheduler(shop.app)
    first = shop.pass_time(50, scheduler, ack=False)
    assert len(first) == 1
    assert shop.pass_time(70, scheduler, ack=False) == []
    # When that job is done, then the next occurrences run again
    shop.finish()
    assert len(shop.pass_time(60, scheduler)) == 2
    assert shop.app.schedules.get("half").left_out >= 1


def test_the_latest_occurrence_follows_when_the_job_before_is_done(shop: Shop) -> None:
    # Given a job that runs over three further occurrences
    shop.app.schedule("*/30 * * * * *", shop.work.s(), name="half", overlap="follow")
    scheduler = Scheduler(shop.app)
    (first,) = shop.pass_time(50, scheduler, ack=False)
    shop.pass_time(first + 95 - shop.now, scheduler, ack=False)
    # When that job is done, then the last of the three runs within a few seconds, and the others do not run
    shop.finish()
    assert shop.pass_time(5, scheduler) == [first + 90]
    assert shop.pass_time(60, scheduler) == [first + 120, first + 150]


@pytest.mark.parametrize("change", ["resume", "change"])
def test_no_occurrence_waits_any_longer_after_a_pause_or_a_change_of_the_times(shop: Shop, change: str) -> None:
    # Given an occurrence that waits for the job before
    shop.app.schedules.add("x", shop.work.s(), every=30, overlap="follow", misfire="skip")
    scheduler = Scheduler(shop.app)
    shop.pass_time(100, scheduler, ack=False)
    assert stored(shop, "x").is_waiting
    # When the schedule is paused and resumed, or gets other times
    if change == "resume":
        period = 30
        shop.app.schedules.pause("x")
        shop.app.schedules.resume("x")
    else:
        period = 31
        shop.app.schedules.change("x", shop.work.s(), every=period, overlap="follow", misfire="skip")
    shop.finish()
    # Then an occurrence that was missed later is not made as if it had waited
    shop.clock.advance(30 * period - (shop.clock() / _SECOND + 5) % period)
    scheduler.look()
    assert shop.take() == []


@pytest.mark.parametrize("overlap", ["skip", "follow"])
def test_two_occurrences_are_never_there_at_once_with_many_schedulers(shop: Shop, overlap: str) -> None:
    shop.app.schedule("*/5 * * * * *", shop.work.s(), name="five", overlap=overlap)
    schedulers = [Scheduler(shop.app) for _ in range(4)]
    chance = random.Random(5)
    for _ in range(100):
        shop.pass_time(chance.choice([1, 3, 8]), *schedulers, ack=False)
        stats = shop.app.queue().stats()
        assert (stats.ready or 0) + (stats.delayed or 0) + (stats.reserved or 0) <= 1
        if chance.random() < 0.4:
            shop.finish()
    assert len({occurrence for occurrence, _ in shop.runs}) == len(shop.runs) > 20


def test_a_buried_job_does_not_stop_a_schedule_without_overlap(shop: Shop) -> None:
    shop.app.schedule("*/30 * * * * *", shop.work.s(), name="half", overlap="skip")
    scheduler = Scheduler(shop.app)
    shop.pass_time(50, scheduler, ack=False)
    shop.consumer.settle([Bury(lease) for lease in shop.leases])
    shop.leases.clear()
    assert len(shop.pass_time(60, scheduler)) == 2


# --- at run time -----------------------------------------------------------------------------------------


def test_a_schedule_that_is_stored_at_run_time_runs(shop: Shop) -> None:
    scheduler = Scheduler(shop.app)
    scheduler.look()
    info = shop.app.schedules.add("ten", shop.work.s(1), "*/10 * * * * *", zone="Europe/Berlin")
    assert (info.origin, info.is_paused, info.last, len(info.next)) == ("stored", False, None, 5)
    assert info.next[0].local.utcoffset() in {dt.timedelta(hours=1), dt.timedelta(hours=2)}
    assert len(shop.pass_time(60, scheduler)) >= 5


def test_a_name_is_taken_once(shop: Shop) -> None:
    shop.app.schedules.add("ten", shop.work.s(1), "*/10 * * * * *")
    with pytest.raises(ScheduleExists, match="there is a schedule 'ten' already: change it"):
        shop.app.schedules.add("ten", shop.work.options(queue="other").s(1), every=5)
    shop.app.schedule("* * * * *", shop.work.s(), name="a")
    with pytest.raises(ScheduleExists, match="give one of the two another name="):
        shop.app.schedule("* * * * *", shop.work.s(1), name="a")


class Meeting(MemoryBackend):
    """A backend with two callers: each of them waits for the other one after it has listed what is stored."""

    def __init__(self) -> None:
        super().__init__()
        self.barrier = threading.Barrier(2)

    def notes(self, home: str, prefix: str = "", *, limit: int = 100, after: str | None = None) -> NotePage:
        page = super().notes(home, prefix, limit=limit, after=after)
        with contextlib.suppress(threading.BrokenBarrierError):
            self.barrier.wait(0.3)
        self.barrier.reset()
        return page


def test_two_processes_that_add_a_name_at_once_in_two_queues_add_it_once() -> None:
    backend = Meeting()
    refused: list[Exception] = []

    def add(queue: str) -> None:
        app = multiq.App(backend=backend)
        try:
            app.schedules.add("ann", app.task(queue=queue, name="work")(new_id_task).s(), every=60)
        except ScheduleExists as exc:
            refused.append(exc)

    together(add, "a", "b")
    assert len(refused) == 1
    assert [info.name for info in multiq.App(backend=backend).schedules.list()] == ["ann"]


def test_two_programs_with_a_schedule_in_two_queues_store_it_once() -> None:
    # Given an old and a new program that start at the same time, or that both notice that the server lost its data
    backend = Meeting()

    def look(queue: str) -> None:
        app = multiq.App(backend=backend)
        app.schedule(None, app.task(queue=queue, name="work")(new_id_task).s(), every=60, name="ann")
        Scheduler(app).look()

    together(look, "a", "b")
    assert [info.name for info in multiq.App(backend=backend).schedules.list()] == ["ann"]


@pytest.mark.parametrize("is_in_code", [False, True])
def test_a_name_is_taken_once_although_a_process_stood_still_while_it_added_it(
    shop: Shop, is_in_code: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a process that stands still before it stores a schedule, longer than it may keep others from adding any
    slow, other = multiq.App(backend=shop.backend), multiq.App(backend=shop.backend)
    tasks = {app: app.task(queue=queue, name="work")(new_id_task) for app, queue in ((slow, "slow"), (other, "other"))}
    turns = iter([True])
    carry_out = MemoryBackend.carry_out

    def late(backend: MemoryBackend, steps: Sequence[Step], *, when: Sequence[Version] = ()) -> bool:
        if any(version.key == key_of("ann") for version in when) and next(turns, False):
            shop.clock.advance(11)
            other.schedules.add("ann", tasks[other].s(), every=60)
        return carry_out(backend, steps, when=when)

    monkeypatch.setattr(MemoryBackend, "carry_out", late)
    # When both add one name in different queues
    if is_in_code:
        slow.schedule(None, tasks[slow].s(), every=60, name="ann")
        Scheduler(slow).look()
    else:
        with pytest.raises(ScheduleExists):
            slow.schedules.add("ann", tasks[slow].s(), every=60)
    # Then there is one schedule with this name
    assert [info.queue for info in slow.schedules.list()] == ["slow" if is_in_code else "other"]


def together(function: Callable[[str], None], *arguments: str) -> None:
    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(function, argument) for argument in arguments]:
            done.result()


def test_schedules_are_added_although_a_process_died_while_it_added_some(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.backend.carry_out([Put(HOME, "adding", b"of a dead process", ttl=10)])
    monkeypatch.setattr("multiq.schedules.adding.time.sleep", lambda _: shop.clock.advance(1))
    shop.app.schedules.add("ten", shop.work.s(), every=10)
    assert shop.backend.note(HOME, "adding") is None
    shop.backend.carry_out([Put(HOME, "adding", b"of a process that holds it for ever")])
    with pytest.raises(OptionInvalid, match="got no turn"):
        shop.app.schedules.add("more", shop.work.s(), every=10)


def test_a_pause_deletes_what_is_not_due_and_leaves_out_its_time(shop: Shop) -> None:
    shop.app.schedules.add("ten", shop.work.s(), "*/10 * * * * *", misfire="all")
    scheduler = Scheduler(shop.app)
    found = shop.pass_time(25, scheduler)
    assert found == [10.0, 20.0]
    info = shop.app.schedules.pause("ten")
    assert info.is_paused
    assert info.next == []
    assert shop.pass_time(200, scheduler) == []
    # When the schedule is resumed, then future occurrences run, and no occurrence of the pause
    shop.app.schedules.resume("ten")
    assert shop.pass_time(35, scheduler) == [230.0, 240.0, 250.0, 260.0]


def test_a_pause_keeps_a_job_that_has_run_and_waits_for_its_next_attempt(shop: Shop) -> None:
    # Given a schedule whose jobs are delayed by up to ten minutes
    shop.app.schedules.add("x", shop.work.s(), every=60, jitter=600)
    scheduler = Scheduler(shop.app)
    scheduler.look()
    # When the first job has failed and waits for its next attempt, and the schedule is paused
    while not shop.leases:
        shop.pass_time(10, scheduler, step=10, ack=False)
    failed, *others = shop.leases
    shop.consumer.settle([Release(failed, delay=3600), *(Ack(lease) for lease in others)])
    shop.app.schedules.pause("x")
    # Then only this job is left
    assert [record.id for record in shop.backend.jobs("default", State.DELAYED).jobs] == [failed.id]


def test_a_removed_schedule_and_its_coming_jobs_are_gone(shop: Shop) -> None:
    shop.app.schedules.add("ten", shop.work.s(), "*/10 * * * * *")
    scheduler = Scheduler(shop.app)
    shop.pass_time(15, scheduler)
    shop.app.schedules.remove("ten")
    assert shop.pass_time(200, scheduler) == []
    with pytest.raises(ScheduleNotFound, match="there is no schedule 'ten'"):
        shop.app.schedules.get("ten")


def test_a_removal_keeps_the_jobs_of_a_schedule_that_is_added_again_meanwhile(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a process that adds a schedule again as soon as it is no longer stored, and makes its jobs
    shop.app.schedules.add("ten", shop.work.s(), every=10)
    Scheduler(shop.app).look()
    turns = iter([True])

    def add_again(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if shop.backend.note("default", key_of("ten")) is None and next(turns, False):
                shop.app.schedules.add("ten", shop.work.s(), every=10)
                Scheduler(shop.app).look()
            return function(*args, **options)

        return call

    monkeypatch.setattr(shop.backend, "delete", add_again(shop.backend.delete))
    monkeypatch.setattr(shop.backend, "peek", add_again(shop.backend.peek))
    # When the schedule is removed
    shop.app.schedules.remove("ten")
    # Then each job that the schedule has made since is there
    added = [info for info in shop.app.schedules.list() if info.last is not None]
    assert shop.app.queue().stats().delayed == 6 * len(added)


def test_a_changed_schedule_keeps_what_was_made_and_has_no_missed_occurrences(shop: Shop) -> None:
    shop.app.schedules.add("x", shop.work.s(1), "0 0 * * *", misfire="all")
    scheduler = Scheduler(shop.app)
    shop.pass_time(100, scheduler)
    shop.app.schedules.change("x", shop.work.options(queue="default").s(2), every=10, misfire="all")
    assert shop.pass_time(30, scheduler) == [110.0, 120.0, 130.0]


def test_a_schedule_that_moves_to_another_queue_keeps_its_state(shop: Shop) -> None:
    shop.app.schedules.add("ten", shop.work.s(), "*/10 * * * * *")
    scheduler = Scheduler(shop.app)
    shop.pass_time(15, scheduler)
    last = shop.app.schedules.get("ten").last
    shop.app.schedules.change("ten", shop.work.options(queue="other").s(), "*/10 * * * * *")
    (info,) = shop.app.schedules.list()
    assert (info.queue, info.last) == ("other", last)
    shop.pass_time(100, scheduler)
    assert shop.app.queue("other").stats().ready


def test_jobs_in_the_queue_before_count_and_are_deleted_after_a_schedule_has_moved(shop: Shop) -> None:
    # Given a schedule without overlap, whose job runs, and another one whose jobs are made
    shop.app.schedules.add("skip", shop.work.s(), "*/10 * * * * *", overlap="skip")
    scheduler = Scheduler(shop.app)
    assert shop.pass_time(12, scheduler, ack=False) == [10.0]
    shop.app.schedules.add("allow", shop.work.s(), "*/10 * * * * *")
    scheduler.look()
    # When both move to another queue
    moved = shop.work.options(queue="other").s()
    shop.app.schedules.change("skip", moved, "*/10 * * * * *", overlap="skip")
    shop.app.schedules.change("allow", moved, "*/10 * * * * *")
    shop.app.schedules.pause("allow")
    # Then the running job counts, and the coming jobs of the paused schedule are deleted
    assert shop.pass_time(40, scheduler, ack=False) == []
    assert shop.app.queue("other").stats().ready == 0


@pytest.mark.parametrize("end", ["pause", "remove"])
@pytest.mark.parametrize("change", ["times", "jitter", "two queues", "times and queue"])
def test_jobs_that_were_made_before_a_change_are_deleted_by_a_pause_and_a_removal(
    shop: Shop, change: str, end: str
) -> None:
    # Given a schedule whose jobs of the next minute are made, and which is changed then
    shop.app.schedules.add("ten", shop.work.s(), "*/10 * * * * *", jitter=0 if change != "jitter" else 300)
    Scheduler(shop.app).look()
    assert shop.app.queue("default").stats().delayed == 6
    times = "*/10 * * * * *" if "times" not in change else "5 * * * * *"
    if change == "two queues":
        shop.app.schedules.change("ten", shop.work.options(queue="other").s(), times)
    queue = "default" if "queue" not in change else "third"
    shop.app.schedules.change("ten", shop.work.options(queue=queue).s(), times)
    assert shop.app.queue("default").stats().delayed == 6
    # When it is paused or removed, then none of these jobs runs
    getattr(shop.app.schedules, end)("ten")
    assert shop.pass_time(400) == []


def test_a_record_forgets_its_former_times_when_their_jobs_are_due(shop: Shop) -> None:
    shop.app.schedules.add("ten", shop.work.s(), "*/10 * * * * *")
    scheduler = Scheduler(shop.app)
    for number in range(30):
        scheduler.look()
        shop.app.schedules.change("ten", shop.work.s(), f"{number} * * * * *")
        shop.app.schedules.change("ten", shop.work.s(number), f"{number} * * * * *")
    assert len(stored(shop, "ten").formers) == MOST_FORMERS
    shop.pass_time(200)
    shop.app.schedules.change("ten", shop.work.s(), "*/10 * * * * *")
    assert stored(shop, "ten").formers == ()


def test_a_running_job_counts_after_its_schedule_has_moved_twice(shop: Shop) -> None:
    shop.app.schedules.add("skip", shop.work.s(), "*/10 * * * * *", overlap="skip")
    scheduler = Scheduler(shop.app)
    assert shop.pass_time(12, scheduler, ack=False) == [10.0]
    for queue in ("other", "third"):
        shop.app.schedules.change("skip", shop.work.options(queue=queue).s(), "*/10 * * * * *", overlap="skip")
    shop.pass_time(40, scheduler, ack=False)
    assert shop.app.queue("third").stats().ready == 0
    shop.finish()
    shop.pass_time(20, scheduler, ack=False)
    assert shop.app.queue("third").stats().ready == 1


def test_what_was_missed_during_a_deployment_runs_although_the_call_has_changed(shop: Shop) -> None:
    # Given a program that is replaced while an occurrence is missed
    shop.app.schedule("*/10 * * * *", shop.work.s(1), name="x")
    Scheduler(shop.app).look()
    shop.clock.advance(650)
    shop.app.code_schedules.clear()
    # When the new program has other arguments, but the same times
    shop.app.schedule("*/10 * * * *", shop.work.s(2), name="x")
    Scheduler(shop.app).look()
    # Then the missed occurrence runs
    assert [decode_envelope(lease.body).args for lease in shop.consumer.reserve(9, 0)] == [[2]]


def test_the_expiry_of_an_occurrence_begins_at_its_due_time_also_if_it_was_missed(shop: Shop) -> None:
    @shop.app.task(expires=100)
    def brief() -> None: ...

    shop.app.schedule("*/10 * * * *", brief.s(), name="brief", misfire="all")
    Scheduler(shop.app).look()
    now = shop.clock() // _SECOND
    shop.clock.advance(600 - now % 600 + 600 + 30)
    Scheduler(shop.app).look()
    expiries = [decode_envelope(lease.body).expires for lease in shop.consumer.reserve(9, 0)]
    assert expiries == pytest.approx([0.0, 70.0], abs=0.01)
    assert None not in expiries
    assert 0 not in expiries


def test_run_now_enqueues_beside_the_schedule(shop: Shop) -> None:
    before = shop.app.schedules.add("daily", shop.work.s(3), at="07:00")
    job = shop.app.schedules.run("daily")
    assert job.state() is State.READY
    assert decode_envelope(shop.backend.peek("default", job.id).body).args == [3]
    assert shop.app.schedules.get("daily") == before


def test_a_schedule_that_vanished_from_code_is_listed_and_goes_on(shop: Shop) -> None:
    # Given a schedule in code, which a scheduler has stored
    shop.app.schedule("*/10 * * * * *", shop.work.s(), name="ten")
    Scheduler(shop.app).look()
    assert list(shop.app.schedules.vanished()) == []
    # When the next version of the code does not declare this schedule
    del shop.app.code_schedules["ten"]
    scheduler = Scheduler(shop.app)
    assert len(shop.pass_time(60, scheduler)) == 6
    # Then the schedule is listed as vanished, and stays until it is removed
    (info,) = shop.app.schedules.vanished()
    assert (info.name, info.is_vanished, info.origin) == ("ten", True, "code")
    shop.app.schedules.remove("ten")
    assert list(shop.app.schedules.list()) == []


def test_a_schedule_in_code_is_changed_in_the_code(shop: Shop) -> None:
    shop.app.schedule("*/10 * * * * *", shop.work.s(), name="ten")
    with pytest.raises(ScheduleNotFound, match="it is in the code, and is stored when a worker of the app starts"):
        shop.app.schedules.get("ten")
    Scheduler(shop.app).look()
    with pytest.raises(OptionInvalid, match="must be changed in the code that defines it"):
        shop.app.schedules.change("ten", shop.work.s(), every=5)
    # When the code changes, and a process with it starts
    shop.app.code_schedules.clear()
    shop.app.schedule(None, shop.work.s(), every=30, name="ten")
    Scheduler(shop.app).look()
    assert shop.app.schedules.get("ten").when == "every 30 s"


# --- definitions -----------------------------------------------------------------------------------------


def test_the_decorator_takes_a_task_or_a_function(shop: Shop) -> None:
    @shop.app.schedule(at=["07:00", "19:00"], zone="Europe/Berlin")
    @shop.app.task(queue="reports")
    def report() -> str:
        return "done"

    @shop.app.schedule("0 * * * *")
    def hourly() -> None: ...

    assert report() == "done"
    assert {name: definition.queue for name, definition in shop.app.code_schedules.items()} == {
        "report": "reports",
        "hourly": "default",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "must have one of a cron expression, every= and at=, got none"),
        ({"at": 7}, "must be a time of day"),
        ({"every": 5, "at": "07:00"}, "must have one of a cron expression, every= and at=, got every and at"),
        ({"every": 5, "misfire": "never"}, "misfire must be 'skip', 'once', 'all', or"),
        ({"every": 5, "misfire": "all(0)"}, "with n from 1 to 500"),
        ({"every": 5, "misfire": ["once"]}, "misfire must be 'skip', 'once', 'all', or"),
        ({"every": 5, "overlap": "no"}, "overlap must be one of allow, skip, follow"),
        ({"every": 5, "zone": "Berlin"}, "zone must be the name of a time zone"),
    ],
)
def test_a_wrong_option_is_refused(shop: Shop, options: Any, message: str) -> None:
    with pytest.raises(ScheduleInvalid, match=message.replace("(", r"\(").replace(")", r"\)")):
        shop.app.schedule(None, shop.work.s(), name="x", **options)


def test_a_task_without_a_call_is_refused(shop: Shop) -> None:
    call: Any = shop.work
    with pytest.raises(ScheduleInvalid, match=r"a schedule must have a call \(task.s\(...\)\), got Task"):
        shop.app.schedule("* * * * *", call, name="x")
    with pytest.raises(ScheduleInvalid, match="a schedule must have a call"):
        shop.app.schedules.add("x", call, "* * * * *")


def test_a_schedule_in_code_has_a_task_of_its_app(shop: Shop) -> None:
    # Given a task of another app, which the workers of this app do not have
    other = multiq.App("memory://")

    @other.task
    def mail() -> None: ...

    # When it is scheduled by this app, then the error says how it can be scheduled
    with pytest.raises(multiq.ArgumentsInvalid, match=r"must schedule its own tasks, got task 'mail' of App\("):
        shop.app.schedule("* * * * *", mail.s())
    assert shop.app.code_schedules == {}


def test_a_call_with_wrong_arguments_or_a_delay_is_refused(shop: Shop) -> None:
    @shop.app.task
    def add(a: int) -> int:
        return a

    with pytest.raises(multiq.ArgumentsInvalid):
        shop.app.schedule("* * * * *", add.s(), name="x")
    with pytest.raises(ScheduleInvalid, match="must have no delay, got 5 s"):
        shop.app.schedule("* * * * *", add.options(delay=5).s(1), name="x")


def test_an_expiry_begins_at_the_due_time(shop: Shop) -> None:
    @shop.app.task(expires=2)
    def brief() -> None: ...

    shop.app.schedule("*/10 * * * * *", brief.s(), name="ten")
    Scheduler(shop.app).look()
    jobs = shop.backend.jobs("default", State.DELAYED).jobs
    expiries = [decode_envelope(job.body).expires for job in jobs]
    assert [round(expiry or 0.0, 3) for expiry in expiries] == [12.0, 22.0, 32.0, 42.0, 52.0, 62.0]


def test_a_backend_without_notes_says_which_backends_have_schedules() -> None:
    with multiq.App("beanstalk://localhost") as app, pytest.raises(Unsupported, match="these can: memory, mysql"):
        _ = app.schedules
    with multiq.App("beanstalk://localhost") as app, pytest.raises(Unsupported):
        Scheduler(app)


# --- servers that are restarted, and clocks that are set ---------------------------------------------------


def empty(shop: Shop) -> None:
    """Lose everything, as a server that is restarted without its data does."""
    for home in (HOME, "default"):
        shop.backend.carry_out([Drop(home, note.key) for note in shop.backend.notes(home).notes])
        shop.backend.purge(home, [State.READY, State.DELAYED, State.HELD])


def test_schedules_in_code_are_stored_again_after_the_server_has_lost_everything(shop: Shop) -> None:
    # Given two programs whose schedules are stored
    shop.app.schedule("*/10 * * * * *", shop.work.s(), name="ten")
    other = multiq.App(backend=shop.backend)
    other.schedule("*/20 * * * * *", other.task(name="work")(new_id_task).s(), name="twenty")
    schedulers = [Scheduler(shop.app), Scheduler(other)]
    shop.pass_time(25, *schedulers)
    # When the server loses all data, then both programs notice this with their next look, also the one that looks
    # second
    empty(shop)
    shop.pass_time(1)
    for scheduler in schedulers:
        scheduler.look()
    assert [info.name for info in shop.app.schedules.list()] == ["ten", "twenty"]
    assert len(shop.pass_time(60, *schedulers)) == 9


@pytest.mark.parametrize("is_told", [False, True], ids=["one node of a cluster", "a failover"])
def test_a_schedule_in_code_that_a_server_has_lost_is_stored_again(shop: Shop, is_told: bool) -> None:
    # Given schedules in code and one that was stored at run time
    shop.app.schedule("*/10 * * * * *", shop.work.s(), name="ten")
    shop.app.schedule("0 7 * * *", shop.work.options(queue="other").s(), name="daily")
    schedulers = [Scheduler(shop.app), Scheduler(shop.app)]
    shop.pass_time(25, *schedulers)
    shop.app.schedules.add("stored", shop.work.s(), every=10)
    shop.pass_time(25, *schedulers)
    # When the server of one queue loses this queue's notes and jobs, and the notes of other queues stay
    before = shop.backend.note(HOME, CHANGES)
    shop.backend.carry_out([Drop("default", note.key) for note in shop.backend.notes("default").notes])
    shop.backend.purge("default", [State.READY, State.DELAYED])
    if is_told:
        shop.backend.carry_out([Put(HOME, CHANGES, b"")])
    assert before is not None
    # Then a running worker stores what is in its code
    shop.pass_time(70, *schedulers)
    assert [info.name for info in shop.app.schedules.list()] == ["ten", "daily"]
    assert len(shop.pass_time(60, *schedulers)) == 6


@pytest.mark.parametrize("is_running", [False, True], ids=["a worker that starts", "a worker that runs"])
def test_schedules_go_on_when_the_server_of_the_list_of_schedules_has_lost_it(shop: Shop, is_running: bool) -> None:
    # Given a schedule in code and one that was stored at run time
    shop.consumer = shop.backend.consumer(["default", "other"])
    shop.app.schedule("*/10 * * * * *", shop.work.s(), name="ten")
    scheduler = Scheduler(shop.app)
    shop.pass_time(15, scheduler)
    queue = "other" if is_running else "default"
    shop.app.schedules.add("stored", shop.work.options(queue=queue).s(), "*/10 * * * * *")
    shop.pass_time(25, scheduler)
    # When a node of a cluster loses the list, and the nodes of the queues lose nothing
    shop.backend.carry_out([Drop(HOME, note.key) for note in shop.backend.notes(HOME).notes])
    assert list(shop.app.schedules.list()) == []
    # Then both schedules go on, each occurrence once
    found = shop.pass_time(60, scheduler if is_running else Scheduler(shop.app))
    assert found == sorted(2 * [50.0, 60.0, 70.0, 80.0, 90.0, 100.0])
    assert {info.name for info in shop.app.schedules.list()} == {"ten", "stored"}


def test_a_schedule_that_old_code_has_in_another_queue_is_not_stored_again_by_it(shop: Shop) -> None:
    # Given a worker with old code
    shop.app.schedule("*/10 * * * * *", shop.work.s(), name="ten")
    old = Scheduler(shop.app)
    shop.pass_time(25, old)
    # When new code moves the schedule, and the old worker looks before it can see the schedule's new note
    note = shop.backend.note("default", key_of("ten"))
    assert note is not None
    new = multiq.App(backend=shop.backend)
    new.schedule("*/10 * * * * *", new.task(name="work", queue="other")(new_id_task).s(), name="ten")
    Scheduler(new).look()
    moved = shop.backend.note("other", key_of("ten"))
    assert moved is not None
    shop.backend.carry_out([Drop("other", key_of("ten"))])
    shop.pass_time(100, old)
    # Then the old worker does not store it in the former queue
    assert shop.backend.note("default", key_of("ten")) is None
    shop.backend.carry_out([Put("other", key_of("ten"), bytes(moved.value))])
    assert [info.queue for info in shop.app.schedules.list()] == ["other"]


def test_a_removed_schedule_that_new_code_has_again_is_stored_again_after_a_loss(shop: Shop) -> None:
    shop.app.schedule("*/10 * * * * *", shop.work.s(), name="ten")
    shop.pass_time(15, Scheduler(shop.app))
    shop.app.schedules.remove("ten")
    scheduler = Scheduler(shop.app)  # of a worker that has started later
    shop.pass_time(15, scheduler)
    shop.backend.carry_out([Drop("default", key_of("ten"))])
    shop.pass_time(70, scheduler)
    assert [info.name for info in shop.app.schedules.list()] == ["ten"]


def test_a_schedule_that_was_removed_is_not_stored_again_by_a_running_worker(shop: Shop) -> None:
    shop.app.schedule("*/10 * * * * *", shop.work.s(), name="ten")
    scheduler = Scheduler(shop.app)
    shop.pass_time(15, scheduler)
    shop.app.schedules.remove("ten")
    shop.pass_time(4000, scheduler, step=20)
    assert list(shop.app.schedules.list()) == []


def test_a_clock_that_is_set_ahead_does_not_stop_a_schedule(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a scheduler, whose own clock advances steadily
    shop.app.schedule("*/10 * * * * *", shop.work.s(), name="ten")
    scheduler = Scheduler(shop.app)
    shop.pass_time(5, scheduler)
    # When the server's clock is set ahead, or the machine has slept
    shop.clock.advance(3600)
    monkeypatch.setattr("multiq.schedules.scheduler.time.monotonic", lambda: shop.clock() / _SECOND - 3600)
    found = shop.pass_time(100, scheduler)
    # Then the scheduler notices this with the second look: the latest missed occurrence runs, and the others follow in
    # time
    assert [at for at in found if at > 3600] == [3620.0 + 10 * number for number in range(9)]


def test_a_clock_that_was_ahead_for_a_while_stops_a_schedule_until_it_is_paused_and_resumed(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a schedule whose occurrences of the next day have been made, because the server's clock was wrong
    shop.app.schedules.add("secondly", shop.work.s(), "* * * * * *")
    day = shop.began + 86_400_000
    rewrite(shop, "secondly", through=day)
    scheduler = Scheduler(shop.app)
    # Then no occurrence is made again, the log has the reason, and the next occurrence is shown
    assert shop.pass_time(30, scheduler) == []
    assert "makes no jobs until 2023-11-15T" in caplog.text
    assert "pause and resume the schedule" in caplog.text
    assert shop.app.schedules.get("secondly").next[0].utc.timestamp() == day / 1000 + 1
    # When the schedule is paused and resumed, then it continues
    calls = len(shop.backend.calls)
    shop.app.schedules.pause("secondly")
    assert len(shop.backend.calls) < calls + 20
    shop.app.schedules.resume("secondly")
    assert len(shop.pass_time(10, scheduler)) == 10


def test_an_error_of_one_queue_s_server_does_not_stop_the_schedules_of_other_queues(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given schedules in queues of which one is unreachable, as on a cluster
    for queue in ("a", "default", "z"):
        shop.app.schedules.add(queue, shop.work.options(queue=queue).s(), "*/10 * * * * *")
    now = MemoryBackend.now

    def fail(self: MemoryBackend, home: str) -> float:
        if home == "default":
            raise BackendUnavailable("no answer")
        return now(self, home)

    monkeypatch.setattr(MemoryBackend, "now", fail)
    with pytest.raises(BackendUnavailable, match="no answer"):
        Scheduler(shop.app).look()
    assert [shop.app.queue(queue).stats().delayed for queue in ("a", "default", "z")] == [6, 0, 6]


# --- hosts with other time zones -------------------------------------------------------------------------


@pytest.mark.parametrize("down", ["default", HOME])
def test_a_server_that_is_down_when_the_schedules_are_read_stops_only_its_own(
    shop: Shop, down: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a scheduler that has read schedules, and a queue whose server is down, or the server with the list of queues
    for queue in ("a", "default", "z"):
        shop.app.schedules.add(queue, shop.work.options(queue=queue).s(), "*/10 * * * * *")
    scheduler = Scheduler(shop.app)
    scheduler.look()
    for method in ("now", "note", "notes"):
        monkeypatch.setattr(MemoryBackend, method, failing(getattr(MemoryBackend, method), down))
    # When the schedules are read again, as every half hour
    shop.clock.advance(2000)
    with pytest.raises(BackendUnavailable, match="no answer"):
        scheduler.look()
    # Then the jobs of the other queues are made: the missed one, and those of the next minute
    stats = {queue: shop.app.queue(queue).stats() for queue in ("a", "z")}
    assert {queue: (found.ready, found.delayed) for queue, found in stats.items()} == {"a": (7, 6), "z": (7, 6)}
    # And the schedules are read again when the server is back
    monkeypatch.undo()
    monkeypatch.setattr("multiq.schedules.scheduler.time.monotonic", lambda: shop.clock() / _SECOND)
    scheduler.look()
    assert shop.app.queue("default").stats().delayed == 6


def failing(function: Callable[..., Any], down: str) -> Callable[..., Any]:
    def fail(self: MemoryBackend, home: str, *args: Any, **options: Any) -> Any:
        if home == down:
            raise BackendUnavailable("no answer")
        return function(self, home, *args, **options)

    return fail


def test_workers_with_other_time_zones_are_told(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a scheduler that has made occurrences in a zone, and in UTC
    shop.app.schedules.add("berlin", shop.work.s(), "*/10 * * * *", zone="Europe/Berlin")
    shop.app.schedules.add("utc", shop.work.s(), "*/10 * * * *")
    scheduler, other = Scheduler(shop.app), Scheduler(shop.app)
    shop.pass_time(900, scheduler, step=10)
    assert others_zones(shop.backend) == set()
    assert "time zones" not in caplog.text
    # When a scheduler with other time zone data makes occurrences, too
    for module in ("scheduler", "record"):
        monkeypatch.setattr(f"multiq.schedules.{module}.zones_version", lambda: "1999z")
    shop.pass_time(600, other, step=10)
    monkeypatch.undo()
    monkeypatch.setattr("multiq.schedules.scheduler.time.monotonic", lambda: shop.clock() / _SECOND)
    # Then each listing and the log of the first scheduler show the difference
    assert others_zones(shop.backend) == {"1999z"}
    assert shop.app.schedules.get("berlin").zones == "1999z"
    shop.pass_time(600, scheduler, step=10)
    assert "other workers have the time zones 1999z" in caplog.text
    assert others_zones(shop.backend) == set()


def test_a_schedule_of_a_zone_that_this_machine_does_not_know_can_be_listed_and_removed(shop: Shop) -> None:
    for name in ("a", "strange"):
        shop.app.schedules.add(name, shop.work.s(), "*/10 * * * * *")
    rewrite(shop, "strange", zone="Mars/Olympus")
    assert [(info.name, len(info.next)) for info in shop.app.schedules.list()] == [("a", 5), ("strange", 0)]
    shop.app.schedules.pause("strange")
    shop.app.schedules.remove("strange")
    assert [info.name for info in shop.app.schedules.list()] == ["a"]


@pytest.mark.parametrize("zone", ["localtime", "posixrules"])
def test_a_zone_that_differs_between_machines_is_refused(shop: Shop, zone: str) -> None:
    with pytest.raises(ScheduleInvalid, match="zone must be the name of a time zone"):
        shop.app.schedules.add("x", shop.work.s(), at="07:00", zone=zone)


# --- one that does not work does not stop the others ------------------------------------------------------


def rewrite(shop: Shop, name: str, /, **changes: Any) -> None:
    """Change a stored schedule as another program or another version of multiq could."""
    note = shop.backend.note("default", key_of(name))
    assert note is not None
    stored = decode(note)
    definition = {field: changes.pop(field) for field in list(changes) if field in Definition.__struct_fields__}
    changed = msgspec.structs.replace(stored.definition, **definition)
    record = msgspec.structs.replace(stored, definition=changed, **changes)
    shop.backend.carry_out([Put("default", key_of(name), encode(record))])


@pytest.mark.parametrize(
    "broken",
    [
        {"body": msgspec.Raw(b'{"multiq":9,"task":"work"}')},
        {"body": msgspec.Raw(b'"x"')},
        {"cron": "0 0 31 2 *"},
        {"zone": "Mars/Olympus"},
        {"cron": "", "at": ("25:99",)},
        {"cron": ""},
        {"every": -5},
        {"every": 10**15},
        {"ttr": 1e300},
        {"jitter": 1e300},
        {"grace": 1e300},
        {"expires": 1e300},
        {"through": 10**18},
        {"last": 10**18},
        {"cron": "", "at": ("07:00\n",)},
        {"cron": "", "at": ("0\u0667:00",)},  # a digit that is not ASCII
        {"priority": -1},
        {"priority": 2**40},
        {"ttr": 0.0},
        {"misfire": "all", "most": 10**9, "through": 0},
        {"unique": UniqueKey(b"")},
        {"unique": UniqueKey(b"k" * 65)},
        {"unique": UniqueKey(b"k", hold=-1.0)},
        {"unique": UniqueKey(b"k", max_wait=1e300)},
        {"gates": tuple(Gate(f"limit {number}") for number in range(5))},
        {"gates": (Gate("limit", "k" * 201),)},
        {"name": "other"},
    ],
    ids=lambda broken: " ".join(f"{name}={value}" for name, value in broken.items() if name != "body") or None,
)
def test_a_schedule_that_cannot_be_made_does_not_stop_the_others(shop: Shop, broken: dict[str, Any]) -> None:
    for name in ("a", "broken", "z"):
        shop.app.schedules.add(name, shop.work.s(), "*/10 * * * * *")
    rewrite(shop, "broken", **broken)
    assert shop.pass_time(30, Scheduler(shop.app)) == [10.0, 10.0, 20.0, 20.0, 30.0, 30.0]
    # and it can be removed
    shop.app.schedules.remove("broken")
    assert [info.name for info in shop.app.schedules.list()] == ["a", "z"]


def test_an_unexpected_error_does_not_end_a_worker_s_sidecar(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Scheduler) -> float:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Scheduler, "look", fail)
    scheduling = Scheduling(shop.app)
    scheduling.notice()
    scheduling.look_if_due()
    assert "schedules do not run now, and are tried again: this should not happen: ZeroDivisionError" in caplog.text


def test_a_schedule_whose_job_the_backend_refuses_does_not_stop_the_others(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a backend that refuses one of the jobs
    for name in ("a", "refused", "z"):
        shop.app.schedules.add(name, shop.work.s(), "*/10 * * * * *")
    carry_out = MemoryBackend.carry_out

    def refuse(self: MemoryBackend, steps: Sequence[Step], *, when: Sequence[Version] = ()) -> bool:
        if any(isinstance(step, Enqueue) and b'"refused"' in step.job.body for step in steps):
            raise PayloadTooLarge(9, 8, "")
        return carry_out(self, steps, when=when)

    monkeypatch.setattr(MemoryBackend, "carry_out", refuse)
    # When a scheduler works, then the other schedules run
    assert shop.pass_time(30, Scheduler(shop.app)) == [10.0, 10.0, 20.0, 20.0, 30.0, 30.0]


def test_a_call_whose_job_would_be_too_large_with_its_headers_is_refused(shop: Shop) -> None:
    @shop.app.task
    def store(text: str) -> None: ...

    size = shop.app.settings.max_body - 80
    store.enqueue("x" * size)  # without the headers of an occurrence the job fits
    with pytest.raises(PayloadTooLarge):
        shop.app.schedules.add("large", store.s("x" * size), "* * * * *")


# --- costs -----------------------------------------------------------------------------------------------


def test_a_look_without_a_due_schedule_is_one_call(shop: Shop) -> None:
    shop.app.schedules.add("yearly", shop.work.s(), "0 0 1 1 *")
    scheduler = Scheduler(shop.app)
    scheduler.look()
    shop.backend.calls.clear()
    scheduler.look()
    assert shop.backend.calls == ["note"]


def test_hundreds_of_schedules_in_code_are_stored_in_a_few_calls(shop: Shop) -> None:
    # Given schedules in code, of which one is stored in another queue
    for number in range(300):
        shop.app.schedule("0 7 * * *", shop.work.s(number), name=f"s{number}")
    shop.app.schedules.add("s7", shop.work.options(queue="other").s(), "0 7 * * *")
    shop.backend.calls.clear()
    Scheduler(shop.app).look()
    assert {info.queue for info in shop.app.schedules.list()} == {"default"}
    assert len(list(shop.app.schedules.list())) == 300
    assert shop.backend.calls.count("carry_out") <= 9  # two of them for the turn to add schedules


def test_hundreds_of_due_schedules_are_a_few_calls(shop: Shop) -> None:
    for number in range(300):
        shop.app.schedule("*/10 * * * * *", shop.work.s(number), name=f"s{number}")
    Scheduler(shop.app).look()
    shop.pass_time(30)
    scheduler = Scheduler(shop.app)
    scheduler.look()
    shop.pass_time(30)
    shop.backend.calls.clear()
    scheduler.look()
    assert shop.backend.calls.count("carry_out") <= 9  # two of them for the turn to add schedules
    assert len(shop.backend.calls) < 30


def test_a_worker_without_schedules_makes_no_call_for_them() -> None:
    from multiq.worker.processes.scheduling import Scheduling

    backend = Counting()
    app = multiq.App(backend=backend)
    scheduling = Scheduling(app)
    scheduling.look_if_due()
    assert backend.calls == []
    # And once a schedule was stored, every worker learns of it when it reads the control flags
    from multiq.control.flags import Control

    assert not Control(backend).read().has_schedules
    work = app.task(new_id_task)
    app.schedules.add("x", work.s(), "* * * * * *")
    assert Control(backend).read().has_schedules
    Control(backend).restart()
    assert Control(backend).read().has_schedules
    scheduling.notice()
    scheduling.look_if_due()
    assert app.queue().stats().delayed


@pytest.mark.parametrize("ahead", [-1, 240.1, float("inf"), float("nan")])
def test_a_scheduler_makes_no_occurrence_too_far_ahead(ahead: float) -> None:
    with pytest.raises(OptionInvalid, match="from 0 to 240, got"):
        Scheduler(multiq.App("memory://"), ahead=ahead)


def new_id_task() -> str:
    return new_id()


def test_importing_multiq_imports_no_cron_library() -> None:
    import subprocess
    import sys

    late = "{'cronsim', 'zoneinfo', 'multiq.schedules'}"
    code = f"import multiq, sys; multiq.App('memory://'); assert not {late} & {{*sys.modules}}"
    subprocess.run([sys.executable, "-c", code], check=True)
