"""Users with the fewest privileges that multiq needs: the recipes of docs/mysql.md, on a real server."""

from __future__ import annotations

import re
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from multiq.backend import (
    Abandon,
    Ack,
    After,
    Arrive,
    Bury,
    Drop,
    Gate,
    GiveBack,
    NewJob,
    Put,
    Quota,
    Release,
    State,
    Terms,
    Touch,
    UniqueKey,
    Verdict,
    Version,
)
from multiq.backend.registry import open_backend
from multiq.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from servers.mysql import MysqlDatabases, Place

    from multiq.backend import Backend, Consumer

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
        backend.enqueue("q", [NewJob(b"again", "one")])  # a repetition, as after a lost reply
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
        everybody.enqueue("q", [NewJob(b"held", "held", terms=Terms(2))])
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
            _, leases = consumer.exchange([Ack(one, After(keep=60, outcome=b"did")) for one in leases], 10, 1)
        # the statements of settles other than ack, bury and touch
        assert len(kept := backend.history("q").outcomes) == 37
        assert backend.outcomes("q", [kept[0].id])[0] is not None
        assert backend.forget("q", [kept[0].id]) == 1
        assert backend.forget("q") == 0
        assert consumer.reserve(1, 0.1) == []
        assert backend.stats("q").buried == 1
        assert backend.queues() == ["q"]
        assert len(backend.jobs("q", State.BURIED).jobs) == 1
        backend.kick("q", 1)
        (kicked,) = consumer.reserve(1, 0)
        notes: list[Verdict] = [Touch(kicked, After(memo=b"half")), Release(kicked, after=After(detail=b"why"))]
        assert consumer.settle(notes) == [None] * 2
        _carry_out_steps(backend, consumer)
        backend.delete("q", two.id)
        for call in (
            lambda: backend.enqueue("q", [NewJob(b"", "more")]),
            lambda: backend.pause("q", 1),
            lambda: backend.resume("q"),
        ):
            with pytest.raises(BackendUnavailable, match=r"(INSERT|DELETE).*command denied.*multiq_"):
                call()


def test_a_producer_with_more_rights_enqueues_unique_jobs(
    user: Callable[[str], str], place: Place, mysql_server: MysqlDatabases
) -> None:
    # Given a producer, which may not use keys
    url = user("producer")
    name = re.search(r"producer\w+", url)
    assert name is not None

    def job(job_id: str, **options: Any) -> NewJob:
        return NewJob(b"x", job_id, terms=Terms(unique=UniqueKey(b"k", **options)))

    denied = pytest.raises(BackendUnavailable, match=r"INSERT.*command denied.*multiq_unique")
    with open_backend(url) as backend, denied:
        backend.enqueue("q", [job("one")])
    # When it has the rights that the page names for unique jobs
    for rights, table in (
        ("SELECT, INSERT, UPDATE", "multiq_jobs"),
        ("SELECT, INSERT, UPDATE, DELETE", "multiq_unique"),
        ("SELECT, INSERT, UPDATE, DELETE", "multiq_receipts"),
    ):
        mysql_server.ask(f"GRANT {rights} ON {place.name}.{table} TO {name[0]}")
    # Then it can enqueue them
    with open_backend(url) as backend, mysql_server.client(place.name, user=name[0], password="secret") as own:  # noqa: S106
        assert backend.enqueue("q", [job("one")]) == ["one"]
        assert backend.enqueue("q", [job("two", on_conflict="replace")]) == ["one"]
        assert backend.enqueue("q", [job("three", on_conflict="replace")], connection=own) == ["one"]
        own.commit()


def test_a_worker_with_more_rights_works_within_limits(
    user: Callable[[str], str], place: Place, mysql_server: MysqlDatabases
) -> None:
    # Given a worker that has the rights that the page names for limits
    url = user("worker")
    name = re.search(r"worker\w+", url)
    assert name is not None
    for table in ("multiq_gates", "multiq_lines", "multiq_leases"):
        mysql_server.ask(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {place.name}.{table} TO {name[0]}")
    mysql_server.ask(f"GRANT SELECT ON {place.name}.multiq_limits TO {name[0]}")
    with open_backend(place.url) as everybody:
        everybody.limits("q", {"api": Quota(slots=1)})
        everybody.enqueue("q", [NewJob(b"x", str(at), terms=Terms(gates=(Gate("api"),))) for at in range(3)])
    # Then it takes one job after the other
    with open_backend(url) as backend, backend.consumer(["q"]) as consumer:
        for _ in range(3):
            (lease,) = consumer.reserve(5, 5)
            assert backend.limits("q")[0].running == 1
            assert consumer.settle([Ack(lease)]) == [None]
        with pytest.raises(BackendUnavailable, match=r"command denied.*multiq_limits"):
            backend.limits("q", {"api": Quota(slots=2)})


def _carry_out_steps(backend: Backend, consumer: Consumer) -> None:
    """Release a held job, and store a note, as a worker does whose jobs are in a flow."""
    (lease,) = consumer.reserve(1, 0)
    steps = (Arrive("q", "held", "one"), Put("q", "key", b"value", 60))
    assert consumer.settle([Bury(lease, after=After(steps=steps))]) == [None]
    assert backend.peek("q", "held").awaits == 1
    assert backend.carry_out([Arrive("q", "held", "two")], when=[Version("q", "absent", "")])
    assert [found.id for found in consumer.reserve(1, 0)] == ["held"]
    assert backend.carry_out([Drop("q", "key")])
    assert backend.notes("q").notes == []


@pytest.mark.parametrize("name", ["producer", "worker"])
def test_neither_account_may_do_anything_else(
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
