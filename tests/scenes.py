"""Scenes, played through a proxy that cuts connections: jobs that exist before, a call, and checks after it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from multiq.backend import Ack, Bury, GiveBack, NewJob, Release, State, Touch
from multiq.errors import JobNotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from proxy import Fault, Proxy

    from multiq.backend import Backend, Consumer, JobRecord, Lease, Verdict

QUEUE = "mail"
OTHER = "other"
SEVERAL = ("a", "b", "c")


@dataclass
class Stage:
    """What a scene uses: a backend and a consumer through the proxy, and a backend directly to the server."""

    proxy: Proxy
    server: Any
    """The server, through the interface that the driver's tests use."""
    there: Backend
    """A backend that is connected without the proxy."""
    backend: Backend
    consumer: Consumer
    wipe: Callable[[], object]
    """Removes all jobs, without multiq."""
    leases: list[Lease] = field(default_factory=list)

    def clear(self) -> None:
        """Begin again with empty queues, open connections, and a consumer without leases."""
        self.wipe()
        self.leases = []
        self.backend.stats(QUEUE)
        self.consumer.reserve(1, 0)

    def put(self, *ids: str, queue: str = QUEUE, **options: Any) -> None:
        self.there.enqueue(queue, [NewJob(f"body of {job_id}".encode(), job_id, **options) for job_id in ids])

    def hold(self, *ids: str, **options: Any) -> None:
        self.put(*ids, **options)
        self.leases = self.consumer.reserve(len(ids), 0)
        assert [lease.id for lease in self.leases] == list(ids)

    def bury(self, *ids: str) -> None:
        self.put(*ids)
        with self.there.consumer([QUEUE]) as consumer:
            leases = consumer.reserve(len(ids), 0)
            assert consumer.settle([Bury(lease, "was bad") for lease in leases]) == [None] * len(ids)

    def counts(self, queue: str = QUEUE) -> tuple[int | None, ...]:
        stats = self.there.stats(queue)
        return stats.ready, stats.delayed, stats.reserved, stats.buried

    def ids(self, state: State) -> list[str]:
        return [job.id for job in self.there.jobs(QUEUE, state).jobs]

    def peek(self, job_id: str) -> JobRecord:
        return self.there.peek(QUEUE, job_id)


@dataclass
class Scene:
    """A test of one operation."""

    given: Callable[[Stage], object]
    act: Callable[[Stage], Any]
    then: Callable[[Stage, Any], None]


def play(stage: Stage, scene: Scene, before: Callable[[], None] = lambda: None) -> tuple[int, int]:
    """Play a scene from the start. Returns how many bytes the call sent, and how many it received."""
    stage.clear()
    scene.given(stage)
    sent, replied = stage.proxy.sent, stage.proxy.replied
    before()
    answer = scene.act(stage)
    sizes = stage.proxy.sent - sent, stage.proxy.replied - replied
    scene.then(stage, answer)
    in_step(stage)
    return sizes


def play_with(stage: Stage, scene: Scene, fault: Fault) -> None:
    """Play a scene with a fault in its call; the fault must happen."""
    sent, replied = play(stage, scene, lambda: stage.proxy.arm(fault))
    assert not stage.proxy.is_armed, f"nothing was cut: {fault} of {sent} sent and {replied} replied bytes"


def in_step(stage: Stage) -> None:
    """The next calls on the same connections get their own replies, and not those of other calls."""
    stage.put("probe", queue="probe")
    assert stage.backend.peek("probe", "probe").body == b"body of probe"
    assert stage.backend.stats("never used").ready == 0


def settles(verdict: Callable[[Lease], Verdict], then: Callable[[Stage], None]) -> Scene:
    """A scene in which the consumer holds two jobs, and gives both this verdict in one call."""

    def check(stage: Stage, answers: Sequence[object]) -> None:
        assert list(answers) == [None, None]
        then(stage)

    return Scene(
        lambda stage: stage.hold("a", "b"),
        lambda stage: stage.consumer.settle([verdict(lease) for lease in stage.leases]),
        check,
    )


# --- what must be true afterwards ------------------------------------------------------------------------


