"""Accounts with the fewest permissions that multiq needs: the recipes of docs/redis.md, on a real server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import multiq_redis
from multiq.backend import (
    Ack,
    Arrive,
    Bury,
    Drop,
    Enqueue,
    Gate,
    NewJob,
    Put,
    Quota,
    Release,
    State,
    Terms,
    UniqueKey,
    Version,
)
from multiq.backend.effects import After
from multiq.backend.registry import open_backend
from multiq.errors import BackendError, BackendUnavailable

if TYPE_CHECKING:
    from servers.redis import RedisServer

    from multiq.backend import Step, Verdict

PAGE = Path(__file__).parents[3] / "docs" / "redis.md"
LUA = Path(multiq_redis.__file__).parent / "lua"


def recipe(name: str) -> list[str]:
    """The words of one ``ACL SETUSER`` of the page."""
    found = re.search(rf"ACL SETUSER {name} (.*?)\n\s*```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found[1].replace("\\", " ").split()


@pytest.fixture
def accounts(server: RedisServer) -> RedisServer:
    for name in ("producer", "worker", "flows"):
        server.ask("ACL", "SETUSER", name, *recipe(name))
    return server


def url(server: RedisServer, name: str) -> str:
    return f"redis://{name}:secret@127.0.0.1:{server.port}"


def test_producer_account_enqueues_and_cannot_reserve(accounts: RedisServer) -> None:
    with open_backend(url(accounts, "producer")) as backend, backend.consumer(["q"]) as consumer:
        backend.enqueue("q", [NewJob(b"1", "one")])
        backend.enqueue("q", [NewJob(b"2", "two", delay=5), NewJob(b"x" * 5000, "three")])
        for refused in (
            lambda: consumer.reserve(1, 0),
            lambda: backend.peek("q", "one"),
            lambda: backend.delete("q", "one"),
            lambda: backend.purge("q", [State.READY]),
        ):
            with pytest.raises(BackendError):
                refused()
    for command in (("FLUSHALL",), ("CONFIG", "GET", "*"), ("KEYS", "*"), ("HGETALL", "multiq:{q}:jobs")):
        allowed = accounts.ask("ACL", "DRYRUN", "producer", *command)
        assert allowed != b"OK"


def test_the_rule_for_multiq_has_each_command_of_the_scripts() -> None:
    scripts = "".join(path.read_text() for path in LUA.rglob("*.lua"))
    used = {name.lower() for name in re.findall(r"redis\.p?call\(\s*'(\w+)'", scripts)}
    assert len(used) > 20
    assert used <= {word.removeprefix("+") for word in recipe("multiq")}


@pytest.mark.parametrize("may_delete", [True, False])
def test_account_for_flows_replaces_the_only_parked_job(accounts: RedisServer, may_delete: bool) -> None:
    # Given a job that waits at a gate, and a producer, with or without a command that older recipes did not have
    if not may_delete:
        accounts.ask("ACL", "SETUSER", "flows", "-del")
    terms = Terms(gates=(Gate("api"),), unique=UniqueKey(b"key", on_conflict="replace"))
    with open_backend(accounts.url) as everybody, everybody.consumer(["q"]) as consumer:
        everybody.limits("q", {"api": Quota(slots=1)})
        everybody.enqueue("q", [NewJob(b"first", "first", terms=Terms(gates=(Gate("api"),)))])
        (first,) = consumer.reserve(9, 0)
        everybody.enqueue("q", [NewJob(b"old", "parked", terms=terms)])
        assert consumer.reserve(9, 0) == []
        # When the producer replaces this job, twice
        with open_backend(url(accounts, "flows")) as producer:
            for body in (b"new", b"newer"):
                producer.enqueue("q", [NewJob(body, "another", terms=terms)])
                assert consumer.reserve(9, 0) == []
                assert everybody.stats("q").ready == 1
        # Then the job is handed out when the gate opens
        assert consumer.settle([Ack(first)]) == [None]
        (lease,) = consumer.reserve(9, 5)
        assert (lease.id, lease.body) == ("parked", b"newer")


def test_account_without_a_command_of_a_script_is_told_so(accounts: RedisServer) -> None:
    accounts.ask("ACL", "SETUSER", "flows", "-zadd")
    with open_backend(url(accounts, "flows")) as backend, pytest.raises(BackendUnavailable, match="does not allow"):
        backend.enqueue("q", [NewJob(b"x", "one", delay=5)])


def test_worker_account_works_and_reaches_no_other_keys(accounts: RedisServer) -> None:
    with open_backend(accounts.url) as everybody:
        everybody.enqueue("q", [NewJob(b"1", "one"), NewJob(b"2", "two")])
    with open_backend(url(accounts, "worker")) as backend, backend.consumer(["q"]) as consumer:
        one, two = consumer.reserve(2, 0)
        assert consumer.settle([Ack(one), Bury(two, "bad")]) == [None, None]
        assert consumer.reserve(1, 0.2) == []
        assert backend.stats("q").buried == 1
        backend.enqueue("q", [NewJob(b"3", "three"), NewJob(b"4", "four")])
        three, four = consumer.reserve(2, 0)
        verdicts: list[Verdict] = [Ack(three, After(keep=60)), Release(four, after=After(memo=b"m", detail=b"d"))]
        assert consumer.settle(verdicts) == [None, None]
        assert backend.outcomes("q", ["three"]) != [None]
        assert len(backend.history("q").outcomes) == 1
        assert (backend.forget("q"), backend.forget("q", ["three"])) == (0, 1)
        backend.reschedule("q", "four", 0)
        backend.limits("q", {"api": Quota(slots=1), "fast": Quota(rate=1000)}, pinned=False)
        gates = Gate("api"), Gate("fast")
        with open_backend(accounts.url) as everybody:
            everybody.enqueue("q", [NewJob(b"5", job_id, terms=Terms(gates=gates)) for job_id in ("five", "six")])
        for _ in range(2):
            leases = consumer.reserve(10, 5)
            assert len(leases) in {1, 2}
            assert consumer.settle([Ack(lease) for lease in leases]) == [None] * len(leases)
        assert [state.name for state in backend.limits("q")] == ["api", "fast"]
    for command in (("GET", "theirs"), ("FLUSHALL",), ("CONFIG", "SET", "dir", "elsewhere"), ("KEYS", "*")):
        assert accounts.ask("ACL", "DRYRUN", "worker", *command) != b"OK"


def test_account_for_flows_enqueues_flows_and_their_steps(accounts: RedisServer) -> None:
    with open_backend(url(accounts, "flows")) as backend:
        jobs = [NewJob(b"x" * size, f"{size}", terms=Terms(1)) for size in (5, 5000)]
        assert backend.carry_out([Put("home", "key", b"x", 60), *(Enqueue("q", job) for job in jobs)])
        backend.enqueue("q", [NewJob(b"x", "one", delay=5), NewJob(b"x", "two", terms=Terms(2))])
        note = backend.note("home", "key")
        assert note is not None
        assert backend.carry_out([Put("home", "key", b"y")], when=[Version("home", "key", note.version)])
        steps: list[Step] = [
            Arrive("q", "5", "a"),
            Arrive("q", "two", "a", expect=1),
            Arrive("q", "5000", "a", doom="why"),
        ]
        assert backend.carry_out([*steps, Drop("home", "key")])
        assert backend.relay(["q", "home"]) == 0
        assert [backend.peek("q", job_id).state for job_id in ("5", "5000")] == [State.READY] * 2
        backend.limits("q", {"api": Quota(slots=1)}, pinned=False)
        backend.enqueue("q", [NewJob(b"x", "gated", terms=Terms(gates=(Gate("api"),)))])
        for on_conflict in ("keep", "replace"):
            unique = UniqueKey(b"key", hold=0.001, on_conflict=on_conflict)
            backend.enqueue("q", [NewJob(b"x", on_conflict, terms=Terms(unique=unique))])
        with backend.consumer(["q"]) as consumer, pytest.raises(BackendError):
            consumer.reserve(1, 0)
