"""Query plans: every statement uses an index and sorts nothing, whatever SQLite's statistics are."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import multiq_sqlite
from multiq_sqlite.connection import open_file
from multiq_sqlite.statements import script, statement

if TYPE_CHECKING:
    from collections.abc import Iterator

FILES = sorted(file.stem for file in (Path(multiq_sqlite.__file__).parent / "sql").glob("*.sql"))
SCRIPTS = {name for name in FILES if name in {"schema", "moves"} or name.startswith("upgrade_")}
STATEMENTS = [name for name in FILES if name not in SCRIPTS]

# these sort a handful of groups or names, never jobs
SORTING = {"stats", "queues"}


@pytest.fixture(scope="module", params=["no statistics", "statistics of many", "statistics of few"])
def tables(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[sqlite3.Connection]:
    """A connection of the driver to a file that may have been analysed before."""
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
    sqlite.executemany(row, [(str(number), number % 4) for number in range(jobs)])
    sqlite.commit()
    sqlite.execute("ANALYZE")
    sqlite.close()


@pytest.mark.parametrize("name", STATEMENTS)
def test_no_statement_reads_or_sorts_a_whole_table(tables: sqlite3.Connection, name: str) -> None:
    plan = _plan(tables, name)
    scans = [step for step in plan if re.match(r"SCAN (multiq_jobs|multiq_bodies|job|buried)\b", step)]
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
        ("queues", "COVERING INDEX multiq_jobs_id (queue>?)"),
    ],
)
def test_statement_uses_its_index(tables: sqlite3.Connection, name: str, index: str) -> None:
    assert any(index in step for step in _plan(tables, name))


def test_bulk_moves_look_each_job_up_by_key(tables: sqlite3.Connection) -> None:
    """The plan of a trigger cannot be asked for, so its statements are, with a parameter for the row's seq."""
    moves = [text for text in script("moves") if "TRIGGER" in text]
    assert len(moves) == 6
    for text in moves:
        statement_of_it = re.sub(r"new\.\w+", ":it", text.partition("BEGIN")[2].partition(";")[0])
        plan = [row[3] for row in tables.execute(f"EXPLAIN QUERY PLAN {statement_of_it}", {"it": 1})]
        assert plan == ["SEARCH multiq_jobs USING INTEGER PRIMARY KEY (rowid=?)"]


@pytest.mark.parametrize("name", FILES)
def test_every_sql_file_is_used(name: str) -> None:
    sources = "".join(file.read_text() for file in Path(multiq_sqlite.__file__).parent.glob("*.py"))
    assert name.startswith("upgrade_") or f'"{name}"' in sources


def _plan(tables: sqlite3.Connection, name: str) -> list[str]:
    text = statement(name)
    names = set(re.findall(r":(\w+)", text))
    parameters: object = dict.fromkeys(names, "[1]") if names else [1] * text.count("?")
    return [row[3] for row in tables.execute(f"EXPLAIN QUERY PLAN {text}", parameters)]  # type: ignore[arg-type]
