"""Schedules: how schedulers create due jobs on a backend that stores notes."""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import TYPE_CHECKING

import msgspec
import pytest

from multiq.backend import Ack, Drop, Put, State
from multiq.conformance.case import SLEEP_GRACE, Topic, promise, requires
from multiq.conformance.threads import together
from multiq.control.flags import RESTART, Control
from multiq.errors import JobNotFound
from multiq.limits import Limit
from multiq.schedules import Scheduler, record
from multiq.schedules.record import CHANGES, HOME, occurrence_id
from multiq.unique import Unique

if TYPE_CHECKING:
    from collections.abc import Iterator

    from multiq.app import App
    from multiq.backend import Backend
    from multiq.task import Task

_SCHEDULERS = 6


@requires("notes")
class ServerTimeTests(Topic):
    @promise("16.6")
    def test_the_time_goes_on_as_the_backend_s_own_clock_does(self) -> None:
        # Given the backend's time
        before, began = self.backend.now(self.queue), self.harness.now()
        # When some time passes
        self.harness.advance(SLEEP_GRACE)
        # Then the backend's time has advanced by the same amount, and differs from this machine's time by less than a
        # year
        after = self.backend.now(self.queue)
        assert SLEEP_GRACE - self.harness.slack <= after - before <= self.harness.now() - began + self.harness.slack
        if self.harness.real_time:
            assert abs(after - time.time()) < 365 * 86400

    @promise("16.6")
    @requires("inspection")
    def test_a_delay_that_is_counted_from_the_time_ends_at_the_time_that_was_meant_or_later(self) -> None:
        # Given a job that is to be due at a given time. The job's delay is counted from the backend's time
        at = self.backend.now(self.queue) + 1.0
        self.enqueue(delay=at - self.backend.now(self.queue) + 2e-6)
        # When a consumer waits for the job
        while not (leases := self.reserve(1)):
            self.harness.advance(0.05)
        # Then the consumer does not get the job before the given time
        assert self.backend.now(self.queue) >= at
        self.settle(*map(Ack, leases))


