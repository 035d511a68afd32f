"""Permits with one planted bug each: the suite finds every bug, by the test that is meant to find it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pytest

from multiq import permit_notes as permits
from multiq.backend.memory import MemoryBackend
from multiq.conformance.planted import PlantedBug
from multiq.conformance.runner import run_harness
from multiq.permit_notes import PermitBook

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from multiq.backend import Quota
    from multiq.permit_notes import Granted, Holder, PermitPlace, Refused, _State


def _not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A permit lasts until it is freed, so a worker that dies keeps it forever."""

    def live(state: _State, now: int) -> tuple[Holder, ...]:
        return state.holders

    def put(place: PermitPlace, state: _State, now: int) -> Any:
        forever = tuple(msgspec.structs.replace(one, ends_at=now + 10**15) for one in state.holders)
        return original(place, msgspec.structs.replace(state, holders=forever), now)

    original = permits._put
    monkeypatch.setattr(permits, "_live", live)
    monkeypatch.setattr(permits, "_put", put)


def _one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check compares with ``>`` instead of ``>=``."""
    original = permits._refusal

    def refusal(place: PermitPlace, quota: Quota, live: Sequence[Holder], due: int, now: int) -> Refused | None:
        more = quota if quota.slots is None else msgspec.structs.replace(quota, slots=quota.slots + 1)
        return original(place, more, live, due, now)

    monkeypatch.setattr(permits, "_refusal", refusal)


def _freed_by_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A free removes the permit of the job, also if a later lease of the job has taken it over."""
    original = PermitBook.free

    def free(self: PermitBook, grants: Sequence[Granted]) -> None:
        jobs = {granted.holder.job for granted in grants}
        for place in {place for granted in grants for place in granted.held}:
            note = self._backend.note(permits.HOME, place.note)
            for holder in () if note is None else permits._state(note).holders:
                if holder.job in jobs:
                    original(self, [permits.Granted((place,), holder)])

    monkeypatch.setattr(PermitBook, "free", free)


def _counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A free removes the oldest permit, as a counter does."""
    original = PermitBook.free

    def free(self: PermitBook, grants: Sequence[Granted]) -> None:
        for place in {place for granted in grants for place in granted.held}:
            note = self._backend.note(permits.HOME, place.note)
            for holder in () if note is None else permits._state(note).holders[:1]:
                original(self, [permits.Granted((place,), holder)])

    monkeypatch.setattr(PermitBook, "free", free)


def _some(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job takes its permits one after another, and keeps the first ones if the next one is refused."""
    original = PermitBook.ask

    def ask(self: PermitBook, lease: Any, wanted: Sequence[PermitPlace]) -> Granted | Refused:
        answers = [original(self, lease, [place]) for place in wanted]
        return next((one for one in answers if isinstance(one, permits.Refused)), answers[0])

    monkeypatch.setattr(PermitBook, "ask", ask)


def _no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The note forgets when the next job is due at the rate."""
    original = permits._put

    def put(place: PermitPlace, state: _State, now: int) -> Any:
        return original(place, msgspec.structs.replace(state, due=0), now)

    monkeypatch.setattr(permits, "_put", put)


class _Bug(NamedTuple):
    plant: Callable[[pytest.MonkeyPatch], None]
    test: str
    """The test of ``PermitsTests`` that finds the bug."""


BUGS = {
    "not returned after a crash": _Bug(
        _not_returned, "test_a_permit_that_nobody_frees_ends_by_time_and_is_not_freed_twice"
    ),
    "one more than the quota": _Bug(
        _one_too_many, "test_callers_at_the_same_time_hold_as_many_permits_as_there_are_slots"
    ),
    "freed by the job": _Bug(_freed_by_job, "test_a_later_lease_of_a_job_takes_its_permit_over"),
    "a counter": _Bug(_counted, "test_a_permit_that_nobody_frees_ends_by_time_and_is_not_freed_twice"),
    "some of the permits": _Bug(_some, "test_a_job_holds_all_of_its_permits_or_none"),
    "no turns": _Bug(_no_turns, "test_a_rate_gives_its_burst_and_then_one_turn_at_a_time"),
}


def outcome_of(test: str) -> str:
    harness = PlantedBug("permits", "", "", MemoryBackend).harness()
    report = run_harness(harness, select=[test])
    (row,) = [row for row in report.rows if row.name == test]
    return row.outcome


@pytest.mark.one_row
@pytest.mark.parametrize("name", BUGS)
def test_the_test_that_is_about_a_bug_of_permits_finds_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bug = BUGS[name]
    # Given permits without the bug, then the test finds nothing
    assert outcome_of(bug.test) == "kept"
    # When the bug is planted, then it fails
    bug.plant(monkeypatch)
    assert outcome_of(bug.test) == "failed"
