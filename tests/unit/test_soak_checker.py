"""The checker of histories: for each invariant, a history that violates only it; and histories without violations."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from multiq.soak.counterexamples import check
from multiq.soak.history import Event, HistoryDamaged, Recorder, about, cut, read, replay, write
from multiq.soak.invariants import INVARIANTS, Setting

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

S = 1_000_000_000


class Script:
    """Writes a history by hand: every call has its time, in seconds."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._ops = 0

    def note(self, at: float, f: str, proc: str = "nemesis.1", **fields: Any) -> None:
        self.events.append(Event(t=round(at * S), proc=proc, type="info", f=f, **fields))

    def call(
        self, begin: float, end: float | None, f: str, *, proc: str = "worker.1", type_: Any = "ok",
        answer: dict[str, Any] | None = None, **fields: Any,
    ) -> None:  # fmt: skip
        self._ops += 1
        self.events.append(Event(t=round(begin * S), proc=proc, type="invoke", f=f, op=self._ops, **fields))
        if end is not None:
            self.events.append(Event(t=round(end * S), proc=proc, type=type_, f=f, op=self._ops, **(answer or {})))

    def enqueue(self, begin: float, end: float | None, *jobs: int, type_: Any = "ok", **fields: Any) -> None:
        fields = {"queue": "q", "ttr": 2.0, "max_attempts": 3, **fields}
        self.call(begin, end, "enqueue", proc="producer.1", type_=type_, jobs=jobs, **fields)

    def claim(  # noqa: PLR0917 - a line of a history
        self, begin: float, end: float, job: int, token: str, attempt: int = 1, proc: str = "worker.1"
    ) -> None:
        answer = {"jobs": (job,), "tokens": (token,), "attempts": (attempt,)}
        self.call(begin, end, "claim", proc=proc, answer=answer)

    def run(  # noqa: PLR0917 - as above
        self, begin: float, end: float | None, job: int, attempt: int = 1, proc: str = "worker.1",
        outcome: str = "done", **fields: Any,
    ) -> None:  # fmt: skip
        self._ops += 1
        op = self._ops
        self.events.append(
            Event(
                t=round(begin * S),
                proc=proc,
                type="invoke",
                f="start",
                op=op,
                jobs=(job,),
                attempts=(attempt,),
                **fields,
            )
        )
        if end is not None:
            self.events.append(
                Event(t=round(end * S), proc=proc, type="ok", f="end", op=op, jobs=(job,), outcome=outcome)
            )

    def say(self, begin: float, end: float | None, verb: str, job: int, token: str, **fields: Any) -> None:
        self.call(begin, end, verb, jobs=(job,), tokens=(token,), **fields)

    def audit(self, at: float, **states: str) -> None:
        jobs = tuple(int(name.removeprefix("job")) for name in states)
        self.note(at, "audit", jobs=jobs, states=tuple(states.values()))

    def broken(self, **setting: Any) -> set[str]:
        return set(check(sorted(self.events, key=lambda event: event.t), Setting(**setting)).violations)


def a_good_life(script: Script) -> None:
    """A history in which jobs are done, late, retried, released, touched, buried, and run again after a crash."""
    script.enqueue(0.0, 0.1, 1, 2, 3)
    for job in (1, 2):
        script.claim(0.2, 0.3, job, f"t{job}")
        script.run(0.4, 0.5, job)
        script.say(0.6, 0.7, "ack", job, f"t{job}")
    script.claim(0.8, 0.9, 3, "t3")
    script.run(0.9, 1.0, 3, outcome="raised")
    script.say(1.0, 1.1, "release", 3, "t3", delay=1.0)
    script.claim(2.2, 2.3, 3, "t3b", attempt=2)
    script.say(3.9, 4.0, "touch", 3, "t3b")
    script.run(2.4, 5.0, 3, attempt=2)
    script.say(5.1, 5.2, "ack", 3, "t3b")
    script.enqueue(0.0, 0.1, 4, delay=3.0)
    script.claim(2.9, 3.1, 4, "t4", proc="worker.2")
    script.run(3.2, None, 4, proc="worker.2")
    script.note(3.5, "fault", kind="kill", target="worker.2")
    script.claim(5.3, 5.4, 4, "t4b", attempt=2)
    script.run(5.5, 5.6, 4, attempt=2)
    script.say(5.6, 5.7, "ack", 4, "t4b")
    script.enqueue(0.0, 0.1, 5)
    script.claim(6.0, 6.1, 5, "t5")
    script.run(6.1, 6.2, 5, outcome="raised")
    script.say(6.2, 6.3, "bury", 5, "t5")
    script.enqueue(1.0, None, 6)  # its producer was killed
    script.note(7.0, "healed")
    script.note(9.0, "drained")
    script.note(9.1, "count", queue="q", kind="buried", value=1)
    script.audit(9.2, job5="buried")


