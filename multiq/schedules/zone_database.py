"""The time zones of schedules: finds them by name, and returns the version of this machine's time zones."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from multiq.errors import ScheduleInvalid
from multiq.formatting import shown

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

_OF_ONE_MACHINE = {"localtime", "posixrules"}  # names of zones that differ between machines


def find_zone(name: str) -> ZoneInfo:
    """Return the time zone of a name like ``Europe/Berlin``. Raises ``ScheduleInvalid``."""
    from zoneinfo import ZoneInfo

    if isinstance(name, str) and name not in _OF_ONE_MACHINE:
        try:
            return ZoneInfo(name)
        except (KeyError, ValueError, OSError):  # ZoneInfoNotFoundError is a KeyError; OSError: the name of a folder
            pass
    raise ScheduleInvalid(
        f"zone must be the name of a time zone like Europe/Berlin, got {shown(name)}: see "
        "zoneinfo.available_timezones(); if that is empty, this system has no time zones: pip install tzdata"
    )


def library_versions() -> str:
    """Return the versions of the cron library and of the time zones, for ``multiq doctor``."""
    from importlib.metadata import version

    return f"cronsim {version('cronsim')}, time zones {zones_version()}"


@functools.cache
def zones_version() -> str:
    """Return the version of this machine's time zones, like ``2026a``. Empty: the version is not known."""
    import zoneinfo
    from importlib.metadata import PackageNotFoundError, version
    from pathlib import Path

    for folder in zoneinfo.TZPATH:
        for name in ("tzdata.zi", "+VERSION"):
            try:
                with (Path(folder) / name).open() as file:
                    words = file.readline().split()
            except OSError:
                continue
            if words:
                return words[-1]
        if (Path(folder) / "UTC").exists():
            return "the time zones of the system, of an unknown version"
    try:
        return f"{version('tzdata')} of the package tzdata"
    except PackageNotFoundError:
        return "missing: pip install tzdata"
