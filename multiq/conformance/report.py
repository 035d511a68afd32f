"""The results of a run of the suite, by test, by paragraph of the contract and by capability.

A power in the code is a capability that a backend either has or lacks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from .paragraphs import PARAGRAPHS

if TYPE_CHECKING:
    from collections.abc import Iterable

Outcome: TypeAlias = Literal["kept", "refused", "failed", "does not apply", "not tried"]
Verdict: TypeAlias = Literal["kept", "kept in part", "refused", "broken", "not tried"]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    name: str
    """The name of the test function, which can be read as a sentence."""
    paragraphs: tuple[str, ...]
    powers: tuple[str, ...]
    """The capabilities that a backend must declare for the test to run."""
    outcome: Outcome
    seconds: float
    power: str | None = None
    """The missing capability of a refused test."""
    gap: str | None = None
    """The kind of the missing capability: "not done", "cannot today" or "never"."""
    reason: str | None = None
    """The reason why a test was refused, does not apply or was not tried. For a failed test: a short text of its
    failure."""
    detail: str | None = None
    """For a failed test: the whole text of its failure."""


class Paragraph(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one paragraph of ``docs/contract.md``, from the tests that check the paragraph."""

    number: str
    title: str
    verdict: Verdict
    kept: int
    failed: int
    refused: tuple[str, ...]
    """The missing capabilities for which tests were refused, each as "name: kind: reason"."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The report of a run. ``ok`` is true if no test failed and every declared capability was tried."""

    backend: str
    target: str
    """The tested backend: a URL with its password masked, or the name of a harness."""
    rows: tuple[Row, ...]
    unproved: tuple[str, ...]
    """Capabilities that the backend claims but no test has tried. Every test of such a capability was refused, did not
    apply or was missing."""
    is_whole: bool
    """Whether all topics were run. If only some topics were run, ``unproved`` is empty."""
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
        """The tests that need a method which the harness lacks. A test that was not tried does not make a run fail."""
        return self._with("not tried")

    def topics(self) -> dict[str, list[Row]]:
        """The rows of each topic, in the order of the run."""
        topics: dict[str, list[Row]] = {}
        for row in self.rows:
            topics.setdefault(row.topic, []).append(row)
        return topics

    def paragraphs(self) -> list[Paragraph]:
        return [self._paragraph(number, title) for number, title in PARAGRAPHS.items()]

    def summary(self) -> str:
        parts = [f"{len(self.kept)} kept", f"{len(self.refused)} refused", f"{len(self.failed)} broken"]
        if self.not_tried:
            parts.append(f"{len(self.not_tried)} not tried")
        if self.unproved:
            parts.append(f"claimed without proof: {', '.join(self.unproved)}")
        return f"{self.backend}: {', '.join(parts)} ({self.seconds:.1f} s)"

    def to_json(self) -> bytes:
        """The whole report as one line of JSON."""
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
        """A table of the contract's paragraphs. Below the table are lists of missing capabilities, untried
        capabilities, tests that were not tried, and failures.
        """
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
        """The reasons why tests were not tried, each with the number of tests."""
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