def test_a_history_of_all_ordinary_events_violates_no_invariant() -> None:
    script = Script()
    a_good_life(script)
    assert script.broken() == set()


def lost(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7)
    script.audit(9.5)


def lost_in_the_middle(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7)
    script.run(0.2, None, 7)
    script.audit(9.5)


def invented(script: Script) -> None:
    script.run(0.2, 0.3, 70)


def changed(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7, digests=("aa",))
    script.run(0.2, 0.3, 7, digests=("ab",))
    script.run(0.4, 0.5, 7, digests=("aa",), proc="worker.3", outcome="done")
    script.note(0.35, "fault", kind="kill", target="worker.3")


def refused_and_run(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7, type_="fail")
    script.run(0.2, 0.3, 7)


def acked_twice(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7)
    script.claim(0.2, 0.3, 7, "a")
    script.claim(2.4, 2.5, 7, "b", attempt=2)
    script.say(2.6, 2.7, "ack", 7, "b")
    script.say(2.45, 2.65, "ack", 7, "a", proc="worker.2")


def run_after_the_ack(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7)
    script.claim(0.2, 0.3, 7, "a")
    script.run(0.3, 0.4, 7)
    script.say(0.5, 0.6, "ack", 7, "a")
    script.note(0.6, "fault", kind="cut", target="link")
    script.run(0.7, 0.8, 7, attempt=2, proc="worker.2")


def two_holders(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7)
    script.claim(0.2, 0.3, 7, "a")
    script.claim(1.0, 1.1, 7, "b", attempt=2, proc="worker.2")
    script.say(1.2, 1.3, "ack", 7, "b", proc="worker.2")


def stale_verdict(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7)
    script.claim(0.2, 0.3, 7, "a")
    script.claim(2.4, 2.5, 7, "b", attempt=2, proc="worker.2")
    script.say(2.6, 2.7, "release", 7, "a")
    script.say(2.8, 2.9, "ack", 7, "b", proc="worker.2")


def refused_while_it_lasts(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7)
    script.claim(0.2, 0.3, 7, "a")
    script.run(0.3, 0.4, 7)
    script.say(0.5, 0.6, "ack", 7, "a", type_="fail")


def out_of_order(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7)
    script.enqueue(0.2, 0.3, 8)
    for at, job in ((0.4, 8), (0.6, 7)):
        script.claim(at, at + 0.05, job, f"t{job}")
        script.say(at + 0.1, at + 0.15, "ack", job, f"t{job}")


def less_urgent_first(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7, priority=10)
    script.enqueue(0.2, 0.3, 8, priority=1)
    for at, job in ((0.4, 7), (0.6, 8)):
        script.claim(at, at + 0.05, job, f"t{job}")
        script.say(at + 0.1, at + 0.15, "ack", job, f"t{job}")


def early(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7, delay=5.0)
    script.run(4.9, 5.0, 7)


def early_after_a_release(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7)
    script.claim(0.2, 0.3, 7, "a")
    script.say(0.4, 0.5, "release", 7, "a", delay=2.0)
    script.claim(2.0, 2.1, 7, "b", attempt=2)
    script.say(2.2, 2.3, "ack", 7, "b")


def an_attempt_forgotten(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7)
    script.claim(0.2, 0.3, 7, "a")
    script.claim(2.4, 2.5, 7, "b", attempt=1)
    script.say(2.6, 2.7, "ack", 7, "b")


def an_attempt_too_many(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7)
    script.claim(0.2, 0.3, 7, "a", attempt=2)
    script.say(0.6, 0.7, "ack", 7, "a")


def failed_too_often(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7, max_attempts=2, queue="other")
    for attempt in (1, 2, 3):
        script.run(attempt, attempt + 0.1, 7, attempt=attempt, outcome="raised")
    script.audit(9.5, job7="buried")


def run_twice_for_nothing(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7)
    script.run(0.2, 0.3, 7)
    script.run(0.4, 0.5, 7, attempt=2, proc="worker.2")


def there_twice(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7)
    script.note(9.5, "audit", jobs=(7, 7), states=("buried", "buried"))


def counted_wrongly(script: Script) -> None:
    script.note(9.5, "count", queue="q", kind="delayed", value=3)


def counted_too_few_of_what_is_left_undone(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7)
    script.enqueue(0.0, 0.1, 8)
    script.note(9.0, "drained", err="jobs were left after 60 s")
    script.note(9.5, "count", queue="q", kind="ready", value=1)
    script.note(9.5, "count", queue="q", kind="reserved", value=0)
    script.audit(9.6, job7="delayed", job8="ready")


def left_reserved(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7)
    script.audit(9.5, job7="reserved")


