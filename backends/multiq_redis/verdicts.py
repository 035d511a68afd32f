"""Encodes verdicts for ``lua/exchange.lua`` and ``lua/exchange_after.lua``."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from multiq.backend import Abandon, Ack, Bury, GiveBack, Release, Touch

from .records import microseconds
from .steps import size_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.backend import Verdict
    from multiq.backend.effects import After, OutcomeKind

ACK = b"a"  # the letter of an ack, which has no arguments
_KEEP = struct.Struct(">Qc")
_SIZE = struct.Struct(">I")
KINDS: dict[OutcomeKind, bytes] = {"done": b"d", "cancelled": b"c"}


def find_after(verdicts: Sequence[Verdict]) -> dict[int, After]:
    """Returns the ``After`` of each verdict that has one. The keys are the verdicts' indexes. Most verdicts have
    none."""
    found = {at: verdict.after for at, verdict in enumerate(verdicts) if verdict.after is not None}
    return {at: after for at, after in found.items() if after.steps or _stores(verdicts[at], after)}


def sizes(verdict: Verdict, after: After) -> tuple[int, ...]:
    """The bytes of each value that the verdict stores."""
    steps = map(size_of, after.steps) if after.steps else ()
    if isinstance(verdict, Ack):
        return len(after.outcome), *steps
    return len(after.memo or b""), len(after.detail or b"") if isinstance(verdict, (Release, Bury)) else 0, *steps


def details_after(verdict: Verdict, after: After) -> bytes:
    """Returns the verdict's capital letter, the values that the verdict stores, and the verdict's arguments."""
    plain = details(verdict)
    if not _stores(verdict, after):  # the verdict has nothing but steps
        return plain
    if isinstance(verdict, Ack):
        return b"A" + _KEEP.pack(microseconds(after.keep), KINDS[after.kind]) + after.outcome
    detail = after.detail if isinstance(verdict, (Release, Bury)) else None
    return plain[:1].upper() + _optional(after.memo) + _optional(detail) + plain[1:]


def details(verdict: Verdict) -> bytes:
    """Returns the verdict's letter, followed by the verdict's arguments."""
    match verdict:
        case Ack():
            return ACK
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


def _stores(verdict: Verdict, after: After) -> bool:
    """Whether the verdict stores a value. The steps of the verdict do not count."""
    if isinstance(verdict, Ack):
        return after.keep > 0
    return after.memo is not None or (after.detail is not None and isinstance(verdict, (Release, Bury)))


def _optional(stored: bytes | None) -> bytes:
    """Encodes None as 0. Encodes any other value as its length plus 1, followed by its bytes. So b"" differs from
    None."""
    return _SIZE.pack(0) if stored is None else _SIZE.pack(len(stored) + 1) + stored
