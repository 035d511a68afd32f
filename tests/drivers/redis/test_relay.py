"""Steps for other slots: each is carried out exactly once, at whatever call a process dies."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from proxy import CutReply, CutRequest, Proxy

import multiq
from multiq.backend import Ack, After, Arrive, Bury, Drop, Enqueue, NewJob, Put, State, Terms
from multiq.backend.registry import open_backend
from multiq.errors import BackendCorrupt, BackendFull, BackendUnavailable
from multiq_redis import keys
from multiq_redis.client import Client
from multiq_redis.scripts import script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from servers.redis import RedisServer

    from multiq.backend import Backend, Consumer, Lease, Step

HERE, THERE, HOME = "here", "there", "home"
HELD, NEW = "held", "new"
STEPS: tuple[Step, ...] = (
    Enqueue(THERE, NewJob(b"new", NEW, terms=Terms(1))),
    Arrive(THERE, HELD, "a"),
    Put(HOME, "key", b"value"),
    Arrive(THERE, NEW, "a"),
)
"""The enqueue of a job comes before the arrival at it. The steps form three groups for two targets."""


class KilledError(BaseException):
    """Stands for the death of the process."""


class Killer:
    """Simulates the death of the process before or after one of its calls: nothing more is sent to the store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.verbs: list[str] = []
        self.at: tuple[int, str] | None = None
        perform = Client.perform

        def watched(client: Client, call: Any, deadline: float | None = None) -> Any:
            number = len(self.verbs)
            self.verbs.append(call.verb)
            if self.at == (number, "before"):
                raise KilledError
            reply = perform(client, call, deadline)
            if self.at == (number, "after"):
                raise KilledError
            return reply

        monkeypatch.setattr(Client, "perform", watched)


@pytest.fixture
def killer(monkeypatch: pytest.MonkeyPatch) -> Killer:
    return Killer(monkeypatch)


@pytest.fixture
def other(server: RedisServer) -> Iterator[Backend]:
    """The backend of another process."""
    with open_backend(server.url) as other:
        yield other


def reserved(backend: Backend, consumer: Consumer, job_id: str = "job") -> Lease:
    backend.enqueue(HERE, [NewJob(b"x", job_id)])
    (lease,) = consumer.reserve(1, 0)
    return lease


def prepared(backend: Backend) -> None:
    backend.enqueue(THERE, [NewJob(b"held", HELD, terms=Terms(2))])


def work_off(backend: Backend, queue: str = THERE) -> list[str]:
    """Run and ack all ready jobs. Returns their ids."""
    done = []
    with backend.consumer([queue]) as consumer:
        while leases := consumer.reserve(10, 0):
            assert all(lease.attempt == 1 for lease in leases)
            assert consumer.settle([Ack(lease) for lease in leases]) == [None] * len(leases)
            done += [lease.id for lease in leases]
    return done


def awaits(backend: Backend) -> int | None:
    return backend.peek(THERE, HELD).awaits


def size(server: RedisServer, name: str, queue: str = HERE) -> int:
    return int(server.ask("ZCARD", f"multiq:{{{queue}}}:{name}"))


def key(name: str, queue: str = HERE) -> str:
    return f"multiq:{{{queue}}}:{name}"


CALLS = ["exchange_steps", *["relay", "outbox"] * 3]