def left_behind(script: Script) -> None:
    script.note(9.5, "residue", kind="process", target="worker child 77")


def stuck(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7)
    script.note(19.0, "drained")
    script.audit(19.5, job7="ready")


def late(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7)
    script.note(7.0, "healed")
    script.run(30.0, 30.1, 7)
    script.note(31.0, "drained")


def untyped(script: Script) -> None:
    script.call(0.2, 0.3, "ack", type_="info", answer={"err": "KeyError: 'x'", "is_typed": False})


def ended_by_itself(script: Script) -> None:
    script.note(1.0, "untyped", kind="process", err="worker -p 1 ended with 1: KeyError: 7")


def overdue(script: Script) -> None:
    script.call(0.2, 4.0, "ack", deadline=2.0)


def growing(script: Script) -> None:
    for number in range(10):
        script.note(1 + number / 10, "memory", target="worker.1", value=50 + 4 * number)


def keeping_files(script: Script) -> None:
    for number in range(10):
        script.note(1 + number / 10, "files", target="worker.1", value=10 + 8 * number)


def of_another_queue(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7)
    script.call(0.2, 0.3, "claim", queue="other", answer={"jobs": (7,), "tokens": ("t7",), "attempts": (1,)})
    script.run(0.3, 0.4, 7)


def released_and_gone(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7)
    script.claim(0.2, 0.3, 7, "a")
    script.run(0.3, 0.4, 7)
    script.say(0.4, 0.5, "release", 7, "a")


def gone_with_its_consumer(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7)
    script.claim(0.2, 0.3, 7, "a", proc="worker.2")
    script.run(0.3, 0.4, 7, proc="worker.2")
    script.note(0.5, "fault", kind="kill", target="worker.2")


def gone_after_an_enqueue_in_doubt(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7, type_="info")
    script.run(0.3, 0.4, 7, outcome="raised")


def handed_out_after_its_ack(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7)
    script.claim(0.2, 0.3, 7, "a")
    script.say(0.4, 0.5, "ack", 7, "a")
    script.claim(0.6, 0.7, 7, "b", attempt=2, proc="worker.2")
    script.note(0.7, "fault", kind="kill", target="worker.2")


def kept_after_its_ack(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7)
    script.claim(0.2, 0.3, 7, "a")
    script.say(0.4, 0.5, "ack", 7, "a")
    script.note(9.5, "audit", jobs=(7,), states=("delayed",))


def acked_more_often_than_enqueued(script: Script) -> None:
    script.enqueue(0.0, 0.9, 7, kind="brief")
    script.note(0.2, "fault", kind="cut", target="link")
    for number in range(3):
        at = 0.3 + 3 * number
        script.claim(at, at + 0.05, 7, f"t{number}")
        script.run(at + 0.1, at + 0.15, 7)
        script.say(at + 0.2, at + 0.25, "ack", 7, f"t{number}")


def two_holders_after_an_enqueue_in_doubt(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7, type_="info", kind="brief")
    script.run(0.2, 0.25, 7, proc="worker.9")
    script.note(5.0, "fault", kind="cut", target="link")
    script.claim(20.2, 20.3, 7, "a")
    script.claim(21.0, 21.1, 7, "b", attempt=2, proc="worker.2")
    script.say(21.2, 21.3, "ack", 7, "b", proc="worker.2")


def early_after_a_reschedule(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7, delay=1.0)
    script.call(0.2, 0.3, "reschedule", proc="manage.1", jobs=(7,), delay=5.0)
    script.claim(2.0, 2.1, 7, "a")
    script.say(2.2, 2.3, "ack", 7, "a")


def early_after_a_refused_kick(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7, delay=5.0)
    script.call(0.2, 0.3, "kick", proc="manage.1", type_="fail", jobs=(7,))
    script.run(4.9, 5.0, 7)


def early_to_who_waits(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7)
    script.claim(0.2, 0.3, 7, "a")
    script.say(0.4, 0.5, "release", 7, "a", delay=2.0)
    script.claim(0.35, 0.6, 7, "b", attempt=2, proc="worker.2")
    script.say(0.7, 0.8, "ack", 7, "b")


def an_attempt_too_many_of_a_task(script: Script) -> None:
    script.enqueue(5.0, 5.1, 7)
    script.note(5.1, "fault", kind="kill", target="consume-3.5")
    script.run(5.2, 5.3, 7, attempt=3)


def an_attempt_forgotten_after_a_refused_kick(script: Script) -> None:
    an_attempt_forgotten(script)
    script.call(0.3, 0.35, "kick", proc="manage.1", type_="fail", jobs=(7,))


def given_up_early(script: Script) -> None:
    script.enqueue(40.0, 40.1, 7, max_attempts=3, queue="other")
    script.run(40.2, 40.3, 7, outcome="raised")
    script.note(49.5, "audit", jobs=(7,), states=("buried",))


