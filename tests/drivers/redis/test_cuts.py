"""A reply cut at every byte of every verb, a request cut before its end, an emptied script cache: one effect.

Each verb is a scene: the state before, the call, and what must be true after it, once and not twice. The call goes
through a proxy, and all other calls go directly to the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from proxy import MOST, CutReply, CutRequest, Pass, Proxy, Slice, places, some
from scenes import OTHER, QUEUE, THREE_JOBS, Scene, Stage, enqueued, every_verb, play, play_with
from servers.redis import RedisServer

from multiq.backend.registry import open_backend
from multiq.errors import EnqueueUncertain

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """A private server, because each scene first empties the server."""
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def stage(server: RedisServer) -> Iterator[Stage]:
    with (
        Proxy(("127.0.0.1", server.port)) as proxy,
        open_backend(server.url) as there,
        open_backend(f"redis://127.0.0.1:{proxy.port}") as backend,
        backend.consumer([QUEUE, OTHER]) as consumer,
    ):
        yield Stage(proxy, server, there, backend, consumer, lambda: server.ask("FLUSHALL"))


@pytest.fixture(autouse=True)
def _nothing_armed(stage: Stage) -> Iterator[None]:
    yield
    stage.proxy.mode = Pass()
    stage.proxy.disarm()


@pytest.mark.one_row
@pytest.mark.parametrize("most", MOST)
@every_verb
def test_reply_cut_at_any_byte_leaves_exactly_one_effect(stage: Stage, scene: Scene, most: int | None) -> None:
    play(stage, scene)
    _, size = play(stage, scene)
    assert size > 0
    for turn, at in enumerate(some(places(size), most)):
        play_with(stage, scene, CutReply(at=at, rst=turn % 2 == 1))


@pytest.mark.one_row
@every_verb
def test_request_cut_before_its_end_leaves_exactly_one_effect(stage: Stage, scene: Scene) -> None:
    play(stage, scene)  # the first time, the request also contains the scripts' text
    size, _ = play(stage, scene)
    for at in sorted({0, 1, size // 2, size - 1}):
        play_with(stage, scene, CutRequest(at=at))


@every_verb
def test_reply_in_pieces_of_one_byte_is_parsed_the_same(stage: Stage, scene: Scene) -> None:
    stage.proxy.mode = Slice(1)
    play(stage, scene)


@every_verb
def test_flushed_script_cache_makes_no_difference(stage: Stage, scene: Scene) -> None:
    play(stage, scene, lambda: stage.server.ask("SCRIPT", "FLUSH"))


def test_call_is_attempted_twice_and_not_ten_times(stage: Stage) -> None:
    """redis-py by itself would repeat a command up to ten times, and the server might carry out each of them."""
    stage.clear()
    stage.server.ask("CONFIG", "RESETSTAT")
    stage.proxy.arm(CutReply(times=1000))
    with pytest.raises(EnqueueUncertain) as caught:
        stage.backend.enqueue(QUEUE, THREE_JOBS)
    assert caught.value.ids == tuple(job.id for job in THREE_JOBS)
    stage.proxy.disarm()
    ran = stage.server.ask("INFO", "commandstats")["cmdstat_evalsha"]["calls"]
    assert ran <= 2
    assert stage.counts() in {(2, 1, 0, 0), (0, 0, 0, 0)}
    enqueued(stage, stage.backend.enqueue(QUEUE, THREE_JOBS))
