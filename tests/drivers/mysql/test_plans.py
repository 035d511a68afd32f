"""How the server means to carry out our statements: by the index each was written for, without sorting jobs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import multiq_mysql
from multiq.registry import open_backend
from multiq_mysql.floors import BOTTOM
from multiq_mysql.statements import NOW, Sql, render, template

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pymysql.connections import Connection
    from servers.mysql import MysqlDatabases

VERBS = sorted(file.stem for file in (Path(multiq_mysql.__file__).parent / "sql").glob("*.sql"))
READING = [verb for verb in VERBS if verb not in {"enqueue", "newest", "pause", "resume", "queues"}]

#: what each placeholder stands for
VALUES: dict[str, Any] = {
    "again": BOTTOM, "delay": 5, "due": BOTTOM, "floor": Sql("place = 1024 AND seq > 7"), "horizon": 1000, "id": b"1",
    "limit": 10, "newest": 10**6, "now": NOW, "number": 0, "order": Sql("ASC"), "pause": 5, "place": 5,
    "priority": None, "queue": b"q", "ready": BOTTOM, "reason": b"why", "seq": 3, "seqs": [1, 2], "state": 3,
    "token": 5, "row": Sql("1"),
}  # fmt: skip

#: the index, and how many of its columns narrow the search: their lengths in bytes
PRIMARY, PLACE, ID = "PRIMARY", "multiq_jobs_place", "multiq_jobs_id"
INDEXES = {
    "abandon": PRIMARY, "ack": PRIMARY, "buried": PLACE, "bury": PRIMARY, "claim": PLACE, "delete": ID, "due": PLACE,
    "find": ID, "give_back": PRIMARY, "held": PRIMARY, "kick": PRIMARY, "kick_job": ID, "last_buried": PLACE,
    "look": PLACE, "page": PLACE, "peek": ID, "promote": PRIMARY, "purge": PRIMARY, "purgeable": PLACE,
    "read_back": PRIMARY, "release": PRIMARY, "remove": PRIMARY, "reserve": PRIMARY, "stats": PLACE,
    "still_buried": PRIMARY, "still_there": PRIMARY, "take_out": ID, "touch": PRIMARY,
}  # fmt: skip


@pytest.fixture(scope="module", params=["few", "many"])
def tables(request: pytest.FixtureRequest, mysql_server: MysqlDatabases) -> Iterator[Connection[Any]]:
    """A plain connection to tables that the server has statistics of."""
    with mysql_server.database() as place, open_backend(place.url) as backend, mysql_server.client(place.name) as plain:
        backend.stats("q")
        values = ",".join(
            f"('q', {number}, {number % 5}, 1024, 1024, 60000000, 0, 'x')"
            for number in range(3 if request.param == "few" else 5000)
        )
        _ask(plain, f"{template('enqueue').partition('VALUES')[0]} VALUES {values}")
        _ask(plain, "ANALYZE TABLE multiq_jobs")
        yield plain


@pytest.mark.parametrize("verb", READING)
def test_every_statement_uses_its_index_and_sorts_nothing(tables: Connection[Any], verb: str) -> None:
    for step in _plan(tables, verb):
        if step["table"] in {"multiq_jobs", "job"}:
            assert step["key"] == INDEXES[verb], step
            # what locks nothing may read a table of three rows whole
            allowed = {"range", "ref", "const", "eq_ref"} | ({"index"} if verb == "still_there" else set())
            assert step["type"] in allowed, step
        assert "filesort" not in (step["Extra"] or ""), step
        assert "temporary" not in (step["Extra"] or ""), step


@pytest.mark.parametrize("verb", ["look", "stats", "due", "last_buried", "buried"])
def test_what_is_only_counted_or_found_is_read_from_the_index_alone(tables: Connection[Any], verb: str) -> None:
    steps = [step for step in _plan(tables, verb) if step["table"] == "multiq_jobs"]
    assert steps
    assert all("Using index" in step["Extra"] for step in steps)


def test_a_look_backwards_reads_the_same_index_and_sorts_nothing(tables: Connection[Any]) -> None:
    steps = [step for step in _plan(tables, "look", order=Sql("DESC")) if step["table"] == "multiq_jobs"]
    assert len(steps) == 4
    for step in steps:
        assert step["key"] == PLACE, step
        assert "Using index" in step["Extra"], step
        assert "filesort" not in step["Extra"], step


def test_listing_queues_jumps_from_name_to_name(tables: Connection[Any]) -> None:
    (step,) = [step for step in _plan(tables, "queues") if step["table"] == "multiq_jobs"]
    assert step["type"] == "range"
    assert "group-by" in step["Extra"]


@pytest.mark.parametrize("verb", VERBS)
def test_every_file_is_read_by_somebody_and_says_nothing_of_one_dialect(verb: str) -> None:
    sources = "".join(file.read_text() for file in Path(multiq_mysql.__file__).parent.glob("*.py"))
    assert f'"{verb}"' in sources
    # MariaDB alone, MySQL alone, or not the same in both; and double quotes depend on the SQL mode
    assert not re.search(r'RETURNING|\bVALUES\(\w+\)|\bAS new\b|LATERAL|"', template(verb))


def test_a_claim_locks_what_it_hands_out_and_no_more(tables: Connection[Any], mysql_server: MysqlDatabases) -> None:
    claim = render("claim", **{**VALUES, "state": 0, "limit": 1, "floor": BOTTOM})
    seen = set()
    others = [mysql_server.connect(_name(tables), autocommit=False) for _ in range(min(6, _ready(tables)))]
    try:
        for other in others:
            _ask(other, "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
            ((head, _),) = _ask(other, claim)
            seen.add(head.partition(",")[0])
        assert len(seen) == len(others) > 0
    finally:
        for other in others:
            other.close()


def test_a_scan_that_finds_nothing_blocks_no_producer(
    mysql_server: MysqlDatabases, place: Any, backend: Any, jobs: Callable[..., Any]
) -> None:
    # Given somebody who looks for jobs in an empty queue and keeps the transaction open
    with mysql_server.client(place.name, autocommit=False) as idle:
        _ask(idle, "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        assert _ask(idle, render("claim", **{**VALUES, "state": 0, "floor": BOTTOM})) == ()
        # Then a job can be enqueued all the same
        backend.enqueue("q", jobs())
    assert backend.stats("q").ready == 1


def _name(connection: Connection[Any]) -> str:
    ((name,),) = _ask(connection, "SELECT DATABASE()")
    return str(name)


def _ready(connection: Connection[Any]) -> int:
    ((count,),) = _ask(connection, "SELECT COUNT(*) FROM multiq_jobs WHERE state = 0")
    return int(count)


def _plan(connection: Connection[Any], verb: str, **other: Any) -> list[dict[str, Any]]:
    names = set(re.findall(r"{(\w+)}", template(verb)))
    text = render(verb, **{name: {**VALUES, **other}[name] for name in names})
    from pymysql.cursors import DictCursor

    with connection.cursor(DictCursor) as cursor:
        cursor.execute(f"EXPLAIN {text}")
        return list(cursor.fetchall())


def _ask(connection: Connection[Any], text: str) -> tuple[Any, ...]:
    with connection.cursor() as cursor:
        cursor.execute(text)
        return tuple(cursor.fetchall())