def run_again_long_after_a_kick(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7, delay=5.0)
    script.call(0.2, 0.3, "kick", proc="manage.1", jobs=(7,))
    script.run(10.2, 10.3, 7)
    script.run(20.4, 20.5, 7, attempt=2, proc="worker.2")


def run_again_after_a_refused_kick(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7)
    script.run(0.2, 0.3, 7)
    script.call(0.3, 0.35, "kick", proc="manage.1", type_="fail", jobs=(7,))
    script.run(0.4, 0.5, 7, attempt=2, proc="worker.2")


def run_twice_after_one_bury(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7)
    script.claim(0.2, 0.3, 7, "a")
    script.run(0.3, 0.4, 7)
    script.say(0.4, 0.5, "bury", 7, "a")
    script.call(0.6, 0.7, "kick_any", proc="manage.1", deadline=2.0)
    script.run(0.8, 0.85, 7, attempt=2, proc="worker.2")
    script.run(0.9, 0.95, 7, attempt=3, proc="worker.3")
    script.note(9.5, "audit", jobs=(7,), states=("ready",))


def run_again_though_only_a_link_was_cut(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7)
    script.claim(0.2, 0.3, 7, "a")
    script.run(0.3, 0.4, 7)
    script.note(0.45, "fault", kind="cut", target="link", value=1.0)
    script.run(0.9, 0.95, 7, attempt=2, proc="worker.3")
    script.note(9.5, "audit", jobs=(7,), states=("ready",))


def run_again_as_the_second_was_killed(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7)
    script.run(0.2, 0.3, 7)
    script.note(0.35, "fault", kind="kill", target="worker.2", value=1.0)
    script.run(0.4, 0.5, 7, attempt=2, proc="worker.2")


def run_again_long_after_a_fault(script: Script) -> None:
    script.enqueue(40.0, 40.1, 7)
    script.note(40.0, "fault", kind="cut", target="link", value=1.0)
    script.run(45.2, 45.3, 7)
    script.run(45.4, 45.5, 7, attempt=2, proc="worker.2")


def there_twice_after_an_enqueue_in_doubt(script: Script) -> None:
    script.enqueue(0.0, 0.9, 7, kind="brief")
    script.note(0.2, "fault", kind="cut", target="link")
    script.run(0.3, 0.4, 7)
    script.note(9.5, "audit", jobs=(7, 7), states=("buried", "buried"))


def waiting_beside_a_busy_queue(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7, queue="other")
    script.note(7.0, "healed")
    for number in range(100, 125):
        script.enqueue(number - 93.0, number - 92.9, number)
        script.run(number - 92.5, number - 92.4, number)
    script.run(30.0, 30.1, 7)
    script.note(40.0, "drained")


def late_after_a_release(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7)
    script.note(7.0, "healed")
    script.claim(8.0, 8.1, 7, "a")
    script.run(8.1, 8.2, 7)
    script.say(8.2, 8.3, "release", 7, "a", delay=0.5)
    script.claim(30.0, 30.1, 7, "b", attempt=2)
    script.run(30.1, 30.2, 7, attempt=2)
    script.say(30.2, 30.3, "ack", 7, "b")
    script.note(40.0, "drained")


def still_delayed_after_a_release(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7)
    script.claim(0.2, 0.3, 7, "a")
    script.run(0.3, 0.4, 7)
    script.say(0.4, 0.5, "release", 7, "a", delay=0.5)
    script.note(30.0, "drained")
    script.note(30.5, "audit", jobs=(7,), states=("delayed",))


