"""Cut connections: the reply to every call is cut at every byte, the request before its end. No job is lost.

Each call is a scene: the state before, the call, and what must be true after it. beanstalkd knows no tokens, so a call
whose reply was lost may raise an error that its outcome is unknown. But it never returns a wrong answer, and the next
calls get their own answers. The call goes through a proxy, everything else beside it, in the server's own words.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from proxy import MOST, CutReply, CutRequest, Pass, Proxy, Slice, places, some
from scenes import OTHER, QUEUE, some_and_a_late_one, two_held_and_three_waiting, two_queues
from servers.beanstalk import BareClient, BeanstalkServer
from servers.process import until

from multiq.backend import Ack, Bury, GiveBack, NewJob, Release, State, Touch
from multiq.backend.registry import open_backend
from multiq.errors import BackendUnavailable, EnqueueUncertain, LeaseLost, MultiqError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from multiq.backend import Backend, Consumer, JobRecord, Lease, Page, QueueStats, Verdict

EVERY_BYTE = 400  # of a reply up to this length; of a longer one the two ends, and a spread between them
#: bytes by which replies differ in length: ids and ages have more digits, and on a busy machine the lease timer sends
#: a no-op, whose reply (NOT_FOUND) comes along
VARIES = 20

ABC = ("a", "b", "c")


@dataclass
class Stage:
    """What a scene uses: clients that go through the proxy, and clients that connect to the server directly."""

    proxy: Proxy
    client: BareClient
    """Beside the proxy."""
    backend: Backend
    consumer: Consumer
    is_cut: bool = False
    """Whether a connection is cut while the scene is played."""
    leases: list[Lease] = field(default_factory=list)
    ids: dict[str, int] = field(default_factory=dict)
    """The body of each job that the scene has put -> its id."""

    def clear(self) -> None:
        """Empty tubes, open connections, and a consumer that holds nothing."""
        self.consumer.close()
        until(lambda: self.client.stats()["current-jobs-reserved"] == "0", "nothing is held")
        for tube in self.tubes():
            self.client.ask(b"use " + tube)
            for state in (b"ready", b"delayed", b"buried"):
                while (reply := self.client.ask(b"peek-" + state)).startswith(b"FOUND"):
                    self.client.ask(b"delete " + reply.split()[1])
            self.client.ask(b"pause-tube %b 0" % tube)
        self.client.ask(b"use default")
        self.leases, self.ids = [], {}
        self.consumer = self.backend.consumer([QUEUE, OTHER])
        self.backend.stats(QUEUE)
        assert self.consumer.reserve(1, 0) == []

    def put(self, *bodies: str, queue: str = QUEUE, **options: int) -> None:
        for body in bodies:
            self.ids[body] = self.client.put(body.encode(), tube=queue, **options)

    def hold(self, *bodies: str) -> None:
        self.put(*bodies)
        self.leases = self.consumer.reserve(len(bodies), 0)
        assert [lease.body.decode() for lease in self.leases] == list(bodies)

    def bury(self, *bodies: str) -> None:
        self.put(*bodies)
        self.client.watch(QUEUE)
        for body in bodies:
            assert self.client.reserve() == (self.ids[body], body.encode())
            self.client.ask(b"bury %d 1024" % self.ids[body])
        self.client.watch("default")
        self.client.ask(b"ignore " + QUEUE.encode())

    def pause(self) -> None:
        assert self.client.ask(b"pause-tube %b 3600" % QUEUE.encode()) == b"PAUSED"

    def jobs(self) -> list[tuple[str, str]]:
        """The body and the state of each job on the server that was put in this scene, in the order of the ids."""
        mark = self.client.put(b"mark", tube="default")
        self.client.ask(b"delete %d" % mark)
        found = []
        for job_id in range(min(self.ids.values(), default=max(1, mark - 10)), mark):
            reply = self.client.ask(b"peek %d" % job_id)
            stats = self.client.stats("job", str(job_id))
            if reply.startswith(b"FOUND") and stats:
                found.append((reply.partition(b"\r\n")[2].decode(), stats["state"]))
        return found

    def becomes(self, *allowed: Sequence[tuple[str, str]]) -> None:
        """The jobs are as in one of these lists, once the server has noticed the lost connection."""
        wanted = [list(one) for one in allowed]
        seen: list[Any] = []

        def fits() -> bool:
            seen[:] = self.jobs()
            return seen in wanted

        until(fits, f"the jobs are {' or '.join(map(str, wanted))}, not {seen}")

    def state(self, body: str) -> str | None:
        return self.client.stats("job", str(self.ids[body])).get("state")

    def tubes(self) -> list[bytes]:
        return [line[2:] for line in self.client.ask(b"list-tubes").split(b"\n") if line.startswith(b"- ")]


@dataclass
class Scene:
    """One call."""

    given: Callable[[Stage], object]
    act: Callable[[Stage], Any]
    answered: Callable[[Stage, Any], None]
    """Asserts what holds after the call has returned."""
    failed: Callable[[Stage, Any], None]
    """Asserts what holds after the call has raised one of *errors*: the jobs are as before the call, or as after it."""
    errors: tuple[type[MultiqError], ...] = (BackendUnavailable,)


def ready(*bodies: str) -> list[tuple[str, str]]:
    return [(body, "ready") for body in bodies]


# --- enqueue ---------------------------------------------------------------------------------------------

NEW_JOBS = [NewJob(b"one", "1"), NewJob(b"two", "2"), NewJob(b"late", "3", delay=3600)]
STORED = [("one", "ready"), ("two", "ready"), ("late", "delayed")]


def enqueued(stage: Stage, ids: list[str]) -> None:
    assert len(ids) == 3
    stage.ids = dict(zip(("one", "two", "late"), map(int, ids), strict=True))
    stage.becomes(STORED)


def uncertain(stage: Stage, error: MultiqError) -> None:
    if not isinstance(error, EnqueueUncertain):
        stage.becomes([])  # nothing was sent
        return
    assert error.queue == QUEUE
    assert error.jobs, "what is uncertain is in hand"
    certain = len(NEW_JOBS) - len(error.jobs)
    assert list(error.jobs) == NEW_JOBS[certain:]
    stage.becomes(*(STORED[:count] for count in range(certain, 4)))


# --- settling --------------------------------------------------------------------------------------------


def settles(verdict: Callable[[Lease], Verdict], done: str | None) -> Scene:
    """Two reserved jobs get this verdict in one call. *done* is their state afterwards. None: they are deleted.

    A lost connection makes them ready, and ends their leases. A verdict without an answer is refused, whether it was
    carried out or not.
    """

    def verdicts(stage: Stage) -> list[Verdict]:
        return [verdict(lease) for lease in stage.leases]

    def answered(stage: Stage, answers: list[LeaseLost | None]) -> None:
        if not stage.is_cut:
            assert answers == [None, None]
        until(lambda: done == "reserved" or "reserved" not in (stage.state("a"), stage.state("b")), "it is settled")
        for body, answer in zip(("a", "b"), answers, strict=True):
            assert stage.state(body) == done or (isinstance(answer, LeaseLost) and stage.state(body) == "ready")
        assert all(isinstance(again, LeaseLost) for again in stage.consumer.settle(verdicts(stage)))

    return Scene(
        lambda stage: stage.hold("a", "b"), lambda stage: stage.consumer.settle(verdicts(stage)), answered, never, ()
    )


def never(_: Stage, error: MultiqError) -> None:
    """The call must not fail."""
    raise error


def touched(stage: Stage, answers: list[LeaseLost | None]) -> None:
    if not stage.is_cut:
        assert answers == [None, None]
    for lease, answer in zip(stage.leases, answers, strict=True):
        if answer is None:
            assert stage.consumer.settle([Ack(lease)]) == [None]
        else:
            until(lambda lease=lease: stage.state(lease.body.decode()) == "ready", "it is ready")  # type: ignore[misc]


def not_touched(stage: Stage, _: BackendUnavailable) -> None:
    stage.becomes(ready("a", "b"))


# --- reserving -------------------------------------------------------------------------------------------


def reserved(stage: Stage, leases: list[Lease]) -> None:
    assert [lease.body for lease in leases] == [b"a", b"b"]
    assert {lease.attempt for lease in leases} <= ({1, 2} if stage.is_cut else {1})
    assert stage.consumer.settle([Ack(lease) for lease in leases]) == [None, None]
    stage.becomes(ready("c"))


def reserved_from_both(stage: Stage, leases: list[Lease]) -> None:
    assert [(lease.queue, lease.body) for lease in leases] == [(QUEUE, b"a"), (OTHER, b"x")]
    assert stage.consumer.settle([Ack(lease) for lease in leases]) == [None, None]
    stage.becomes(ready("y"))


def exchanged(stage: Stage, answer: tuple[list[LeaseLost | None], list[Lease]]) -> None:
    lost, leases = answer
    acked = [lease.body.decode() for lease, refusal in zip(stage.leases, lost, strict=True) if refusal is None]
    if not stage.is_cut:
        assert acked == ["a", "b"]
        assert [lease.body for lease in leases] == [b"c", b"d"]
    assert stage.consumer.settle([Ack(lease) for lease in leases]) == [None] * len(leases)
    done = {*acked, *(lease.body.decode() for lease in leases)}
    perhaps = {"", "a", "b", "ab"} if stage.is_cut else {""}  # acks that were carried out, but whose replies were cut
    stage.becomes(*(ready(*(body for body in "abcde" if body not in {*done, *more})) for more in sorted(perhaps)))


# --- looking ---------------------------------------------------------------------------------------------


def peeked(stage: Stage, job: JobRecord) -> None:
    assert (job.id, job.body, job.state) == (str(stage.ids["b"]), b"b", State.READY)


def listed(_: Stage, page: Page) -> None:
    assert [job.body for job in page.jobs] == [b"a"]


def counted(_: Stage, stats: QueueStats) -> None:
    assert (stats.ready, stats.delayed, stats.reserved, stats.buried) == (3, 1, 0, 0)


def named(_: Stage, names: list[str]) -> None:
    assert names == [QUEUE, OTHER]


def unchanged(stage: Stage, _: BackendUnavailable) -> None:
    assert set(stage.jobs()) >= set(ready("a"))


# --- managing --------------------------------------------------------------------------------------------


def deleted(stage: Stage, _: None) -> None:
    stage.becomes(ready("a", "c"))


def perhaps_deleted(stage: Stage, _: BackendUnavailable) -> None:
    stage.becomes(ready("a", "c"), ready("a", "b", "c"))


RESCHEDULED = [*ready("a", "c"), ("b", "delayed")]


def rescheduled(stage: Stage, job_id: str) -> None:
    assert job_id != str(stage.ids["b"])
    stage.becomes(RESCHEDULED)


def perhaps_rescheduled(stage: Stage, _: MultiqError) -> None:
    stage.becomes(ready("a", "b", "c"), [*ready("a", "b", "c"), ("b", "delayed")], RESCHEDULED)


def states_of_abc(*states: str) -> list[tuple[str, str]]:
    return list(zip(ABC, states, strict=True))


def kicked(stage: Stage, count: int) -> None:
    if not stage.is_cut:
        assert count == 2
    stage.becomes(states_of_abc("ready", "ready", "buried"))


def perhaps_kicked(stage: Stage, _: BackendUnavailable) -> None:
    stage.becomes(*(states_of_abc(*["ready"] * count, *["buried"] * (3 - count)) for count in range(3)))


def kicked_one(stage: Stage, _: None) -> None:
    stage.becomes(states_of_abc("buried", "ready", "buried"))


def perhaps_kicked_one(stage: Stage, _: BackendUnavailable) -> None:
    stage.becomes(states_of_abc("buried", "ready", "buried"), states_of_abc("buried", "buried", "buried"))


def paused(stage: Stage, _: None) -> None:
    assert stage.client.stats("tube", QUEUE)["pause"] == "3600"


def resumed(stage: Stage, _: None) -> None:
    assert stage.client.stats("tube", QUEUE)["pause"] == "0"


def purged(stage: Stage, count: int) -> None:
    assert count <= 3 if stage.is_cut else count == 3
    stage.becomes([("late", "delayed")])


def perhaps_purged(stage: Stage, _: BackendUnavailable) -> None:
    late = [("late", "delayed")]
    stage.becomes(late, *(ready(*left) + late for left in ("c", "bc", "abc")))


# --- the calls -------------------------------------------------------------------------------------------


def paused_with_jobs(stage: Stage) -> None:
    stage.put(*ABC)
    stage.pause()


def three(stage: Stage) -> None:
    stage.put(*ABC)


def id_of(stage: Stage, body: str) -> str:
    return str(stage.ids[body])


SCENES = {
    "enqueue": Scene(
        lambda _: None,
        lambda stage: stage.backend.enqueue(QUEUE, NEW_JOBS),
        enqueued,
        uncertain,
        (EnqueueUncertain, BackendUnavailable),
    ),
    "reserve": Scene(
        three,
        lambda stage: stage.consumer.reserve(2, 0),
        reserved,
        lambda stage, _: stage.becomes(ready(*ABC)),
    ),
    "reserve from two queues": Scene(
        two_queues,
        lambda stage: stage.consumer.reserve(2, 0),
        reserved_from_both,
        lambda stage, _: stage.becomes(ready("a", "x", "y")),
    ),
    "ack": settles(Ack, None),
    "release": settles(lambda lease: Release(lease, priority=7), "ready"),
    "release with a delay": settles(lambda lease: Release(lease, delay=3600), "delayed"),
    "bury": settles(Bury, "buried"),
    "touch": Scene(
        lambda stage: stage.hold("a", "b"),
        lambda stage: stage.consumer.settle([Touch(lease) for lease in stage.leases]),
        touched,
        not_touched,
    ),
    "give back": settles(GiveBack, "ready"),
    "exchange": Scene(
        two_held_and_three_waiting,
        lambda stage: stage.consumer.exchange([Ack(lease) for lease in stage.leases], 2, 0),
        exchanged,
        never,
        (),
    ),
    "peek": Scene(three, lambda stage: stage.backend.peek(QUEUE, id_of(stage, "b")), peeked, unchanged),
    "jobs": Scene(three, lambda stage: stage.backend.jobs(QUEUE, State.READY, limit=1), listed, unchanged),
    "stats": Scene(some_and_a_late_one, lambda stage: stage.backend.stats(QUEUE), counted, unchanged),
    "queues": Scene(two_queues, lambda stage: stage.backend.queues(), named, unchanged),
    "delete": Scene(three, lambda stage: stage.backend.delete(QUEUE, id_of(stage, "b")), deleted, perhaps_deleted),
    "reschedule": Scene(
        three,
        lambda stage: stage.backend.reschedule(QUEUE, id_of(stage, "b"), 3600),
        rescheduled,
        perhaps_rescheduled,
        (BackendUnavailable, EnqueueUncertain),
    ),
    "kick": Scene(lambda stage: stage.bury(*ABC), lambda stage: stage.backend.kick(QUEUE, 2), kicked, perhaps_kicked),
    "kick_job": Scene(
        lambda stage: stage.bury(*ABC),
        lambda stage: stage.backend.kick_job(QUEUE, id_of(stage, "b")),
        kicked_one,
        perhaps_kicked_one,
    ),
    "pause": Scene(three, lambda stage: stage.backend.pause(QUEUE, 3600), paused, unchanged),
    "resume": Scene(paused_with_jobs, lambda stage: stage.backend.resume(QUEUE), resumed, unchanged),
    "purge": Scene(
        some_and_a_late_one,
        lambda stage: stage.backend.purge(QUEUE, [State.READY, State.BURIED]),
        purged,
        perhaps_purged,
    ),
}

every_verb = pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES.keys())


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    """On a private server, because each scene first empties the server."""
    with (
        BeanstalkServer() as server,
        Proxy(server.address) as proxy,
        server.client() as client,
        open_backend(f"beanstalk://127.0.0.1:{proxy.port}") as backend,
        backend.consumer([QUEUE, OTHER]) as consumer,
    ):
        yield Stage(proxy, client, backend, consumer)


@pytest.fixture(autouse=True)
def _nothing_armed(stage: Stage) -> Iterator[None]:
    yield
    stage.proxy.mode = Pass()
    stage.proxy.disarm()
    stage.is_cut = False


def play(stage: Stage, scene: Scene) -> tuple[int, int]:
    """Play a scene from the start. Returns how many bytes the call sent, and got as its reply."""
    stage.is_cut = False
    stage.clear()
    scene.given(stage)
    sent, replied = stage.proxy.sent, stage.proxy.replied
    answer = scene.act(stage)
    sizes = stage.proxy.sent - sent, stage.proxy.replied - replied
    scene.answered(stage, answer)
    in_step(stage)
    return sizes


def play_with(stage: Stage, scene: Scene, fault: CutReply | CutRequest, size: int) -> None:
    """Play a scene, and cut the call's reply or request after *size* bytes."""
    stage.is_cut = True
    stage.clear()
    scene.given(stage)
    stage.proxy.arm(fault)
    try:
        answer = scene.act(stage)
    except scene.errors as exc:
        stage.proxy.disarm()
        scene.failed(stage, exc)
    else:
        assert not stage.proxy.is_armed or fault.at >= size - VARIES, f"nothing was cut: {fault} of {size}"
        stage.proxy.disarm()
        scene.answered(stage, answer)
    in_step(stage)