def enqueued(stage: Stage, ids: list[str]) -> None:
    assert ids == ["a", "b", "late"]
    assert (stage.ids(State.READY), stage.ids(State.DELAYED)) == (["a", "b"], ["late"])
    assert stage.peek("b").body == b"two"


def reserved(stage: Stage, leases: list[Lease]) -> None:
    assert [(lease.id, lease.body, lease.attempt, lease.crashes) for lease in leases] == [
        ("a", b"body of a", 1, 0),
        ("b", b"body of b", 1, 0),
    ]
    assert stage.counts() == (1, 0, 2, 0)
    assert stage.consumer.settle([Ack(lease) for lease in leases]) == [None, None]
    assert stage.counts() == (1, 0, 0, 0)


def reserved_from_both(stage: Stage, leases: list[Lease]) -> None:
    assert [(lease.queue, lease.id, lease.attempt) for lease in leases] == [(QUEUE, "a", 1), (OTHER, "x", 1)]
    assert stage.counts() == (0, 0, 1, 0)
    assert stage.counts(OTHER) == (1, 0, 1, 0)
    assert stage.consumer.settle([Ack(lease) for lease in leases]) == [None, None]


def acked(stage: Stage) -> None:
    assert stage.counts() == (0, 0, 0, 0)


def released(stage: Stage) -> None:
    assert stage.ids(State.READY) == ["a", "b"]
    assert [(stage.peek(job_id).attempt, stage.peek(job_id).crashes) for job_id in "ab"] == [(1, 0), (1, 0)]
    assert [(stage.peek(job_id).priority, stage.peek(job_id).reason) for job_id in "ab"] == [(7, "later")] * 2


def released_late(stage: Stage) -> None:
    assert stage.counts() == (0, 2, 0, 0)


def buried(stage: Stage) -> None:
    assert stage.ids(State.BURIED) == ["a", "b"]
    assert [(stage.peek(job_id).reason, stage.peek(job_id).kicks) for job_id in "ab"] == [("no good", 0)] * 2


def touched(stage: Stage) -> None:
    assert stage.counts() == (0, 0, 2, 0)
    assert stage.consumer.settle([Ack(lease) for lease in stage.leases]) == [None, None]


def given_back(stage: Stage) -> None:
    assert stage.ids(State.READY) == ["a", "b"]
    assert [stage.peek(job_id).attempt for job_id in "ab"] == [0, 0]


def exchanged(stage: Stage, answer: tuple[list[object], list[Lease]]) -> None:
    lost, leases = answer
    assert lost == [None, None]
    assert [(lease.id, lease.attempt) for lease in leases] == [("c", 1), ("d", 1)]
    assert stage.counts() == (1, 0, 2, 0)
    assert stage.consumer.settle([Ack(lease) for lease in leases]) == [None, None]


def peeked(stage: Stage, job: JobRecord) -> None:
    assert (job.id, job.body, job.state) == ("b", b"body of b", State.READY)


def listed(stage: Stage, page: Any) -> None:
    assert [(job.id, job.body) for job in page.jobs] == [("a", b"body of a"), ("b", b"body of b")]
    assert page.after is not None


def deleted(stage: Stage, _: None) -> None:
    with pytest.raises(JobNotFound):
        stage.peek("b")
    assert stage.ids(State.READY) == ["a", "c"]


def rescheduled(stage: Stage, job_id: str) -> None:
    assert job_id == "b"
    assert (stage.ids(State.READY), stage.ids(State.DELAYED)) == (["a", "c"], ["b"])
    assert 3500 < (stage.peek("b").due_in or 0) <= 3600


def kicked(stage: Stage, count: int) -> None:
    assert count == 2
    assert (stage.ids(State.READY), stage.ids(State.BURIED)) == (["a", "b"], ["c"])
    assert [stage.peek(job_id).kicks for job_id in SEVERAL] == [1, 1, 0]


def kicked_one(stage: Stage, _: None) -> None:
    assert (stage.ids(State.READY), stage.ids(State.BURIED)) == (["b"], ["a", "c"])
    assert stage.peek("b").kicks == 1


def paused(stage: Stage, _: None) -> None:
    assert 3500 < (stage.there.stats(QUEUE).paused_for or 0) <= 3600
    assert stage.counts() == (3, 0, 0, 0)


