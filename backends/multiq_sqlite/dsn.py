"""The options and the path in a URL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiq.errors import UrlInvalid
from multiq.settings.url import Option, choice, seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from multiq.settings.url import BackendUrl

OPTIONS: Mapping[str, Option] = {
    "synchronous": Option(
        choice("full", "normal"),
        "full",
        "full: a job is on the disk when enqueue returns; normal: faster, but a power loss undoes the last commits",
    ),
    "timeout": Option(seconds(0, 3600), 10.0, "seconds that a call waits while another process has the write lock"),
}


def path_of(url: BackendUrl) -> str:
    """Return the path of a URL's file. Raises ``UrlInvalid``."""
    if url.host or url.port or url.username or url.password:
        raise UrlInvalid(
            f"{str(url)!r} cannot be used: write three slashes and a path, as in sqlite:///jobs.db (in this folder) or "
            "sqlite:////var/lib/app/jobs.db"
        )
    return url.path.removeprefix("/")
