"""``RedisBackend(client=...)``: the settings of redis-py clients, on one server, with Sentinel and in a cluster."""

from __future__ import annotations

import contextlib
import ssl
from typing import TYPE_CHECKING, Any

import pytest
import redis
import redis.asyncio
import redis.cluster
import redis.sentinel
from proxy import Proxy
from servers.certificate import Certificate
from servers.process import HOST
from servers.redis import SERVICE, RedisCluster, RedisServer, SentinelTrio

from multiq import App, Worker
from multiq.backend import Ack, Backend, NewJob
from multiq.errors import BackendUnavailable, OptionInvalid
from multiq.ids import new_id
from multiq_redis.backend import RedisBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

#: redis-py annotates only some of its methods, and differently in each version
Redis: Any = redis.Redis
BlockingConnectionPool: Any = redis.BlockingConnectionPool
ClusterNode: Any = redis.cluster.ClusterNode
Sentinel: Any = redis.sentinel.Sentinel

QUEUE = "mail"
PASSWORD = "S3CR3T"  # noqa: S105 - of a server for these tests


def new(body: bytes = b"x") -> NewJob:
    return NewJob(body, new_id())


def works(backend: Backend, queue: str = QUEUE) -> None:
    """Enqueue, reserve and ack a job."""
    (job_id,) = backend.enqueue(queue, [new()])
    with backend.consumer([queue]) as consumer:
        (lease,) = consumer.reserve(1, 5)
        assert lease.id == job_id
        assert consumer.settle([Ack(lease)]) == [None]


@pytest.fixture
def guarded_server(new_redis: Callable[..., RedisServer]) -> RedisServer:
    server = new_redis(requirepass=PASSWORD)
    server.ask("ACL", "SETUSER", "ann", "on", f">{PASSWORD}", "~*", "+@all")
    return server


def clients_of(server: RedisServer) -> list[dict[str, str]]:
    """The server's connections, with the one that this function opens."""
    with server.client() as observer:
        found: list[dict[str, str]] = observer.client_list()
    return found


class Provider(redis.CredentialProvider):
    def __init__(self, *credentials: str) -> None:
        self._credentials = credentials

    def get_credentials(self) -> tuple[str, ...]:  # type: ignore[override]
        return self._credentials


# --- one server ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda port: Redis(HOST, port, username="ann", password=PASSWORD, db=2, client_name="shop"),
        lambda port: Redis(HOST, port, password=PASSWORD, db=2, client_name="shop", decode_responses=True),
        lambda port: Redis.from_url(f"redis://ann:{PASSWORD}@{HOST}:{port}/2?client_name=shop"),
        lambda port: Redis(HOST, port, db=2, client_name="shop", credential_provider=Provider("ann", PASSWORD)),
        lambda port: Redis(HOST, port, db=2, client_name="shop", credential_provider=Provider(PASSWORD)),
        lambda port: Redis(HOST, port, db=2, client_name="shop", password=PASSWORD, protocol=3),
        lambda port: redis.ConnectionPool(host=HOST, port=port, db=2, client_name="shop", password=PASSWORD),
        lambda port: BlockingConnectionPool(host=HOST, port=port, db=2, client_name="shop", password=PASSWORD),
    ],
    ids=["user", "decoding", "url", "provider", "provider of a password", "RESP 3", "pool", "blocking pool"],
)
def test_client_of_one_server(guarded_server: RedisServer, make: Callable[[int], Any]) -> None:
    client = make(guarded_server.port)
    with contextlib.closing(client), RedisBackend(client=client) as backend:
        works(backend)
        names = [(one["name"], one["db"]) for one in clients_of(guarded_server) if one["name"]]
        assert set(names) == {("shop", "2")}
        client.close()
        works(backend)


def test_client_of_a_unix_socket(guarded_server: RedisServer) -> None:
    with Redis(unix_socket_path=str(guarded_server.socket), password=PASSWORD, db=1) as client:
        with RedisBackend(client=client, prefix="shop", partitions=2) as backend:
            works(backend)
            backend.enqueue(QUEUE, [new() for _ in range(20)])
        keys = {key.decode().partition("}")[0] for key in client.keys("shop:*")}
    assert keys == {"shop:{mail", "shop:{mail#1"}