def test_settle_with_steps_for_two_queues_to_and_fro_makes_seven_calls(backend: Backend, killer: Killer) -> None:
    prepared(backend)
    with backend.consumer([HERE]) as consumer:
        lease = reserved(backend, consumer)
        killer.verbs.clear()
        assert consumer.settle([Ack(lease, After(steps=STEPS))]) == [None]
        assert killer.verbs == CALLS


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("number", range(len(CALLS)))
def test_process_that_dies_at_any_call_leaves_each_step_to_be_carried_out_once(
    server: RedisServer, other: Backend, killer: Killer, number: int, moment: str
) -> None:
    # Given a process that dies at one of the calls of a settle with steps
    prepared(other)
    dying = open_backend(server.url)
    consumer = dying.consumer([HERE])
    lease = reserved(dying, consumer)
    killer.verbs.clear()
    killer.at = number, moment
    with pytest.raises(KilledError):
        consumer.settle([Ack(lease, After(steps=STEPS))])
    killer.at = None
    is_settled = other.stats(HERE).reserved == 0
    assert is_settled is (number > 0 or moment == "after")
    # When another process relays twice, and runs all ready jobs after each relay
    assert other.relay([HERE]) == 0
    done = work_off(other)
    assert other.relay([HERE]) == 0
    done += work_off(other)
    # Then each step was carried out once, or no step if the verdict was not settled
    assert done == ([NEW] if is_settled else [])
    assert awaits(other) == (1 if is_settled else 2)
    assert (other.note(HOME, "key") is not None) is is_settled
    assert size(server, "outbox") == 0
    consumer.close()
    dying.close()


@pytest.mark.parametrize(("first", "following"), [(at, later) for later in range(1, len(CALLS)) for at in range(later)])
@pytest.mark.long
def test_failover_that_loses_the_last_calls_takes_a_verdict_and_its_steps_together(
    server: RedisServer, other: Backend, monkeypatch: pytest.MonkeyPatch, first: int, following: int
) -> None:
    # Given a settle with steps, some of whose calls the new primary has not received when it gets the next one
    prepared(other)
    perform, number = Client.perform, 0
    received: dict[bytes, bytes] = {}

    def failing_over(client: Client, call: Any, deadline: float | None = None) -> Any:
        nonlocal number
        if number == first:
            received.update({name: server.ask("DUMP", name) for name in server.ask("KEYS", "*")})
        if number == following:
            server.ask("FLUSHALL")
            for name, value in received.items():
                server.ask("RESTORE", name, 0, value)
        number += 1
        return perform(client, call, deadline)

    with open_backend(server.url) as backend, backend.consumer([HERE]) as consumer:
        lease = reserved(backend, consumer)
        with monkeypatch.context() as patch:
            patch.setattr(Client, "perform", failing_over)
            assert consumer.settle([Ack(lease, After(steps=STEPS))]) == [None]
    assert number > following
    # When another process relays
    assert other.relay([HERE]) == 0
    # Then the verdict is lost with all of its steps, or each step was carried out once
    is_settled = other.stats(HERE).reserved == 0
    assert is_settled is (first > 0)
    assert work_off(other) == ([NEW] if is_settled else [])
    assert awaits(other) == (1 if is_settled else 2)
    assert (other.note(HOME, "key") is not None) is is_settled
    assert size(server, "outbox") == 0


@pytest.mark.parametrize("verb", ["exchange_steps", "relay", "outbox"])
@pytest.mark.parametrize("fault", [CutReply(), CutReply(at=3), CutRequest(at=20)])
def test_lost_reply_of_any_call_leaves_each_step_carried_out_once(
    server: RedisServer, other: Backend, verb: str, fault: CutReply | CutRequest
) -> None:
    prepared(other)
    with (
        Proxy(("127.0.0.1", server.port)) as proxy,
        open_backend(f"redis://127.0.0.1:{proxy.port}") as backend,
        backend.consumer([HERE]) as consumer,
    ):
        # Given a server that has loaded the scripts
        lease = reserved(backend, consumer, "first")
        assert consumer.settle([Ack(lease, After(steps=(Drop(HOME, "none"),)))]) == [None]
        lease = reserved(backend, consumer)
        # When a connection breaks at one of the calls
        proxy.arm(type(fault)(at=fault.at, after=script(verb).sha.encode()))
        assert consumer.settle([Ack(lease, After(steps=STEPS))]) == [None]
    # Then each step was carried out once
    assert other.relay([HERE]) == 0
    assert work_off(other) == [NEW]
    assert awaits(other) == 1