@requires("notes", "holds", "inspection", "management")
class SchedulesTests(Topic):
    """The tests of schedules use multiq's own schedulers, with the backend under test."""

    @pytest.fixture(autouse=True)
    def _clean_up(self, _set_up: None) -> Iterator[None]:
        """The store may be used for other tests, too. So all schedules, and the mark that schedules exist, are
        deleted."""
        self.app, self.task = self._program(self.backend)
        yield
        if not self.backend.declared.notes:
            return
        for info in list(self.app.schedules.list()):
            if info.name.startswith(self.queue):
                self.app.schedules.remove(info.name)
        self.backend.carry_out([Drop(HOME, CHANGES), Drop(HOME, f"home/{self.queue}")])
        with contextlib.suppress(JobNotFound):
            self.backend.delete(RESTART, "schedules")

    def schedulers(self, count: int) -> list[Scheduler]:
        """Several schedulers. Each scheduler has its own connection. A new scheduler reads the time again. The new
        reading matters if a test has moved the clock."""
        return [Scheduler(self._program(self.another_backend())[0]) for _ in range(count)]

    def _program(self, backend: Backend) -> tuple[App, Task[..., None]]:
        from multiq.app import App

        app = App(backend=backend)

        @app.task(queue=self.queue, ttr=600)
        def work(number: int = 0) -> None: ...

        return app, work

    def made(self) -> list[tuple[str, float]]:
        """The ids of all jobs of the queue, and in how many seconds each job is due."""
        states = [State.READY, State.DELAYED]
        records = [job for state in states for job in self.backend.jobs(self.queue, state, limit=1000).jobs]
        return [(job.id, job.due_in or 0.0) for job in records]

    @promise("17.1")
    @requires("lists_jobs")
    def test_each_occurrence_of_the_next_minute_is_made_once_by_many_schedulers_at_once(self) -> None:
        # Given a schedule, and several schedulers, each with its own connection
        self.app.schedules.add(self.queue, self.task.s(), "*/5 * * * * *")
        schedulers = self.schedulers(_SCHEDULERS)
        # When all schedulers make the due jobs at the same time, twice
        began = self.backend.now(self.queue)
        for _ in range(2):
            together([scheduler.look for scheduler in schedulers])
        took = self.backend.now(self.queue) - began
        # Then there is one job for each occurrence
        made = self.made()
        assert len({job_id for job_id, _ in made}) == len(made)
        assert 12 <= len(made) <= 13 + took / 5
        # And the jobs are five seconds apart
        due = sorted(due_in for _, due_in in made if due_in)
        assert all(abs(later - earlier - 5) < 1 for earlier, later in itertools.pairwise(due))

    @promise("17.2")
    @requires("lists_jobs")
    def test_an_occurrence_is_not_due_before_its_time_by_the_backend_s_clock(self) -> None:
        # Given a schedule that is due every second
        self.app.schedules.add(self.queue, self.task.s(), every=1)
        # When a scheduler makes the due jobs
        Scheduler(self.app).look()
        # Then each job is due at the time that its id names, or later
        due = dict(self.made())
        now = self.backend.now(self.queue)
        times = {occurrence_id(self.queue, second * 1000): second for second in range(int(now) - 5, int(now) + 100)}
        assert len(due) >= 30  # of 60: a job that becomes due between the two listings is in neither
        for job_id, due_in in due.items():
            if due_in:
                assert due_in >= times[job_id] - now - 0.001

    @promise("17.1", "17.3")
    def test_an_occurrence_whose_job_has_run_is_not_made_again(self) -> None:
        # Given a scheduler that has made jobs, and another scheduler that read the schedule earlier
        self.app.schedules.add(self.queue, self.task.s(), every=30)
        (early,) = self.schedulers(1)
        early._load_if_changed()
        Scheduler(self.app).look()
        ids = [job_id for job_id, _ in self.made()]
        assert ids
        # When the jobs have run, and the other scheduler makes the due jobs
        for job_id in ids:
            self.backend.kick_job(self.queue, job_id)
        self.settle(*(Ack(lease) for lease in self.reserve(10)))
        early.look()
        # Then the other scheduler makes none of the finished jobs a second time
        assert not {job_id for job_id, _ in self.made()} & {*ids}

    @promise("17.3")
    @requires("lists_jobs")
    @pytest.mark.parametrize(("misfire", "expected"), [("skip", 0), ("once", 1), ("all(3)", 3), ("all", 50)])
    def test_missed_occurrences_are_made_by_the_policy(self, misfire: str, expected: int) -> None:
        # Given an hourly schedule whose last 50 occurrences were not made by any scheduler
        self.app.schedules.add(self.queue, self.task.s(), every=3600, misfire=misfire)
        (note,) = self.backend.notes(self.queue, record.PREFIX).notes
        stored = record.decode(note)
        now = int(self.backend.now(self.queue) * 1000)
        behind = (now // 3_600_000 - 50) * 3_600_000
        changed = msgspec.structs.replace(stored, through=behind)
        assert self.backend.carry_out([Put(self.queue, note.key, record.encode(changed))])
        # When a scheduler makes the due jobs
        Scheduler(self.app).look()
        # Then the policy decides how many jobs are ready (one more if an hour has just begun)
        ready = [job_id for job_id, due_in in self.made() if not due_in]
        hour = now // 3_600_000 * 3_600_000
        if now - hour > 30_000:
            latest = [occurrence_id(self.queue, hour - 3_600_000 * back) for back in range(expected)]
            assert sorted(ready) == sorted(latest)
        else:
            assert expected <= len(ready) <= expected + 1

    @promise("17.4")
    @pytest.mark.parametrize("overlap", ["skip", "follow"])
    def test_an_occurrence_is_not_made_while_the_job_before_is_there(self, overlap: str) -> None:
        # Given schedulers that have made the job of an occurrence. Its job runs
        self.app.schedules.add(self.queue, self.task.s(), every=2, overlap=overlap)
        Scheduler(self.app).look()
        self.harness.advance(3)
        (lease,) = self.reserve(10)
        # When later occurrences are due, then no job is made for the later occurrences
        for _ in range(3):
            together([scheduler.look for scheduler in self.schedulers(3)])
            assert self.made() == []
            self.harness.advance(1)
        # And when the running job is done, then one job is made
        self.settle(Ack(lease))
        for _ in range(8):
            together([scheduler.look for scheduler in self.schedulers(3)])
            self.harness.advance(0.5)
        assert len(self.made()) == 1

    @promise("17.5")
    def test_a_paused_or_removed_schedule_makes_nothing_and_its_coming_jobs_are_gone(self) -> None:
        scheduler = Scheduler(self.app)
        book = self.app.schedules
        # Given two schedules whose jobs are made in advance
        names = [f"{self.queue}.a", f"{self.queue}.b"]
        for name in names:
            book.add(name, self.task.s(), every=30)
        scheduler.look()
        stats = self.backend.stats(self.queue)
        assert (stats.ready or 0) + (stats.delayed or 0) >= 4
        # When one schedule is paused, and the other schedule is removed
        book.pause(names[0])
        book.remove(names[1])
        # Then the jobs that are not due are gone, and no scheduler makes more jobs
        scheduler.look()
        Scheduler(self.app).look()
        assert self.backend.stats(self.queue).delayed == 0
        assert [info.name for info in book.list() if info.queue == self.queue] == names[:1]

    @promise("17.6")
    def test_run_now_leaves_the_schedule_as_it_is(self) -> None:
        before = self.app.schedules.add(self.queue, self.task.s(5), every=86400)
        handle = self.app.schedules.run(self.queue)
        assert handle.state() is State.READY
        after = self.app.schedules.get(self.queue)
        assert (after.last, after.next) == (before.last, before.next)

    @promise("17.7")
    def test_a_stored_schedule_is_noticed_by_the_control_flags(self) -> None:
        # Given a scheduler that has looked for schedules
        scheduler = Scheduler(self.app)
        scheduler.look()
        # When another process stores a schedule
        program, task = self._program(self.another_backend())
        program.schedules.add(self.queue, task.s(), every=5)
        # Then all workers learn that schedules exist, and the scheduler makes the jobs when it looks again
        assert Control(self.backend).read().has_schedules
        scheduler.look()
        assert self.made()

    @promise("17.8", "18.9")
    @requires("unique", "lists_jobs")
    def test_an_occurrence_whose_key_is_taken_makes_no_job(self) -> None:
        # Given an every-second schedule of a unique task, and a job that has the task's key
        unique = self.task.options(unique=Unique(by=[]))
        first = unique.enqueue(1)
        self.app.schedules.add(self.queue, unique.s(2), every=1)
        # When an occurrence is due, then no job is made
        for _ in range(3):
            self.harness.advance(1.1)
            self.schedulers(1)[0].look()
            assert [job_id for job_id, _ in self.made()] == [first.id]
        assert self.app.schedules.run(self.queue) == first
        # When the job with the key is gone, then a job is made for the next occurrence, about when it is due
        self.backend.delete(self.queue, first.id)
        give_up_at = self.harness.now() + self.harness.patience
        while not (made := self.made()) and self.harness.now() < give_up_at:
            self.harness.advance(1.1)
            self.schedulers(1)[0].look()
        ((_, due_in),) = made
        assert due_in <= 2

    @promise("17.8", "19.2")
    @requires("limits", "lists_jobs")
    def test_the_jobs_of_a_schedule_keep_to_its_limits(self) -> None:
        limited = self._limited()
        self.app.schedules.add(self.queue, limited.s(), every=1)
        Scheduler(self.app).look()
        self.harness.past(self.in_(5))
        # Then the jobs that are due are handed out one at a time
        leases = self.reserve()
        assert len(leases) == 1
        self.settle(Ack(leases[0]))
        assert len(self.reserve()) == 1
        self.backend.limits(self.queue, {"one": None})

    def _limited(self) -> Task[..., None]:
        @self.app.task(queue=self.queue, ttr=600, limits=Limit("one", slots=1))
        def limited() -> None: ...

        return limited