def in_step(stage: Stage) -> None:
    """The next calls on the same connections get their own replies, and no others."""
    consumer = stage.consumer
    stage.put("probe", queue="probe")
    assert stage.backend.peek("probe", id_of(stage, "probe")).body == b"probe"
    assert stage.backend.stats("never-used").ready == 0
    stage.client.ask(b"pause-tube %b 3600" % QUEUE.encode())  # so that no job that the scene has left is handed out
    stage.put("next", queue=OTHER, priority=0)
    (lease,) = consumer.reserve(1, 5)
    assert lease.body == b"next"
    assert consumer.settle([Ack(lease)]) == [None]
    assert stage.state("next") is None


@pytest.mark.one_row
@pytest.mark.parametrize("most", MOST)
@every_verb
def test_reply_cut_at_any_byte_loses_no_job_and_reports_the_truth(stage: Stage, scene: Scene, most: int | None) -> None:
    play(stage, scene)
    _, size = play(stage, scene)
    assert size > 0
    for turn, at in enumerate(some(places(size, EVERY_BYTE), most)):
        play_with(stage, scene, CutReply(at=at, rst=turn % 2 == 1), size)


@pytest.mark.one_row
@pytest.mark.parametrize("most", MOST)
@every_verb
def test_request_cut_at_any_byte_loses_no_job_and_reports_the_truth(
    stage: Stage, scene: Scene, most: int | None
) -> None:
    play(stage, scene)
    size, _ = play(stage, scene)
    for at in some(places(size, EVERY_BYTE), most):
        play_with(stage, scene, CutRequest(at=at), size)


@pytest.mark.long
@every_verb
def test_reply_in_pieces_of_one_byte_is_read_whole(stage: Stage, scene: Scene) -> None:
    stage.proxy.mode = Slice(1)
    play(stage, scene)
