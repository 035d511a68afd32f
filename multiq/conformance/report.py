"""The results of a run of the suite: by test, by paragraph of the contract, and by power.

A power is a capability that a backend either has or lacks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from .contract import PARAGRAPHS

if TYPE_CHECKING:
    from collections.abc import Iterable

Outcome: TypeAlias = Literal["kept", "refused", "failed", "does not apply", "not tried"]
Verdict: TypeAlias = Literal["kept", "kept in part", "refused", "broken", "not tried"]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One test: what it checks, and its outcome."""

    topic: str
    name: str
    """The name of the test function, which reads as a sentence."""
    paragraphs: tuple[str, ...]
    powers: tuple[str, ...]
    """The powers that a backend must claim for the test to run."""
    outcome: Outcome
    seconds: float
    power: str | None = None
    """Refused: the power that is missing."""
    gap: str | None = None
    """Refused: "not done", "cannot today" or "never"."""
    reason: str | None = None
    """Refused: why the power is missing. Does not apply, not tried: why not. Failed: a summary of a few lines."""
    detail: str | None = None
    """Failed: the whole text of the failure."""


class Paragraph(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one paragraph of ``docs/contract.md``, from the tests that check it."""

    number: str
    title: str
    verdict: Verdict
    kept: int
    failed: int
    refused: tuple[str, ...]
    """The gaps for which tests were refused, each as "power: kind: reason"."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The report of a run. ``ok`` is its verdict: no test failed, and every claimed power was tried."""

    backend: str
    target: str
    """What was tested: a URL, with its password masked, or the name of a harness."""
    rows: tuple[Row, ...]
    unproved: tuple[str, ...]
    """Powers that the backend claims and no test tried, although the harness has the hooks for them."""
    is_whole: bool
    """Whether all topics were run. A run of a part leaves ``unproved`` empty: it proves no power."""
    seconds: float

    @property
    def ok(self) -> bool:
        return bool(self.rows) and not self.failed and not self.unproved

    @property
    def kept(self) -> list[Row]:
        return self._with("kept")

    @property
    def failed(self) -> list[Row]:
        return self._with("failed")

    @property
    def refused(self) -> list[Row]:
        return self._with("refused")

    @property
    def not_tried(self) -> list[Row]:
        """The tests for which the harness has no hook.

        These tests show nothing about the backend, and do not make a run fail.
        """
        return self._with("not tried")

    def topics(self) -> dict[str, list[Row]]:
        """The rows by topic, in the order of the run."""
        topics: dict[str, list[Row]] = {}
        for row in self.rows:
            topics.setdefault(row.topic, []).append(row)
        return topics

    def paragraphs(self) -> list[Paragraph]:
        """The contract, paragraph by paragraph."""
        return [self._paragraph(number, title) for number, title in PARAGRAPHS.items()]

    def summary(self) -> str:
        """The verdict in a line."""
        parts = [f"{len(self.kept)} kept", f"{len(self.refused)} refused", f"{len(self.failed)} broken"]
        if self.not_tried:
            parts.append(f"{len(self.not_tried)} not tried")
        if self.unproved:
            parts.append(f"claimed without proof: {', '.join(self.unproved)}")
        return f"{self.backend}: {', '.join(parts)} ({self.seconds:.1f} s)"

    def to_json(self) -> bytes:
        """The whole report, as one line of JSON."""
        document = {
            "backend": self.backend,
            "target": self.target,
            "ok": self.ok,
            "is_whole": self.is_whole,
            "seconds": round(self.seconds, 3),
            "unproved": self.unproved,
            "paragraphs": self.paragraphs(),
            "rows": self.rows,
        }
        return msgspec.json.encode(document)

    def markdown(self) -> str:
        """The table of the contract's paragraphs, then lists of the gaps, the tests not tried and the failures."""
        lines = ["| paragraph | promise | verdict | tests |", "| --- | --- | --- | ---: |"]
        for paragraph in self.paragraphs():
            tests = f"{paragraph.kept} of {paragraph.kept + paragraph.failed}"
            lines.append(f"| {paragraph.number} | {paragraph.title} | {paragraph.verdict} | {tests} |")
        lines += self._section("Refused", self._gaps())
        lines += self._section("Claimed without proof", self.unproved)
        lines += self._section("Not tried", self.why_not_tried())
        broken = (f"{row.topic}: {_sentence(row.name)} ({row.seconds:.1f} s): {_line(row)}" for row in self.failed)
        lines += self._section("Broken", broken)
        return "\n".join(lines) + "\n"

    def why_not_tried(self) -> list[str]:
        """The reasons why tests were not tried, and for each how many tests."""
        reasons = [_line(row) for row in self.not_tried]
        return [f"{reason} ({reasons.count(reason)} tests)" for reason in dict.fromkeys(reasons)]

    # --- internals ---

    def _with(self, outcome: Outcome) -> list[Row]:
        return [row for row in self.rows if row.outcome == outcome]

    def _paragraph(self, number: str, title: str) -> Paragraph:
        rows = [row for row in self.rows if number in row.paragraphs]
        outcomes = [row.outcome for row in rows]
        kept, failed, refused = (outcomes.count(outcome) for outcome in ("kept", "failed", "refused"))
        is_partial = bool(refused) or "not tried" in outcomes
        return Paragraph(
            number=number,
            title=title,
            verdict=_verdict(kept, failed, refused, is_partial=is_partial),
            kept=kept,
            failed=failed,
            refused=tuple(dict.fromkeys(_gap(row) for row in rows if row.outcome == "refused")),
        )

    def _gaps(self) -> Iterable[str]:
        return dict.fromkeys(f"`{row.power}`, {row.gap}: {row.reason}" for row in self.refused)

    @staticmethod
    def _section(title: str, items: Iterable[str]) -> list[str]:
        bullets = [f"- {item}" for item in items]
        return ["", f"{title}:", "", *bullets] if bullets else []


def _verdict(kept: int, failed: int, refused: int, *, is_partial: bool) -> Verdict:
    if failed:
        return "broken"
    if kept:
        return "kept in part" if is_partial else "kept"
    return "refused" if refused else "not tried"


def _gap(row: Row) -> str:
    return f"{row.power}: {row.gap}: {row.reason}"


def _sentence(name: str) -> str:
    return name.removeprefix("test_").replace("_", " ")


def _line(row: Row) -> str:
    return (row.reason or "").partition("\n")[0]
