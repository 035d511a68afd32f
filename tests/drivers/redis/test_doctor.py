"""``multiq doctor`` on real Redis servers with good and bad settings."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from servers.process import HOST

from multiq.backend import Ack, NewJob
from multiq.backend.registry import open_backend
from multiq.errors import BackendUnavailable
from multiq.ids import new_id
from multiq_redis import doctor

if TYPE_CHECKING:
    from collections.abc import Callable

    from servers.redis import RedisCluster, RedisServer, SentinelTrio

    from multiq.backend import Finding

    NewRedis = Callable[..., RedisServer]


def found(url: str) -> dict[str, Finding]:
    with open_backend(url) as backend:
        return {finding.what: finding for finding in backend.doctor()}


def levels(url: str, *names: str) -> dict[str, str]:
    findings = found(url)
    return {name: findings[name].level for name in names}


def test_doctor_passes_a_server_that_keeps_everything(new_redis: NewRedis) -> None:
    server = new_redis(appendonly="yes", appendfsync="always", maxmemory_policy="noeviction")
    findings = found(server.url)
    # on a busy machine every answer takes long
    assert {finding.level for what, finding in findings.items() if what != "latency"} == {"ok"}
    assert "power failure" in findings["durability"].why
    assert server.ask("DBSIZE") == 0


@pytest.mark.parametrize(
    ("config", "level", "survives"),
    [
        ({"appendonly": "yes", "appendfsync": "everysec"}, "warn", "a power failure loses the last jobs"),
        ({"appendonly": "yes", "appendfsync": "no"}, "warn", "a power failure loses the last jobs"),
        ({"save": "3600 1"}, "warn", "not a killed server"),
        ({}, "warn", "killed workers only"),
    ],
)
def test_doctor_derives_durability_from_persistence_settings(
    new_redis: NewRedis, config: dict[str, str], level: str, survives: str
) -> None:
    finding = found(new_redis(**config).url)["durability"]
    assert finding.level == level
    assert survives in finding.why


def test_doctor_reports_missing_persistence(new_redis: NewRedis) -> None:
    assert levels(new_redis().url, "appendonly") == {"appendonly": "bad"}


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-lru", "allkeys-random", "volatile-ttl"])
def test_doctor_reports_an_eviction_policy(new_redis: NewRedis, policy: str) -> None:
    server = new_redis(appendonly="yes", maxmemory="100mb", maxmemory_policy=policy)
    finding = found(server.url)["maxmemory-policy"]
    assert finding.level == "bad"
    assert policy in finding.why


def test_doctor_warns_of_a_nearly_full_server(new_redis: NewRedis) -> None:
    server = new_redis()
    server.set("maxmemory", str(int(server.ask("INFO", "memory")["used_memory"]) + 50_000))
    assert levels(server.url, "maxmemory") == {"maxmemory": "warn"}


def test_doctor_reports_a_failed_aof_write(new_redis: NewRedis) -> None:
    server = new_redis(save="3600 1")
    (server.folder / "dump.rdb").mkdir()
    (server.folder / "dump.rdb" / "in the way").touch()
    server.ask("BGSAVE")
    while server.ask("INFO", "persistence")["rdb_last_bgsave_status"] == "ok":
        pass
    assert levels(server.url, "rdb_last_bgsave_status") == {"rdb_last_bgsave_status": "bad"}


def test_doctor_reports_refused_questions_as_unknown(new_redis: NewRedis) -> None:
    server = new_redis(appendonly="yes", appendfsync="always")
    server.ask("ACL", "SETUSER", "shop", "on", ">S3CR3T", "~*", "&*", "+@all", "-config", "-acl")
    findings = found(f"redis://shop:S3CR3T@{HOST}:{server.port}")
    assert {name: findings[name].level for name in ("appendonly", "durability")} == {
        "appendonly": "unknown",
        "durability": "unknown",
    }
    assert "config|get" in findings["appendonly"].advice
    assert "S3CR3T" not in str(findings)


def test_doctor_promises_nothing_to_an_account_without_rights(new_redis: NewRedis) -> None:
    server = new_redis()
    server.ask("ACL", "SETUSER", "shop", "on", ">S3CR3T", "~*", "+ping", "+time", "+hello")
    findings = found(f"redis://shop:S3CR3T@{HOST}:{server.port}")
    names = ("version", "appendonly", "maxmemory-policy", "durability")
    assert {findings[name].level for name in names} == {"unknown"}


@pytest.mark.long
def test_doctor_reports_a_replica_and_warns_of_lagging_replicas(redis_sentinel: SentinelTrio) -> None:
    assert levels(redis_sentinel.replica.url, "role") == {"role": "bad"}
    assert levels(redis_sentinel.url, "min-replicas-to-write") == {"min-replicas-to-write": "warn"}
    redis_sentinel.primary.set("min-replicas-to-write", "1")
    findings = found(redis_sentinel.url)
    assert findings["min-replicas-to-write"].level == "ok"
    assert "failover" in findings["durability"].why


@pytest.mark.long
def test_doctor_reads_a_cluster_as_the_documented_user(redis_cluster: RedisCluster) -> None:
    # Given a user with the permissions that docs/redis.md lists for multiq and its scripts
    page = (Path(__file__).parents[3] / "docs" / "redis.md").read_text()
    recipe = page[page.index("ACL SETUSER multiq") : page.index("`multiq doctor redis://host` checks")]
    words = ["allkeys", *re.findall(r"\+[a-z|]+", recipe)]
    assert "+bzpopmin" in words
    for node in redis_cluster.nodes:
        node.ask("ACL", "SETUSER", "multiq", "on", ">S3CR3T", "resetchannels", "-@all", *words)
    try:
        # Then the doctor can judge all settings, and jobs can be enqueued and reserved
        url = redis_cluster.url.replace("://", "://multiq:S3CR3T@")
        assert {name for name, finding in found(url).items() if finding.level == "unknown"} == set()
        assert found(url)["cluster_state"].level == "ok"
        with open_backend(url) as backend, backend.consumer(["recipe"]) as consumer:
            backend.enqueue("recipe", [NewJob(b"x", new_id())])
            assert consumer.settle([Ack(lease) for lease in consumer.reserve(1, 5)]) == [None]
            assert consumer.reserve(1, 0.3) == []
    finally:
        for node in redis_cluster.nodes:
            node.ask("ACL", "DELUSER", "multiq")


def test_doctor_merges_equal_findings_of_cluster_nodes(redis_cluster: RedisCluster) -> None:
    node = redis_cluster.nodes[1]
    findings = found(redis_cluster.url)
    assert findings["cluster_state"].level == "ok"
    assert [name for name in findings if name.startswith("maxmemory-policy")] == ["maxmemory-policy"]
    node.set("maxmemory-policy", "allkeys-lru")
    try:
        findings = found(redis_cluster.url)
    finally:
        node.set("maxmemory-policy", "noeviction")
    assert findings[f"maxmemory-policy ({HOST}:{node.port})"].level == "bad"
    assert sum(name.startswith("maxmemory-policy") for name in findings) == 3


def test_doctor_requires_password_and_encryption_off_loopback(new_redis: NewRedis) -> None:
    address = _own_address()
    server = new_redis(bind="0.0.0.0", protected_mode="no")  # noqa: S104 - the point of it; gone in a moment
    url = f"redis://{address}:{server.port}"
    assert levels(url, "password", "encryption") == {"password": "bad", "encryption": "warn"}
    server.ask("ACL", "SETUSER", "shop", "on", ">S3CR3T", "~*", "&*", "+@all")
    server.ask("ACL", "SETUSER", "default", "resetpass")
    findings = found(f"redis://shop:S3CR3T@{address}:{server.port}")
    assert findings["password"].level == "ok"
    assert "shop" in findings["password"].why
    assert levels(server.url.replace("redis://", "redis://shop:S3CR3T@"), "address") == {"address": "ok"}


def _own_address() -> str:
    """An address of this machine that is not loopback; the packets never leave it."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return str(address.address)
    pytest.skip("this machine has no address but loopback")