BROKEN: list[tuple[str, Callable[[Script], None]]] = [
    ("I1", lost),
    ("I1", lost_in_the_middle),
    ("I1", released_and_gone),
    ("I1", gone_with_its_consumer),
    ("I1", gone_after_an_enqueue_in_doubt),
    ("I2", invented),
    ("I2", changed),
    ("I2", of_another_queue),
    ("I2", refused_and_run),
    ("I3", acked_twice),
    ("I3", run_after_the_ack),
    ("I3", handed_out_after_its_ack),
    ("I3", kept_after_its_ack),
    ("I3", acked_more_often_than_enqueued),
    ("I4", two_holders),
    ("I4", two_holders_after_an_enqueue_in_doubt),
    ("I5", stale_verdict),
    ("I5", refused_while_it_lasts),
    ("I6", out_of_order),
    ("I7", less_urgent_first),
    ("I8", early),
    ("I8", early_after_a_release),
    ("I8", early_after_a_reschedule),
    ("I8", early_after_a_refused_kick),
    ("I8", early_to_who_waits),
    ("I9", an_attempt_forgotten),
    ("I9", an_attempt_too_many),
    ("I9", an_attempt_too_many_of_a_task),
    ("I9", an_attempt_forgotten_after_a_refused_kick),
    ("I10", failed_too_often),
    ("I10", given_up_early),
    ("I11", run_twice_for_nothing),
    ("I11", run_again_long_after_a_kick),
    ("I11", run_again_after_a_refused_kick),
    ("I11", run_twice_after_one_bury),
    ("I11", run_again_though_only_a_link_was_cut),
    ("I11", run_again_as_the_second_was_killed),
    ("I11", run_again_long_after_a_fault),
    ("I12", there_twice),
    ("I12", there_twice_after_an_enqueue_in_doubt),
    ("I12", counted_wrongly),
    ("I12", counted_too_few_of_what_is_left_undone),
    ("I13", left_reserved),
    ("I13", left_behind),
    ("I14", stuck),
    ("I14", late),
    ("I14", waiting_beside_a_busy_queue),
    ("I14", late_after_a_release),
    ("I14", still_delayed_after_a_release),
    ("I15", untyped),
    ("I15", overdue),
    ("I15", ended_by_itself),
    ("I18", growing),
    ("I18", keeping_files),
]


def test_a_short_peak_of_memory_is_not_growth() -> None:
    script = Script()
    for number, value in enumerate([50, 52, 51, 90, 52, 51, 53, 90, 52, 52]):
        script.note(1 + number / 10, "memory", target="worker.1", value=value)
    assert script.broken() == set()


def test_a_delay_that_ends_between_count_and_audit_is_not_a_violation_where_jobs_were_left_undone() -> None:
    script = Script()
    script.enqueue(0.0, 0.1, 7)
    script.note(9.0, "drained", err="jobs were left after 60 s")
    script.note(9.5, "count", queue="q", kind="ready", value=1)
    script.note(9.5, "count", queue="q", kind="delayed", value=0)
    script.audit(9.6, job7="delayed")
    assert script.broken() == set()
    assert check(script.events).figures["left undone"] == 1


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_run_may_begin_after_a_later_one_if_a_cut_has_ended_its_lease(is_cut: bool) -> None:
    # Given a job whose first holder has lost its connection, and does not know that yet when it begins
    script = Script()
    script.enqueue(0.0, 0.1, 7, queue="other")
    if is_cut:
        script.note(0.2, "fault", kind="cut", target="link", value=1.0)
    script.run(0.3, 0.4, 7, attempt=2, proc="job.2")
    script.run(0.35, 0.5, 7, attempt=1, proc="job.1")
    # Then the attempts are in order, and without the cut connection they are not
    found = check(script.events, Setting(counts_exactly=False, ends_leases_with_connection=True))
    assert ("I9" in found.violations) is not is_cut


def passed_over(script: Script, attempt: int) -> None:
    script.enqueue(0.0, 0.1, 7, priority=5)
    script.enqueue(0.2, 0.3, 8, priority=5)
    script.claim(1.0, 1.1, 8, "t8")
    script.claim(2.0, 2.1, 7, "t7", attempt=attempt)
    script.run(2.1, 2.2, 7, attempt=attempt)


@pytest.mark.parametrize(("attempt", "is_cut", "broken"), [(1, True, True), (2, False, True), (2, True, False)])
def test_a_job_that_was_taken_by_a_claim_whose_reply_was_lost_is_not_out_of_order(
    attempt: int, is_cut: bool, broken: bool
) -> None:
    script = Script()
    passed_over(script, attempt)
    if is_cut:
        script.note(0.6, "fault", kind="cut", target="link")
    assert ("I6" in script.broken(one_consumer=frozenset({"q"}))) is broken


@pytest.mark.parametrize(
    ("kind", "is_cut", "ends", "broken"),
    [("brief", True, 0.9, False), ("brief", False, 0.9, True), ("", True, 0.9, True), ("brief", True, 0.3, True)],
)
def test_a_task_that_ran_before_its_enqueue_was_answered_may_be_stored_once_more(
    kind: str, is_cut: bool, ends: float, broken: bool
) -> None:
    script = Script()
    script.enqueue(0.0, ends, 7, kind=kind)
    script.run(0.4, 0.5, 7)
    script.run(1.0, 1.1, 7)
    if is_cut:
        script.note(0.2, "fault", kind="cut", target="link")
    assert ("I9" in script.broken()) is broken
    found = check(sorted(script.events, key=lambda event: event.t))
    assert found.figures.get("stored again", 0) == (not broken)
    # the result is the same if the backend repeats each enqueue
    assert ("I9" in script.broken(repeats_enqueues=True)) is (broken and bool(kind or not is_cut or ends < 0.5))


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_reschedule_whose_reply_was_lost_may_leave_two_where_it_is_a_copy(is_copied: bool) -> None:
    script = Script()
    acked_twice(script)
    script.call(0.15, 0.2, "reschedule", jobs=(7,), type_="info", answer={"err": "EnqueueUncertain: cut"})
    assert ("I3" in script.broken(reschedules_by_copy=is_copied)) is not is_copied


