"""Capabilities: the backend has what it declares, and each missing capability has a reason.

A power in the code is a capability that a backend either has or lacks. A measure is a number that a backend declares,
like the shortest ttr.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import pytest

from multiq.backend import OPTIONAL_PARTS, Arrive, Backend, State
from multiq.backend.base import methods_of
from multiq.backend.capabilities import MEASURES, POWERS, Gap, GapKind
from multiq.backend.registry import backends_with
from multiq.conformance.case import Topic, promise, requires
from multiq.conformance.requirements import REQUIRES, declared
from multiq.errors import JobNotFound, Unsupported
from multiq.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Callable


class CapabilitiesTests(Topic):
    @promise("11.8")
    def test_every_missing_power_says_what_kind_of_gap_it_is_and_why(self) -> None:
        # Given all powers: the backend has each power, or a reason why the power is missing
        for power in POWERS:
            claim = self.can.claim(power)
            if claim is not True:
                # Then each missing power has one of the three kinds, and a reason in words
                assert isinstance(claim, Gap), power
                assert claim.kind in get_args(GapKind), power
                assert len(claim.reason) >= 10, power

    @promise("11.8")
    def test_the_declared_capabilities_are_those_of_the_live_backend(self) -> None:
        # Given the capabilities that the driver declares without a server, and the capabilities of a backend with its
        # server
        declared, live = type(self.backend).declared, self.backend.capabilities
        # Then the backend with its server has no power that the driver does not declare. The measures may differ, and
        # powers may be missing
        assert live.backend == declared.backend
        gained = [power for power in POWERS if live.claim(power) and not declared.claim(power)]
        assert gained == []

    @promise("11.8", "2.5", "3.10", "4.1")
    def test_the_measures_make_sense(self) -> None:
        # Given the measures
        delay_resolution, min_ttr, poll_interval, max_body, longest_delay = (
            getattr(self.can, measure) for measure in MEASURES
        )
        # Then delays and leases are usable, and a body may be long enough
        assert 0 < delay_resolution <= 1
        assert 1 <= min_ttr <= 10
        assert 0 < poll_interval <= 10
        assert max_body is None or max_body >= 1024
        assert longest_delay is None or longest_delay >= 60

    @promise("11.3")
    @pytest.mark.parametrize("power", POWERS)
    def test_a_refusal_names_the_power_and_the_backends_that_have_it(self, power: str) -> None:
        # Given the error for a missing power
        gap = type(self.backend).declared.claim(power)
        if not isinstance(gap, Gap):
            self.does_not_apply(f"this backend has {power}")
        refusal = self.backend.unsupported(power)
        # Then the error names the power, the kind, the reason, and the backends that have the power
        assert isinstance(refusal, Unsupported)
        assert refusal.capability == power
        assert gap.kind in str(refusal)
        assert gap.reason in str(refusal)
        assert list(refusal.others) == backends_with(power)
        assert type(self.backend).declared.backend not in refusal.others

    @promise("11.3", "11.8")
    @requires("inspection", "management", "pausing", "purging")
    @pytest.mark.parametrize("power", OPTIONAL_PARTS)
    def test_an_optional_part_works_or_is_refused(self, power: str) -> None:
        # Given multiq's calls of an optional part of the driver interface
        queue, job_id = self.queue, new_id()
        calls: dict[str, Callable[[], object]] = {
            "peek": lambda: self.backend.peek(queue, job_id),
            "jobs": lambda: self.backend.jobs(queue, State.READY),
            "delete": lambda: self.backend.delete(queue, job_id),
            "reschedule": lambda: self.backend.reschedule(queue, job_id, 0),
            "kick_job": lambda: self.backend.kick_job(queue, job_id),
            "pause": lambda: self.backend.pause(queue, 0),
            "resume": lambda: self.backend.resume(queue),
            "purge": lambda: self.backend.purge(queue, [State.READY]),
            "outcomes": lambda: self.backend.outcomes(queue, [job_id]),
            "history": lambda: self.backend.history(queue),
            "forget": lambda: self.backend.forget(queue, [job_id]),
            "carry_out": lambda: self.backend.carry_out([Arrive(queue, job_id, "member")]),
            "relay": lambda: self.backend.relay([queue]),
            "note": lambda: self.backend.note(queue, "key"),
            "notes": lambda: self.backend.notes(queue),
            "now": lambda: self.backend.now(queue),
            "limits": lambda: self.backend.limits(queue),
            "schema": self.backend.schema,
            "doctor": self.backend.doctor,
        }
        declares = bool(type(self.backend).declared.claim(power))
        for method in methods_of(power):
            try:
                calls[method]()
                refused_for = None
            except JobNotFound:
                refused_for = None
            except Unsupported as exc:
                refused_for = exc.capability
            # Then each method works if the driver declares the part. If the driver does not declare the part, the
            # method raises Unsupported with the part's name.
            if method == "doctor":  # there are general checks for every backend
                assert refused_for is None
            else:
                assert refused_for == (None if declares else power), method

    @promise("11.8")
    @requires("schema")
    def test_the_tables_can_be_looked_at_and_brought_up(self) -> None:
        # Given a store that is in use
        self.enqueue()
        schema = self.backend.schema()
        # Then the tables are ready, no migration is missing, and there is a script that makes the tables
        assert schema.check().state == "ready"
        assert schema.up() == []
        assert schema.sql(0).strip()

    @promise("11.8")
    @requires("diagnosis")
    def test_the_doctor_has_checks_of_the_driver_s_own(self) -> None:
        # Given the findings of the doctor
        findings = self.backend.doctor()
        # Then there are more than the general findings, each with a level and a reason in words
        general = {finding.what for finding in Backend.doctor(self.backend)}
        assert {finding.what for finding in findings} - general
        assert {finding.level for finding in findings} <= {"ok", "warn", "bad", "unknown"}
        assert all(finding.why for finding in findings)

    @promise("11.8")
    def test_every_claimed_power_has_its_tests_in_this_run(self) -> None:
        # Given the test classes of this harness, in this module and in the other files of the run
        harness_class = type(self).harness_class
        here = vars(self._request.module).values()
        there = (getattr(item, "cls", None) for item in self._request.session.items)
        classes = {cls for cls in (*here, *there) if isinstance(cls, type) and issubclass(cls, Topic)}
        ours = {cls for cls in classes if getattr(cls, "harness_class", None) is harness_class}
        # When the powers that the tests require are collected
        tests = [getattr(cls, name) for cls in ours for name in dir(cls) if name.startswith("test_")]
        proved = {power for test in (*ours, *tests) for power in declared(test, REQUIRES)}
        # Then each declared power has a test. If a topic were left out, a power would have no test.
        unproved = sorted(power for power in POWERS if self.can.claim(power) and power not in proved)
        assert not unproved, f"claimed, but nothing in this run tries it: {', '.join(unproved)}"