def test_doctor_raises_for_an_unreachable_server(new_redis: NewRedis) -> None:
    server = new_redis()
    server.stop()
    with open_backend(server.url) as backend, pytest.raises(BackendUnavailable):
        backend.doctor()


def test_doctor_names_versions_that_crash_on_client_unblock(redis_server: RedisServer) -> None:
    version = str(redis_server.ask("INFO", "server")["redis_version"])
    finding = found(redis_server.url)["version"]
    assert version in finding.why
    if int(version.partition(".")[0]) < 8:
        assert "CLIENT UNBLOCK" in finding.why
        assert "8.2" in finding.why


@pytest.mark.parametrize(
    ("info", "is_named"),
    [
        ({"redis_version": "6.2.7"}, True),
        ({"redis_version": "8.0.1"}, True),
        ({"redis_version": "8.2.0"}, False),
        ({"redis_version": "7.2.4", "server_name": "valkey", "valkey_version": "8.1.0"}, True),
        ({"redis_version": "7.2.4", "server_name": "valkey", "valkey_version": "9.0.0"}, False),
        ({"redis_version": "7.2.4", "server_name": "another"}, False),
    ],
)
def test_doctor_compares_each_kind_of_server_with_its_own_version(info: dict[str, str], is_named: bool) -> None:
    finding = doctor._version(info)
    assert finding.level == "ok"
    assert ("CLIENT UNBLOCK" in finding.why) is is_named