@pytest.mark.parametrize("fault", ["", "freeze", "restart"])
def test_a_job_may_be_locked_by_a_transaction_that_has_lost_its_client(fault: str) -> None:
    script = Script()
    script.enqueue(0.0, 0.1, 7, priority=5)
    script.enqueue(0.2, 0.3, 8, priority=1)
    if fault:
        script.note(0.8, "fault", kind=fault, target="store", value=0.1)
    script.claim(1.0, 1.1, 7, "t7")
    script.claim(1.2, 1.3, 8, "t8")
    assert ("I7" in script.broken(one_consumer=frozenset({"q"}), locks_rows=True)) is not bool(fault)
    assert "I7" in script.broken(one_consumer=frozenset({"q"}))


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_job_of_a_claim_that_failed_was_taken_before_what_has_come_since(has_failed: bool) -> None:
    script = Script()
    script.enqueue(0.0, 0.1, 7, priority=5)
    script.call(0.2, 1.0, "claim", type_="info" if has_failed else "ok", answer={"err": "BackendTimeout: cut"})
    script.enqueue(1.1, 1.2, 8, priority=1)
    script.claim(1.3, 1.4, 7, "t7")
    script.claim(1.5, 1.6, 8, "t8")
    assert ("I7" in script.broken(one_consumer=frozenset({"q"}))) is not has_failed


@pytest.mark.parametrize(("invariant", "story"), BROKEN, ids=lambda value: getattr(value, "__name__", value))
def test_a_violation_is_found_by_its_own_invariant(invariant: str, story: Callable[[Script], None]) -> None:
    # Given a correct history with one violation
    script = Script()
    if invariant not in {"I6", "I7"}:
        a_good_life(script)
    story(script)
    # Then only this invariant is violated, and a second one only if the same event violates two
    also: set[str] = set()
    if story is acked_twice:
        also = {"I5"}
    elif story is refused_while_it_lasts:
        also = {"I1"}  # and the job is not in the store
    elif story is run_after_the_ack:
        also = {"I11"}
    found = script.broken(one_consumer=frozenset({"q"} if invariant in {"I6", "I7"} else ()))
    assert invariant in found
    assert found <= {invariant} | also


def a_stopped_holder(script: Script) -> None:
    """A consumer was stopped when its reserve was answered. Another consumer did the job before the first one
    continued."""
    script.enqueue(0.0, 0.1, 7)
    script.note(0.3, "fault", kind="stop", target="worker.1", value=4.0)
    script.claim(0.2, 3.9, 7, "a")
    script.claim(2.4, 2.5, 7, "b", attempt=2, proc="worker.2")
    script.run(2.5, 2.6, 7, attempt=2, proc="worker.2")
    script.say(2.7, 2.8, "ack", 7, "b", proc="worker.2")
    script.run(3.9, 4.0, 7)
    script.say(4.1, 4.2, "ack", 7, "a", type_="fail")


def a_stopped_holder_of_a_released_job(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7)
    script.note(0.3, "fault", kind="stop", target="worker.1", value=4.0)
    script.claim(0.2, 3.9, 7, "a")
    script.claim(2.4, 2.5, 7, "b", attempt=2, proc="worker.2")
    script.run(2.5, 2.6, 7, attempt=2, proc="worker.2")
    script.say(2.7, 2.8, "release", 7, "b", proc="worker.2", delay=5.0)
    script.run(3.9, 4.0, 7)
    script.say(4.1, 4.2, "ack", 7, "a", type_="fail")
    script.audit(9.5, job7="ready")


def handed_out_by_a_reserve_after_one_that_failed(script: Script) -> None:
    """The first reserve had taken the job, and the lease lasts from that time."""
    script.enqueue(0.0, 0.1, 7)
    script.note(0.2, "fault", kind="cut", target="link")
    script.call(0.2, 2.2, "claim", type_="info", answer={"err": "BackendTimeout: cut"})
    script.claim(2.25, 2.3, 7, "a")
    script.run(2.3, 2.35, 7)
    script.claim(2.6, 2.7, 7, "b", attempt=2, proc="worker.2")
    script.run(2.7, 2.8, 7, attempt=2, proc="worker.2")
    script.say(2.75, 2.78, "ack", 7, "a", type_="fail")
    script.say(2.9, 3.0, "ack", 7, "b", proc="worker.2")


