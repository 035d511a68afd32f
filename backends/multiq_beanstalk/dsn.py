"""The options and the address in a URL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiq.errors import UrlInvalid
from multiq.settings.url import Option, seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from multiq.driverkit.net import Address
    from multiq.settings.url import BackendUrl

_PORT = 11300

OPTIONS: Mapping[str, Option] = {
    "timeout": Option(seconds(0.05, 3600), 5.0, "seconds that a call may take"),
}


def address_of(url: BackendUrl) -> Address:
    """Return the address of a URL's server. Raises ``UrlInvalid``."""
    if url.username is not None or url.password is not None:
        raise _invalid(url, "beanstalkd has no users or passwords: leave them out")
    if url.scheme == "beanstalk+unix":
        if url.hosts or len(url.path) <= 1:
            raise _invalid(url, "write three slashes and a path, as in beanstalk+unix:///run/beanstalkd.sock")
        return url.path
    if url.scheme != "beanstalk":
        raise _invalid(url, f"the scheme must be beanstalk or beanstalk+unix, got {url.scheme}")
    if len(url.hosts) > 1:
        raise _invalid(url, "it names several hosts, and beanstalkd is one server")
    if url.path.strip("/"):
        raise _invalid(url, "beanstalkd has no databases: leave the path out")
    return url.host or "localhost", _PORT if url.port is None else url.port


def _invalid(url: BackendUrl, why: str) -> UrlInvalid:
    return UrlInvalid(f"{str(url)!r} cannot be used: {why}")
