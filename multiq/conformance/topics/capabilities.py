"""Capabilities: the backend has what it declares, and each missing power has a reason."""

from __future__ import annotations

from typing import get_args

import pytest

from multiq.backend.capabilities import MEASURES, POWERS, Gap, GapKind
from multiq.backend.registry import backends_with
from multiq.conformance.case import Topic, promise
from multiq.conformance.requirements import REQUIRES, declared
from multiq.errors import Unsupported


class CapabilitiesTests(Topic):
    """What ``Backend.declared`` and ``Backend.capabilities`` promise."""

    @promise("11.8")
    def test_every_missing_power_says_what_kind_of_gap_it_is_and_why(self) -> None:
        # Given all powers, of which each is there or is a gap
        for power in POWERS:
            claim = self.can.claim(power)
            if claim is not True:
                # Then a gap has one of the three kinds, and a reason to read
                assert isinstance(claim, Gap), power
                assert claim.kind in get_args(GapKind), power
                assert len(claim.reason) >= 10, power

    @promise("11.8")
    def test_the_declared_capabilities_are_those_of_the_live_backend(self) -> None:
        # Given the capabilities that the driver declares without a server, and those with one
        declared, live = type(self.backend).declared, self.backend.capabilities
        # Then the server may sharpen a measure or lack a power, but adds none that were denied
        assert live.backend == declared.backend
        gained = [power for power in POWERS if live.claim(power) and not declared.claim(power)]
        assert gained == []

    @promise("11.8", "2.5", "3.10", "4.1")
    def test_the_measures_make_sense(self) -> None:
        # Given the measures
        delay_resolution, min_ttr, poll_interval, max_body = (getattr(self.can, measure) for measure in MEASURES)
        # Then delays and leases are of some use, and there is room for a body
        assert 0 < delay_resolution <= 1
        assert 1 <= min_ttr <= 10
        assert 0 < poll_interval <= 10
        assert max_body is None or max_body >= 1024

    @promise("11.3")
    @pytest.mark.parametrize("power", POWERS)
    def test_a_refusal_names_the_power_and_the_backends_that_have_it(self, power: str) -> None:
        # Given the refusal of a power
        gap = type(self.backend).declared.claim(power)
        if not isinstance(gap, Gap):
            self.does_not_apply(f"this backend has {power}")
        refusal = self.backend.unsupported(power)
        # Then it names the missing power, the kind of the gap, its reason, and the backends that have the power
        assert isinstance(refusal, Unsupported)
        assert refusal.capability == power
        assert gap.kind in str(refusal)
        assert gap.reason in str(refusal)
        assert list(refusal.others) == backends_with(power)
        assert type(self.backend).declared.backend not in refusal.others

    @promise("11.8")
    def test_every_claimed_power_has_its_tests_in_this_run(self) -> None:
        # Given the test classes that this harness is given to, here and in other files of the run
        harness_class = type(self).harness_class
        here = vars(self._request.module).values()
        there = (getattr(item, "cls", None) for item in self._request.session.items)
        classes = {cls for cls in (*here, *there) if isinstance(cls, type) and issubclass(cls, Topic)}
        ours = {cls for cls in classes if getattr(cls, "harness_class", None) is harness_class}
        # When their tests are asked what they are about
        tests = (getattr(cls, name) for cls in ours for name in dir(cls) if name.startswith("test_"))
        proved = {power for test in tests for power in declared(test, REQUIRES)}
        # Then no claim is left without a test: a topic that was left out would leave its powers unproved
        unproved = sorted(power for power in POWERS if self.can.claim(power) and power not in proved)
        assert not unproved, f"claimed, but nothing in this run tries it: {', '.join(unproved)}"