def given_back_as_its_process_ended(script: Script) -> None:
    """A job failed while another job of its process ignored its time limit. The process was ended before it could
    report the failure."""
    script.enqueue(0.0, 0.1, 7, max_attempts=1)
    script.note(0.2, "fault", "worker.1", kind="kill", target="worker.1", value=10.0)
    script.run(0.3, 1.4, 7, outcome="raised")
    script.run(1.9, 2.0, 7, proc="worker.2", outcome="raised")
    script.audit(9.5, job7="buried")


def failed_and_retried_before_its_process_ended(script: Script) -> None:
    """The process was ended a moment after the failure. The job may have been given back, but was not."""
    script.enqueue(0.0, 0.1, 7, max_attempts=3)
    script.run(0.3, 0.31, 7, outcome="raised")
    script.run(0.5, 0.51, 7, attempt=2)
    script.note(0.7, "fault", "worker.1", kind="kill", target="worker.1", value=1.0)


def a_task_in_doubt_that_is_stored_again(script: Script) -> None:
    script.enqueue(0.0, 0.9, 7, kind="brief")
    script.note(0.2, "fault", kind="cut", target="link")
    for number in range(2):
        at = 0.3 + number
        script.claim(at, at + 0.05, 7, f"t{number}")
        script.run(at + 0.1, at + 0.15, 7)
        script.say(at + 0.2, at + 0.25, "ack", 7, f"t{number}")


def buried_by_attempts_that_never_began(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7, max_attempts=2)
    script.run(0.2, 0.3, 7, outcome="raised")
    script.note(0.5, "fault", kind="kill", target="job.7", value=1.0)
    script.note(9.5, "audit", jobs=(7,), states=("buried",))


def recovered_and_deleted(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7, type_="info")
    script.claim(0.2, 0.3, 7, "a")
    script.say(0.4, 0.5, "release", 7, "a")
    script.call(0.6, None, "delete", proc="manage.1", jobs=(7,))
    script.audit(9.5)


def acked_by_who_was_killed(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7)
    script.claim(0.2, 0.3, 7, "a")
    script.run(0.3, 0.4, 7)
    script.say(0.4, None, "ack", 7, "a")
    script.audit(9.5)


def kicked_while_it_was_delayed(script: Script) -> None:
    script.enqueue(0.0, 0.1, 7, delay=5.0)
    script.call(0.2, None, "kick", proc="manage.1", jobs=(7,))
    script.run(0.9, 1.0, 7)
    script.audit(9.5)


@pytest.mark.parametrize(
    "story",
    [
        a_stopped_holder,
        a_stopped_holder_of_a_released_job,
        handed_out_by_a_reserve_after_one_that_failed,
        given_back_as_its_process_ended,
        failed_and_retried_before_its_process_ended,
        a_task_in_doubt_that_is_stored_again,
        buried_by_attempts_that_never_began,
        recovered_and_deleted,
        acked_by_who_was_killed,
        kicked_while_it_was_delayed,
    ],
)
def test_an_allowed_history_breaks_no_invariant(story: Callable[[Script], None]) -> None:
    script = Script()
    story(script)
    assert script.broken() == set()


@pytest.mark.parametrize(("is_cut", "broken"), [(True, set[str]()), (False, {"I1"})])
def test_a_refused_ack_whose_reply_was_lost_may_have_counted_on_beanstalkd(is_cut: bool, broken: set[str]) -> None:
    script = Script()
    script.enqueue(0.0, 0.1, 7)
    script.claim(0.2, 0.3, 7, "a")
    script.run(0.3, 0.4, 7)
    if is_cut:
        script.note(0.45, "fault", kind="freeze", target="link", value=2.0)
    script.say(0.5, 2.5, "ack", 7, "a", type_="fail")
    script.audit(9.5)
    assert script.broken(ends_leases_with_connection=True) - {"I5"} == broken
    assert script.broken() >= {"I1"}  # on other backends, a cut does not explain the missing job


def test_every_invariant_has_a_history_that_breaks_it() -> None:
    assert {invariant for invariant, _ in BROKEN} == INVARIANTS.keys()


def test_a_fault_explains_only_its_own_history() -> None:
    # Given an interrupted run that a fault explains, and the same run without the fault
    script = Script()
    script.enqueue(0.0, 0.1, 7)
    script.run(0.2, None, 7)
    script.run(0.6, 0.7, 7, attempt=2, proc="worker.2")
    without = script.broken()
    script.note(0.5, "fault", kind="kill", target="worker.1")
    assert (without, script.broken()) == ({"I11"}, set())


@pytest.mark.parametrize(("waits", "broken"), [(True, set()), (False, {"I11"})])
def test_a_process_that_is_stopped_may_hold_the_lock_of_all(waits: bool, broken: set[str]) -> None:
    # Given a job whose lease ended while it ran, because a stopped process held the lock
    script = Script()
    script.enqueue(0.0, 0.1, 7)
    script.note(0.4, "fault", kind="stop", target="consume-3.9", value=3.5)
    script.run(0.2, 4.7, 7)
    script.run(4.0, 8.5, 7, attempt=2, proc="worker.2")
    assert script.broken(waits_for_the_stopped=waits) == broken


