"""Users that can do no more than they must: the recipes of docs/mysql.md, on a real server."""

from __future__ import annotations

import re
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from multiq.backend import Abandon, Ack, Bury, GiveBack, NewJob, Release, State, Touch
from multiq.backend.registry import open_backend
from multiq.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from servers.mysql import MysqlDatabases, Place

    from multiq.backend import Verdict

PAGE = Path(__file__).parents[3] / "docs" / "mysql.md"


def recipe(name: str) -> list[str]:
    """The statements of the page that make one user."""
    (found,) = re.findall(rf"```text\n(CREATE USER {name} .*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return [line.rstrip(";") for line in found.splitlines()]


@pytest.fixture
def user(mysql_server: MysqlDatabases, place: Place) -> Iterator[Callable[[str], str]]:
    """Makes a user as the page says, under a name of its own, and returns its URL."""
    made = []
    with open_backend(place.url) as everybody:
        everybody.stats("q")  # makes the tables

    def make(name: str) -> str:
        own = f"{name}{uuid.uuid4().hex[:8]}"
        made.append(own)
        for statement in recipe(name):
            mysql_server.ask(re.sub(rf"\b{name}\b", own, statement).replace("shop.", f"{place.name}."))
        return mysql_server.url(place.name, user=f"{own}:secret")

    yield make
    for own in made:
        mysql_server.ask(f"DROP USER {own}")


def test_a_producer_enqueues_and_can_take_nothing(user: Callable[[str], str], place: Place) -> None:
    with open_backend(user("producer")) as backend, backend.consumer(["q"]) as consumer:
        backend.enqueue("q", [NewJob(b"1", "one")])
        backend.enqueue("q", [NewJob(b"2", "two", delay=5), NewJob(b"x" * 200_000, "three")])
        backend.enqueue("q", [NewJob(b"again", "one")])  # as after a lost reply
        for call in (
            lambda: consumer.reserve(1, 0),
            lambda: backend.peek("q", "one"),
            lambda: backend.jobs("q", State.READY),
            lambda: backend.stats("q"),
            backend.queues,
            lambda: backend.delete("q", "one"),
            lambda: backend.reschedule("q", "one", 1),
            lambda: backend.kick_job("q", "two"),
            lambda: backend.purge("q", [State.READY]),
            lambda: backend.pause("q", 1),
            lambda: backend.resume("q"),
        ):
            with pytest.raises(BackendUnavailable, match=r"(SELECT|INSERT|UPDATE|DELETE).*command denied.*multiq_"):
                call()
    with open_backend(place.url) as everybody:
        assert everybody.stats("q").ready == 2
        assert everybody.peek("q", "one").body == b"1"


def test_a_worker_works_and_makes_no_jobs(user: Callable[[str], str], place: Place) -> None:
    with open_backend(place.url) as everybody:
        everybody.enqueue("q", [NewJob(bytes([at]), str(at)) for at in range(40)])
    with open_backend(user("worker")) as backend, backend.consumer(["q"]) as consumer:
        one, two, three, four, five, six = consumer.reserve(6, 0)
        verdicts: list[Verdict] = [
            Ack(one),
            Bury(two, "bad"),
            Release(three, 0.5),
            GiveBack(four),
            Touch(five),
            Abandon(six),
        ]
        assert consumer.settle(verdicts) == [None] * 6
        _, leases = consumer.exchange([Ack(five)], 10, 0)
        while leases:
            _, leases = consumer.exchange([Ack(one) for one in leases], 10, 1)
        assert consumer.reserve(1, 0.1) == []
        assert backend.stats("q").buried == 1
        assert backend.queues() == ["q"]
        assert len(backend.jobs("q", State.BURIED).jobs) == 1
        backend.kick("q", 1)
        backend.delete("q", two.id)
        for call in (
            lambda: backend.enqueue("q", [NewJob(b"", "more")]),
            lambda: backend.pause("q", 1),
            lambda: backend.resume("q"),
        ):
            with pytest.raises(BackendUnavailable, match=r"(INSERT|DELETE).*command denied.*multiq_"):
                call()


@pytest.mark.parametrize("name", ["producer", "worker"])
def test_neither_reaches_anything_else(
    mysql_server: MysqlDatabases, user: Callable[[str], str], place: Place, name: str
) -> None:
    mysql_server.ask(f"CREATE TABLE {place.name}.theirs (a INT)")
    url = user(name)
    own = url.partition("//")[2].partition(":")[0]
    for statement in (
        f"SELECT * FROM {place.name}.theirs",  # noqa: S608 - a name of this test
        f"DROP TABLE {place.name}.multiq_jobs",
        f"ALTER TABLE {place.name}.multiq_jobs ADD x INT",
        f"UPDATE {place.name}.multiq_schema SET version = 99",  # noqa: S608 - the same
        "SELECT * FROM mysql.global_priv",
        "SELECT LOAD_FILE('/etc/passwd') IS NOT NULL INTO OUTFILE '/tmp/x'",
    ):
        with (
            pytest.raises(Exception, match=r"(?i)denied"),
            mysql_server.client(user=own, password=b"secret") as client,
            client.cursor() as cursor,
        ):
            cursor.execute(statement)
