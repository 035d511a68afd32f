"""Accounts that can do no more than they must: the recipes of docs/redis.md, on a real server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from multiq.backend import Ack, Bury, NewJob, State
from multiq.backend.registry import open_backend
from multiq.errors import BackendError

if TYPE_CHECKING:
    from servers.redis import RedisServer

PAGE = Path(__file__).parents[3] / "docs" / "redis.md"


def recipe(name: str) -> list[str]:
    """The words of one ``ACL SETUSER`` of the page."""
    found = re.search(rf"ACL SETUSER {name} (.*?)\n\s*```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found[1].replace("\\", " ").split()


@pytest.fixture
def accounts(server: RedisServer) -> RedisServer:
    for name in ("producer", "worker"):
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


def test_worker_account_works_and_reaches_no_other_keys(accounts: RedisServer) -> None:
    with open_backend(accounts.url) as everybody:
        everybody.enqueue("q", [NewJob(b"1", "one"), NewJob(b"2", "two")])
    with open_backend(url(accounts, "worker")) as backend, backend.consumer(["q"]) as consumer:
        one, two = consumer.reserve(2, 0)
        assert consumer.settle([Ack(one), Bury(two, "bad")]) == [None, None]
        assert consumer.reserve(1, 0.2) == []
        assert backend.stats("q").buried == 1
    for command in (("GET", "theirs"), ("FLUSHALL",), ("CONFIG", "SET", "dir", "elsewhere"), ("KEYS", "*")):
        assert accounts.ask("ACL", "DRYRUN", "worker", *command) != b"OK"
