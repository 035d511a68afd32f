"""Makes the servers of a URL: parses addresses, credentials and TLS options, and refuses what does not fit together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiq.driverkit.tls import tls_context
from multiq.errors import UrlInvalid

from .dsn import ConnectionSettings
from .topology import ClusterServers, OneServer, SentinelServers

if TYPE_CHECKING:
    import ssl

    from multiq.settings.url import BackendUrl

    from .topology import Servers

_PORT = 6379
_SENTINEL_PORT = 26379
_SCHEMES = "redis, rediss, redis+unix, redis+sentinel, redis+cluster"


def servers_of(url: BackendUrl) -> Servers:
    """Return the servers of a URL, not connected yet. Raises ``UrlInvalid``."""
    make = {
        "redis": _one,
        "rediss": _one,
        "redis+unix": _unix,
        "redis+sentinel": _sentinels,
        "redis+cluster": _cluster,
    }.get(url.scheme)
    if make is None:
        raise _invalid(url, f"the scheme must be one of {_SCHEMES}, got {url.scheme}")
    if len(url.hosts) > 1 and make not in {_sentinels, _cluster}:
        raise _invalid(url, "only redis+sentinel:// and redis+cluster:// take several hosts")
    return make(url)


def _one(url: BackendUrl) -> Servers:
    return OneServer(_addresses(url, _PORT)[0], _settings(url, url.path.strip("/")), url.options["timeout"])


def _unix(url: BackendUrl) -> Servers:
    if url.hosts or len(url.path) <= 1:
        raise _invalid(url, "write three slashes and a path, as in redis+unix:///run/redis/redis.sock")
    return OneServer(url.path, _settings(url, ""), url.options["timeout"])


def _sentinels(url: BackendUrl) -> Servers:
    service, _, database = url.path.strip("/").partition("/")
    if not service:
        raise _invalid(url, "name the service after the sentinels, as in redis+sentinel://host1,host2,host3/mymaster")
    settings = _settings(url, database)
    sentinels = ConnectionSettings(
        fixed_password=url.options["sentinel_password"],
        tls=settings.tls,
        password_file=url.options["sentinel_password_file"],
        password_env=url.options["sentinel_password_env"],
    )
    _refuse_two_passwords(url, url.options["sentinel_password"], "sentinel_")
    return SentinelServers(_addresses(url, _SENTINEL_PORT), service, settings, sentinels, url.options["timeout"])


def _cluster(url: BackendUrl) -> Servers:
    if url.path.strip("/") not in {"", "0"}:
        raise _invalid(url, "a cluster has only one database: leave the path out; ?prefix= keeps applications apart")
    return ClusterServers(_addresses(url, _PORT), _settings(url, ""), url.options["timeout"])


def _addresses(url: BackendUrl, port: int) -> list[tuple[str, int]]:
    hosts = url.hosts or (("localhost", None),)
    return [(host or "localhost", port if given is None else given) for host, given in hosts]


def _settings(url: BackendUrl, database: str) -> ConnectionSettings:
    if database and not database.isdecimal():
        raise _invalid(url, f"the database must be a number, as in redis://host/0, got {database!r}")
    _refuse_two_passwords(url, url.password)
    return ConnectionSettings(
        url.username or None,
        url.password,
        int(database or 0),
        _tls(url),
        password_file=url.options["password_file"],
        password_env=url.options["password_env"],
    )


def _refuse_two_passwords(url: BackendUrl, written: str | None, prefix: str = "") -> None:
    names = f"{prefix}password_file", f"{prefix}password_env"
    if sum(source is not None for source in (written, *(url.options[name] for name in names))) > 1:
        raise _invalid(url, f"the password is given twice: write it into the URL, or name a {names[0]} or a {names[1]}")


def _tls(url: BackendUrl) -> ssl.SSLContext | None:
    options = url.options
    named = [name for name in ("ca", "cert", "key") if options[name] is not None]
    unchecked = options["dangerously_skip_tls_verification"] == "yes"
    if url.scheme != "rediss" and options["tls"] != "yes":
        if named or unchecked:
            names = ", ".join([*named, *(["dangerously_skip_tls_verification"] if unchecked else [])])
            raise _invalid(url, f"{names} would be ignored without TLS: write rediss://, or tls=yes for many servers")
        return None
    return tls_context(options["ca"], options["cert"], options["key"], skip_verification=unchecked)


def _invalid(url: BackendUrl, why: str) -> UrlInvalid:
    return UrlInvalid(f"{str(url)!r} cannot be used: {why}")
