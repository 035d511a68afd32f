"""The Lua scripts: their headers, and their behaviour on servers before 7.0, even full ones."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import multiq_redis
from multiq.backend import Ack, Bury, GiveBack, NewJob, Release, State, Touch
from multiq.backend.effects import After
from multiq.backend.registry import open_backend
from multiq.errors import BackendFull
from multiq.ids import new_id
from multiq_redis.connection import Connection
from multiq_redis.records import new_job
from multiq_redis.scripts import STATES_SET, script

if TYPE_CHECKING:
    from collections.abc import Callable

    from servers.redis import RedisServer

    from multiq.backend import Lease, Verdict


QUEUE = "mail"
FOLDER = Path(multiq_redis.__file__).parent / "lua"
VERBS = sorted(path.stem for path in FOLDER.glob("*.lua"))


@pytest.mark.parametrize("verb", VERBS)
def test_script_uses_the_keys_of_its_header_and_no_others(verb: str) -> None:
    made = script(verb)
    # "at +": a script that takes the same keys of several partitions
    used = {int(number) for number in re.findall(r"(?:KEYS|keys)\[(?:at \+ )?(\d+)\]", made.text)}
    assert used == set(range(1, len(made.keys) + 1))
    assert "KEYS[#" not in made.text


@pytest.mark.parametrize("verb", VERBS)
def test_script_documents_its_arguments_and_reply(verb: str) -> None:
    text = (FOLDER / f"{verb}.lua").read_text()
    assert text.startswith("--- flags: ")
    assert "\n-- KEYS  1 " in text
    assert "\n-- =>    " in text
    assert STATES_SET not in script(verb).keys or verb in {"jobs", "purge"}


@pytest.mark.parametrize("verb", VERBS)
def test_only_newer_servers_see_a_shebang(verb: str) -> None:
    assert script(verb).text.startswith("#!lua")
    assert not script(verb, before_7=True).text.startswith("#!")
    assert not re.search("^--- ", script(verb, before_7=True).text, re.MULTILINE)


@pytest.fixture
def old_redis(new_redis: Callable[..., RedisServer], monkeypatch: pytest.MonkeyPatch) -> RedisServer:
    """A server to which the driver sends the scripts for 6.2. As on 6.2, only the first write can be refused."""
    monkeypatch.setattr(Connection, "is_before_7", property(lambda _: True))
    return new_redis()


def test_every_verb_works_before_7(old_redis: RedisServer) -> None:
    with open_backend(old_redis.url) as backend, backend.consumer([QUEUE]) as consumer:
        backend.enqueue(QUEUE, [NewJob(b"%d" % number, str(number)) for number in range(6)])
        leases = consumer.reserve(5, 0)
        kinds: list[Callable[[Lease], Verdict]] = [Ack, lambda lease: Release(lease, 60), Bury, Touch, GiveBack]
        verdicts = [kind(lease) for kind, lease in zip(kinds, leases, strict=True)]
        assert consumer.settle(verdicts) == [None] * 5
        stats = backend.stats(QUEUE)
        assert (stats.ready, stats.delayed, stats.reserved, stats.buried) == (2, 1, 1, 1)
        backend.kick_job(QUEUE, "1")
        assert backend.kick(QUEUE, 10) == 1
        backend.reschedule(QUEUE, "5", 60)
        backend.delete(QUEUE, "4")
        backend.pause(QUEUE, 60)
        assert consumer.reserve(1, 0) == []
        backend.resume(QUEUE)
        assert [job.id for job in backend.jobs(QUEUE, State.READY).jobs] == ["1", "2"]
        assert backend.purge(QUEUE, [State.READY, State.DELAYED]) == 3


def test_full_server_before_7_refuses_jobs_and_still_drains(old_redis: RedisServer) -> None:
    with open_backend(old_redis.url) as backend, backend.consumer([QUEUE]) as consumer:
        # Given a server without room
        backend.enqueue(QUEUE, [NewJob(b"x", new_id(), ttr=1) for _ in range(20)])
        leases = consumer.reserve(10, 0)
        old_redis.set("maxmemory", "1")
        # Then it takes no job
        for jobs in ([NewJob(b"x", new_id())], [NewJob(b"x", new_id()), NewJob(b"x", new_id())]):
            with pytest.raises(BackendFull):
                backend.enqueue(QUEUE, jobs)
        # And all other calls succeed, whichever write comes first
        assert consumer.settle([Touch(leases[0])]) == [None]
        assert consumer.settle([Release(leases[0], 60)]) == [None]
        assert consumer.settle([Ack(lease) for lease in leases[1:9]]) == [None] * 8
        assert len(consumer.reserve(20, 0)) == 10
        time.sleep(1.1)
        assert len(consumer.reserve(20, 0)) == 11
        backend.pause(QUEUE, 60)
        backend.resume(QUEUE)


def test_full_server_before_7_drops_outcomes_and_stores_memos(old_redis: RedisServer) -> None:
    with open_backend(old_redis.url) as backend, backend.consumer([QUEUE]) as consumer:
        # Given a server without room
        ids = backend.enqueue(QUEUE, [NewJob(b"x", new_id()) for _ in range(4)])
        one, two, three, four = consumer.reserve(4, 0)
        kept, memo = After(keep=60, outcome=b"result"), After(memo=b"memo")
        assert consumer.settle([Ack(one, kept)]) == [None]
        old_redis.set("maxmemory", "1")
        # When a call has verdicts with and without an outcome, then all are accepted, but only the memo is stored
        verdicts: list[Verdict] = [Release(two, 60, after=memo), Ack(three, kept), Ack(four)]
        assert consumer.settle(verdicts) == [None] * 3
        assert [outcome is not None for outcome in backend.outcomes(QUEUE, ids)] == [True, False, False, False]
        assert backend.peek(QUEUE, two.id).memo == b"memo"
        assert backend.forget(QUEUE, ids) == 1


def test_call_that_arrives_again_or_late_has_no_effect(redis_server: RedisServer) -> None:
    # Given two calls of one client
    redis_server.ask("FLUSHALL")
    with open_backend(redis_server.url) as backend:
        backend.enqueue(QUEUE, [NewJob(b"", job_id) for job_id in "abc"])
        with backend.consumer([QUEUE]) as consumer:
            consumer.settle([Bury(lease) for lease in consumer.reserve(3, 0)])
        client = backend._pool.dedicated()  # type: ignore[attr-defined]
        first, second = client.next_number(), client.next_number()
        assert client.call("kick", QUEUE, (1,), number=first) == b"1"
        # When the first call arrives again, then it gets the same answer, and has no effect
        assert client.call("kick", QUEUE, (1,), number=first) == b"1"
        assert backend.stats(QUEUE).buried == 2
        # And when it arrives after the second call, it has no effect either
        assert client.call("kick", QUEUE, (1,), number=second) == b"1"
        client.call("kick", QUEUE, (1,), number=first)
        assert backend.stats(QUEUE).buried == 1
        client.close()


def test_single_enqueue_that_arrives_again_or_late_has_no_effect_even_when_its_job_is_done(
    redis_server: RedisServer,
) -> None:
    # Given two enqueues of one client, whose jobs are already acked
    redis_server.ask("FLUSHALL")
    with open_backend(redis_server.url) as backend:
        client = backend._pool.dedicated()  # type: ignore[attr-defined]
        numbers = [client.next_number() for _ in range(20)]
        jobs = [new_job(NewJob(b"", new_id())) for _ in numbers]

        def arrives(at: int) -> None:
            job = jobs[at]
            assert job is not None
            assert client.call("enqueue_one", QUEUE, job, number=numbers[at]) == b"ok"

        for at in range(len(numbers)):
            arrives(at)
        with backend.consumer([QUEUE]) as consumer:
            leases = consumer.reserve(len(numbers), 0)
            assert len(leases) == len(numbers)
            consumer.settle([Ack(lease) for lease in leases])
        # When the last call arrives again, and then each earlier one, they get the same reply, and add no jobs
        for at in reversed(range(len(numbers))):
            arrives(at)
        assert backend.stats(QUEUE).ready == 0
        client.close()
