"""Encodes verdicts for ``lua/exchange.lua``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiq.backend import Abandon, Ack, Bury, GiveBack, Release, Touch

from .records import microseconds

if TYPE_CHECKING:
    from multiq.backend import Verdict


def details(verdict: Verdict) -> bytes:
    """Returns the verdict's letter, followed by the verdict's arguments."""
    match verdict:
        case Ack():
            return b"a"
        case GiveBack(delay=delay):
            return b"g%d" % microseconds(delay) if delay else b"g"
        case Touch():
            return b"t"
        case Bury(reason=reason):
            return b"b" + _text(reason)
        case Abandon(reason=reason):
            return b"x" + _text(reason)
        case Release(delay=delay, priority=priority, reason=reason):
            return b"r%d:%b:%b" % (microseconds(delay), b"" if priority is None else b"%d" % priority, _text(reason))


def _text(reason: str | None) -> bytes:
    """Encodes a reason in UTF-8. Unpaired surrogates in an error's text are escaped."""
    return b"" if reason is None else b"+" + reason.encode("utf-8", "backslashreplace")
