"""Calls to several partitions in one round trip, whose replies are cut at every byte: each has exactly one effect.

All partitions are on one server, so all replies come over one connection, and a cut can hit each of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from proxy import MOST, CutReply, CutRequest, Pass, Proxy, Slice, places, some
from scenes import QUEUE, Scene, Stage, play, play_with
from servers.redis import RedisServer

from multiq.backend import Ack, Bury, NewJob, Release, State, Touch
from multiq.backend.effects import After
from multiq.backend.registry import open_backend
from multiq_redis import keys
from multiq_redis.records import partition_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from multiq.backend import Lease

OPTIONS = "partitions=4"
IDS = [f"job {number}" for number in range(12)]
HELD = IDS[:6]


class WideStage(Stage):
    """A stage whose jobs are in several partitions, and therefore have no single order."""

    def hold(self, *ids: str, **options: Any) -> None:
        self.put(*ids, **options)
        self.leases = sorted(self.consumer.reserve(len(ids), 0), key=lambda lease: ids.index(lease.id))
        assert [lease.id for lease in self.leases] == list(ids)
        assert len({partition_of(lease) for lease in self.leases}) >= 3  # jobs in several partitions

    def ids(self, state: State) -> list[str]:
        return sorted(super().ids(state))


def enqueued(stage: Stage, ids: list[str]) -> None:
    assert ids == IDS
    assert stage.ids(State.READY) == sorted(IDS)


def all_are_acked(stage: Stage, leases: list[Lease]) -> None:
    assert stage.consumer.settle([Ack(lease) for lease in leases]) == [None] * len(leases)


def reserved(stage: Stage, leases: list[Lease]) -> None:
    assert sorted(lease.id for lease in leases) == sorted(IDS)
    assert {(lease.attempt, lease.crashes) for lease in leases} == {(1, 0)}
    assert stage.counts() == (0, 0, 12, 0)
    all_are_acked(stage, leases)
    assert stage.counts() == (0, 0, 0, 0)


def acked(stage: Stage, answers: list[object]) -> None:
    assert answers == [None] * 6
    assert stage.counts() == (0, 0, 0, 0)


def of_all_kinds(stage: Stage, answers: list[object]) -> None:
    assert answers == [None] * 6
    assert stage.counts() == (2, 2, 0, 2)
    assert {stage.peek(job_id).attempt for job_id in HELD} == {1}


def exchanged(stage: Stage, answer: tuple[list[object], list[Lease]]) -> None:
    lost, leases = answer
    assert lost == [None] * 6
    assert sorted(lease.id for lease in leases) == sorted(IDS[6:])
    assert {lease.attempt for lease in leases} == {1}
    assert stage.counts() == (0, 0, 6, 0)
    all_are_acked(stage, leases)


def paused(stage: Stage, _: None) -> None:
    assert stage.there.stats(QUEUE).paused_for is not None
    assert stage.consumer.reserve(12, 0) == []


def counted(stage: Stage, stats: Any) -> None:
    assert stats.ready == 12


def kicked(stage: Stage, count: int) -> None:
    assert count == 12
    assert stage.counts() == (12, 0, 0, 0)
    assert {stage.peek(job_id).kicks for job_id in IDS} == {1}


def bury_all(stage: Stage) -> None:
    stage.put(*IDS)
    with stage.there.consumer([QUEUE]) as consumer:
        leases = consumer.reserve(12, 0)
        assert consumer.settle([Bury(lease) for lease in leases]) == [None] * 12


def six_held_and_six_waiting(stage: Stage) -> None:
    stage.hold(*HELD)
    stage.put(*IDS[6:])


def verdicts_of_all_kinds(stage: Stage) -> Any:
    a, b, c, d, e, f = stage.leases
    return [Release(a), Release(b), Release(c, 3600), Release(d, 3600), Bury(e), Bury(f)]


KEPT = After(keep=3600, outcome=b"first")


def acks(stage: Stage) -> list[Ack]:
    return [Ack(lease, KEPT) for lease in stage.leases]


def kept(stage: Stage, answers: list[object]) -> None:
    assert answers == [None] * 6
    assert stage.counts() == (0, 0, 0, 0)
    assert {outcome and outcome.body for outcome in stage.there.outcomes(QUEUE, HELD)} == {b"first"}
    assert stage.there.forget(QUEUE, HELD) == 6


def keep_six(stage: Stage) -> None:
    stage.hold(*HELD)
    assert stage.there.forget(QUEUE, HELD) == 0
    assert stage.consumer.settle(acks(stage)) == [None] * 6


def forgotten(stage: Stage, count: int) -> None:
    assert count == 6
    assert stage.there.history(QUEUE).outcomes == []


def found(stage: Stage, outcomes: list[Any]) -> None:
    assert [outcome and outcome.id for outcome in outcomes] == [*HELD, None]


def in_history(stage: Stage, page: Any) -> None:
    assert sorted(outcome.id for outcome in page.outcomes) == HELD


def with_memos(stage: Stage) -> Any:
    memo, both = After(memo=b"memo"), After(memo=b"memo", detail=b"detail")
    a, b, c, d, e, f = stage.leases
    return [
        Release(a, after=both),
        Release(b, 3600, after=both),
        Bury(c, after=both),
        Bury(d, after=both),
        Touch(e, memo),
        Touch(f, memo),
    ]


def memos_are_stored(stage: Stage, answers: list[object]) -> None:
    assert answers == [None] * 6
    assert stage.counts() == (1, 1, 2, 2)
    assert {stage.peek(job_id).memo for job_id in HELD} == {b"memo"}
    assert [stage.peek(job_id).detail for job_id in HELD] == [b"detail"] * 4 + [b""] * 2
    assert {stage.peek(job_id).attempt for job_id in HELD} == {1}


SCENES = {
    "enqueue": Scene(
        lambda _: None,
        lambda stage: stage.backend.enqueue(QUEUE, [NewJob(b"x", job_id) for job_id in IDS]),
        enqueued,
    ),
    "reserve": Scene(lambda stage: stage.put(*IDS), lambda stage: stage.consumer.reserve(12, 0), reserved),
    "ack": Scene(
        lambda stage: stage.hold(*HELD),
        lambda stage: stage.consumer.settle([Ack(lease) for lease in stage.leases]),
        acked,
    ),
    "settle": Scene(
        lambda stage: stage.hold(*HELD),
        lambda stage: stage.consumer.settle(verdicts_of_all_kinds(stage)),
        of_all_kinds,
    ),
    "exchange": Scene(
        six_held_and_six_waiting,
        lambda stage: stage.consumer.exchange([Ack(lease) for lease in stage.leases], 12, 0),
        exchanged,
    ),
    "ack with outcomes": Scene(lambda stage: stage.hold(*HELD), lambda stage: stage.consumer.settle(acks(stage)), kept),
    "settle with memos": Scene(
        lambda stage: stage.hold(*HELD), lambda stage: stage.consumer.settle(with_memos(stage)), memos_are_stored
    ),
    "forget": Scene(keep_six, lambda stage: stage.backend.forget(QUEUE, HELD), forgotten),
    "outcomes": Scene(keep_six, lambda stage: stage.backend.outcomes(QUEUE, [*HELD, "none"]), found),
    "history": Scene(keep_six, lambda stage: stage.backend.history(QUEUE), in_history),
    "pause": Scene(lambda stage: stage.put(*IDS), lambda stage: stage.backend.pause(QUEUE, 3600), paused),
    "stats": Scene(lambda stage: stage.put(*IDS), lambda stage: stage.backend.stats(QUEUE), counted),
    "kick": Scene(bury_all, lambda stage: stage.backend.kick(QUEUE, 100), kicked),
}

every_scene = pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES.keys())


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with (
        RedisServer() as server,
        Proxy(("127.0.0.1", server.port)) as proxy,
        open_backend(f"{server.url}?{OPTIONS}") as there,
        open_backend(f"redis://127.0.0.1:{proxy.port}?{OPTIONS}") as backend,
        backend.consumer([QUEUE]) as consumer,
    ):
        yield WideStage(proxy, server, there, backend, consumer, lambda: server.ask("FLUSHALL"))


@pytest.fixture(autouse=True)
def _nothing_armed(stage: Stage) -> Iterator[None]:
    yield
    stage.proxy.mode = Pass()
    stage.proxy.disarm()


def sizes(stage: Stage, scene: Scene) -> tuple[int, int]:
    """The fewest bytes that a scene sends and receives. The rotation of the partitions changes the numbers."""
    play(stage, scene)
    seen = [play(stage, scene) for _ in range(8)]
    return min(sent for sent, _ in seen), min(replied for _, replied in seen)


@pytest.mark.one_row
@pytest.mark.parametrize("most", MOST)
@every_scene
def test_reply_cut_at_any_byte_leaves_exactly_one_effect(stage: Stage, scene: Scene, most: int | None) -> None:
    _, size = sizes(stage, scene)
    for turn, at in enumerate(some(places(size), most)):
        play_with(stage, scene, CutReply(at=at, rst=turn % 2 == 1))


@pytest.mark.one_row
@pytest.mark.parametrize("most", [4, pytest.param(40, marks=pytest.mark.long)])
@every_scene
def test_request_cut_before_its_end_leaves_exactly_one_effect(stage: Stage, scene: Scene, most: int) -> None:
    size, _ = sizes(stage, scene)
    for at in some(range(size), most):
        play_with(stage, scene, CutRequest(at=at))


@every_scene
def test_reply_in_pieces_of_one_byte_is_parsed_the_same(stage: Stage, scene: Scene) -> None:
    stage.proxy.mode = Slice(1)
    play(stage, scene)


@pytest.mark.one_row
@every_scene
def test_flushed_script_cache_makes_no_difference(stage: Stage, scene: Scene) -> None:
    play(stage, scene, lambda: stage.server.ask("SCRIPT", "FLUSH"))


def test_jobs_of_these_scenes_are_in_all_partitions(stage: Stage) -> None:
    stage.clear()
    stage.put(*IDS)
    partitions = [keys.partition(QUEUE, number) for number in range(4)]
    assert all(stage.server.ask("EXISTS", keys.jobs(keys.base("multiq", partition))) for partition in partitions)