def test_sockets_of_the_client_are_not_shared(guarded_server: RedisServer) -> None:
    with Redis(HOST, guarded_server.port, password=PASSWORD) as client:
        client.ping()
        ours = client.client_id()
        with RedisBackend(client=client) as backend:
            works(backend)
            client.connection_pool.disconnect()
            works(backend)
            assert client.client_id() != ours
            assert client.ping()


def test_connect_function_of_the_client_logs_in(guarded_server: RedisServer) -> None:
    called: list[str] = []

    def log_in(connection: Any) -> None:
        called.append(type(connection).__name__)
        connection.on_connect()
        connection.send_command("AUTH", "ann", PASSWORD)
        assert connection.read_response() == b"OK"

    with (
        Redis(HOST, guarded_server.port, redis_connect_func=log_in) as client,
        RedisBackend(client=client) as backend,
    ):
        works(backend)
        assert called
        assert set(called) == {"Connection"}
        assert {one["user"] for one in clients_of(guarded_server)} - {"default"} == {"ann"}


def test_connect_function_that_fails_is_a_typed_error(guarded_server: RedisServer) -> None:
    def fail(connection: Any) -> None:
        raise KeyError(PASSWORD)

    with (
        Redis(HOST, guarded_server.port, redis_connect_func=fail) as client,
        RedisBackend(client=client) as backend,
        pytest.raises(BackendUnavailable, match="redis_connect_func raised KeyError") as caught,
    ):
        backend.stats(QUEUE)
    assert PASSWORD not in str(caught.value)


# --- TLS -------------------------------------------------------------------------------------------------


def test_tls_settings_of_the_client_are_taken(redis_tls: RedisServer) -> None:
    assert redis_tls.certificate is not None
    authority = redis_tls.certificate.authority
    url = f"rediss://{HOST}:{redis_tls.port}"
    for client in (
        Redis(HOST, redis_tls.port, ssl=True, ssl_ca_certs=str(authority), ssl_check_hostname=True),
        Redis(
            HOST, redis_tls.port, ssl=True, ssl_ca_data=authority.read_text(), ssl_min_version=ssl.TLSVersion.TLSv1_2
        ),
        Redis.from_url(f"{url}?ssl_ca_certs={authority}&ssl_cert_reqs=required"),
        Redis(HOST, redis_tls.port, ssl=True, ssl_cert_reqs="none", ssl_check_hostname=False),
    ):
        with client, RedisBackend(client=client) as backend:
            works(backend, "tls")


def test_tls_of_the_client_checks_what_the_client_checks(redis_tls: RedisServer) -> None:
    with (
        Redis(HOST, redis_tls.port, ssl=True) as client,
        RedisBackend(client=client) as backend,
        pytest.raises(BackendUnavailable, match="cannot be trusted"),
    ):
        backend.enqueue("tls", [new()])


def test_certificate_of_the_client_is_shown(tmp_path: Path, new_redis: Callable[..., RedisServer]) -> None:
    certificate = Certificate.make(tmp_path, "both")
    server = new_redis(certificate=certificate, tls_auth_clients="yes")
    own = {"ssl_certfile": str(certificate.pair), "ssl_keyfile": str(certificate.pair)}
    for options, is_accepted in (({}, False), (own, True)):
        client = Redis(HOST, server.port, ssl=True, ssl_ca_certs=str(certificate.authority), **options)
        with client, RedisBackend(client=client) as backend:
            if is_accepted:
                works(backend)
            else:
                with pytest.raises(BackendUnavailable):
                    works(backend)


# --- Sentinel --------------------------------------------------------------------------------------------


