"""A reply cut at every byte of every verb, a request cut before its end, a connection cut before and after the COMMIT:
one effect.

Each verb is a scene: the state before, the call, and what must be true after it, once and not twice. The call goes
through a proxy, and all other calls go directly to the server.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from proxy import MOST, CutReply, CutRequest, Fault, Pass, Proxy, Slice, some
from scenes import OTHER, QUEUE, Scene, Stage, play, play_with
from scenes import SCENES as COMMON

from multiq.backend import (
    Ack,
    After,
    Bury,
    Enqueue,
    Gate,
    NewJob,
    Quota,
    Release,
    State,
    Terms,
    Touch,
    UniqueKey,
)
from multiq.backend.registry import open_backend

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from servers.mysql import MysqlDatabases

    from multiq.backend import Lease

EVERY_BYTE = bool(os.environ.get("MULTIQ_TEST_EVERY_BYTE"))  # takes minutes
STEP = 7  # bytes between two cuts: no packet of the protocol is shorter

# --- verdicts that store something, and forget ------------------------------------------------------------


def keeping(lease: Lease) -> Ack:
    return Ack(lease, After(keep=60, outcome=f"did {lease.id}".encode()))


def kept(stage: Stage, *ids: str) -> None:
    """These jobs are deleted, and the history has their outcomes and no others, each of the first attempt."""
    assert {outcome.id: (outcome.body, outcome.attempt) for outcome in stage.there.history(QUEUE).outcomes} == {
        job_id: (f"did {job_id}".encode(), 1) for job_id in ids
    }


def all_kept(stage: Stage, answers: Sequence[object]) -> None:
    assert list(answers) == [None] * len(stage.leases)
    assert stage.counts() == (0, 0, 0, 0)
    kept(stage, *(lease.id for lease in stage.leases))


def exchanged_and_kept(stage: Stage, answer: tuple[list[object], list[Lease]]) -> None:
    answers, leases = answer
    assert answers == [None, None]
    assert [(lease.id, lease.attempt, lease.memo) for lease in leases] == [("c", 1, b"")]
    kept(stage, "a", "b")
    assert stage.consumer.settle([Ack(lease) for lease in leases]) == [None]


def hold_two_of_three(stage: Stage) -> None:
    stage.hold("a", "b")
    stage.put("c")


def hold_three_and_lose_one(stage: Stage) -> None:
    """Another client acks one of three reserved jobs, so that a settle of all three checks each lease."""
    stage.hold(*"abc")
    with stage.there.consumer([QUEUE]) as other:
        assert other.settle([Ack(stage.leases[1])]) == [None]


def others_kept(stage: Stage, answers: Sequence[object]) -> None:
    assert [answer is None for answer in answers] == [True, False, True]
    assert stage.counts() == (0, 0, 0, 0)
    kept(stage, "a", "c")


def note(stage: Stage) -> list[object]:
    a, b, c = stage.leases
    return list(
        stage.consumer.settle(
            [
                Touch(a, After(memo=b"half")),
                Release(a, after=After(memo=b"more", detail=b"failed")),
                Bury(b, after=After(detail=b"traceback")),
                keeping(c),
            ]
        )
    )


def noted(stage: Stage, answers: list[object]) -> None:
    assert answers == [None] * 4
    a, b = stage.peek("a"), stage.peek("b")
    assert (a.state, a.memo, a.detail) == (State.READY, b"more", b"failed")
    assert (b.state, b.memo, b.detail) == (State.BURIED, b"", b"traceback")
    kept(stage, "c")


def keep_three(stage: Stage) -> None:
    stage.hold(*"abc")
    assert stage.consumer.settle([keeping(lease) for lease in stage.leases]) == [None] * 3


def forgotten(stage: Stage, count: int) -> None:
    assert count == 2
    kept(stage, "c")


def settle_keeping(stage: Stage) -> Sequence[object]:
    return stage.consumer.settle([keeping(lease) for lease in stage.leases])


KEEPING = {
    "lone ack with an outcome": Scene(lambda stage: stage.hold("a"), settle_keeping, all_kept),
    "acks with outcomes": Scene(lambda stage: stage.hold("a", "b"), settle_keeping, all_kept),
    "acks with outcomes, one refused": Scene(hold_three_and_lose_one, settle_keeping, others_kept),
    "exchange with outcomes": Scene(
        hold_two_of_three,
        lambda stage: stage.consumer.exchange([keeping(lease) for lease in stage.leases], 1, 0),
        exchanged_and_kept,
    ),
    "memos, details and an outcome": Scene(lambda stage: stage.hold(*"abc"), note, noted),
    "forget": Scene(keep_three, lambda stage: stage.backend.forget(QUEUE, ["a", "b", "none"]), forgotten),
}

# --- unique keys ------------------------------------------------------------------------------------------


def with_key(job_id: str, key: bytes, body: bytes = b"new", **options: Any) -> NewJob:
    return NewJob(body, job_id, terms=Terms(unique=UniqueKey(key, **options)))


def put_old(stage: Stage) -> None:
    stage.put("old", terms=with_key("", b"k").terms)


def enqueue_with_keys(stage: Stage) -> list[str]:
    replacing = with_key("met", b"k", b"replaced", on_conflict="replace")
    jobs = [with_key("a", b"a", hold=60), replacing, with_key("again", b"a"), NewJob(b"x", "plain")]
    return stage.backend.enqueue(QUEUE, jobs)


def enqueued_with_keys(stage: Stage, ids: list[str]) -> None:
    assert ids == ["a", "old", "a", "plain"]
    assert sorted(stage.ids(State.READY)) == ["a", "old", "plain"]
    assert stage.peek("old").body == b"replaced"
    assert stage.there.enqueue(QUEUE, [with_key("later", b"a"), with_key("last", b"k")]) == ["a", "old"]


def bury_with_keys(stage: Stage) -> None:
    """Bury two jobs with keys and one without. Another job has taken the first key."""
    stage.there.enqueue(
        QUEUE, [with_key("lost", b"k", until="buried"), NewJob(b"x", "plain"), with_key("own", b"o", until="buried")]
    )
    with stage.there.consumer([QUEUE]) as consumer:
        assert consumer.settle([Bury(lease) for lease in consumer.reserve(3, 0)]) == [None] * 3
    put_old(stage)


def kicked_with_keys(stage: Stage, count: int) -> None:
    assert count == 2
    assert (sorted(stage.ids(State.READY)), stage.ids(State.BURIED)) == (["old", "own", "plain"], ["lost"])
    assert [stage.peek(job_id).kicks for job_id in ("own", "plain")] == [1, 1]


def kicked_one(stage: Stage, _: None) -> None:
    assert stage.ids(State.BURIED) == ["lost", "plain"]
    assert stage.peek("own").kicks == 1


def rescheduled_with_key(stage: Stage, job_id: str) -> None:
    assert (job_id, stage.ids(State.DELAYED)) == ("own", ["own"])
    assert stage.there.enqueue(QUEUE, [with_key("met", b"o")]) == ["own"]


def ack_with_keys(stage: Stage) -> list[object]:
    put_old(stage)
    steps = tuple(Enqueue(QUEUE, job) for job in (with_key("met", b"k"), with_key("next", b"n")))
    first, second = stage.leases
    return list(stage.consumer.settle([Ack(first, After(steps=steps)), Release(second, 60)]))


def acked_with_keys(stage: Stage, answers: list[object]) -> None:
    assert answers == [None, None]
    assert (sorted(stage.ids(State.READY)), stage.ids(State.DELAYED)) == (["next", "old"], ["b"])


def carry_out_with_keys(stage: Stage) -> bool:
    jobs = with_key("met", b"k", b"replaced", on_conflict="replace"), with_key("next", b"n")
    return stage.backend.carry_out([Enqueue(QUEUE, job) for job in jobs])


def carried_out_with_keys(stage: Stage, is_done: bool) -> None:
    assert is_done
    assert sorted(stage.ids(State.READY)) == ["next", "old"]
    assert stage.peek("old").body == b"replaced"


UNIQUE = {
    "enqueue with keys": Scene(put_old, enqueue_with_keys, enqueued_with_keys),
    "kick with keys": Scene(bury_with_keys, lambda stage: stage.backend.kick(QUEUE, 10), kicked_with_keys),
    "kick_job with a key": Scene(bury_with_keys, lambda stage: stage.backend.kick_job(QUEUE, "own"), kicked_one),
    "reschedule with a key": Scene(
        bury_with_keys, lambda stage: stage.backend.reschedule(QUEUE, "own", 60), rescheduled_with_key
    ),
    "ack with keys": Scene(lambda stage: stage.hold("a", "b"), ack_with_keys, acked_with_keys),
    "carry_out with keys": Scene(put_old, carry_out_with_keys, carried_out_with_keys),
}

# --- limits -----------------------------------------------------------------------------------------------


def limit(stage: Stage) -> None:
    """Store two limits with one slot, and enqueue three jobs that need it."""
    stage.there.limits(QUEUE, {"one": Quota(slots=1), "fair": Quota(fair=True)})
    stage.put("a", "b", "c", terms=Terms(gates=(Gate("one"), Gate("fair", "7"))))


def run_one(stage: Stage) -> None:
    limit(stage)
    stage.leases = stage.consumer.reserve(3, 0)
    assert [lease.id for lease in stage.leases] == ["a"]


def one_runs(stage: Stage, job_id: str, parked: int) -> None:
    """This job alone runs, in its first attempt, and each of the others waits at one limit."""
    states = stage.there.limits(QUEUE)
    assert [(state.name, state.running) for state in states] == [("fair", 1), ("one", 1)]
    assert sum(state.parked for state in states) == parked
    assert (stage.peek(job_id).state, stage.peek(job_id).attempt) == (State.RESERVED, 1)


def reserved_one(stage: Stage, leases: list[Lease]) -> None:
    assert [(lease.id, lease.attempt) for lease in leases] == [("a", 1)]
    one_runs(stage, "a", 2)
    assert stage.consumer.settle([Ack(lease) for lease in leases]) == [None]


def exchanged_one(stage: Stage, answer: tuple[list[object], list[Lease]]) -> None:
    answers, leases = answer
    assert (answers, [(lease.id, lease.attempt) for lease in leases]) == ([None], [("b", 1)])
    one_runs(stage, "b", 1)
    assert stage.consumer.settle([Ack(lease) for lease in leases]) == [None]


def park(stage: Stage) -> None:
    """Park a job that waits for a closed limit, and one behind it that does not."""
    stage.there.limits(QUEUE, {"closed": Quota(slots=0), "fair": Quota(fair=True)})
    stage.put("a", terms=Terms(gates=(Gate("closed"), Gate("fair", "7"))))
    stage.put("b", terms=Terms(gates=(Gate("fair", "7"),)))
    assert stage.consumer.reserve(3, 0) == []


def line_goes_on(stage: Stage, answer: object) -> None:
    assert answer in {None, 1, "a"}
    leases = stage.consumer.reserve(3, 5)
    assert [lease.id for lease in leases] == ["b"]
    assert stage.consumer.settle([Ack(lease) for lease in leases]) == [None]


def purge_first(stage: Stage) -> int:
    """Purge the parked jobs, and enqueue the second one again."""
    purged = stage.backend.purge(QUEUE, [State.READY])
    stage.put("b", terms=Terms(gates=(Gate("fair", "7"),)))
    return purged - 1


LIMITS = {
    "delete of a parked job": Scene(park, lambda stage: stage.backend.delete(QUEUE, "a"), line_goes_on),
    "reschedule of a parked job": Scene(park, lambda stage: stage.backend.reschedule(QUEUE, "a", 60), line_goes_on),
    "purge of parked jobs": Scene(park, purge_first, line_goes_on),
    "reserve within limits": Scene(limit, lambda stage: stage.consumer.reserve(3, 5), reserved_one),
    "exchange within limits": Scene(
        run_one, lambda stage: stage.consumer.exchange([Ack(lease) for lease in stage.leases], 3, 5), exchanged_one
    ),
}
SCENES = COMMON | KEEPING | UNIQUE | LIMITS

every_verb = pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES.keys())


@pytest.fixture(scope="module")
def stage(mysql_server: MysqlDatabases) -> Iterator[Stage]:
    with (
        mysql_server.database() as place,
        Proxy((mysql_server.host, mysql_server.port)) as proxy,
        open_backend(place.url) as there,
        open_backend(mysql_server.url(place.name, port=proxy.port)) as backend,
        backend.consumer([QUEUE, OTHER]) as consumer,
    ):
        # Both connect before the first fault, which is for a packet of the scene. The first packet of a connection has
        # the word COMMIT, too. A consumer connects when there is a job.
        backend.enqueue(QUEUE, [NewJob(b"x", "first")])
        consumer.reserve(1, 0)
        yield Stage(proxy, mysql_server, there, backend, consumer, lambda: _wipe(mysql_server, place.name))


@pytest.fixture(autouse=True)
def _nothing_armed(stage: Stage) -> Iterator[None]:
    yield
    stage.proxy.mode = Pass()
    stage.proxy.disarm()


def _wipe(server: MysqlDatabases, database: str) -> None:
    for table in ("jobs", "queues", "outcomes", "arrivals", "notes", "unique", "limits", "gates", "lines", "leases"):
        server.ask(f"DELETE FROM multiq_{table}", database=database)  # noqa: S608 - ours


def places(size: int) -> range:
    """The places at which to cut a reply or request of *size* bytes: at least one in each packet."""
    return range(0, size, 1 if EVERY_BYTE else STEP)


@pytest.mark.one_row
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
@pytest.mark.long
def test_a_request_that_is_cut_before_it_is_whole_leaves_exactly_one_effect(stage: Stage, scene: Scene) -> None:
    size, _ = play(stage, scene)
    for at in sorted({0, 1, size // 4, size // 2, size * 3 // 4, size - 40}):
        play_with(stage, scene, CutRequest(at=at))


@every_verb
@pytest.mark.long
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
    *KEEPING,
    *UNIQUE,
    *LIMITS,
]


@pytest.mark.one_row
@pytest.mark.parametrize("fault", [CutRequest(after=b"COMMI"), CutReply(after=b"COMMIT")], ids=["before", "after"])
@pytest.mark.parametrize("name", WITH_COMMIT)
def test_a_cut_before_or_after_the_commit_leaves_exactly_one_effect(stage: Stage, name: str, fault: Fault) -> None:
    """The client cannot know on which side of the commit the connection was cut."""
    play_with(stage, SCENES[name], fault)
