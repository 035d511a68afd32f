"""The history of a queue: the kept outcomes of jobs that are gone, as ``Queue.history`` returns them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from .backend import Outcome
from .envelope import decode_json
from .errors import OptionInvalid
from .formatting import shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .backend import OutcomeKind

KINDS: tuple[OutcomeKind, ...] = ("done", "cancelled")


class OutcomeInfo(Outcome, frozen=True, kw_only=True):
    """The kept outcome of a job that is gone. ``body`` has the bytes, and ``document`` the decoded JSON."""

    @classmethod
    def of(cls, outcome: Outcome) -> OutcomeInfo:
        return cls(**{name: getattr(outcome, name) for name in outcome.__struct_fields__})

    @property
    def document(self) -> dict[str, Any]:
        """The fields of the outcome, such as ``value``. Empty: the outcome is not a JSON object."""
        found = decode_json(self.body)
        return found if isinstance(found, dict) else {}

    @property
    def value(self) -> Any:
        """The value that the task returned, decoded from JSON. It is also None if the outcome has no value
        (``omitted``)."""
        return self.document.get("value")

    @property
    def omitted(self) -> str | None:
        """The reason why the outcome has no value. None: the outcome has a value."""
        document = self.document
        return None if "value" in document else str(document.get("omitted", "no value is stored"))


class HistoryPage(msgspec.Struct, frozen=True):
    """A page of a history. Pass its ``after`` to get the next page. None: this is the last page."""

    outcomes: list[OutcomeInfo]
    after: str | None

    def __iter__(self) -> Iterator[OutcomeInfo]:
        return iter(self.outcomes)

    def __len__(self) -> int:
        return len(self.outcomes)


def check_kind(kind: str | None) -> OutcomeKind | None:
    """Return the kind of this name. Raises ``OptionInvalid``."""
    if kind is None:
        return None
    for known in KINDS:
        if kind == known:
            return known
    raise OptionInvalid(f"kind must be one of {', '.join(KINDS)}, got {shown(kind)}")
