"""Finds drivers by the entry-point group ``multiq.backends``. A driver is imported at its first use."""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING, Any, cast

from multiq.driverkit.fork import forks
from multiq.errors import BackendNotInstalled, DriverInvalid, MultiqError
from multiq.settings.url import has_store, parse_url, split

from .capabilities import Capabilities

if TYPE_CHECKING:
    from .base import Backend

GROUP = "multiq.backends"

#: names and classes of backends for tests. They are not listed among the backends, because they keep no jobs
FOR_TESTS = {"sync": "SyncBackend", "null": "NullBackend"}

#: URL scheme -> name of the driver, if the names differ
ALIASES = {"rediss": "redis"}


def open_backend(url: str, *, create: bool = True) -> Backend:
    """Construct the backend of a URL, without connecting. Raises ``UrlInvalid``, ``BackendNotInstalled``.

    ``create=False`` is for commands that only read. The backend then creates no file and no tables. The backend's calls
    raise ``BackendError`` if the file or the tables are missing, for example because the path is wrong.
    """
    with forks.opening:
        if "store=" in url and has_store(url):
            # loaded by name, like a driver: few programs need it, and an import at the top would be a cycle
            opening = importlib.import_module("multiq.backend.paired.opening")
            return cast("Backend", opening.open_paired(url, driver_of, create=create))
        driver = driver_of(url)
        return driver.from_url(parse_url(url, driver.options, create=create))


def driver_of(url: str) -> type[Backend]:
    """Return the class of a URL's driver. Raises ``UrlInvalid``, and the errors of ``load_driver``."""
    name = split(url).scheme.partition("+")[0]
    return load_driver(ALIASES.get(name, name))


def load_driver(name: str) -> type[Backend]:
    """Return the driver's class.

    Raises ``BackendNotInstalled`` if the driver is missing or cannot be imported. Raises ``DriverInvalid`` if the class
    is not a driver, or if its capabilities contradict its methods.
    """
    driver = _load_for_tests(name) if name in FOR_TESTS else load(GROUP, name)
    if not isinstance(getattr(driver, "declared", None), Capabilities):
        raise DriverInvalid(
            f"the {name} backend must be a subclass of multiq.backend.Backend whose `declared` is its capabilities, "
            f"got {driver!r}"
        )
    return cast("type[Backend]", driver)


def load(group: str, name: str) -> Any:
    """Return the object that *name* registers in an entry-point group. Raises the errors of ``load_driver``."""
    from stevedore.exception import MultipleMatches
    from stevedore.extension import error_on_conflict
    from stevedore.named import NamedExtensionManager  # logs no warning for a missing name, unlike DriverManager

    try:
        manager: NamedExtensionManager[Any] = NamedExtensionManager(
            group,
            [name],
            on_load_failure_callback=_reraise,
            on_missing_entrypoints_callback=None,
            conflict_resolver=error_on_conflict,
        )
        found = manager[name] if manager.names() else None
    except MultiqError:
        raise
    except MultipleMatches as exc:
        raise BackendNotInstalled(f"two installed packages bring a backend {name!r}: uninstall one ({exc})") from exc
    except ImportError as exc:
        raise BackendNotInstalled(f"the {name} backend cannot be imported: {exc}{_extra(name)}") from exc
    except (Exception, SystemExit) as exc:  # a foreign module may raise any error
        what = f"{type(exc).__name__}: {exc}"
        raise BackendNotInstalled(f"the {name} backend cannot be imported: {what}") from exc
    if found is None:
        raise BackendNotInstalled(_not_installed(name))
    return found.plugin


def installed(group: str = GROUP) -> list[str]:
    """Return the sorted names of an entry-point group. The default is all drivers. Imports no driver."""
    from importlib.metadata import entry_points

    return sorted({point.name for point in entry_points(group=group)})


def backends_with(power: str) -> list[str]:
    """Return the installed backends with this capability. Drivers that cannot be loaded are left out."""
    found = []
    for name in installed():
        try:
            declared = load_driver(name).declared
        except MultiqError:
            continue
        if declared.claim(power):
            found.append(name)
    return found


def _load_for_tests(name: str) -> Any:
    from importlib import import_module

    return getattr(import_module("multiq.testing"), FOR_TESTS[name])


def _reraise(_manager: object, _entrypoint: object, exc: BaseException) -> None:
    raise exc


def _not_installed(name: str) -> str:
    names = installed()
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else _extra(name)
    return f"no backend {name!r} is installed (there are: {', '.join(names) or 'none'}){hint}"


def _extra(name: str) -> str:
    """Return the advice to install the extra of multiq that has this driver. Empty if multiq has no such extra."""
    from importlib.metadata import metadata

    extras = metadata("multiq").get_all("Provides-Extra") or []
    return f"; pip install 'multiq[{name}]'" if name in extras else ""
