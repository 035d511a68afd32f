"""The random walks of the conformance suite: what is drawn, and that it can be drawn again."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, get_args

import msgspec
import pytest

from multiq.backend.capabilities import POWERS, Gap
from multiq.backend.memory import MemoryBackend
from multiq.conformance import ManualHarness
from multiq.conformance.stateful import steps as kinds
from multiq.conformance.stateful.drawing import draw_walks
from multiq.conformance.stateful.walk_comparison import run_walks, take_walks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from multiq.backend.capabilities import Capabilities
    from multiq.conformance.stateful.steps import Act, Say, Step

ALL = MemoryBackend.declared
NOTHING: Capabilities = msgspec.structs.replace(ALL, **dict.fromkeys(POWERS, Gap("never", "for a test")))


class MiscountingBackend(MemoryBackend):
    def kick(self, queue: str, limit: int) -> int:
        return super().kick(queue, limit) + 1


class MiscountingHarness(ManualHarness):
    def open(self) -> MiscountingBackend:
        return MiscountingBackend(name=self.prefix, clock=self.clock)


def drawn(can: Capabilities = ALL, *, count: int = 50, real_time: bool = False, seed: int = 1) -> list[list[Step]]:
    return draw_walks(can, count, real_time=real_time, seed=seed)


def verdicts(walks: Iterable[Iterable[Step]]) -> list[Say]:
    return [
        say for steps in walks for step in steps if isinstance(step, kinds.Settle | kinds.Exchange)
        for say in step.verdicts
    ]  # fmt: skip


def acts(walks: list[list[Step]]) -> list[Act]:
    carried_out = [act for steps in walks for step in steps if isinstance(step, kinds.CarryOut) for act in step.acts]
    return carried_out + [act for say in verdicts(walks) for act in say.acts]


def test_a_seed_draws_the_same_walks_each_time() -> None:
    assert drawn(seed=1) == drawn(seed=1)
    assert drawn(seed=1) != drawn(seed=2)


@pytest.mark.parametrize("real_time", [False, True])
@pytest.mark.parametrize("can", [ALL, NOTHING], ids=["all", "nothing"])
def test_no_two_walks_have_the_same_kinds_of_steps_in_the_same_order(can: Capabilities, real_time: bool) -> None:
    walks = drawn(can, count=100, real_time=real_time)
    assert len({tuple(map(type, steps)) for steps in walks}) == len(walks) == 100


def test_a_backend_that_can_do_everything_takes_all_kinds_of_steps() -> None:
    walks = drawn()
    assert {type(step) for steps in walks for step in steps} == set(get_args(kinds.Step))
    assert {say.kind for say in verdicts(walks)} == {"ack", "release", "bury", "touch", "give_back", "abandon"}
    assert {type(act) for act in acts(walks)} == set(get_args(kinds.Act))
    assert any(say.then is None for say in verdicts(walks))
    assert len({say.then for say in verdicts(walks)}) > 100


def test_a_backend_takes_no_step_that_it_cannot_take() -> None:
    walks = drawn(NOTHING)
    always = {kinds.Enqueue, kinds.Reserve, kinds.Reorder, kinds.Settle, kinds.Exchange, kinds.Kick, kinds.Tick}
    assert {type(step) for steps in walks for step in steps} == always
    assert {say.kind for say in verdicts(walks)} == {"ack", "release", "bury", "touch"}
    assert {say.then for say in verdicts(walks)} == {None}
    assert acts(walks) == []
    jobs = [job for steps in walks for step in steps if isinstance(step, kinds.Enqueue) for job in step.jobs]
    assert {job.priority for job in jobs} == {1024}
    assert {job.awaits for job in jobs} == {0}


@pytest.mark.parametrize(
    ("power", "types"),
    [
        ("client_ids", {kinds.EnqueueAgain}),
        ("management", {kinds.KickJob, kinds.Reschedule, kinds.Delete}),
        ("inspection", {kinds.Peek, kinds.List}),
        ("pausing", {kinds.Pause, kinds.Resume}),
        ("purging", {kinds.Purge}),
        ("outcomes", {kinds.Outcomes, kinds.History, kinds.Forget}),
        ("holds", {kinds.CarryOut, kinds.ListNotes}),
        ("notes", {kinds.ListNotes}),
    ],
)
def test_a_backend_that_lacks_one_capability_takes_all_other_steps(power: str, types: set[type]) -> None:
    can = msgspec.structs.replace(ALL, **{power: Gap("never", "for a test")})
    assert {type(step) for steps in drawn(can) for step in steps} == set(get_args(kinds.Step)) - types


def test_a_walk_in_real_time_has_few_ticks() -> None:
    def ticks(walks: list[list[Step]]) -> list[int]:
        return [sum(step.ticks for step in steps if isinstance(step, kinds.Tick)) for steps in walks]

    assert max(ticks(drawn(real_time=True))) <= 8
    assert min(ticks(drawn(real_time=False))) >= 6


def test_a_failure_says_how_to_draw_its_walks_again() -> None:
    # Given a walk that has found a bug
    harness = MiscountingHarness()
    backend = harness.open()
    with pytest.raises(AssertionError) as first:
        run_walks(harness, backend, ALL)
    (note,) = first.value.__notes__
    parts = re.fullmatch(r"drawn by draw_walks\(can, (\d+), real_time=False, seed=(\d+)\)", note)
    assert parts is not None
    # When the walks are drawn again
    walks = drawn(count=int(parts[1]), seed=int(parts[2]))
    # Then they find the bug again
    with pytest.raises(AssertionError) as again:
        take_walks(harness, backend, ALL, walks)
    assert str(again.value) == str(first.value)
