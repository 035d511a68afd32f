"""The server's plans for the driver's statements: each uses the index it was written for, and sorts no jobs."""

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
from multiq_mysql.scan_window import FROM_START
from multiq_mysql.session_settings import SESSION_SETTINGS
from multiq_mysql.statements import NOW, Sql, render, template

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pymysql.connections import Connection
    from servers.mysql import MysqlDatabases

VERBS = sorted(file.stem for file in (Path(multiq_mysql.__file__).parent / "sql").glob("*.sql"))
WRITING = {
    "arrive", "claim_key", "enqueue", "enqueue_held", "enqueue_terms", "join_lines", "keep", "keep_if_acked",
    "begin_change", "lease_gates", "lock_gates", "lock_keys", "newest",
    "old_arrivals", "opens", "pause", "put", "put_limit", "queues", "receipt", "resume", "stock",
}  # fmt: skip
READING = [verb for verb in VERBS if verb not in WRITING]

#: placeholder -> its value in these tests
VALUES: dict[str, Any] = {
    "after": b"a", "again": FROM_START, "awaits": 3, "beyond": b"z", "first": b"a", "home": b"q", "lock": Sql(""),
    "members": Sql("x'31',x'32'"), "names": Sql("x'31',x'32'"), "delay": 5, "due": FROM_START,
    "condition": Sql("place = 1024 AND seq > 7"), "horizon": 1000,
    "detail": b"why", "expires_at": 2**62, "floor": 3, "ids": Sql("x'31',x'32'"), "inline": 8192, "kinds": [0, 1],
    "memo": b"half", "id": b"5", "limit": 10, "newest": 10**6, "now": NOW, "number": 0, "order": Sql("ASC"),
    "pause": 5, "place": 5,
    "priority": None, "queue": b"q", "ready": FROM_START, "reason": b"why", "seq": 3, "seqs": [1, 2], "state": 3,
    "closed_key": b"1", "closed_name": b"1", "gates": b"#", "latest": 5, "look_at": 5, "name": b"1",
    "pinned": 1, "quota": b"{}", "leases": Sql("(1,1),(2,2)"), "turn": 5,
    "before": 199, "behind": 2**62, "body": b"x", "examined": 10, "held_until": 0, "hold_delay": 5, "key": b"1",
    "keys": Sql("x'31',x'32'"), "ttr": 5, "known": Sql("x'31',x'32'"), "end": 10**6,
    "token": 0, "row": Sql("1"), "ticket": 5, "writer": 5, "writers": [4, 5],
}  # fmt: skip

#: the index of each statement, and the length in bytes of its columns that narrow the search
PRIMARY, PLACE, ID, EXPIRY = "PRIMARY", "multiq_jobs_place", "multiq_jobs_id", "multiq_outcomes_expiry"
NOTES_EXPIRY = "multiq_notes_expiry"
LOOK, LINES_JOB = "multiq_gates_look", "multiq_lines_job"
INDEXES = {
    "abandon": PRIMARY, "arrived": ID, "awaits": PRIMARY, "doom": PRIMARY, "drop": PRIMARY, "drop_arrivals": PRIMARY,
    "drop_expired_notes": NOTES_EXPIRY, "let_go": PRIMARY, "note": PRIMARY, "notes": PRIMARY, "targets": ID,
    "versions": PRIMARY, "ack": PRIMARY, "ack_with_ticket": PRIMARY, "buried": PLACE, "bury": PRIMARY, "reserve": PLACE,
    "deletable": ID, "delete": ID, "detail": PRIMARY,
    "drop_expired": EXPIRY, "due": PLACE, "find": ID, "forget": PRIMARY,
    "give_back": PRIMARY, "held": PRIMARY, "history": EXPIRY, "kick": PRIMARY, "kick_job": ID, "memo": PRIMARY,
    "memos": PRIMARY, "outcomes": PRIMARY,
    "last_buried": PLACE, "look": PLACE, "page": PLACE, "peek": ID, "promote": PRIMARY, "purge": PRIMARY,
    "old_receipts": PRIMARY, "purgeable": PLACE, "lock": PRIMARY, "read_back": PRIMARY, "receipts": PRIMARY,
    "release": PRIMARY, "remove": PRIMARY, "begin_leases": PRIMARY, "stats": PLACE, "take_out": ID, "tidy": PRIMARY,
    "touch": PRIMARY, "added": ID, "buried_page": PLACE, "drop_keys": ID, "keys": ID, "kick_with_key": PRIMARY,
    "locked_key": PRIMARY, "owner": ID, "replace": PRIMARY, "stale_keys": ID, "take_key": PRIMARY,
    "change": PRIMARY, "end_change": PRIMARY, "go_on_later": PRIMARY, "last_of_slice": PRIMARY,
    "read_locked": PRIMARY, "reserve_gated": PLACE, "drop_limit": PRIMARY, "end_lease": PRIMARY, "end_leases": PRIMARY,
    "ended": PRIMARY, "existing_gates": PRIMARY, "gate": PRIMARY, "gates_to_look_at": LOOK, "in_lines": LINES_JOB,
    "leased": PRIMARY, "leased_gates": PRIMARY, "leave_line": PRIMARY, "leave_lines": LINES_JOB, "line": PRIMARY,
    "lines_to_look_at": LOOK, "open_gate": PRIMARY, "open_gates": PRIMARY, "park": PRIMARY,
    "others": PLACE, "others_by_seq": PRIMARY, "others_end": PLACE, "reserve_others": PRIMARY,
    "parked": PRIMARY, "past_gates": LOOK, "quotas": PRIMARY, "rate": PRIMARY, "running": PRIMARY,
    "set_gate": PRIMARY, "unblock": "multiq_gates_closed", "unplaced": PLACE, "waiting": PRIMARY,
}  # fmt: skip


