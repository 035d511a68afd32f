"""Outcomes on Redis: full servers, short scripts, partitions, expired outcomes, and calls that keep nothing."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Any

import pytest
from proxy import Proxy
from servers.process import until

from multiq.backend import Ack, Bury, GiveBack, NewJob, Release, State, Touch
from multiq.backend.effects import After
from multiq.backend.registry import open_backend
from multiq.errors import BackendCorrupt, BackendFull, OptionInvalid, PayloadTooLarge
from multiq_redis.exchange import repeat
from multiq_redis.scripts import script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from servers.redis import RedisServer

    from multiq.backend import Backend, Consumer, Lease, Verdict

QUEUE = "q"
LONG = 3600.0
KEPT = After(keep=LONG, outcome=b"result")
MEGABYTE = b"x" * 1_000_000


def key(name: str) -> str:
    return f"multiq:{{{QUEUE}}}:{name}"


def reserve(backend: Backend, consumer: Consumer, count: int) -> list[Lease]:
    ids = [f"job {number:05}" for number in range(count)]
    backend.enqueue(QUEUE, [NewJob(b"x", job_id) for job_id in ids])
    leases: list[Lease] = []
    while len(leases) < count:
        leases += consumer.reserve(count, 0)
    return sorted(leases, key=lambda lease: lease.id)


def keep(backend: Backend, consumer: Consumer, count: int, after: After = KEPT) -> list[str]:
    leases = reserve(backend, consumer, count)
    assert consumer.settle([Ack(lease, after) for lease in leases]) == [None] * count
    return [lease.id for lease in leases]


def pages(backend: Backend, limit: int, **options: str) -> Iterator[list[str]]:
    after = None
    while True:
        page = backend.history(QUEUE, limit=limit, after=after, **options)  # type: ignore[arg-type]
        yield [outcome.id for outcome in page.outcomes]
        after = page.after
        if after is None:
            return


def left(server: RedisServer) -> set[str]:
    """The keys that never expire."""
    with server.client() as client:
        return {name.decode() for name in client.scan_iter("multiq:*") if client.ttl(name) == -1}


@pytest.fixture
def consumer(backend: Backend) -> Iterator[Consumer]:
    with backend.consumer([QUEUE]) as consumer:
        yield consumer


# --- calls that store nothing beside ---------------------------------------------------------------------

PLAIN_BYTES = 719  # bytes of a settle of six jobs, as few as before multiq had outcomes


def plain_verdicts(leases: list[Lease]) -> list[Verdict]:
    nothing = After()
    one, two, three, four, five, six = leases
    return [Ack(one), Ack(two, nothing), Release(three, after=nothing), Bury(four), Touch(five, nothing), GiveBack(six)]


def digests_known(server: RedisServer) -> dict[str, bool]:
    verbs = ["exchange", "exchange_after", "exchange_at_maxmemory"]
    return dict(
        zip(verbs, map(bool, server.ask("SCRIPT", "EXISTS", *(script(verb).sha for verb in verbs))), strict=True)
    )


def test_verdicts_that_store_nothing_beside_use_the_plain_script_only(
    server: RedisServer, backend: Backend, consumer: Consumer
) -> None:
    # Given a server that knows no script
    leases = reserve(backend, consumer, 6)
    server.ask("SCRIPT", "FLUSH")
    # When verdicts of all kinds store no outcome, memo or detail, then the plain script carries them out
    assert consumer.settle(plain_verdicts(leases)) == [None] * 6
    assert digests_known(server) == {"exchange": True, "exchange_after": False, "exchange_at_maxmemory": False}
    # And with one outcome, the driver uses the other script
    keep(backend, consumer, 1)
    assert digests_known(server)["exchange_after"]


def test_verdicts_that_store_nothing_beside_send_as_many_bytes_as_before_outcomes(server: RedisServer) -> None:
    with (
        Proxy(("127.0.0.1", server.port)) as proxy,
        open_backend(f"redis://127.0.0.1:{proxy.port}") as backend,
        backend.consumer([QUEUE]) as consumer,
    ):
        consumer.settle(plain_verdicts(reserve(backend, consumer, 6)))  # so that the server knows the script
        server.ask("FLUSHALL")
        leases = reserve(backend, consumer, 6)
        before = proxy.sent
        consumer.settle(plain_verdicts(leases))
        assert proxy.sent - before == PLAIN_BYTES


def test_plain_script_has_the_keys_that_it_had_before_outcomes() -> None:
    assert script("exchange").keys == (
        "call", "jobs", "bodies", "reasons", "ready", "delayed", "reserved", "buried", "sequence",
        "paused", "hint", "partitions", "unreadable",
    )  # fmt: skip


def test_poll_for_a_missing_outcome_is_one_call(server: RedisServer, backend: Backend) -> None:
    backend.outcomes(QUEUE, ["a"])
    server.ask("CONFIG", "RESETSTAT")
    assert backend.outcomes(QUEUE, ["a", "b"]) == [None, None]
    assert server.ask("INFO", "commandstats")["cmdstat_evalsha"]["calls"] == 1


# --- a full server ---------------------------------------------------------------------------------------


def test_full_server_acks_jobs_and_drops_their_outcomes(
    server: RedisServer, backend: Backend, consumer: Consumer
) -> None:
    # Given a full server
    leases = reserve(backend, consumer, 4)
    backend.enqueue(QUEUE, [NewJob(b"x", "next")])
    server.set("maxmemory", "1")
    with pytest.raises(BackendFull):
        backend.enqueue(QUEUE, [NewJob(b"x", "refused")])
    # When jobs are acked with an outcome on the full server, then they are gone, and the next job is handed out
    verdicts = [Ack(leases[0], KEPT), Ack(leases[1], KEPT), Ack(leases[2])]
    lost, (lease,) = consumer.exchange(verdicts, 1, 0)
    assert (lost, lease.id) == ([None] * 3, "next")
    # And no outcome is kept
    assert backend.outcomes(QUEUE, [lease.id for lease in leases]) == [None] * 4
    # And the server keeps outcomes again when it has room
    server.set("maxmemory", "0")
    assert consumer.settle([Ack(leases[3], KEPT)]) == [None]
    assert [outcome.id for outcome in backend.history(QUEUE).outcomes] == [leases[3].id]


def test_full_server_stores_memos_and_details(server: RedisServer, backend: Backend, consumer: Consumer) -> None:
    one, two, three = reserve(backend, consumer, 3)
    server.set("maxmemory", "1")
    verdicts: list[Verdict] = [Touch(one, After(memo=b"1")), Bury(two, after=After(detail=b"2")), Ack(three, KEPT)]
    assert consumer.settle(verdicts) == [None] * 3
    assert (backend.peek(QUEUE, one.id).memo, backend.peek(QUEUE, two.id).detail) == (b"1", b"2")
    assert backend.outcomes(QUEUE, [three.id]) == [None]


def test_full_server_drops_expired_outcomes_at_acks(server: RedisServer, backend: Backend, consumer: Consumer) -> None:
    keep(backend, consumer, 4, After(keep=0.01, outcome=b"old"))
    leases = reserve(backend, consumer, 2)
    time.sleep(0.02)
    server.set("maxmemory", "1")
    assert consumer.settle([Ack(lease, KEPT) for lease in leases]) == [None] * 2
    assert left(server) == set()


def test_uncertain_ack_is_answered_truly_by_a_server_that_is_full_meanwhile(
    server: RedisServer, backend: Backend
) -> None:
    # Given an ack with an outcome that was carried out
    with backend.consumer([QUEUE]) as consumer:
        (lease,) = reserve(backend, consumer, 1)
        client = consumer._client  # type: ignore[attr-defined]
        sent: list[Any] = []
        perform_each = client.perform_each

        def record(calls: Any, deadline: float | None = None) -> Any:
            sent.extend(calls)
            return perform_each(calls, deadline)

        client.perform_each = record
        assert consumer.settle([Ack(lease, KEPT)]) == [None]
        (call,) = sent
        # When the same call arrives again at the server, which is now full
        server.set("maxmemory", "1")
        reply = repeat(client, call, time.monotonic() + 5)
        # Then it gets the same answer as the first time, and the outcome is still stored
        assert reply[3] == b"1"
        assert backend.history(QUEUE).outcomes[0].body == b"result"


# --- sizes -----------------------------------------------------------------------------------------------


def test_outcome_over_the_servers_limit_is_refused_before_any_verdict(new_redis: Callable[..., RedisServer]) -> None:
    server = new_redis(proto_max_bulk_len="2mb")
    with open_backend(server.url) as backend, backend.consumer([QUEUE]) as consumer:
        leases = reserve(backend, consumer, 4)
        large = b"x" * 2_200_000
        for too_large in (
            Ack(leases[1], After(keep=1, outcome=large)),
            Touch(leases[1], After(memo=large)),
            Release(leases[1], after=After(detail=large)),
        ):
            with pytest.raises(PayloadTooLarge) as refused:
                consumer.settle([Ack(leases[0]), too_large])
            assert refused.value.size_bytes == len(large)
        assert backend.stats(QUEUE).reserved == 4
        # And data that a verdict ignores may have any size
        ignored: list[Verdict] = [
            Ack(leases[0], After(outcome=large, memo=large)),
            Touch(leases[1], After(detail=large)),
        ]
        assert consumer.settle(ignored) == [None, None]


@pytest.mark.parametrize("partitions", [1, 4])
def test_many_large_outcomes_are_kept_and_read_in_pieces(server: RedisServer, partitions: int) -> None:
    with open_backend(f"{server.url}?partitions={partitions}") as backend, backend.consumer([QUEUE]) as consumer:
        ids = keep(backend, consumer, 20, After(keep=LONG, outcome=MEGABYTE))
        kept = backend.outcomes(QUEUE, [*ids, "missing", ids[0]])
        assert [outcome and len(outcome.body) for outcome in kept] == [len(MEGABYTE)] * 20 + [None, len(MEGABYTE)]
        assert sorted(job_id for page in pages(backend, 7) for job_id in page) == ids


def test_reserve_counts_memos_among_its_eight_megabytes(backend: Backend, consumer: Consumer) -> None:
    leases = reserve(backend, consumer, 20)
    assert consumer.settle([Release(lease, after=After(memo=MEGABYTE)) for lease in leases]) == [None] * 20
    found: list[Lease] = []
    while len(found) < 20:
        part = consumer.reserve(20, 0)
        assert 0 < len(part) <= 8
        found += part
    assert all(lease.memo == MEGABYTE for lease in found)


# --- pages, and what has expired -------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 7, 499, 500, 501, 2000])
def test_history_of_outcomes_that_expire_together_lists_each_once(
    backend: Backend, consumer: Consumer, limit: int
) -> None:
    ids = keep(backend, consumer, 1200 if limit > 1 else 40)
    found = list(pages(backend, limit))
    assert {len(page) for page in found[:-1]} <= {limit}
    listed = [job_id for page in found for job_id in page]
    assert sorted(listed) == ids


def test_page_goes_on_behind_an_outcome_that_was_forgotten(backend: Backend, consumer: Consumer) -> None:
    keep(backend, consumer, 30)
    order = [outcome.id for outcome in backend.history(QUEUE).outcomes]
    first = backend.history(QUEUE, limit=10)
    backend.forget(QUEUE, order[5:12])
    rest = backend.history(QUEUE, after=first.after)
    assert [outcome.id for outcome in rest.outcomes] == order[12:]


@pytest.mark.parametrize("partitions", [1, 4])
def test_history_of_a_rare_kind_looks_through_all_outcomes(server: RedisServer, partitions: int) -> None:
    with open_backend(f"{server.url}?partitions={partitions}") as backend, backend.consumer([QUEUE]) as consumer:
        leases = reserve(backend, consumer, 3000)
        rare = {leases[at].id for at in (0, 1, 1700, 2999)}
        verdicts = [Ack(lease, After(keep=LONG, kind="cancelled" if lease.id in rare else "done")) for lease in leases]
        assert consumer.settle(verdicts) == [None] * 3000
        found = list(pages(backend, 3, kind="cancelled"))
        assert sorted(map(len, found)) == [1, 3]
        assert {job_id for page in found for job_id in page} == rare


def test_history_over_partitions_is_one_order(server: RedisServer) -> None:
    with open_backend(f"{server.url}?partitions=4") as backend, backend.consumer([QUEUE]) as consumer:
        leases = reserve(backend, consumer, 40)
        for turn, lease in enumerate(leases):
            assert consumer.settle([Ack(lease, After(keep=LONG + 10 * ((7 * turn) % 40)))]) == [None]
        in_order = [outcome.expires_in for outcome in backend.history(QUEUE).outcomes]
        assert in_order == sorted(in_order, reverse=True)
        assert [job_id for page in pages(backend, 7) for job_id in page] == [
            outcome.id for outcome in backend.history(QUEUE).outcomes
        ]


@pytest.mark.parametrize("after", ["", "x", "1", "1.", ".61", "1.6", "1.zz", "-1.61", "9" * 30 + ".61", "1:2.3"])
def test_foreign_cursor_of_a_history_is_refused(backend: Backend, after: str) -> None:
    with pytest.raises(OptionInvalid, match="cursor"):
        backend.history(QUEUE, after=after)


@pytest.mark.parametrize("partitions", [1, 4])
def test_forget_deletes_many_in_slices_and_counts_what_had_not_expired(server: RedisServer, partitions: int) -> None:
    with open_backend(f"{server.url}?partitions={partitions}") as backend, backend.consumer([QUEUE]) as consumer:
        ids = keep(backend, consumer, 1300)
        assert backend.forget(QUEUE, [*ids[:1200], *ids[:50], "missing"]) == 1200
        assert sorted(job_id for page in pages(backend, 500) for job_id in page) == ids[1200:]
        keep(backend, consumer, 1300, After(keep=0.001))
        until(lambda: not backend.history(QUEUE, limit=1).outcomes or len(list(pages(backend, 500))) == 1, "expired")
        assert backend.forget(QUEUE, ids) == 0
        assert backend.forget(QUEUE) == 0


def test_forget_deletes_at_most_its_limit(backend: Backend, consumer: Consumer) -> None:
    keep(backend, consumer, 1300, After(keep=0.3))
    time.sleep(0.4)
    assert [backend.forget(QUEUE, limit=limit) for limit in (1, 700, 1000)] == [1, 700, 599]


# --- what is left ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [1, 3])
def test_queue_of_expired_outcomes_leaves_nothing_behind(server: RedisServer, partitions: int) -> None:
    url = f"{server.url}?partitions={partitions}"
    with open_backend(url) as backend, backend.consumer([QUEUE]) as consumer:
        keep(backend, consumer, 20, After(keep=0.2, outcome=b"old"))
        # Given outcomes of a queue without jobs, then the queue is not listed, and the doctor has no finding about it
        assert backend.queues() == []
        assert not any("outcome" in str(finding) for finding in backend.doctor())
        time.sleep(0.3)
        # When the outcomes have expired and are forgotten, then no key is left
        assert backend.forget(QUEUE) == 20
        assert left(server) <= {key("partitions")}


def test_outcomes_survive_the_end_of_their_queue(server: RedisServer, backend: Backend, consumer: Consumer) -> None:
    ids = keep(backend, consumer, 2)
    assert left(server) == {key("outcomes"), key("expiring")}
    backend.enqueue(QUEUE, [NewJob(b"x", "other")])
    backend.purge(QUEUE, [State.READY])
    assert [outcome and outcome.id for outcome in backend.outcomes(QUEUE, ids)] == ids


# --- partitions ------------------------------------------------------------------------------------------


def test_outcome_is_found_by_clients_with_any_number_of_partitions(server: RedisServer) -> None:
    with (
        open_backend(f"{server.url}?partitions=4") as wide,
        open_backend(server.url) as narrow,
        open_backend(f"{server.url}?partitions=3") as other,
    ):
        with wide.consumer([QUEUE]) as consumer:
            ids = keep(wide, consumer, 20)
        for backend in (wide, narrow, other):
            assert [outcome and outcome.id for outcome in backend.outcomes(QUEUE, ids)] == ids
            assert len(backend.history(QUEUE).outcomes) == 20
        assert narrow.forget(QUEUE, ids) == 20


# --- another program's data ------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [b"", b"short", b"\xff" * 21 + b"x"])
def test_outcome_of_another_program_is_left_out_or_reported(
    server: RedisServer, backend: Backend, consumer: Consumer, stored: bytes
) -> None:
    (good,) = keep(backend, consumer, 1)
    server.ask("HSET", key("outcomes"), hashlib.md5(b"").digest(), stored)  # noqa: S324 - any 16 bytes
    server.ask("ZADD", key("expiring"), "9e15", hashlib.md5(b"").digest())  # noqa: S324
    foreign = "d41d8cd9-8f00-b204-e980-0998ecf8427e"
    if len(stored) < 21:
        assert backend.outcomes(QUEUE, [good, foreign])[1] is None
        assert [outcome.id for outcome in backend.history(QUEUE).outcomes] == [good]
    else:
        with pytest.raises(BackendCorrupt):
            backend.outcomes(QUEUE, [good, foreign])


def test_ack_into_a_key_of_another_type_changes_nothing(
    server: RedisServer, backend: Backend, consumer: Consumer
) -> None:
    (lease,) = reserve(backend, consumer, 1)
    server.ask("SET", key("outcomes"), "x")
    with pytest.raises(BackendCorrupt):
        consumer.settle([Ack(lease, KEPT)])
    assert backend.peek(QUEUE, lease.id).state is State.RESERVED
    server.ask("DEL", key("outcomes"))
    assert consumer.settle([Ack(lease, KEPT)]) == [None]
