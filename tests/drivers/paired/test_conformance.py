"""beanstalkd with an SQLite store beside it against the contract, in real time."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, ClassVar

import pytest
from servers.beanstalk import BeanstalkServer
from servers.mysql import any_server
from servers.redis import RedisServer

from multiq.backend.registry import open_backend
from multiq.conformance import Harness, suite
from multiq.fault_proxy import Proxy
from multiq.settings.url import with_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from multiq.backend import Backend


class PairedHarness(Harness):
    """Pairs of one server and one file; each test has queues of its own."""

    walks = 4
    server: ClassVar[BeanstalkServer]
    store: ClassVar[str]

    def open(self) -> Backend:
        return open_backend(with_store(self.server.url, self.store))

    def proxied(self) -> tuple[Proxy, Backend]:
        proxy = Proxy(self.server.address)
        url = f"beanstalk://{proxy.host}:{proxy.port}?timeout={self.deadline}"
        return proxy, open_backend(with_store(url, self.store))

    def restart(self) -> None:
        self.server.stop()
        self.server.start()
        assert "missing data" not in self.server.log, self.server.log


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    with BeanstalkServer(binlog=True, fsync_ms=None) as PairedHarness.server, tempfile.TemporaryDirectory() as folder:
        PairedHarness.store = f"sqlite:///{folder}/store.db"
        yield


BESIDE_THE_PROXY = frozenset(
    {
        "test_a_forget_whose_reply_is_lost_counts_what_it_deleted",
        "test_a_look_at_outcomes_whose_reply_is_lost_sees_what_is_there",
        "test_a_history_whose_reply_is_lost_has_what_is_there",
        "test_a_put_and_a_drop_whose_replies_are_lost_are_carried_out",
        "test_a_look_at_notes_whose_reply_is_lost_sees_what_is_there",
        "test_every_call_to_a_server_that_hangs_ends_with_a_timeout_in_time",
    }
)


@pytest.fixture(autouse=True)
def _beside_the_proxy(request: pytest.FixtureRequest) -> None:
    if request.node.originalname in BESIDE_THE_PROXY:
        pytest.skip("the proxy is in front of the server with the jobs, and this call is one of the store")


QUICK = "TestCapabilities"
TOPICS = ("TestOutcomes", "TestMemos", "TestHolds", "TestNotes", "TestSteps")  # the topics that the store adds

#: the topics whose calls go to beanstalkd alone, as they do without a store
WITHOUT_STORE = {
    "TestAbandon", "TestDelete", "TestEnqueue", "TestGiveBack", "TestJobs", "TestKick", "TestKickJob",
    "TestNames", "TestPause", "TestPeek", "TestPurge", "TestQueueOrder", "TestQueues", "TestRelease",
    "TestReschedule", "TestTouch", "TestTransaction", "TestWaiting", "TestWaking",
}  # fmt: skip

for _name, _topic in suite(PairedHarness).items():
    if _name in WITHOUT_STORE:
        _topic = pytest.mark.exhaustive(_topic)
    elif _name != QUICK:
        _topic = pytest.mark.long(_topic)
    globals()[_name] = _topic


class RedisHarness(PairedHarness):
    """The same with a store on Redis, for the topics that the store adds."""

    redis: ClassVar[RedisServer]

    def open(self) -> Backend:
        return open_backend(with_store(self.server.url, self.redis.url))


class MySqlHarness(PairedHarness):
    """The same with a store on MySQL or MariaDB."""

    place: ClassVar[str]

    def open(self) -> Backend:
        return open_backend(with_store(self.server.url, self.place))


@pytest.fixture(scope="module")
def _redis() -> Iterator[None]:
    with RedisServer() as RedisHarness.redis:
        yield


@pytest.fixture(scope="module")
def _mysql() -> Iterator[None]:
    with any_server() as server, server.database() as place:
        MySqlHarness.place = place.url
        yield


for _harness, _fixture in ((RedisHarness, "_redis"), (MySqlHarness, "_mysql")):
    for _title in TOPICS:
        _mark = pytest.mark.long if _title == "TestSteps" else pytest.mark.exhaustive
        _one = pytest.mark.usefixtures(_fixture)(_mark(suite(_harness)[_title]))
        globals()[f"{_title}On{_harness.__name__.removesuffix('Harness')}"] = _one
