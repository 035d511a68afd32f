"""The contract on servers whose defaults do not fit multiq: time zone, SQL modes, collations, isolation, autocommit.

Each variant is a whole server, as its administrator may have set it up, and every session of ours begins with these
defaults. Several wrong defaults are tested on one server, because a server for each takes longer.

``make test`` has one of them, with the random walks and the topics that its settings bear on; ``make test-long`` has
the same of the others; ``make test-exhaustive`` has the other topics.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from servers.mysql import MysqlServer

from multiq.backend import Ack, NewJob
from multiq.backend.registry import open_backend
from multiq.conformance import ManualHarness, suite
from multiq.settings.url import parse_url
from multiq_mysql.backend import MysqlBackend
from multiq_mysql.dsn import Dsn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pymysql.connections import Connection
    from servers.mysql import Place

_QUICK = {"innodb_flush_log_at_trx_commit": 2}
_CHATHAM = "<+1345>-13:45"  # 13:45 hours ahead

#: name -> the server's settings
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "Far": {
        "system_zone": _CHATHAM,
        "sql_mode": "ANSI,PAD_CHAR_TO_FULL_LENGTH,TRADITIONAL",
        "transaction_isolation": "SERIALIZABLE",
        "autocommit": 0,
    },
    "Folded": {
        "character_set_server": "utf8mb4",
        "collation_server": "utf8mb4_unicode_ci",  # a = A = ä
        "sql_mode": "NO_BACKSLASH_ESCAPES,ANSI_QUOTES,PIPES_AS_CONCAT,NO_UNSIGNED_SUBTRACTION,IGNORE_SPACE",
        "lower_case_table_names": 1,
        "default_time_zone": "-12:00",
    },
    "Snapshot": {
        "innodb_snapshot_isolation": 1,  # error 1020 for a row that was changed after the snapshot
        "transaction_isolation": "REPEATABLE-READ",
        "character_set_server": "latin1",
        "collation_server": "latin1_german1_ci",
        "sql_mode": "",
        "completion_type": "CHAIN",
        "innodb_lock_wait_timeout": 1,
        "innodb_rollback_on_timeout": 1,
    },
}

#: name -> the topics that its settings bear on
TOPICS: Mapping[str, frozenset[str]] = {
    "Far": frozenset({"TestRelease", "TestTouch", "TestTransaction", "TestWalk"}),  # times and commits
    "Folded": frozenset({"TestNames", "TestQueues", "TestTransaction", "TestWalk"}),  # texts
    "Snapshot": frozenset({"TestConcurrency", "TestErrors", "TestTransaction", "TestWalk"}),  # snapshots
}

IN_SHORT = "Far"  # the variant that ``make test`` runs; the server of each variant takes seconds


class Variant(ManualHarness):
    """Backends on one server of the variant, which lives until the module's tests are through."""

    walks = 2  # of 12 with ``make test-long``
    name: ClassVar[str]

    def open(self) -> MysqlBackend:
        _, place = _server(self.name)
        return MysqlBackend(Dsn.from_url(parse_url(place.url, MysqlBackend.options)), clock=self.clock)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Connection[Any]]:
        server, place = _server(self.name)
        with server.client(place.name, autocommit=False) as connection:
            yield connection

    def restart(self) -> None:
        server, _ = _server(self.name)
        server.restart()


@functools.cache
def _server(name: str) -> tuple[MysqlServer, Place]:
    server = _servers.enter_context(MysqlServer(**{**_QUICK, **VARIANTS[name]}))
    return server, _servers.enter_context(server.database())


_servers = contextlib.ExitStack()


@pytest.fixture(scope="module", autouse=True)
def _end_servers() -> Iterator[None]:
    yield
    _server.cache_clear()
    _servers.close()


for _name in VARIANTS:
    _harness = type(f"{_name}Harness", (Variant,), {"name": _name})
    for _test, _class in suite(_harness).items():
        if _test not in TOPICS[_name]:
            _class = pytest.mark.exhaustive(_class)
        elif _name != IN_SHORT:
            _class = pytest.mark.long(_class)
        globals()[f"{_test}{_name}"] = _class
    _patient = type(f"Patient{_name}Harness", (_harness,), {"walks": 12})
    globals()[f"TestAllWalks{_name}"] = pytest.mark.long(suite(_patient)["TestWalk"])


@pytest.mark.long
def test_each_variant_has_its_settings() -> None:
    asked = "SELECT @@sql_mode, @@collation_database, TIMESTAMPDIFF(MINUTE, UTC_TIMESTAMP(), NOW()), @@tx_isolation"
    found = {}
    for name in VARIANTS:
        server, place = _server(name)
        with server.client(place.name, autocommit=None) as connection, connection.cursor() as cursor:
            cursor.execute(asked)
            ((mode, collation, minutes, isolation),) = cursor.fetchall()
            found[name] = ("ANSI" in mode, collation, round(minutes), isolation, connection.get_autocommit())
    assert found == {
        "Far": (True, "latin1_swedish_ci", 825, "SERIALIZABLE", False),
        "Folded": (True, "utf8mb4_unicode_ci", -720, "REPEATABLE-READ", True),
        "Snapshot": (False, "latin1_german1_ci", 0, "REPEATABLE-READ", True),
    }


@pytest.mark.long
def test_a_job_is_due_by_the_server_s_clock_in_any_zone() -> None:
    """The conformance suite uses a manual clock; this test uses the server's clock."""
    for name in VARIANTS:
        _, place = _server(name)
        with open_backend(place.url) as backend, backend.consumer(["zone"]) as consumer:
            backend.enqueue("zone", [NewJob(b"x", "late", delay=0.3), NewJob(b"x", "much later", delay=3600)])
            due_in = backend.peek("zone", "much later").due_in
            assert due_in is not None
            assert 3500 < due_in <= 3600
            (lease,) = consumer.reserve(5, 20)
            assert (lease.id, lease.age >= 0.3) == ("late", True)
            assert consumer.settle([Ack(lease)]) == [None]
