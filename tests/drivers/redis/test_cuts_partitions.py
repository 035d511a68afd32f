"""Replies cut at every byte, of calls to several partitions in one round trip: still exactly one effect of each.

On one server, so that all partitions' replies come over one connection and a cut may hit any of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from proxy import MOST, CutReply, CutRequest, Pass, Proxy, Slice, places, some
from scenes import QUEUE, Scene, Stage, play, play_with
from servers.redis import RedisServer

from multiq.backend import Ack, Bury, NewJob, Release, State
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
    """A stage for jobs that come in no one order."""

    def hold(self, *ids: str, **options: Any) -> None:
        self.put(*ids, **options)
        self.leases = sorted(self.consumer.reserve(len(ids), 0), key=lambda lease: ids.index(lease.id))
        assert [lease.id for lease in self.leases] == list(ids)
        assert len({partition_of(lease) for lease in self.leases}) >= 3  # else this would test less than it claims

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
    """How many bytes a scene sends and gets at least: the rotation decides how many partitions are asked first."""
    play(stage, scene)
    seen = [play(stage, scene) for _ in range(8)]
    return min(sent for sent, _ in seen), min(replied for _, replied in seen)


@pytest.mark.parametrize("most", MOST)
@every_scene
def test_reply_cut_at_any_byte_leaves_exactly_one_effect(stage: Stage, scene: Scene, most: int | None) -> None:
    _, size = sizes(stage, scene)
    for turn, at in enumerate(some(places(size), most)):
        play_with(stage, scene, CutReply(at=at, rst=turn % 2 == 1))


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


@every_scene
def test_flushed_script_cache_makes_no_difference(stage: Stage, scene: Scene) -> None:
    play(stage, scene, lambda: stage.server.ask("SCRIPT", "FLUSH"))


def test_jobs_of_these_scenes_are_in_all_partitions(stage: Stage) -> None:
    stage.clear()
    stage.put(*IDS)
    partitions = [keys.partition(QUEUE, number) for number in range(4)]
    assert all(stage.server.ask("EXISTS", keys.jobs(keys.base("multiq", partition))) for partition in partitions)
