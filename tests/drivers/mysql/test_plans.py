"""How the server means to carry out our statements: by the index each was written for, without sorting jobs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pymysql.constants import CLIENT
from pymysql.cursors import DictCursor

import multiq_mysql
from multiq.backend import Ack, State
from multiq.backend.registry import open_backend
from multiq_mysql.pool import _SESSION
from multiq_mysql.scan_window import FROM_START
from multiq_mysql.statements import NOW, Sql, render, template

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pymysql.connections import Connection
    from servers.mysql import MysqlDatabases

VERBS = sorted(file.stem for file in (Path(multiq_mysql.__file__).parent / "sql").glob("*.sql"))
READING = [verb for verb in VERBS if verb not in {"enqueue", "newest", "pause", "receipt", "resume", "stock", "queues"}]

#: what each placeholder stands for
VALUES: dict[str, Any] = {
    "again": FROM_START, "delay": 5, "due": FROM_START, "condition": Sql("place = 1024 AND seq > 7"), "horizon": 1000,
    "id": b"1", "limit": 10, "newest": 10**6, "now": NOW, "number": 0, "order": Sql("ASC"), "pause": 5, "place": 5,
    "priority": None, "queue": b"q", "ready": FROM_START, "reason": b"why", "seq": 3, "seqs": [1, 2], "state": 3,
    "token": 0, "row": Sql("1"), "ticket": 5, "writer": 5, "writers": [4, 5],
}  # fmt: skip

#: the index, and how many of its columns narrow the search: their lengths in bytes
PRIMARY, PLACE, ID = "PRIMARY", "multiq_jobs_place", "multiq_jobs_id"
INDEXES = {
    "abandon": PRIMARY, "ack": PRIMARY, "ack_with_ticket": PRIMARY, "buried": PLACE, "bury": PRIMARY, "claim": PLACE,
    "delete": ID, "due": PLACE, "find": ID, "give_back": PRIMARY, "held": PRIMARY, "kick": PRIMARY, "kick_job": ID,
    "last_buried": PLACE, "look": PLACE, "page": PLACE, "peek": ID, "promote": PRIMARY, "purge": PRIMARY,
    "old_receipts": PRIMARY, "purgeable": PLACE, "lock": PRIMARY, "read_back": PRIMARY, "receipts": PRIMARY,
    "release": PRIMARY, "remove": PRIMARY, "reserve": PRIMARY, "stats": PLACE, "take_out": ID, "tidy": PRIMARY,
    "touch": PRIMARY,
}  # fmt: skip


SIZES = [10, 1_000, pytest.param(1_000_000, marks=pytest.mark.long)]


@pytest.fixture(scope="module", params=SIZES)
def tables(request: pytest.FixtureRequest, mysql_server: MysqlDatabases) -> Iterator[Connection[Any]]:
    """A session as ours are, on tables of this size that the server has statistics of."""
    ours = {"init_command": _SESSION, "client_flag": CLIENT.MULTI_STATEMENTS}
    with (
        mysql_server.database() as place,
        open_backend(place.url) as backend,
        mysql_server.client(place.name, **ours) as plain,
    ):
        backend.stats("q")
        _ask(
            plain,
            "INSERT INTO multiq_jobs (queue, id, state, place, priority, ttr, enqueued_at, body) "  # noqa: S608
            f"SELECT 'q', seq, seq MOD 5, 1024, 1024, 60000000, 0, 'x' FROM seq_1_to_{request.param} ORDER BY seq",
        )
        _ask(plain, f"INSERT INTO multiq_receipts SELECT seq, 1, 1 FROM seq_1_to_{request.param}")  # noqa: S608
        _ask(plain, "ANALYZE TABLE multiq_jobs, multiq_receipts")
        yield plain


@pytest.mark.parametrize("verb", READING)
def test_every_statement_uses_its_index_and_sorts_nothing(tables: Connection[Any], verb: str) -> None:
    _is_by_index(verb, _plan(tables, verb))


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("verb", [verb for verb in READING if "{seqs}" in template(verb)])
def test_a_batch_of_many_rows_of_the_table_reads_these_and_no_others(
    tables: Connection[Any], verb: str, share: float
) -> None:
    """A statement locks each row that it reads: a DELETE without a hint, or a long IN (...), would read all rows."""
    ((rows,),) = _ask(tables, "SELECT MAX(seq) FROM multiq_jobs")
    _is_by_index(verb, _plan(tables, verb, seqs=range(1, min(2500, int(rows * share)) + 1)))


def _is_by_index(verb: str, plan: list[dict[str, Any]]) -> None:
    """A range or a point of the index that the statement is written for."""
    for step in plan:
        if step["table"] in {"multiq_jobs", "multiq_receipts", "job", "ticket", "receipt"}:
            assert step["key"] == INDEXES[verb], step
            assert step["type"] in {"range", "ref", "const", "eq_ref"}, step
        assert "filesort" not in (step["Extra"] or ""), step
        assert "temporary" not in (step["Extra"] or ""), step
        assert not (step["table"] or "").startswith("<"), step  # made for the purpose


@pytest.mark.parametrize("verb", ["look", "stats", "due", "last_buried", "buried"])
def test_counts_and_lookups_read_the_index_alone(tables: Connection[Any], verb: str) -> None:
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
def test_every_sql_file_is_used_and_avoids_single_dialects(verb: str) -> None:
    sources = "".join(file.read_text() for file in Path(multiq_mysql.__file__).parent.glob("*.py"))
    assert f'"{verb}"' in sources
    # MariaDB alone, MySQL alone, or not the same in both; and double quotes depend on the SQL mode
    assert not re.search(r'RETURNING|\bVALUES\(\w+\)|\bAS new\b|LATERAL|"', template(verb))


def test_a_claim_locks_what_it_hands_out_and_no_more(tables: Connection[Any], mysql_server: MysqlDatabases) -> None:
    claim = render("claim", **{**VALUES, "state": 0, "limit": 1, "condition": FROM_START})
    seen = set()
    others = [mysql_server.connect(_name(tables), autocommit=False) for _ in range(min(6, _ready(tables, 6)))]
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
    # Given a client that scans an empty queue and keeps the transaction open
    with mysql_server.client(place.name, autocommit=False) as idle:
        _ask(idle, "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        assert _ask(idle, render("claim", **{**VALUES, "state": 0, "condition": FROM_START})) == ()
        # Then a job can be enqueued all the same
        backend.enqueue("q", jobs())
    assert backend.stats("q").ready == 1


@pytest.mark.parametrize("count", [2, 10, 100, 300])
def test_statements_wait_for_no_rows_of_other_transactions(
    mysql_server: MysqlDatabases, place: Any, backend: Any, jobs: Callable[..., Any], count: int
) -> None:
    # Given an application that has enqueued into another queue and does not commit
    with mysql_server.client(place.name, autocommit=False) as app, open_backend(f"{place.url}?timeout=5") as hasty:
        backend.enqueue("q", jobs(2 * count))
        backend.enqueue("other", jobs(1), connection=app)
        consumer = hasty.consumer(["q"])
        leases = consumer.reserve(count, 0)
        # Then what is known by its key is changed all the same, be it nearly all that there is
        assert consumer.settle([Ack(lease) for lease in leases]) == [None] * count
        assert hasty.purge("q", [State.READY]) == count
        app.rollback()


def _name(connection: Connection[Any]) -> str:
    ((name,),) = _ask(connection, "SELECT DATABASE()")
    return str(name)


def _ready(connection: Connection[Any], most: int) -> int:
    return len(_ask(connection, f"SELECT 1 FROM multiq_jobs WHERE state = 0 LIMIT {most:d}"))  # noqa: S608 - a number


def _plan(connection: Connection[Any], verb: str, **other: Any) -> list[dict[str, Any]]:
    names = set(re.findall(r"{(\w+)}", template(verb)))
    text = render(verb, **{name: {**VALUES, **other}[name] for name in names})

    with connection.cursor(DictCursor) as cursor:
        cursor.execute(f"EXPLAIN {text}")
        return list(cursor.fetchall())


def _ask(connection: Connection[Any], text: str) -> tuple[Any, ...]:
    with connection.cursor() as cursor:
        cursor.execute(text)
        return tuple(cursor.fetchall())