OURS = {
    "multiq_jobs", "multiq_receipts", "multiq_outcomes", "multiq_arrivals", "multiq_notes", "job", "ticket", "receipt",
}  # fmt: skip
#: statements about few jobs, or without a lock
LIMITED = {"drop_arrivals", "in_lines"}
#: tables of limits, and their names in statements
LIMITING = {
    "multiq_gates", "multiq_leases", "multiq_limits", "multiq_lines", "gate", "leased", "line", "other", "quota",
}  # fmt: skip
#: statements about a few rows, or for a person, which group what they find
GROUPED = {"leased_gates", "unplaced"}
#: the statements that first read a page of an index in a subquery
PAGED = {
    "drop_arrivals", "drop_expired", "drop_expired_notes", "drop_keys", "history", "lines_to_look_at", "others_end",
    "past_gates", "stale_keys",
}  # fmt: skip
SIZES = [
    10, 1_000, pytest.param(30_000, marks=pytest.mark.long), pytest.param(1_000_000, marks=pytest.mark.exhaustive),
]  # fmt: skip


@pytest.fixture(scope="module", params=SIZES)
def tables(request: pytest.FixtureRequest, mysql_server: MysqlDatabases) -> Iterator[Connection[Any]]:
    """A session like the driver's, on tables of this size, for which the server has statistics."""
    ours = {"init_command": SESSION_SETTINGS, "client_flag": CLIENT.MULTI_STATEMENTS}
    with (
        mysql_server.database() as place,
        open_backend(place.url) as backend,
        mysql_server.client(place.name, **ours) as plain,
    ):
        backend.stats("q")
        _ask(
            plain,
            "INSERT INTO multiq_jobs (queue, id, state, place, priority, ttr, enqueued_at, body) "  # noqa: S608
            f"SELECT 'q', seq, seq MOD 6, 1024, 1024, 60000000, 0, 'x' FROM seq_1_to_{request.param} ORDER BY seq",
        )
        _ask(plain, f"INSERT INTO multiq_receipts SELECT seq, 1, 1 FROM seq_1_to_{request.param}")  # noqa: S608
        _ask(
            plain,
            "INSERT INTO multiq_outcomes SELECT 'q', seq, seq MOD 2, seq, (seq MOD 2) * 4e15 + seq, 1, 'x' "  # noqa: S608
            f"FROM seq_1_to_{request.param}",
        )
        _ask(
            plain,
            "INSERT INTO multiq_arrivals SELECT 5 * (seq MOD 2), seq "  # noqa: S608
            f"FROM seq_1_to_{request.param}",
        )
        _ask(
            plain,
            "INSERT INTO multiq_notes SELECT 'q', seq, 1, IF(seq MOD 2, seq, NULL), 'x' "  # noqa: S608
            f"FROM seq_1_to_{request.param}",
        )
        _ask(plain, f"INSERT INTO multiq_unique SELECT 'q', seq, seq, 0 FROM seq_1_to_{request.param}")  # noqa: S608
        for table, values in {
            "limits": "'q', seq, 0, '{}'",
            "gates": "'q', seq MOD 3, seq, 0, IF(seq MOD 2, seq, NULL), seq, IF(seq MOD 4, NULL, 1), 1",
            "lines": "'q', seq MOD 3, seq MOD 5, 1024, seq",
            "leases": "seq, seq MOD 3, seq MOD 5, 'q', 1",
        }.items():
            _ask(plain, f"INSERT INTO multiq_{table} SELECT {values} FROM seq_1_to_{request.param}")  # noqa: S608
        _ask(plain, "ANALYZE TABLE multiq_limits, multiq_gates, multiq_lines, multiq_leases")
        _ask(
            plain,
            "ANALYZE TABLE multiq_jobs, multiq_receipts, multiq_outcomes, multiq_arrivals, multiq_notes, multiq_unique",
        )
        yield plain