@pytest.fixture
def guarded_trio() -> Iterator[SentinelTrio]:
    """Servers and sentinels that demand a password."""
    with SentinelTrio() as trio:
        for server in (trio.primary, *trio.replicas):
            server.ask("ACL", "SETUSER", "ann", "on", f">{PASSWORD}", "~*", "+@all")
        for sentinel in trio.sentinels:
            sentinel.ask("ACL", "SETUSER", "guard", "on", f">{PASSWORD}-2", "+@all")
            sentinel.ask("ACL", "SETUSER", "default", "off")
        yield trio


def users_of(server: RedisServer) -> set[str]:
    return {one["user"] for one in clients_of(server)}


@pytest.mark.long
def test_client_of_sentinels_follows_a_failover(guarded_trio: SentinelTrio) -> None:
    sentinel = Sentinel(
        [(HOST, one.port) for one in guarded_trio.sentinels],
        sentinel_kwargs={"username": "guard", "password": f"{PASSWORD}-2"},
        username="ann",
        password=PASSWORD,
        client_name="shop",
    )
    client = sentinel.master_for(SERVICE)
    with client, RedisBackend(client=client, timeout=20) as backend:
        works(backend)
        assert "ann" in users_of(guarded_trio.primary)
        guarded_trio.primary.kill()
        backend.enqueue(QUEUE, [new()])
        assert "ann" in users_of(guarded_trio.replica)
        works(backend, "other")
    for one in sentinel.sentinels:
        one.close()


@pytest.mark.long
def test_provider_that_fails_is_not_asked_again_by_the_same_call(redis_sentinel: SentinelTrio) -> None:
    asked: list[str] = []

    class Broken(redis.CredentialProvider):
        def get_credentials(self) -> tuple[str, str]:
            asked.append("once")
            raise RuntimeError("no token")

    sentinel = Sentinel([(HOST, one.port) for one in redis_sentinel.sentinels])
    client = sentinel.master_for(SERVICE, credential_provider=Broken())
    with RedisBackend(client=client) as backend, pytest.raises(BackendUnavailable, match="Broken raised RuntimeError"):
        backend.enqueue(QUEUE, [new()])
    assert asked == ["once"]


@pytest.mark.long
def test_url_has_the_user_of_the_sentinels(guarded_trio: SentinelTrio) -> None:
    where = ",".join(f"{HOST}:{one.port}" for one in guarded_trio.sentinels)
    options = f"sentinel_username=guard&sentinel_password={PASSWORD}-2"
    with App(f"redis+sentinel://ann:{PASSWORD}@{where}/{SERVICE}?{options}") as app:
        works(app.backend)
    with (
        App(f"redis+sentinel://ann:{PASSWORD}@{where}/{SERVICE}?timeout=1") as app,
        pytest.raises(BackendUnavailable, match="none of the sentinels"),
    ):
        works(app.backend)


def test_client_of_a_replica_is_refused() -> None:
    with pytest.raises(OptionInvalid, match="master_for"):
        RedisBackend(client=Sentinel([(HOST, 1)]).slave_for(SERVICE))


# --- a cluster -------------------------------------------------------------------------------------------


@pytest.mark.long
def test_client_of_a_cluster_follows_a_slot(redis_cluster: RedisCluster) -> None:
    for node in redis_cluster.nodes:
        node.ask("ACL", "SETUSER", "ann", "on", f">{PASSWORD}", "~*", "+@all")
    client = redis.RedisCluster(
        startup_nodes=[ClusterNode(HOST, node.port) for node in redis_cluster.nodes[:2]],
        credential_provider=Provider("ann", PASSWORD),
        client_name="shop",
    )
    with contextlib.closing(client), RedisBackend(client=client) as backend:
        for number in range(6):
            works(backend, f"queue-{number}")
        slot = redis_cluster.slot_of("multiq:{mail}:jobs")
        backend.enqueue(QUEUE, [new()])
        there = next(node for node in redis_cluster.nodes if node is not redis_cluster.owner(slot))
        back = redis_cluster.owner(slot)
        redis_cluster.move(slot, there)
        try:
            with backend.consumer([QUEUE]) as consumer:
                (lease,) = consumer.reserve(1, 5)
                assert consumer.settle([Ack(lease)]) == [None]
        finally:
            redis_cluster.move(slot, back)
        for node in redis_cluster.nodes:
            named = [one["user"] for one in clients_of(node) if one["name"] == "shop"]
            assert set(named) == {"ann"}


