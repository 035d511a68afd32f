"""Measures three layouts of the MySQL tables with minimal SQL. docs/decisions/0013 uses the figures.

    python benchmarks/mysql_tables.py

together: one table that also has the bodies. apart: bodies in a separate table. split: two small tables list the ready
and the reserved jobs, and a third table has the other columns (as in Solid Queue). Jobs are inserted 1,000 at a time
and claimed 100 at a time. The transaction of a claim deletes the jobs of the previous claim.
"""

# ruff: noqa: S608 - the statements are made of numbers

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pymysql.constants import CLIENT

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from servers.mysql import MysqlServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from pymysql.connections import Connection

_HEAD = (
    "id BINARY(16) NOT NULL, queue VARBINARY(128) NOT NULL, state TINYINT NOT NULL, place BIGINT NOT NULL, "
    "token BIGINT UNSIGNED NOT NULL DEFAULT 0, attempt INT NOT NULL DEFAULT 0, enqueued_at BIGINT NOT NULL DEFAULT 0, "
)
_SEQ = "seq BIGINT UNSIGNED NOT NULL AUTO_INCREMENT PRIMARY KEY, "
_KEYS = "UNIQUE KEY (queue, id), KEY place (queue, state, place, seq)"
_BODIES = "CREATE TABLE bodies (seq BIGINT UNSIGNED NOT NULL PRIMARY KEY, body LONGBLOB NOT NULL)"

SCHEMAS = {
    "together": [f"CREATE TABLE jobs ({_SEQ}{_HEAD} body LONGBLOB NOT NULL, {_KEYS})"],
    "apart": [f"CREATE TABLE jobs ({_SEQ}{_HEAD} {_KEYS})", _BODIES],
    "split": [
        f"CREATE TABLE jobs ({_SEQ}{_HEAD} body LONGBLOB NOT NULL, UNIQUE KEY (queue, id))",
        (
            "CREATE TABLE ready (queue VARBINARY(128) NOT NULL, place BIGINT NOT NULL, seq BIGINT UNSIGNED NOT NULL, "
            "PRIMARY KEY (queue, place, seq))"
        ),
        (
            "CREATE TABLE reserved (seq BIGINT UNSIGNED NOT NULL PRIMARY KEY, token BIGINT UNSIGNED NOT NULL, "
            "due_at BIGINT NOT NULL, KEY (due_at))"
        ),
    ],
}


def insert(connection: Connection[Any], layout: str, first: int, count: int, body: str) -> None:
    """One batch."""
    numbers = range(first, first + count)
    rows = ",".join(
        f"({number},x'{number:032x}','q',0,1024" + (f",x'{body}')" if layout != "apart" else ")") for number in numbers
    )
    columns = "seq, id, queue, state, place" + (", body" if layout != "apart" else "")
    statements = [f"INSERT INTO jobs ({columns}) VALUES {rows}"]
    if layout == "apart":
        statements.append("INSERT INTO bodies VALUES " + ",".join(f"({number},x'{body}')" for number in numbers))
    if layout == "split":
        statements.append("INSERT INTO ready VALUES " + ",".join(f"('q',1024,{number})" for number in numbers))
    ask(connection, "BEGIN", *statements, "COMMIT")


def work_off(connection: Connection[Any], layout: str) -> int:
    """Work off all jobs, one batch after the other. Returns how many."""
    worked, held = 0, ""
    while True:
        done = _DONE[layout](held) if held else []
        if layout == "split":
            claim = "SELECT seq FROM ready WHERE queue = 'q' ORDER BY place, seq LIMIT 100 FOR UPDATE SKIP LOCKED"
        else:
            columns = "seq, id, attempt" + (", body" if layout == "together" else "")
            claim = (
                f"SELECT {columns} FROM jobs FORCE INDEX (place) WHERE queue = 'q' AND state = 0 "
                "ORDER BY place, seq LIMIT 100 FOR UPDATE SKIP LOCKED"
            )
        rows = ask(connection, "BEGIN", *done, claim)
        held = ",".join(str(row[0]) for row in rows)
        worked += len(rows)
        ask(connection, *(_CLAIM[layout](held) if held else []), "COMMIT")
        if not held:
            return worked


_CLAIM: dict[str, Callable[[str], list[str]]] = {
    "together": lambda held: [
        f"UPDATE jobs SET state = 2, token = 5, attempt = attempt + 1, place = 9 WHERE seq IN ({held})"
    ],
    "apart": lambda held: [
        f"UPDATE jobs SET state = 2, token = 5, attempt = attempt + 1, place = 9 WHERE seq IN ({held})",
        f"SELECT seq, body FROM bodies WHERE seq IN ({held})",
    ],
    "split": lambda held: [
        f"DELETE FROM ready WHERE queue = 'q' AND place = 1024 AND seq IN ({held})",
        "INSERT INTO reserved VALUES " + ",".join(f"({seq},5,9)" for seq in held.split(",")),
        f"UPDATE jobs SET attempt = attempt + 1 WHERE seq IN ({held})",
        f"SELECT seq, id, attempt, body FROM jobs WHERE seq IN ({held})",
    ],
}
_DONE: dict[str, Callable[[str], list[str]]] = {
    "together": lambda held: [f"DELETE FROM jobs WHERE seq IN ({held}) AND token = 5"],
    "apart": lambda held: [
        f"DELETE FROM jobs WHERE seq IN ({held}) AND token = 5",
        f"DELETE FROM bodies WHERE seq IN ({held})",
    ],
    "split": lambda held: [
        f"DELETE FROM reserved WHERE seq IN ({held}) AND token = 5",
        f"DELETE FROM jobs WHERE seq IN ({held})",
    ],
}


def ask(connection: Connection[Any], *statements: str) -> tuple[Any, ...]:
    """The rows of the last statement."""
    with connection.cursor() as cursor:
        cursor.execute(";".join(statements))
        rows = cursor.fetchall()
        while cursor.nextset():
            rows = cursor.fetchall()
        return tuple(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    print("| body | layout | inserted /s | worked off /s |\n|---|---|---|---|")
    with MysqlServer(innodb_buffer_pool_size="256M", max_allowed_packet="64M") as server:
        for size, jobs in ((100, given.jobs), (2_000, given.jobs), (20_000, given.jobs // 5)):
            figures: dict[str, list[tuple[float, float]]] = {layout: [] for layout in SCHEMAS}
            for _ in range(given.repeats):
                for layout in SCHEMAS:
                    figures[layout].append(measure(server, layout, jobs, "78" * size))
            for layout, measured in figures.items():
                inserted, worked = (statistics.median(column) for column in zip(*measured, strict=True))
                print(f"| {size:,} B | {layout} | {inserted:,.0f} | {worked:,.0f} |")


def measure(server: MysqlServer, layout: str, jobs: int, body: str) -> tuple[float, float]:
    """The numbers of jobs that are inserted and worked off per second."""
    with server.database() as place, server.client(place.name, client_flag=CLIENT.MULTI_STATEMENTS) as connection:
        ask(connection, "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED", *SCHEMAS[layout])
        start = time.perf_counter()
        for first in range(1, jobs + 1, 1_000):
            insert(connection, layout, first, min(1_000, jobs + 1 - first), body)
        inserted = time.perf_counter()
        if work_off(connection, layout) != jobs:
            raise RuntimeError(f"{layout} did not hand out each of {jobs} jobs once")
        return jobs / (inserted - start), jobs / (time.perf_counter() - inserted)


if __name__ == "__main__":
    main()
