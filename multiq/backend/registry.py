"""Drivers, found by the entry-point group ``multiq.backends``. A driver is not imported before it is asked for."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, cast

from multiq.errors import BackendNotInstalled, DriverInvalid, MultiqError
from multiq.settings.url import parse_url, split

from .capabilities import Capabilities

if TYPE_CHECKING:
    from .base import Backend

GROUP = "multiq.backends"

#: scheme of URLs -> name of the driver, where the two differ
ALIASES = {"rediss": "redis"}


def open_backend(url: str, *, create: bool = True) -> Backend:
    """The backend that *url* names, not connected yet. Raises ``UrlInvalid``, ``BackendNotInstalled``.

    With ``create=False`` the backend creates no missing file and no missing tables: its calls raise ``BackendError``.
    That is for commands that only read: if the path is wrong, "no jobs" would be the wrong answer.
    """
    scheme = split(url).scheme
    name = scheme.partition("+")[0]
    driver = load_driver(ALIASES.get(name, name))
    return driver.from_url(parse_url(url, driver.options, create=create))


def load_driver(name: str) -> type[Backend]:
    """The driver's class.

    Raises ``BackendNotInstalled``, whose message lists the installed backends, or says what could not be imported.
    Raises ``DriverInvalid`` for a class that is not a driver, or whose powers contradict its methods.
    """
    driver = load(GROUP, name)
    if not isinstance(getattr(driver, "declared", None), Capabilities):
        raise DriverInvalid(
            f"the {name} backend must be a subclass of multiq.backend.Backend whose `declared` is its capabilities, "
            f"got {driver!r}"
        )
    return cast("type[Backend]", driver)


def load(group: str, name: str) -> Any:
    """The object that the backend *name* registers in the entry-point *group*. Raises what ``load_driver`` raises."""
    from stevedore.exception import MultipleMatches
    from stevedore.extension import error_on_conflict
    from stevedore.named import NamedExtensionManager  # DriverManager logs a warning for a missing name in any case

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
    except (Exception, SystemExit) as exc:  # another party's module: it may raise anything
        what = f"{type(exc).__name__}: {exc}"
        raise BackendNotInstalled(f"the {name} backend cannot be imported: {what}") from exc
    if found is None:
        raise BackendNotInstalled(_not_installed(name))
    return found.plugin


def installed(group: str = GROUP) -> list[str]:
    """The sorted names of all installed drivers, or of the entry points of another *group*. Imports none of them."""
    from importlib.metadata import entry_points

    return sorted({point.name for point in entry_points(group=group)})


def backends_with(power: str) -> list[str]:
    """The installed backends that declare *power*. Drivers that cannot be loaded are left out."""
    found = []
    for name in installed():
        try:
            declared = load_driver(name).declared
        except MultiqError:
            continue
        if declared.claim(power):
            found.append(name)
    return found


def _reraise(_manager: object, _entrypoint: object, exc: BaseException) -> None:
    raise exc


def _not_installed(name: str) -> str:
    names = installed()
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else _extra(name)
    return f"no backend {name!r} is installed (there are: {', '.join(names) or 'none'}){hint}"


def _extra(name: str) -> str:
    """The advice to install the extra of multiq that brings a driver's client library; "" if there is no such extra."""
    from importlib.metadata import metadata

    extras = metadata("multiq").get_all("Provides-Extra") or []
    return f"; pip install 'multiq[{name}]'" if name in extras else ""
