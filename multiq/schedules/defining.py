"""Checks the options of a schedule, and makes its definition."""

from __future__ import annotations

import datetime as dt
import re
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import msgspec

from multiq.errors import ScheduleInvalid
from multiq.formatting import shown
from multiq.validation import check_name, check_timeout

from .at import check_times
from .cron import check_cron
from .every import check_every
from .occurrence_job import job_of
from .record import MOST_MISSED, Definition, Origin, timetable
from .zone_database import find_zone

if TYPE_CHECKING:
    from collections.abc import Iterable

    from multiq.flows.signature import Signature

_ALL = re.compile(r"all(?:\(([0-9]{1,3})\))?")
_SOME_TIME = 4_102_444_800_001  # a time in the year 2100; its text has the greatest length
_OVERLAPS = ("allow", "skip", "follow")


class ScheduleOptions(TypedDict, total=False):
    """The options of ``App.schedule``, beside the cron expression and the call."""

    every: float | dt.timedelta | None
    at: str | dt.time | Iterable[str | dt.time] | None
    zone: str
    misfire: str
    grace: float | dt.timedelta | None
    overlap: str
    jitter: float | dt.timedelta


class Timing(NamedTuple):
    """The checked options of a schedule, without its call."""

    cron: str
    every: int
    at: tuple[str, ...]
    zone: str
    misfire: str
    most: int
    grace: float | None
    overlap: str
    jitter: float


def check_timing(
    cron: str | None = None,
    *,
    every: float | dt.timedelta | None = None,
    at: str | dt.time | Iterable[str | dt.time] | None = None,
    zone: str = "UTC",
    misfire: str = "once",
    grace: float | dt.timedelta | None = None,
    overlap: str = "allow",
    jitter: float | dt.timedelta = 0.0,
) -> Timing:
    """Return the checked options of a schedule. ``App.schedule`` describes them.

    Raises ``ScheduleInvalid`` and ``OptionInvalid``.
    """
    given = [text for text, value in (("a cron expression", cron), ("every", every), ("at", at)) if value is not None]
    if len(given) != 1:
        raise ScheduleInvalid(
            f"a schedule must have one of a cron expression, every= and at=, got {' and '.join(given) or 'none'}"
        )
    kind, most = _misfire(misfire)
    if overlap not in _OVERLAPS:
        raise ScheduleInvalid(f"overlap must be one of {', '.join(_OVERLAPS)}, got {shown(overlap)}")
    find_zone(zone)
    timing = Timing(
        cron="" if cron is None else check_cron(cron),
        every=0 if every is None else check_every(every),
        at=() if at is None else check_times(at),
        zone=zone,
        misfire=kind,
        most=most,
        grace=None if grace is None else check_timeout(_seconds(grace), "grace"),
        overlap=overlap,
        jitter=check_timeout(_seconds(jitter), "jitter"),
    )
    timetable(timing.cron, timing.every, timing.at, timing.zone)
    return timing


def define(name: str, call: Signature, timing: Timing, *, origin: Origin) -> Definition:
    """Return the definition of a schedule.

    Raises ``ScheduleInvalid``, ``NameInvalid``, ``OptionInvalid``, ``ArgumentsInvalid``, ``PayloadInvalid``.
    """
    check_call(call)
    task, options = call.task, call.options
    if options.delay:
        raise ScheduleInvalid(
            f"a scheduled call must have no delay, got {options.delay:g} s: it is due by its schedule"
        )
    if options.limits != task.default.limits:
        raise ScheduleInvalid("a scheduled call must have its task's limits, got other ones: give the task the limits")
    expires = task.expires if options.expires is None else options.expires
    terms = task.terms(call.args, call.kwargs, options)
    definition = Definition(
        name=check_name(name, "schedule"),
        queue=options.queue,
        task=task.name,
        body=msgspec.Raw(task.encode(call.args, call.kwargs, options)),
        priority=options.priority,
        ttr=options.ttr,
        cron=timing.cron,
        every=timing.every,
        at=timing.at,
        zone=timing.zone,
        misfire=timing.misfire,  # type: ignore[arg-type]  # check_timing allows only these
        most=timing.most,
        grace=timing.grace,
        overlap=timing.overlap,  # type: ignore[arg-type]  # check_timing allows only these
        jitter=timing.jitter,
        expires=expires or None,
        origin=origin,
        gates=terms.gates,
        unique=terms.unique,
    )
    job_of(definition, _SOME_TIME, 0.0, task.app.settings.max_body)  # checks the size of a body with its headers
    return definition


def check_call(call: Signature) -> None:
    """Raise ``ScheduleInvalid`` if *call* is not a call, for example if it is a task."""
    from multiq.flows.signature import Signature

    if not isinstance(call, Signature):
        raise ScheduleInvalid(f"a schedule must have a call (task.s(...)), got {shown(call)}")


def _misfire(text: str) -> tuple[str, int]:
    if text in ("skip", "once"):  # a tuple, because a wrong value may have no hash
        return text, MOST_MISSED
    match = _ALL.fullmatch(text) if isinstance(text, str) else None
    most = int(match[1] or MOST_MISSED) if match is not None else 0
    if not 1 <= most <= MOST_MISSED:
        raise ScheduleInvalid(
            f"misfire must be 'skip', 'once', 'all', or 'all(n)' with n from 1 to {MOST_MISSED}, got {shown(text)}"
        )
    return "all", most


def _seconds(value: Any) -> Any:
    return value.total_seconds() if isinstance(value, dt.timedelta) else value