def test_an_outage_that_lasted_longer_than_recorded_explains_its_effects() -> None:
    script = Script()
    script.enqueue(0.0, 0.1, 7)
    script.note(0.2, "fault", kind="restart", target="store", value=1.0)
    script.run(12.0, 12.1, 7)
    script.run(12.2, 12.3, 7, attempt=2, proc="worker.2")
    without = script.broken()
    script.note(11.0, "struck", kind="restart server")
    assert (without, script.broken()) == ({"I11"}, set())


@pytest.mark.parametrize(("f", "ends", "broken"), [("ack", 3.1, True), ("claim", 3.9, False), ("claim", 4.1, True)])
def test_a_reserve_that_waits_may_end_two_seconds_after_its_deadline(f: str, ends: float, broken: bool) -> None:
    script = Script()
    script.call(0.0, ends, f, type_="info", deadline=2.0, answer={"err": "BackendTimeout: frozen"})
    assert ("I15" in script.broken()) is broken


@pytest.mark.parametrize(("seconds", "broken"), [(0.0, True), (2.1, False), (3.1, True)])
def test_the_time_of_writing_the_history_is_not_part_of_a_call(seconds: float, broken: bool) -> None:
    script = Script()
    script.call(0.0, 3.5, "ack", deadline=2.0, answer={"seconds": seconds})
    assert ("I15" in script.broken()) is broken


def test_a_report_shows_the_jobs_history() -> None:
    script = Script()
    a_good_life(script)
    two_holders(script)
    report = check(sorted(script.events, key=lambda event: event.t)).report()
    assert "I4 lease exclusion: 1 violations" in report
    shown = [line.split()[1:5] for line in report.splitlines() if line.startswith("    ")]
    assert ["worker.2", "ok", "claim", "token=b"] in shown
    assert not any("t1" in line for line in report.splitlines()[2:])


def test_a_recorded_history_is_read_as_it_was_written(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "producer")
    op = recorder.invoke("enqueue", jobs=(1, 2), queue="q", ttr=2.0, digests=("a", "b"))
    recorder.answer("ok", "enqueue", op)
    recorder.note("healed")
    # A process was killed in the middle of a line.
    (tmp_path / "worker.9.jsonl").write_bytes(b'{"t":1,"proc":"w","type":"info","f":"healed"}\n{"t":2,"pro')
    events = read(tmp_path)
    assert [event.f for event in events] == ["healed", "enqueue", "enqueue", "healed"]
    assert about(events, 2)[0].digests == ("b",)
    assert len(cut(events, {2})) == 4
    assert len(cut(events, {3})) == 2
    write(tmp_path / "kept.jsonl.gz", events[1:3])
    assert replay(tmp_path / "kept.jsonl.gz") == events[1:3]


def test_a_process_with_the_pid_of_a_killed_one_writes_after_the_incomplete_line(tmp_path: Path) -> None:
    path = tmp_path / f"job.{os.getpid()}.jsonl"
    path.write_bytes(b'{"t":1,"proc":"w","type":"info","f":"healed"}\n{"t":2,"pro')
    recorder = Recorder(tmp_path, "job")
    recorder.note("drained")
    recorder.close()
    assert [event.f for event in read(tmp_path)] == ["healed", "drained"]


@pytest.mark.parametrize(
    "line", [b'{"t":1,"proc":"w","ty{"t":1}', b'{"t":"soon"}', b'{"t":1,"proc":"w","type":"?","f":"x"}']
)
def test_a_line_that_is_not_an_event_is_reported_as_damage(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "worker.9.jsonl").write_bytes(line + b"\n")
    with pytest.raises(HistoryDamaged, match=r"worker\.9"):
        read(tmp_path)


_WRITES = """
import resource, signal, sys
from pathlib import Path
from multiq.soak.history import HistoryDamaged, Recorder
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
recorder = Recorder(Path(sys.argv[1]), "job")
failed = 0
for number in range(100):
    try:
        recorder.invoke("start", jobs=(number,))
    except HistoryDamaged:
        failed += 1
print(failed)
"""


def test_a_history_that_could_not_be_written_is_not_judged(tmp_path: Path) -> None:
    # Given a process that may write a thousand bytes, as on a disk that is full
    done = subprocess.run([sys.executable, "-c", _WRITES, tmp_path], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 80  # each later call failed, because no job may run without its record
    # Then no process is blamed for the missing events
    with pytest.raises(HistoryDamaged, match="could not write down"):
        read(tmp_path)
