"""Durations on the command line, such as ``90`` and ``1h30m``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from multiq.backend import DELAY_MAX

from .argument_types import ParameterType, shown

if TYPE_CHECKING:
    import click

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


class Duration(ParameterType):
    """A duration: seconds, or a number with a unit. Examples: ``90``, ``1.5``, ``250ms``, ``5m``, ``1h30m``, ``2d``."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip().lower()
        try:
            seconds = _seconds(text)
        except ValueError:
            self.fail(f"must be seconds (90, 1.5), or like 250ms, 5m, 1h30m, 2d, got {shown(value)}", param, ctx)
        if not 0 <= seconds <= DELAY_MAX:  # also refuses NaN
            self.fail(f"must be from 0 seconds to a century, got {shown(value)}", param, ctx)
        return seconds


def _seconds(text: str) -> float:
    if _DURATION.fullmatch(text):
        return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
    return float(text)
