"""Builds a ``Servers`` object from the addresses, credentials and TLS options of a URL. Refuses contradictory
options."""

from __future__ import annotations

import ssl
import warnings
from typing import TYPE_CHECKING, Any

from multiq.driverkit.tls import tls_context
from multiq.errors import UrlInvalid

from .cluster import ClusterServers
from .connection_settings import ConnectionSettings
from .sentinel import SentinelServers
from .servers import OneServer

if TYPE_CHECKING:
    from multiq.settings.url import BackendUrl

    from .servers import Servers

_PORT = 6379
_SENTINEL_PORT = 26379
_TLS_VERSIONS = {
    **dict.fromkeys(("tlsv1.2", "1.2", "771"), ssl.TLSVersion.TLSv1_2),  # the numbers are redis-py's
    **dict.fromkeys(("tlsv1.3", "1.3", "772"), ssl.TLSVersion.TLSv1_3),
}
_SAME = {"ssl_ca_certs": "ca", "ssl_certfile": "cert", "ssl_keyfile": "key"}
"""redis-py's names of options -> multiq's older names of the same options."""

_SCHEMES = "redis, rediss, redis+unix, redis+sentinel, redis+cluster"


def read_tls_version(text: str) -> ssl.TLSVersion:
    """Read the option ``ssl_min_version``. Raises ``ValueError``."""
    try:
        return _TLS_VERSIONS[text.lower()]
    except KeyError:
        raise ValueError("must be TLSv1.2 or TLSv1.3") from None


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
        url.options["sentinel_username"],
        fixed_password=url.options["sentinel_password"],
        tls=settings.tls,
        client_name=settings.client_name,
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
        client_name=url.options["client_name"],
    )


def _refuse_two_passwords(url: BackendUrl, written: str | None, prefix: str = "") -> None:
    names = f"{prefix}password_file", f"{prefix}password_env"
    if sum(source is not None for source in (written, *(url.options[name] for name in names))) > 1:
        raise _invalid(url, f"the password is given twice: write it into the URL, or name a {names[0]} or a {names[1]}")


def _tls(url: BackendUrl) -> ssl.SSLContext | None:
    options = dict(url.options)
    unchecked = [
        name
        for name, value in (("dangerously_skip_tls_verification", "yes"), ("ssl_cert_reqs", "none"))
        if options[name] == value
    ]
    named = [name for name in ("ca", "cert", "key") if options[name] is not None]
    named += [name for name, value in options.items() if name.startswith("ssl_") and value is not None]
    if url.scheme != "rediss" and options["tls"] != "yes":
        if names := ", ".join(dict.fromkeys([*named, *unchecked])):
            raise _invalid(
                url, f"{names} would be ignored without TLS: write rediss://, or ?tls=yes for sentinels or a cluster"
            )
        return None
    for theirs, ours in _SAME.items():
        if options[theirs] is not None:
            if options[ours] is not None:
                raise _invalid(url, f"{ours} and {theirs} are the same option: leave one of them out")
            options[ours] = options[theirs]
    context = tls_context(
        options["ca"],
        options["cert"],
        options["key"],
        skip_verification=bool(unchecked),
        ca_path=options["ssl_ca_path"],
        key_password=options["ssl_password"],
        ciphers=options["ssl_ciphers"],
    )
    _loosen_or_tighten(context, options)
    return context


def _loosen_or_tighten(context: ssl.SSLContext, options: dict[str, Any]) -> None:
    if options["ssl_min_version"] is not None:
        context.minimum_version = options["ssl_min_version"]
    if options["ssl_check_hostname"] == "no" and context.check_hostname:
        warnings.warn(
            "ssl_check_hostname=no would accept any server with a certificate of a trusted authority: "
            "use the host name that is in the certificate",
            stacklevel=2,
        )
        context.check_hostname = False


def _invalid(url: BackendUrl, why: str) -> UrlInvalid:
    return UrlInvalid(f"{str(url)!r} cannot be used: {why}")
