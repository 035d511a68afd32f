"""Query plans: every statement uses an index and sorts nothing, whatever SQLite's statistics are."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import multiq_sqlite
from multiq_sqlite.opening import open_file
from multiq_sqlite.statements import script, statement

if TYPE_CHECKING:
    from collections.abc import Iterator

FILES = sorted(file.stem for file in (Path(multiq_sqlite.__file__).parent / "sql").glob("*.sql"))
SCRIPTS = {name for name in FILES if name in {"schema", "moves"} or name.startswith("upgrade_")}
STATEMENTS = [name for name in FILES if name not in SCRIPTS]

TABLES = re.compile(
    r"SCAN (multiq_(jobs|bodies|memos|terms|arrivals|notes|outcomes|gates|rates|turns)|"
    r"job|outcome|buried|leased|line)\b"
)
NEW = re.compile(r"new\.\w+")

# these statements sort a few groups or names, but no jobs
SORTING = {"stats", "queues"}


@pytest.fixture(scope="module", params=["no statistics", "statistics of many", "statistics of few"])
def tables(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[sqlite3.Connection]:
    """A connection of the driver's to a file with or without the statistics of ANALYZE."""
    path = str(tmp_path_factory.mktemp("plans") / "jobs.db")
    open_file(path, "full", 1.0)[0].close()
    if request.param != "no statistics":
        _analyse(path, jobs=3000 if request.param == "statistics of many" else 3)
    sqlite, _ = open_file(path, "full", 1.0)
    yield sqlite
    sqlite.close()


def _analyse(path: str, jobs: int) -> None:
    sqlite = sqlite3.connect(path)
    row = (
        "INSERT INTO multiq_jobs (queue, id, state, priority, due_at, ttr, enqueued_at) VALUES ('q', ?, ?, 0, 0, 1, 0)"
    )
    sqlite.executemany(row, [(str(number), number % 5) for number in range(jobs)])
    sqlite.commit()
    sqlite.execute("ANALYZE")
    sqlite.close()


