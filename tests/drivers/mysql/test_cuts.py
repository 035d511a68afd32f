"""A reply cut at every byte of every verb, a request cut before it is whole, a COMMIT before and after: one effect.

Each verb is a scene: what is there before, the call, and what must be true after it, once and not twice. The call goes
through a proxy, everything else beside it.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

import pytest
from proxy import MOST, CutReply, CutRequest, Fault, Pass, Proxy, Slice, some
from scenes import OTHER, QUEUE, SCENES, Scene, Stage, every_verb, play, play_with

from multiq.backend.registry import open_backend

if TYPE_CHECKING:
    from collections.abc import Iterator

    from servers.mysql import MysqlDatabases

EVERY_BYTE = bool(os.environ.get("MULTIQ_TEST_EVERY_BYTE"))  # takes minutes
STEP = 7  # bytes, otherwise: no packet of the protocol is shorter


@pytest.fixture(scope="module")
def stage(mysql_server: MysqlDatabases) -> Iterator[Stage]:
    with (
        mysql_server.database() as place,
        Proxy((mysql_server.host, mysql_server.port)) as proxy,
        open_backend(place.url) as there,
        open_backend(mysql_server.url(place.name, port=proxy.port)) as backend,
        backend.consumer([QUEUE, OTHER]) as consumer,
    ):
        backend.queues()
        yield Stage(proxy, mysql_server, there, backend, consumer, lambda: _wipe(mysql_server, place.name))


@pytest.fixture(autouse=True)
def _nothing_armed(stage: Stage) -> Iterator[None]:
    yield
    stage.proxy.mode = Pass()
    stage.proxy.disarm()


def _wipe(server: MysqlDatabases, database: str) -> None:
    for table in ("multiq_jobs", "multiq_queues"):
        server.ask(f"DELETE FROM {table}", database=database)  # noqa: S608 - ours


def places(size: int) -> range:
    """Where to cut so many bytes: at least once in each packet."""
    return range(0, size, 1 if EVERY_BYTE else STEP)


@pytest.mark.parametrize("most", MOST)
@every_verb
def test_a_reply_that_is_cut_at_any_byte_leaves_exactly_one_effect(
    stage: Stage, scene: Scene, most: int | None
) -> None:
    play(stage, scene)
    _, size = play(stage, scene)
    assert size > 0
    for turn, at in enumerate(some(places(size), most)):
        fault = CutReply(at=at, rst=turn % 2 == 1)
        _, replied = play(stage, scene, partial(stage.proxy.arm, fault))
        assert not stage.proxy.is_armed or replied <= at, f"nothing was cut at byte {at} of {replied}"
        stage.proxy.disarm()


@every_verb
def test_a_request_that_is_cut_before_it_is_whole_leaves_exactly_one_effect(stage: Stage, scene: Scene) -> None:
    size, _ = play(stage, scene)
    for at in sorted({0, 1, size // 4, size // 2, size * 3 // 4, size - 40}):
        play_with(stage, scene, CutRequest(at=at))


@every_verb
def test_a_reply_in_pieces_of_one_byte_says_the_same(stage: Stage, scene: Scene) -> None:
    stage.proxy.mode = Slice(1)
    play(stage, scene)


WITH_COMMIT = [
    "reserve",
    "reserve from two queues",
    "exchange",
    "release",
    "bury",
    "touch",
    "give back",
    "reschedule",
    "kick",
]


@pytest.mark.parametrize("fault", [CutRequest(after=b"COMMI"), CutReply(after=b"COMMIT")], ids=["before", "after"])
@pytest.mark.parametrize("name", WITH_COMMIT)
def test_a_cut_before_or_after_the_commit_leaves_exactly_one_effect(stage: Stage, name: str, fault: Fault) -> None:
    """The client cannot know which of the two it was."""
    play_with(stage, SCENES[name], fault)
