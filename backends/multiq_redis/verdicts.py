"""Verdicts as ``lua/exchange.lua`` reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiq.backend import Abandon, Ack, Bury, GiveBack, Release, Touch

from .records import microseconds

if TYPE_CHECKING:
    from multiq.backend import Verdict


def details(verdict: Verdict) -> bytes:
    """One letter, and what belongs to it."""
    match verdict:
        case Ack():
            return b"a"
        case GiveBack():
            return b"g"
        case Touch():
            return b"t"
        case Bury(reason=reason):
            return b"b" + _text(reason)
        case Abandon(reason=reason):
            return b"x" + _text(reason)
        case Release(delay=delay, priority=priority, reason=reason):
            return b"r%d:%b:%b" % (microseconds(delay), b"" if priority is None else b"%d" % priority, _text(reason))


def _text(reason: str | None) -> bytes:
    """A reason as it is stored: an error's text may hold halves of surrogate pairs, which UTF-8 cannot."""
    return b"" if reason is None else b"+" + reason.encode("utf-8", "backslashreplace")