def test_relay_that_arrives_again_after_the_follow_up_has_run_changes_nothing(
    server: RedisServer, other: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given recorded calls with steps that were carried out, and whose jobs have run
    prepared(other)
    calls: list[Any] = []
    new_call = Client.new_call

    def record(client: Client, *args: Any, **options: Any) -> Any:
        calls.append(new_call(client, *args, **options))
        return calls[-1]

    monkeypatch.setattr(Client, "new_call", record)
    with open_backend(server.url) as backend, backend.consumer([HERE]) as consumer:
        lease = reserved(backend, consumer)
        assert consumer.settle([Ack(lease, After(steps=(*STEPS, Arrive(THERE, HELD, "b"))))]) == [None]
    relays = [call for call in calls if call.verb in {"relay", "outbox"}]
    assert len(relays) == 6
    assert sorted(work_off(other)) == [HELD, NEW]
    version = other.note(HOME, "key")
    other.enqueue(THERE, [NewJob(b"held", HELD, terms=Terms(2))])
    # When the calls arrive again
    with other._pool.borrowed() as client:  # type: ignore[attr-defined]
        for call in relays:
            client.perform(call)
    # Then nothing changes: no job is enqueued again, and a later job with the same id stays held
    assert work_off(other) == []
    assert awaits(other) == 2
    assert other.note(HOME, "key") == version


def test_two_processes_that_relay_one_outbox_at_once_carry_out_each_step_once(
    server: RedisServer, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given outboxes of dead processes, with many groups
    rounds = 20
    backend.enqueue(THERE, [NewJob(b"held", HELD, terms=Terms(rounds + 1))])
    left_behind(server, backend, monkeypatch, [
        (Enqueue(THERE, NewJob(b"new", f"{number}", terms=Terms(1))), Arrive(THERE, HELD, f"{number}"),
         Arrive(THERE, f"{number}", "a"), Put(HOME, "key", b"%d" % number))
        for number in range(rounds)
    ])  # fmt: skip
    assert size(server, "outbox") > rounds
    # When several threads relay at once, while the follow-up jobs run
    done: list[str] = []
    relays = [threading.Thread(target=backend.relay, args=([HERE],)) for _ in range(4)]
    for relay in relays:
        relay.start()
    while any(relay.is_alive() for relay in relays):
        done += work_off(backend)
    done += work_off(backend)
    # Then each step was carried out once, and the last step of all was carried out last
    assert sorted(done, key=int) == [str(number) for number in range(rounds)]
    assert awaits(backend) == 1
    note = backend.note(HOME, "key")
    assert note is not None
    assert note.value == b"%d" % (rounds - 1)
    assert backend.relay([HERE]) == 0


def left_behind(
    server: RedisServer, backend: Backend, monkeypatch: pytest.MonkeyPatch, all_steps: Sequence[Sequence[Step]]
) -> None:
    """Ack a job for each of these, by a process that dies before it relays."""
    with monkeypatch.context() as patch, open_backend(server.url) as dying, dying.consumer([HERE]) as consumer:
        patch.setattr("multiq_redis.relay.Relay.after", lambda *_: set())
        for number, steps in enumerate(all_steps):
            lease = reserved(backend, consumer, f"sender {number}")
            assert consumer.settle([Ack(lease, After(steps=tuple(steps)))]) == [None]


def test_next_settle_with_steps_relays_what_a_dead_process_has_left(
    server: RedisServer, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given steps of a dead process
    prepared(backend)
    left_behind(server, backend, monkeypatch, [STEPS])
    assert (awaits(backend), size(server, "outbox")) == (2, 3)
    # When another process settles with a step in the same slot, then they are carried out
    with backend.consumer([HERE]) as consumer:
        backend.enqueue(HERE, [NewJob(b"x", "near", terms=Terms(1))])
        lease = reserved(backend, consumer)
        assert consumer.settle([Ack(lease, After(steps=(Arrive(HERE, "near", "a"),)))]) == [None]
    assert (awaits(backend), size(server, "outbox")) == (1, 0)
    assert work_off(backend) == [NEW]


def test_step_of_a_later_call_is_carried_out_after_those_in_front_of_it(
    server: RedisServer, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given the enqueue of a held job that a dead process has left behind
    left_behind(server, backend, monkeypatch, [(Enqueue(THERE, NewJob(b"new", NEW, terms=Terms(1))),)])
    # When another process arrives at this job from the same slot, then the job exists
    with backend.consumer([HERE]) as consumer:
        lease = reserved(backend, consumer)
        assert consumer.settle([Ack(lease, After(steps=(Arrive(THERE, NEW, "a"),)))]) == [None]
    assert work_off(backend) == [NEW]


def test_steps_behind_one_that_cannot_be_carried_out_wait(server: RedisServer, backend: Backend) -> None:
    # Given a target with another program's data
    prepared(backend)
    server.ask("SET", key("notes", HOME), "not a hash")
    with backend.consumer([HERE]) as consumer:
        lease = reserved(backend, consumer)
        # When a verdict has a step there, then the verdict is settled, and the steps from there on wait
        assert consumer.settle([Ack(lease, After(steps=STEPS))]) == [None]
    assert (awaits(backend), work_off(backend)) == (1, [])
    with pytest.raises(BackendCorrupt):
        backend.relay([HERE])
    # And when the data is gone, they are carried out
    server.ask("DEL", key("notes", HOME))
    assert backend.relay([HERE]) == 0
    assert (awaits(backend), work_off(backend)) == (1, [NEW])


def test_key_of_another_type_fails_the_verdict_with_all_of_its_steps(server: RedisServer) -> None:
    for name in ("held", "terms", "arrived", "litter", "notes", "note_keys", "note_expiry", "outbox"):
        server.ask("FLUSHALL")
        with open_backend(server.url) as backend, backend.consumer([HERE]) as consumer:
            lease = reserved(backend, consumer)
            server.ask("SET", key(name), "x")
            with pytest.raises(BackendCorrupt):
                consumer.settle([Ack(lease, After(steps=(Enqueue(HERE, NewJob(b"x", NEW)), *STEPS)))])
            server.ask("DEL", key(name))
            assert backend.stats(HERE).reserved == 1
            assert work_off(backend, HERE) == []


# --- one slot --------------------------------------------------------------------------------------------


def test_steps_in_the_verdicts_own_queue_use_no_outbox(server: RedisServer, backend: Backend, killer: Killer) -> None:
    with backend.consumer([HERE]) as consumer:
        backend.enqueue(HERE, [NewJob(b"x", HELD, terms=Terms(1))])
        lease = reserved(backend, consumer)
        killer.verbs.clear()
        steps = (Arrive(HERE, HELD, "a"), Enqueue(HERE, NewJob(b"x", NEW)), Put(HERE, "key", b"x"), Drop(HERE, "key"))
        _, leases = consumer.exchange([Ack(lease, After(steps=steps))], 5, 0)
        assert killer.verbs == ["exchange_steps"]
        assert sorted(found.id for found in leases) == [HELD, NEW]
        assert consumer.settle([Ack(found) for found in leases]) == [None] * 2
    assert left(server) == set()


def test_verdicts_without_steps_use_the_scripts_without_steps(backend: Backend, killer: Killer) -> None:
    with backend.consumer([HERE]) as consumer:
        lease = reserved(backend, consumer)
        killer.verbs.clear()
        assert consumer.settle([Ack(lease, After(keep=60, outcome=b"x"))]) == [None]
        lease = reserved(backend, consumer)
        assert consumer.settle([Ack(lease, After())]) == [None]
        assert [verb for verb in killer.verbs if verb.startswith("exchange")] == [
            "exchange_after", "exchange", "exchange",
        ]  # fmt: skip


# --- a full server ---------------------------------------------------------------------------------------


def test_full_server_carries_out_the_steps_of_acks(server: RedisServer, backend: Backend) -> None:
    # Given a full server
    prepared(backend)
    with backend.consumer([HERE]) as consumer:
        backend.enqueue(HERE, [NewJob(b"x", "near", terms=Terms(1))])
        lease = reserved(backend, consumer)
        server.set("maxmemory", "1")
        # When a job is acked with an outcome and steps, then the steps are carried out, and the outcome is kept: a
        # job that the steps make ready may need it
        after = After(keep=60, outcome=b"result", steps=(*STEPS, Arrive(HERE, "near", "a")))
        assert consumer.settle([Ack(lease, after)]) == [None]
        assert [outcome.body for outcome in backend.outcomes(HERE, [lease.id]) if outcome] == [b"result"]
        assert [found.id for found in consumer.reserve(5, 0)] == ["near"]
    assert (awaits(backend), work_off(backend)) == (1, [NEW])
    server.set("maxmemory", "0")


def test_full_server_refuses_new_jobs_and_notes_without_a_verdict_and_accepts_arrivals(
    server: RedisServer, backend: Backend
) -> None:
    backend.enqueue(HERE, [NewJob(b"x", HELD, terms=Terms(1))])
    server.set("maxmemory", "1")
    for step in (Enqueue(HERE, NewJob(b"x", NEW)), Put(HERE, "key", b"x"), Enqueue(THERE, NewJob(b"x", NEW))):
        with pytest.raises(BackendFull):
            backend.carry_out([Arrive(HERE, HELD, "a"), step])
    assert backend.peek(HERE, HELD).state is State.HELD
    with pytest.raises(BackendFull):
        backend.enqueue(HERE, [NewJob(b"x", NEW, terms=Terms(1))])
    assert backend.carry_out([Arrive(HERE, HELD, "a"), Drop(HERE, "key")]) is True
    assert work_off(backend, HERE) == [HELD]
    server.set("maxmemory", "0")


# --- what is left ----------------------------------------------------------------------------------------


def left(server: RedisServer) -> set[str]:
    """The keys that never expire."""
    with server.client() as client:
        return {name.decode() for name in client.scan_iter("multiq:*") if client.ttl(name) == -1}


def test_empty_queues_keep_only_marks_until_these_expire(server: RedisServer, backend: Backend) -> None:
    # Given queues that are empty after steps between them
    prepared(backend)
    with backend.consumer([HERE]) as consumer:
        lease = reserved(backend, consumer)
        assert consumer.settle([Ack(lease, After(steps=(*STEPS, Arrive(THERE, HELD, "b"))))]) == [None]
    work_off(backend)
    assert backend.carry_out([Drop(HOME, "key")])
    # Then only the marks of carried out steps are left
    assert left(server) == {key("seen", THERE), key("seen", HOME)}
    # And when they have expired, a relay of their queues deletes them
    for queue in (THERE, HOME):
        for mark in server.ask("ZRANGE", key("seen", queue), 0, -1):
            server.ask("ZADD", key("seen", queue), "1", mark)
    assert backend.relay([THERE, HOME]) == 0
    assert left(server) == set()


def test_marks_that_have_expired_are_deleted_by_later_relays(server: RedisServer, backend: Backend) -> None:
    for number in range(20):
        server.ask("ZADD", key("seen", THERE), "1", f"expired {number}")
    with backend.consumer([HERE]) as consumer:
        for number in range(12):
            lease = reserved(backend, consumer, f"{number}")
            assert consumer.settle([Ack(lease, After(steps=(Arrive(THERE, "none", "a"),)))]) == [None]
    assert size(server, "seen", THERE) == 12


@pytest.mark.parametrize("end", ["arrival", "doom", "kick_job", "delete", "purge"])
def test_members_of_a_job_that_is_no_longer_held_are_deleted_in_slices(
    server: RedisServer, backend: Backend, end: str
) -> None:
    # Given a held job at which more members have arrived than one script deletes
    count = 2500
    backend.enqueue(HERE, [NewJob(b"x", HELD, terms=Terms(count + 1)), NewJob(b"x", "other", terms=Terms(2))])
    for start in range(0, count, 500):
        assert backend.carry_out([Arrive(HERE, HELD, f"{number}") for number in range(start, start + 500)])
    assert backend.carry_out([Arrive(HERE, "other", "a")])
    # When the job is no longer held
    ends: dict[str, Callable[[], object]] = {
        "arrival": lambda: backend.carry_out([Arrive(HERE, HELD, "last")]),
        "doom": lambda: backend.carry_out([Arrive(HERE, HELD, "last", doom="why")]),
        "kick_job": lambda: backend.kick_job(HERE, HELD),
        "delete": lambda: backend.delete(HERE, HELD),
        "purge": lambda: backend.purge(HERE, [State.HELD]),
    }
    ends[end]()
    # Then a part of its members is still stored, but does not count for a later job with the same id
    assert 0 < size(server, "arrived") - (end != "purge") <= count - 1000 + 1
    work_off(backend, HERE)
    backend.enqueue(HERE, [NewJob(b"x", HELD, terms=Terms(2))])
    assert backend.carry_out([Arrive(HERE, HELD, "2499")])
    assert backend.peek(HERE, HELD).awaits == 1
    # And relays delete these members and no others
    for _ in range(3):
        backend.relay([HERE])
    assert size(server, "arrived") == (1 if end == "purge" else 2)
    assert size(server, "litter") == 0
    assert backend.peek(HERE, HELD).awaits == 1


def test_expired_notes_are_deleted_by_later_puts(server: RedisServer, backend: Backend) -> None:
    assert backend.carry_out([Put(HERE, f"old {number}", b"x", 0.01) for number in range(6)])
    until_expired = threading.Event()
    until_expired.wait(0.02)
    for number in range(3):
        assert backend.carry_out([Put(HERE, f"new {number}", b"x")])
    assert server.ask("HLEN", key("notes")) == 3
    assert (size(server, "note_keys"), size(server, "note_expiry")) == (3, 0)


# --- partitions ------------------------------------------------------------------------------------------


def test_arrival_finds_its_job_in_any_partition(server: RedisServer) -> None:
    # Given held jobs that producers with different numbers of partitions have enqueued
    urls = [f"{server.url}?partitions={count}" for count in (1, 4, 8)]
    backends = [open_backend(url) for url in urls]
    ids = [f"{at}-{number}" for at in range(len(backends)) for number in range(8)]
    for job_id in ids:
        backends[int(job_id[0])].enqueue(HERE, [NewJob(b"x", job_id, terms=Terms(2))])
    # When members arrive, with and without a verdict, from clients that know other numbers of partitions
    for at, url in enumerate(urls):
        with open_backend(url) as fresh, fresh.consumer(["elsewhere"]) as consumer:
            fresh.enqueue("elsewhere", [NewJob(b"x", "sender")])
            (lease,) = consumer.reserve(1, 0)
            steps = tuple(Arrive(HERE, job_id, "a") for job_id in ids)
            if at == 0:
                assert fresh.carry_out([*steps, Arrive(HERE, "gone", "a")])
            assert consumer.settle([Ack(lease, After(steps=(*steps, Arrive(HERE, ids[at], "b"))))]) == [None]
            assert fresh.relay([HERE, "elsewhere"]) == 0
    # Then each member counts once
    waiting = {job.id: job.awaits for job in backends[2].jobs(HERE, State.HELD).jobs}
    assert waiting == dict.fromkeys(ids[3:], 1)
    assert backends[2].stats(HERE).ready == 3
    for backend in backends:
        backend.close()


def test_steps_between_the_partitions_of_a_queue_go_by_the_outbox_and_are_handed_out(server: RedisServer) -> None:
    with open_backend(f"{server.url}?partitions=4") as backend, backend.consumer([HERE]) as consumer:
        for number in range(16):
            backend.enqueue(HERE, [NewJob(b"x", f"held {number}", terms=Terms(1))])
            lease = reserved(backend, consumer, f"sender {number}")
            steps = (Arrive(HERE, f"held {number}", "a"),)
            _, (found,) = consumer.exchange([Bury(lease, after=After(steps=steps))], 5, 0)
            assert found.id == f"held {number}"
            assert consumer.settle([Ack(found)]) == [None]
        assert backend.stats(HERE).buried == 16
    with server.client() as client:
        assert not list(client.scan_iter("*:outbox"))
    assert keys.queue_and_number("here#2") == ("here", 2)


# --- flows -----------------------------------------------------------------------------------------------


def test_worker_finishes_a_flow_whose_steps_a_dead_process_has_left(
    server: RedisServer, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a chain over two queues, whose first step was acked by a process that died before it relayed
    app = multiq.App(backend=backend)
    ran: list[str] = []

    @app.task(queue=HERE)
    def first() -> int:
        ran.append("first")
        return 1

    @app.task(queue=THERE)
    def second(value: int) -> int:
        ran.append(f"second {value}")
        return value + 1

    flow = multiq.chain(first.s(), second.s()).enqueue()
    with monkeypatch.context() as patch:
        patch.setattr("multiq_redis.relay.Relay.after", lambda *_: set())
        patch.setattr("multiq_redis.relay.Relay.all_of", lambda *_: 0)
        multiq.Worker(app, queues=[HERE, THERE], stop_when_empty=True).run()
    assert (ran, size(server, "outbox")) == (["first"], 1)
    # When a worker runs, then it relays, and finishes the flow
    multiq.Worker(app, queues=[HERE, THERE], stop_when_empty=True).run()
    assert ran == ["first", "second 1"]
    assert flow.info().state == "finished"
    assert flow.last().result(timeout=0) == 2


@pytest.mark.parametrize("by_member", [True, False])
def test_batch_that_grows_is_not_done_before_its_new_members(
    server: RedisServer, backend: Backend, monkeypatch: pytest.MonkeyPatch, by_member: bool
) -> None:
    # Given a batch that a member, or its producer, adds to, while the steps of the addition cannot be relayed
    app = multiq.App(backend=backend)
    ran: list[str] = []

    @app.task(queue=THERE)
    def more() -> None:
        ran.append("more")

    @app.task(queue=THERE)
    def last(_: str) -> None:
        ran.append("last")

    @app.task(queue=THERE, max_attempts=0)
    def member() -> None:
        ran.append("member")
        if by_member and ran.count("member") == 1:
            fail_to_grow(flow)
            raise multiq.Snooze(0)
        if by_member:  # the member adds the jobs again when it runs again
            flow.add([more.s()])

    def fail_to_grow(flow: multiq.flows.FlowHandle) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("multiq_redis.relay.Relay._carry_out", out_of_order)
            patch.setattr("multiq_redis.relay._PAUSE", 0.0)
            with pytest.raises(BackendUnavailable):
                flow.add([more.s()])

    def out_of_order(*_: object) -> None:
        raise BackendUnavailable("a test")

    flow = multiq.batch([member.s()], then=last.s()).enqueue()
    if not by_member:
        fail_to_grow(flow)
    # When workers run, then the last job runs after the new members
    for _ in range(2):
        multiq.Worker(app, queues=[HERE, THERE], stop_when_empty=True).run()
    assert ran[-1] == "last"
    assert sorted(set(ran)) == ["last", "member", "more"]
    assert (ran.count("last"), ran.count("more")) == (1, 1 + by_member)
    assert flow.info().state == "finished"
