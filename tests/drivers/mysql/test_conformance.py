"""The MySQL backend against the contract, on a server of the module's own, with a clock that is moved by hand."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from servers.mysql import MysqlDatabases, MysqlServer, running

from multiq.conformance import ManualHarness, suite
from multiq.fault_proxy import Proxy
from multiq.settings.url import parse_url
from multiq_mysql.backend import MysqlBackend
from multiq_mysql.dsn import Dsn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pymysql.connections import Connection
    from servers.mysql import Place


class MysqlHarness(ManualHarness):
    """Backends on one database; each test has queues of its own."""

    walks = 3  # of 30 with ``make test-long``
    server: ClassVar[MysqlDatabases]
    place: ClassVar[Place]

    def open(self) -> MysqlBackend:
        return MysqlBackend(self._dsn(self.place.url), clock=self.clock)

    def proxied(self) -> tuple[Proxy, MysqlBackend]:
        proxy = Proxy((self.server.host, self.server.port))
        dsn = self._dsn(self.server.url(self.place.name, port=proxy.port))
        return proxy, MysqlBackend(dsn, timeout=self.deadline, clock=self.clock)

    @staticmethod
    def _dsn(url: str) -> Dsn:
        return Dsn.from_url(parse_url(url, MysqlBackend.options))

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Connection[Any]]:
        with self.server.client(self.place.name, autocommit=False) as connection:
            yield connection

    def restart(self) -> None:
        if isinstance(self.server, MysqlServer):
            self.server.restart()


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        # 2: without a flush at each commit, which would take most of the time
        MysqlHarness.server = running() or stack.enter_context(MysqlServer(innodb_flush_log_at_trx_commit=2))
        MysqlHarness.place = stack.enter_context(MysqlHarness.server.database())
        yield


globals().update(suite(MysqlHarness))


class AllWalks(MysqlHarness):
    walks = 30


TestAllWalks = pytest.mark.long(suite(AllWalks)["TestWalk"])
