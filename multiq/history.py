"""The history of a queue, which is the kept outcomes of jobs that are gone. ``Queue.history`` returns the history."""

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
    """The kept outcome of a job that is gone. ``body`` has the outcome's bytes, and ``document`` has the decoded
    JSON."""

    @classmethod
    def of(cls, outcome: Outcome) -> OutcomeInfo:
        return cls(**{name: getattr(outcome, name) for name in outcome.__struct_fields__})

    @property
    def document(self) -> dict[str, Any]:
        """The fields of the outcome, such as ``value``. The dict is empty if the outcome is not a JSON object."""
        found = decode_json(self.body)
        return found if isinstance(found, dict) else {}

    @property
    def value(self) -> Any:
        """The value that the task returned, decoded from JSON. ``value`` is also None if the outcome has no value
        (``omitted``)."""
        return self.document.get("value")

    @property
    def omitted(self) -> str | None:
        """The reason why the outcome has no value. None means that the outcome has a value."""
        document = self.document
        return None if "value" in document else str(document.get("omitted", "no value is stored"))


class HistoryPage(msgspec.Struct, frozen=True):
    """A page of a history. Pass the page's ``after`` to get the next page. The last page's ``after`` is None."""

    outcomes: list[OutcomeInfo]
    after: str | None

    def __iter__(self) -> Iterator[OutcomeInfo]:
        return iter(self.outcomes)

    def __len__(self) -> int:
        return len(self.outcomes)


def check_kind(kind: str | None) -> OutcomeKind | None:
    """Return *kind* if it is a valid kind of outcome. Raises ``OptionInvalid``."""
    if kind is None:
        return None
    for known in KINDS:
        if kind == known:
            return known
    raise OptionInvalid(f"kind must be one of {', '.join(KINDS)}, got {shown(kind)}")
