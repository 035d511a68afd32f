"""Permits: the limits that multiq enforces on a backend that has notes but no limits of its own."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from multiq.backend import After, GiveBack, Lease, Quota
from multiq.conformance.case import Topic, promise, requires
from multiq.conformance.threads import together
from multiq.ids import new_id
from multiq.permit_notes import Granted, PermitBook, PermitPlace, Refused, change_quotas, states

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG = 600.0
_BOOKS = 6


@requires("notes", "holds")
class PermitsTests(Topic):
    @pytest.fixture(autouse=True)
    def _clean_up(self, _set_up: None) -> Iterator[None]:
        yield
        if self.backend.declared.notes and self.backend.declared.holds:
            for name in ("api", "full"):
                change_quotas(self.backend, self.queue, {name: None}, pinned=True)

    def limit(self, name: str, quota: Quota) -> PermitPlace:
        change_quotas(self.backend, self.queue, {name: quota}, pinned=True)
        return PermitPlace(self.queue, name, "")

    def lease(self, job_id: str, ttr: float = LONG) -> Lease:
        return Lease(self.queue, job_id, new_id(), b"", 0, ttr, 1, 0, 0, 0.0)

    def running(self) -> dict[str, int]:
        return {state.name: state.running for state in states(self.backend, self.queue)}

    @promise("19.12")
    def test_callers_at_the_same_time_hold_as_many_permits_as_there_are_slots(self) -> None:
        # Given three slots
        place = self.limit("api", Quota(slots=3))
        books = [PermitBook(self.backend) for _ in range(_BOOKS)]
        # When more callers than there are slots ask for a permit at the same time
        first = together([partial(book.ask, self.lease(new_id()), [place]) for book in books])
        # Then three callers hold a permit
        granted = [answer for answer in first if isinstance(answer, Granted)]
        assert len(granted) == 3
        assert isinstance(books[0].ask(self.lease(new_id()), [place]), Refused)
        # When the three callers free their permits at the same time, then all slots are free
        together([partial(book.free, [one]) for book, one in zip(books, granted, strict=False)])
        assert self.running() == {"api": 0}

    @promise("19.12")
    def test_a_job_holds_all_of_its_permits_or_none(self) -> None:
        places = [self.limit("api", Quota(slots=1)), self.limit("full", Quota(slots=0))]
        assert isinstance(PermitBook(self.backend).ask(self.lease("a"), places), Refused)
        assert self.running() == {"api": 0, "full": 0}

    @promise("19.13")
    def test_a_permit_that_nobody_frees_ends_by_time_and_is_not_freed_twice(self) -> None:
        # Given a permit of a worker that dies
        place = self.limit("api", Quota(slots=1))
        book = PermitBook(self.backend)
        first = book.ask(self.lease("a", 1.0), [place])
        assert isinstance(first, Granted)
        # When the permit's time is over, then another job gets a permit
        self.harness.advance(1.0 + self.harness.slack)
        second = book.ask(self.lease("b"), [place])
        assert isinstance(second, Granted)
        # And the first job can neither free nor extend the new permit
        book.free([first])
        assert book.extend([(first, time.monotonic() + LONG)]) == [first]
        assert self.running() == {"api": 1}

    @promise("19.12")
    def test_a_later_lease_of_a_job_takes_its_permit_over(self) -> None:
        place = self.limit("api", Quota(slots=1))
        book = PermitBook(self.backend)
        first, second = (book.ask(self.lease("a"), [place]) for _ in range(2))
        assert isinstance(first, Granted)
        assert isinstance(second, Granted)
        book.free([first])
        assert self.running() == {"api": 1}

    @promise("19.14")
    def test_a_rate_gives_its_burst_and_then_one_turn_at_a_time(self) -> None:
        # Given a rate
        place = self.limit("api", Quota(rate=1, per=2.0, burst=3))
        book = PermitBook(self.backend)
        # When many permits are requested at the same time, then as many permits are given as the burst allows
        began = self.harness.now()
        answers = [book.ask(self.lease(str(at)), [place]) for at in range(5)]
        took = self.harness.now() - began
        assert 3 <= sum(isinstance(answer, Granted) for answer in answers) <= 3 + took / 2.0
        # When the time for one more permit has passed, then one more permit is given
        self.harness.advance(2.0 + self.harness.slack)
        assert isinstance(book.ask(self.lease("later"), [place]), Granted)

    @promise("19.15")
    def test_a_job_that_is_given_back_for_want_of_a_permit_has_no_attempt_more(self) -> None:
        # Given a job that is given back twice
        self.enqueue()
        for _ in range(2):
            (lease,) = self.reserve()
            assert lease.attempt == 1
            self.settle(GiveBack(lease, after=After(is_uncounted=True)))
        # Then the job's next attempt is the first attempt
        (lease,) = self.reserve()
        assert lease.attempt == 1
