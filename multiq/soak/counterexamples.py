"""Checks a history by every invariant, and cuts out the smallest part that shows each violation."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .history import about, cut
from .invariants import INVARIANTS, Setting, Violation, stored_again
from .stories import SECOND, Stories

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .history import Event

_SHOWN = 3  # how many violations of each invariant are printed with their history
_LINES = 20  # how many lines of a job's history are printed


@dataclass(frozen=True)
class Verdict:
    """The violations and the counts of one history."""

    violations: dict[str, list[Violation]]
    """The violations by the invariant's name. Invariants that hold are left out."""
    figures: dict[str, int]
    events: Sequence[Event]

    def smallest(self, name: str) -> list[Event]:
        """The part of the history that shows the first violations of an invariant.

        A test can check the returned part of the history again.
        """
        found = self.violations[name]
        if name == "I18":
            return [event for event in self.events if event.f in {"memory", "files"}]
        jobs = {number for one in found[:_SHOWN] for number in (one.number, *one.others) if number is not None}
        if any(one.number is None for one in found):  # a violation about counts concerns all jobs that the audit found
            jobs |= {number for event in self.events if event.f == "audit" for number in event.jobs}
        return cut(self.events, jobs)

    @property
    def is_clean(self) -> bool:
        return not self.violations

    def report(self) -> str:
        """The counts, then the first violations of each invariant with their history."""
        lines = ["  ".join(f"{name} {value:,}" for name, value in self.figures.items())]
        if self.is_clean:
            lines.append(f"{len(INVARIANTS)} invariants hold")
        for violations in self.violations.values():
            lines.append(f"{violations[0].invariant}: {len(violations)} violations")
            for violation in violations[:_SHOWN]:
                lines.append(
                    f"  job {violation.number}: {violation.text}" if violation.number else f"  {violation.text}"
                )
                if violation.number is not None:
                    lines += [f"    {line}" for line in _told(self.events, violation.number)]
                for number in violation.others:
                    lines += [f"  job {number}:", *(f"    {line}" for line in _told(self.events, number))]
        return "\n".join(lines)


def check(events: Sequence[Event], setting: Setting | None = None) -> Verdict:
    """Check a history by all invariants."""
    stories = Stories(events)
    setting = setting or Setting()
    found = {name: list(holds(stories, setting)) for name, holds in INVARIANTS.items()}
    figures = _figures(stories)
    if again := stored_again(stories, setting):
        figures["stored again"] = again
    return Verdict({name: violations for name, violations in found.items() if violations}, figures, events)


def _figures(stories: Stories) -> dict[str, int]:
    figures: Counter[str] = Counter()
    for story in stories:
        figures["asked for"] += 1
        figures["stored"] += story.is_stored
        figures["run"] += bool(story.runs)
        figures["run again"] += max(0, len(story.runs) - 1)
        figures["recovered"] += not story.is_stored and bool(story.runs)
        figures["left"] += bool(story.at_rest)
    if stories.left_undone:
        figures["left undone"] = sum(any(state != "buried" for state in story.at_rest) for story in stories)
    kinds = Counter(event.kind for event in stories.notes["struck"])
    figures["faults"] = sum(kinds.values())
    if stories.notes["missed"]:  # faults that were tried but not observed
        figures["faults missed"] = len(stories.notes["missed"])
    kinds.update(f"{fault.kind} by a job" for fault in stories.faults if fault.proc.startswith("job."))
    return {**figures, **dict(sorted(kinds.items()))}


def _told(events: Sequence[Event], number: int) -> list[str]:
    lines = []
    begin = events[0].t
    for event in about(events, number):
        fields = [f"{(event.t - begin) / SECOND:10.6f}", event.proc, event.type, event.f]
        fields += [f"token={token}" for token in event.tokens] + [f"attempt={attempt}" for attempt in event.attempts]
        fields += [*event.states, event.outcome, event.err]
        fields += [f"delay={event.delay:g}" if event.delay else ""]
        lines.append(" ".join(field for field in fields if field))
    return lines if len(lines) <= _LINES else [*lines[: _LINES // 2], "...", *lines[-_LINES // 2 :]]
