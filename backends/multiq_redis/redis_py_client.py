"""Makes multiq's ``Servers`` from the settings of a redis-py client. The client's sockets are not shared."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from multiq.driverkit.tls import openssl_lock
from multiq.errors import OptionInvalid

from .cluster import ClusterServers
from .connection_settings import ConnectionSettings
from .redis_py_import import redis_py
from .sentinel import SentinelServers
from .servers import OneServer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from multiq.driverkit.net import Address

    from .servers import Servers

_PORT = 6379
_OCSP = ("ssl_validate_ocsp", "ssl_validate_ocsp_stapled")


def servers_of_client(client: Any, timeout: float) -> Servers:
    """Return the servers of a ``redis.Redis``, a connection pool or a ``redis.RedisCluster``.

    Raises ``OptionInvalid`` for other objects, and for settings that multiq would not follow.
    """
    redis = redis_py()
    if isinstance(client, redis.RedisCluster):
        return _cluster(client, timeout)
    pool = client.connection_pool if isinstance(client, redis.Redis) else client
    if not isinstance(pool, redis.ConnectionPool):
        raise OptionInvalid(
            "client must be a redis.Redis, a redis.ConnectionPool or a redis.RedisCluster, got "
            f"{type(client).__module__}.{type(client).__qualname__}"
        )
    if isinstance(pool, redis.sentinel.SentinelConnectionPool):
        return _sentinels(pool, timeout)
    return OneServer(_address(pool), _settings(pool), timeout)


def _sentinels(pool: Any, timeout: float) -> Servers:
    if not pool.is_master:
        raise OptionInvalid("client must be that of a primary, as replicas take no jobs: use Sentinel.master_for")
    sentinels = [sentinel.connection_pool for sentinel in pool.sentinel_manager.sentinels]
    if not sentinels:
        raise OptionInvalid("client must have a Sentinel with at least one address, got none")
    return SentinelServers(
        [_address(one) for one in sentinels], pool.service_name, _settings(pool), _settings(sentinels[0]), timeout
    )


def _cluster(client: Any, timeout: float) -> Servers:
    known = list(client.get_nodes())  # a closed client has no default node
    if not known:
        raise OptionInvalid("client must know at least one node of its cluster, got none")
    nodes = [(node.host, node.port) for node in known]
    pool = client.get_redis_connection(known[0]).connection_pool
    settings = _settings(pool)._replace(connect_func=_after_login(client.user_on_connect_func))
    return ClusterServers(nodes, settings, timeout, remap=client.nodes_manager.address_remap)


def _after_login(connect_func: Callable[[Any], object] | None) -> Callable[[Any], object] | None:
    """Return a login function for a cluster. This function logs in, and then calls *connect_func*.

    For a ``redis.Redis``, redis-py calls its ``redis_connect_func`` instead of the login.
    """
    if connect_func is None:
        return None

    def log_in(connection: Any) -> None:
        connection.on_connect()
        connect_func(connection)

    return log_in


def _address(pool: Any) -> Address:
    options = pool.connection_kwargs
    if issubclass(pool.connection_class, redis_py().UnixDomainSocketConnection):
        path: str = options.get("path", "")
        return path
    return options.get("host", "localhost"), _number(options, "port", _PORT)


def _number(options: dict[str, Any], name: str, default: int) -> int:
    """Reads a number from a client's settings. redis-py also accepts other values. Raises ``OptionInvalid`` for such
    other values."""
    value = options.get(name)
    try:
        return int(value) if value else default
    except (ValueError, TypeError):
        raise OptionInvalid(f"the {name} of client must be a number, got {value!r}") from None


def _settings(pool: Any) -> ConnectionSettings:
    options = pool.connection_kwargs
    keepalive = options.get("socket_keepalive_options")  # in redis-py 8, not a mapping by default
    is_tls = _is_tls(pool.connection_class)
    return ConnectionSettings(
        options.get("username"),
        options.get("password"),
        _number(options, "db", 0),
        _tls(options) if is_tls else None,
        client_name=options.get("client_name"),
        credential_provider=options.get("credential_provider"),
        connect_func=options.get("redis_connect_func"),
        keepalive=keepalive if isinstance(keepalive, Mapping) else None,
    )


def _is_tls(connection_class: type) -> bool:
    """Whether the connections of this class use TLS.

    Raises ``OptionInvalid`` for a class that is not redis-py's own.
    """
    redis = redis_py()
    known: Sequence[type] = (redis.Connection, redis.SSLConnection, redis.UnixDomainSocketConnection)
    with_sentinels = (redis.sentinel.SentinelManagedConnection, redis.sentinel.SentinelManagedSSLConnection)
    if connection_class not in (*known, *with_sentinels):
        raise OptionInvalid(
            "the connection class of client must be redis-py's Connection, SSLConnection or "
            f"UnixDomainSocketConnection, got {connection_class.__module__}.{connection_class.__qualname__}: multiq "
            "opens connections of its own, which would not do what that class does"
        )
    return issubclass(connection_class, redis.SSLConnection)


def _tls(options: dict[str, Any]) -> ssl.SSLContext:
    """Makes the same TLS context as redis-py. Raises ``OptionInvalid``."""
    redis = redis_py()
    asked = ", ".join(name for name in _OCSP if options.get(name))
    if asked:
        raise OptionInvalid(f"client must not have {asked}: multiq does not check OCSP")
    try:
        given = redis.SSLConnection(**{name: value for name, value in options.items() if name.startswith("ssl_")})
        with openssl_lock:
            return _context(given)
    except (redis.RedisError, OSError, ValueError, TypeError) as exc:
        raise OptionInvalid(f"the TLS settings of client cannot be used: {exc}") from exc


def _context(given: Any) -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = given.check_hostname and given.cert_reqs != ssl.CERT_NONE
    context.verify_mode = given.cert_reqs
    for flag in getattr(given, "ssl_include_verify_flags", None) or ():  # not in redis-py 5
        context.verify_flags |= flag
    for flag in getattr(given, "ssl_exclude_verify_flags", None) or ():
        context.verify_flags &= ~flag
    if given.certfile or given.keyfile:
        context.load_cert_chain(given.certfile, given.keyfile, given.certificate_password)
    if given.ca_certs is not None or given.ca_path is not None or given.ca_data is not None:
        context.load_verify_locations(given.ca_certs, given.ca_path, given.ca_data)
    if given.ssl_min_version is not None:
        context.minimum_version = given.ssl_min_version
    if given.ssl_ciphers:
        context.set_ciphers(given.ssl_ciphers)
    return context
