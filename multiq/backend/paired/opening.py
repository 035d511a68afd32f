"""Opens the pair of a URL with ``?store=``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiq.errors import UrlInvalid
from multiq.settings.url import parse_url, redact, without_store

from .backend import Paired, paired_class
from .needs import NEEDED

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiq.backend.base import Backend


def open_paired(url: str, driver_of: Callable[[str], type[Backend]], *, create: bool = True) -> Paired:
    """Construct a pair, without connecting. Raises ``UrlInvalid``, ``BackendNotInstalled``.

    *driver_of*: a function that returns the driver of a URL.
    """
    own_url, store_url = without_store(url)
    primary = driver_of(own_url)
    if all(primary.declared.claim(power) for power in NEEDED):
        raise _invalid(
            url, f"the {primary.declared.backend} backend keeps outcomes and flows itself: leave the option store out"
        )
    if "://" not in store_url:
        raise _invalid(
            url,
            f"the option store must be a URL, percent-encoded, or the name of a configured connection, got "
            f"{redact(store_url)!r}",
        )
    if without_store(store_url, "")[1]:
        raise _invalid(url, "the store must not have a store of its own: name the store itself")
    store = driver_of(store_url)
    lacks = [power for power in NEEDED if not store.declared.claim(power)]
    if lacks:
        raise _invalid(
            url,
            f"the {store.declared.backend} backend cannot be a store, because it lacks {', '.join(lacks)}: use sqlite, "
            "redis or mysql",
        )
    return paired_class(primary, store)(_open(primary, own_url, create=create), _open(store, store_url, create=create))


def _open(driver: type[Backend], url: str, *, create: bool) -> Backend:
    return driver.from_url(parse_url(url, driver.options, create=create))


def _invalid(url: str, why: str) -> UrlInvalid:
    return UrlInvalid(f"{redact(url)!r} cannot be used: {why}")