def test_connect_function_of_a_cluster_is_called_after_the_login(redis_cluster: RedisCluster) -> None:
    for node in redis_cluster.nodes:
        node.ask("ACL", "SETUSER", "ann", "on", f">{PASSWORD}", "~*", "+@all")
    greeted: list[object] = []

    def greet(connection: Any) -> None:
        connection.send_command("ECHO", "hello")
        greeted.append(connection.read_response())

    client = redis.RedisCluster(
        HOST,
        redis_cluster.nodes[0].port,
        username="ann",
        password=PASSWORD,
        client_name="shop",
        redis_connect_func=greet,
    )
    client.close()
    with RedisBackend(client=client) as backend:
        greeted.clear()
        works(backend)
        ours = [one for node in redis_cluster.nodes for one in clients_of(node) if one["cmd"].startswith("eval")]
    assert {(one["user"], one["name"]) for one in ours} == {("ann", "shop")}
    assert set(greeted) == {b"hello"}


def test_addresses_of_a_cluster_are_remapped(redis_cluster: RedisCluster) -> None:
    with contextlib.ExitStack() as stack:
        proxies = {node.port: stack.enter_context(Proxy((HOST, node.port))) for node in redis_cluster.nodes}

        def remap(address: tuple[str, int]) -> tuple[str, int]:
            return HOST, proxies[address[1]].port if address[1] in proxies else address[1]

        first = next(iter(proxies.values()))
        client = redis.RedisCluster(HOST, first.port, address_remap=remap)
        stack.callback(client.close)
        before = {port: proxy.accepted for port, proxy in proxies.items()}
        with RedisBackend(client=client) as backend:
            for number in range(12):
                works(backend, f"queue-{number}")
        assert all(proxy.accepted > before[port] for port, proxy in proxies.items())


# --- apps ------------------------------------------------------------------------------------------------


def test_app_takes_a_backend(guarded_server: RedisServer) -> None:
    done: list[int] = []
    with Redis(HOST, guarded_server.port, password=PASSWORD) as client:
        app = App(backend=RedisBackend(client=client))
        task = app.task(name="add")(done.append)
        with app:
            task.enqueue(3)
            app.close()
            task.enqueue(4)
            Worker(app, stop_when_empty=True, processes=0).run()
    assert done == [3, 4]
    assert (app.url, repr(app)) == ("redis://", "App('redis://', 1 tasks)")


# --- refusals --------------------------------------------------------------------------------------------


class Foreign(redis.Connection):
    """A connection class of an application's own."""


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: "redis://:S3CR3T@h", "got builtins.str"),
        (redis.asyncio.Redis, "got redis.asyncio.client.Redis"),
        (lambda: redis.ConnectionPool(connection_class=Foreign), "got .*Foreign"),
        (lambda: Redis(ssl=True, ssl_validate_ocsp=True), "ssl_validate_ocsp"),
        (lambda: Redis(ssl=True, ssl_ca_certs="/nowhere"), "TLS settings"),
        (lambda: Redis(db="jobs"), "db of client must be a number, got 'jobs'"),
        (lambda: Redis(port="redis"), "port of client must be a number, got 'redis'"),
    ],
)
def test_client_that_cannot_be_used_is_refused(make: Callable[[], Any], named: str) -> None:
    with pytest.raises(OptionInvalid, match=named) as caught:
        RedisBackend(client=make())
    assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"timeout": 0}, "timeout"), ({"partitions": 65}, "partitions"), ({"prefix": "a{b"}, "prefix")],
)
def test_options_of_the_constructor_are_checked(options: dict[str, Any], named: str) -> None:
    with pytest.raises(OptionInvalid, match=named):
        RedisBackend(client=Redis(), **options)


def test_backend_without_a_client_is_refused() -> None:
    with pytest.raises(OptionInvalid, match="client="):
        RedisBackend()