@pytest.mark.parametrize("name", STATEMENTS)
def test_no_statement_reads_or_sorts_a_whole_table(tables: sqlite3.Connection, name: str) -> None:
    plan = _plan(tables, name)
    scans = [step for step in plan if TABLES.match(step)]
    assert scans == []
    if name not in SORTING:
        assert [step for step in plan if "TEMP B-TREE" in step] == []


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("ready", "multiq_jobs_ready (queue=?)"),
        ("jobs_ready", "multiq_jobs_ready (queue=? AND priority=? AND rowid>?)"),
        ("jobs_ready", "multiq_jobs_ready (queue=? AND priority>?)"),
        ("jobs_waiting", "multiq_jobs_waiting (queue=? AND state=? AND due_at=? AND rowid>?)"),
        ("jobs_waiting", "multiq_jobs_waiting (queue=? AND state=? AND due_at>?)"),
        ("due", "COVERING INDEX multiq_jobs_waiting (queue=? AND state=? AND due_at<?)"),
        ("look", "COVERING INDEX multiq_jobs_waiting (queue=? AND state=?)"),
        ("buried", "COVERING INDEX multiq_jobs_waiting (queue=? AND state=?)"),
        ("held", "INTEGER PRIMARY KEY"),
        ("bury", "INTEGER PRIMARY KEY"),
        ("find", "multiq_jobs_id (queue=? AND id=?)"),
        ("parts", "multiq_bodies USING INTEGER PRIMARY KEY"),
        ("parts", "multiq_memos USING INTEGER PRIMARY KEY"),
        ("peek", "multiq_memos USING INTEGER PRIMARY KEY"),
        ("keep", "multiq_jobs USING INTEGER PRIMARY KEY"),
        ("outcomes", "outcome USING INDEX multiq_outcomes_id (queue=? AND id=?)"),
        ("kept", "outcome USING INDEX multiq_outcomes_id (queue=? AND id=?)"),
        ("history", "multiq_outcomes_expiry (queue=? AND kind=? AND expires_at=? AND rowid<?)"),
        ("history", "multiq_outcomes_expiry (queue=? AND kind=? AND expires_at>? AND expires_at<?)"),
        ("expired", "COVERING INDEX multiq_outcomes_expiry (queue=? AND kind=? AND expires_at<?)"),
        ("terms", "multiq_jobs USING INDEX multiq_jobs_id (queue=? AND id=?)"),
        ("terms", "multiq_terms USING INTEGER PRIMARY KEY"),
        ("enqueue_terms", "multiq_jobs USING INDEX multiq_jobs_id (queue=? AND id=?)"),
        ("await", "multiq_terms USING INTEGER PRIMARY KEY"),
        ("let_go", "multiq_jobs USING INTEGER PRIMARY KEY"),
        ("forget_terms", "multiq_terms USING INTEGER PRIMARY KEY"),
        ("drop", "multiq_notes USING INDEX multiq_notes_key (home=? AND key=?)"),
        ("find_note", "multiq_notes USING INDEX multiq_notes_key (home=? AND key=?)"),
        ("notes", "multiq_notes USING INDEX multiq_notes_key (home=? AND key>? AND key<?)"),
        ("expired_notes", "COVERING INDEX multiq_notes_expiry (home=? AND expires_at>? AND expires_at<?)"),
        ("queues", "COVERING INDEX multiq_jobs_id (queue>?)"),
        ("jobs_ready", "multiq_jobs_waiting (queue=? AND state=? AND due_at=? AND rowid>?)"),
        ("gates", "multiq_gates USING PRIMARY KEY (seq=?)"),
        ("head", "multiq_gates_lines (queue=? AND name=? AND key=? AND priority>?)"),
        ("leases", "leased USING INDEX multiq_gates_leases (queue=? AND name=? AND key=?)"),
        ("lines", "COVERING INDEX multiq_gates_lines (queue=? AND name=? AND key>?)"),
        ("next_turns", "multiq_turns_open (queue=? AND name=?)"),
        ("awaited_beside_turns", "multiq_turns_open (queue=? AND name=?)"),
        ("awaited_beside_turns", "multiq_gates_lines (queue=? AND name=? AND key=? AND priority>?)"),
        ("awaited_beside_turns", "multiq_turns_closed (queue=? AND closed_name=? AND closed_key=?)"),
        ("opening", "multiq_rates_opening (queue=? AND opens_at>? AND opens_at<?)"),
        ("look", "multiq_rates_opening (queue=? AND opens_at>?)"),
        ("past_rates", "multiq_rates_past (queue=? AND due<?)"),
        ("closed_keys", "multiq_turns_closed (queue=? AND closed_name=? AND closed_key>?)"),
        ("rate_keys", "multiq_rates USING PRIMARY KEY (queue=? AND name=? AND key>?)"),
        ("drop_turns", "COVERING INDEX multiq_turns_last (queue=? AND name=?)"),
    ],
)
def test_statement_uses_its_index(tables: sqlite3.Connection, name: str, index: str) -> None:
    assert any(index in step for step in _plan(tables, name))


def test_bulk_moves_look_each_job_up_by_key(tables: sqlite3.Connection) -> None:
    """SQLite shows no plans of triggers. So this test asks for the plan of each statement of a trigger."""
    moves = [text for text in script("moves") if "TRIGGER" in text]
    assert len(moves) == 10
    for text in moves:
        *statements, _ = text.partition("BEGIN")[2].split(";\n")
        for one in statements:
            plan = [row[3] for row in tables.execute(f"EXPLAIN QUERY PLAN {NEW.sub(':it', one)}", {"it": 1})]
            found = [step for step in plan if step.startswith(("SEARCH", "SCAN"))]
            assert len(plan) == 1 or "multiq_gates" in one
            for step in found:
                assert re.fullmatch(
                    r"SEARCH \w+ USING (INTEGER )?PRIMARY KEY \(\w+=\?( AND \w+=\?)*\)( LEFT-JOIN)?", step
                )


@pytest.mark.parametrize("name", FILES)
def test_every_sql_file_is_used(name: str) -> None:
    sources = "".join(file.read_text() for file in Path(multiq_sqlite.__file__).parent.glob("*.py"))
    assert name.startswith("upgrade_") or f'"{name}"' in sources


def _plan(tables: sqlite3.Connection, name: str) -> list[str]:
    text = statement(name)
    names = set(re.findall(r":(\w+)", text))
    parameters: object = dict.fromkeys(names, "[1]") if names else [1] * text.count("?")
    return [row[3] for row in tables.execute(f"EXPLAIN QUERY PLAN {text}", parameters)]  # type: ignore[arg-type]