@pytest.mark.parametrize("verb", READING)
def test_every_statement_uses_its_index_and_sorts_nothing(tables: Connection[Any], verb: str) -> None:
    _is_by_index(verb, _plan(tables, verb))


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("verb", [verb for verb in READING if "{seqs}" in template(verb) and verb not in LIMITED])
def test_a_batch_of_many_rows_of_the_table_reads_these_and_no_others(
    tables: Connection[Any], verb: str, share: float
) -> None:
    """A statement locks each row that it reads. A DELETE without a hint, or a long IN (...), would read all rows."""
    ((rows,),) = _ask(tables, "SELECT MAX(seq) FROM multiq_jobs")
    _is_by_index(verb, _plan(tables, verb, seqs=range(1, min(2500, int(rows * share)) + 1)))


def _is_by_index(verb: str, plan: list[dict[str, Any]]) -> None:
    """Assert that the plan uses a range or a point of the index that the statement is written for."""
    has_page = any(step["select_type"] == "DERIVED" for step in plan)
    for step in plan:
        if step["table"] in OURS:
            assert step["key"] == (PRIMARY if step["table"] == "multiq_arrivals" else INDEXES[verb]), step
            assert step["type"] in {"range", "ref", "const", "eq_ref"}, step
        if step["table"] in {"entry", "found", "multiq_unique"}:
            assert (step["key"], step["type"] in {"range", "const", "eq_ref"}) == (PRIMARY, True), step
        if step["table"] in {"arrival", "note", "outcome"}:
            assert (step["key"], step["type"]) == (PRIMARY, "eq_ref" if has_page else "range"), step
        if step["table"] in LIMITING:
            assert step["key"] is not None, step
            assert step["type"] in {"range", "ref", "const", "eq_ref"}, step
        if verb not in GROUPED:
            assert "filesort" not in (step["Extra"] or ""), step
            assert "temporary" not in (step["Extra"] or ""), step
        is_made = (step["table"] or "").startswith(
            "<"
        )  # for the purpose, as the page of an index is that is read first
        assert not is_made or (has_page and verb in PAGED), step


@pytest.mark.parametrize("verb", ["look", "stats", "due", "last_buried", "buried", "drop_expired", "history"])
def test_counts_and_lookups_read_the_index_alone(tables: Connection[Any], verb: str) -> None:
    steps = [step for step in _plan(tables, verb) if step["table"] in {"multiq_jobs", "multiq_outcomes"}]
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


def test_the_clean_up_of_arrivals_jumps_from_job_to_job(tables: Connection[Any]) -> None:
    steps = {step["table"]: step for step in _plan(tables, "old_arrivals", after=0)}
    assert steps["multiq_arrivals"]["type"] == "range"
    ((rows,),) = _ask(tables, "SELECT COUNT(*) FROM multiq_arrivals")
    assert rows < 1000 or "group-by" in steps["multiq_arrivals"]["Extra"]
    assert steps["multiq_jobs"]["key"] == PRIMARY


@pytest.mark.parametrize("verb", VERBS)
def test_every_sql_file_is_used_and_avoids_single_dialects(verb: str) -> None:
    sources = "".join(file.read_text() for file in Path(multiq_mysql.__file__).parent.glob("*.py"))
    assert f'"{verb}"' in sources
    # these exist on one server only, or differ between MariaDB and MySQL; double quotes depend on the SQL mode
    assert not re.search(r'RETURNING|\bVALUES\(\w+\)|\bAS new\b|LATERAL|"', template(verb))


@pytest.mark.long
def test_a_claim_locks_what_it_hands_out_and_no_more(tables: Connection[Any], mysql_server: MysqlDatabases) -> None:
    claim = render("reserve", **{**VALUES, "state": 0, "limit": 1, "condition": FROM_START})
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


@pytest.mark.long
def test_a_scan_that_finds_nothing_blocks_no_producer(
    mysql_server: MysqlDatabases, place: Any, backend: Any, jobs: Callable[..., Any]
) -> None:
    # Given a client that scans an empty queue and keeps the transaction open
    with mysql_server.client(place.name, autocommit=False) as idle:
        _ask(idle, "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        assert _ask(idle, render("reserve", **{**VALUES, "state": 0, "condition": FROM_START})) == ()
        # Then a job can still be enqueued
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
        # Then rows can still be changed by their keys, even nearly all rows
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
    if "opens" in names:
        other["opens"] = Sql(render("opens", queue=VALUES["queue"], now=NOW, horizon=VALUES["horizon"]))
    text = render(verb, **{name: {**VALUES, **other}[name] for name in names})

    with connection.cursor(DictCursor) as cursor:
        cursor.execute(f"EXPLAIN {text}")
        return list(cursor.fetchall())


def _ask(connection: Connection[Any], text: str) -> tuple[Any, ...]:
    with connection.cursor() as cursor:
        cursor.execute(text)
        return tuple(cursor.fetchall())