def resumed(stage: Stage, _: None) -> None:
    assert stage.there.stats(QUEUE).paused_for is None
    assert [lease.id for lease in stage.consumer.reserve(1, 0)] == ["a"]


def purged(stage: Stage, count: int) -> None:
    assert count == 3
    assert stage.counts() == (0, 1, 0, 0)


def counted(stage: Stage, stats: Any) -> None:
    assert (stats.ready, stats.delayed, stats.reserved, stats.buried) == (3, 1, 0, 0)


def named(stage: Stage, names: list[str]) -> None:
    assert names == [QUEUE, OTHER]


# --- the verbs -------------------------------------------------------------------------------------------


class Given(Protocol):
    """The part of a stage that prepares a scene before its call, the same for each kind of stage."""

    def put(self, *ids: str, queue: str = ..., delay: int = ...) -> None: ...
    def hold(self, *ids: str) -> None: ...


def some_and_a_late_one(stage: Given) -> None:
    stage.put(*SEVERAL)
    stage.put("late", delay=3600)


def two_queues(stage: Given) -> None:
    stage.put("a")
    stage.put("x", "y", queue=OTHER)


def two_held_and_three_waiting(stage: Given) -> None:
    stage.hold("a", "b")
    stage.put("c", "d", "e")


def paused_with_jobs(stage: Stage) -> None:
    stage.put(*SEVERAL)
    stage.there.pause(QUEUE, 3600)


THREE_JOBS = [NewJob(b"one", "a"), NewJob(b"two", "b"), NewJob(b"three", "late", delay=3600)]

SCENES = {
    "enqueue": Scene(lambda _: None, lambda stage: stage.backend.enqueue(QUEUE, THREE_JOBS), enqueued),
    "reserve": Scene(lambda stage: stage.put(*SEVERAL), lambda stage: stage.consumer.reserve(2, 0), reserved),
    "reserve from two queues": Scene(two_queues, lambda stage: stage.consumer.reserve(2, 0), reserved_from_both),
    "ack": settles(Ack, acked),
    "release": settles(lambda lease: Release(lease, priority=7, reason="later"), released),
    "release with a delay": settles(lambda lease: Release(lease, delay=3600), released_late),
    "bury": settles(lambda lease: Bury(lease, "no good"), buried),
    "touch": settles(Touch, touched),
    "give back": settles(GiveBack, given_back),
    "exchange": Scene(
        two_held_and_three_waiting,
        lambda stage: stage.consumer.exchange([Ack(lease) for lease in stage.leases], 2, 0),
        exchanged,
    ),
    "peek": Scene(lambda stage: stage.put(*SEVERAL), lambda stage: stage.backend.peek(QUEUE, "b"), peeked),
    "jobs": Scene(
        lambda stage: stage.put(*SEVERAL), lambda stage: stage.backend.jobs(QUEUE, State.READY, limit=2), listed
    ),
    "delete": Scene(lambda stage: stage.put(*SEVERAL), lambda stage: stage.backend.delete(QUEUE, "b"), deleted),
    "reschedule": Scene(
        lambda stage: stage.put(*SEVERAL), lambda stage: stage.backend.reschedule(QUEUE, "b", 3600), rescheduled
    ),
    "kick": Scene(lambda stage: stage.bury(*SEVERAL), lambda stage: stage.backend.kick(QUEUE, 2), kicked),
    "kick_job": Scene(lambda stage: stage.bury(*SEVERAL), lambda stage: stage.backend.kick_job(QUEUE, "b"), kicked_one),
    "pause": Scene(lambda stage: stage.put(*SEVERAL), lambda stage: stage.backend.pause(QUEUE, 3600), paused),
    "resume": Scene(paused_with_jobs, lambda stage: stage.backend.resume(QUEUE), resumed),
    "purge": Scene(some_and_a_late_one, lambda stage: stage.backend.purge(QUEUE, [State.READY, State.BURIED]), purged),
    "stats": Scene(some_and_a_late_one, lambda stage: stage.backend.stats(QUEUE), counted),
    "queues": Scene(two_queues, lambda stage: stage.backend.queues(), named),
}

every_verb = pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES.keys())
