"""Rows that another program has written: they block no other job."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from multiq.backend import Ack, NewJob, State

if TYPE_CHECKING:
    from servers.mysql import MysqlDatabases, Place

    from multiq_mysql.backend import MysqlBackend

ROW = {
    "queue": "'q'",
    "id": "'evil'",
    "state": "0",
    "place": "0",
    "priority": "0",
    "ttr": "60000000",
    "enqueued_at": "0",
    "attempt": "0",
    "crashes": "0",
    "kicks": "0",
    "reason": "NULL",
    "body": "'x'",
}
MOST = "4294967295"


def plant(server: MysqlDatabases, database: str, changed: dict[str, str]) -> None:
    row = {**ROW, **changed}
    columns = ", ".join(f"`{name}`" for name in row)
    text = f"INSERT INTO {database}.multiq_jobs ({columns}) VALUES ({', '.join(row.values())})"  # noqa: S608 - of this page
    server.ask(text)


@pytest.mark.parametrize(
    "changed",
    [
        {"id": "x'fffefd'"},
        {"id": "x''"},
        {"reason": "x'fffe'"},
        {"ttr": "9223372036854775807"},
        {"ttr": "-9223372036854775808"},
        {"attempt": MOST},
        {"crashes": MOST, "state": "2", "place": "1"},
        {"kicks": MOST, "state": "3"},
        {"enqueued_at": "-9223372036854775808"},
        {"enqueued_at": "9223372036854775807"},
        {"queue": "x'ff'"},
        {"state": "2", "place": "-9223372036854775808"},
        {"state": "1", "place": "9223372036854775807"},
        {"state": "3", "place": "9223372036854775807"},
    ],
    ids=str,
)
def test_a_row_of_another_program_blocks_no_other_job(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place, changed: dict[str, str]
) -> None:
    plant(mysql_server, place.name, changed)
    backend.enqueue("q", [NewJob(b"1", "good", priority=9)])
    assert "q" in backend.queues()
    for state in (State.READY, State.DELAYED, State.RESERVED, State.BURIED):
        backend.jobs("q", state)
    backend.kick("q", 10)
    done = []
    with backend.consumer(["q"]) as consumer:
        for _ in range(5):
            for lease in consumer.reserve(1, 0):
                consumer.settle([Ack(lease)])
                done.append(lease.id)
    assert "good" in done
