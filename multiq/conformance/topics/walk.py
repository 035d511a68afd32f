"""Random walks through all operations, compared step by step with the memory backend."""

from __future__ import annotations

from multiq.conformance.case import Topic, promise
from multiq.conformance.stateful.walk_comparison import run_walks


class WalkTests(Topic):
    @promise(
        "1.1", "1.2", "2.2", "3.3", "3.4", "3.5", "4.1", "4.3", "4.4", "5.7", "6.1", "7.1", "9.1", "9.5", "10.1",
        "14.1", "14.2", "14.4", "14.6", "15.1", "15.3", "15.4", "16.2",
    )  # fmt: skip
    def test_random_walks_agree_with_the_model(self) -> None:
        if self.harness.walks == 0:
            self.does_not_apply("no walks were asked for")
        # Given this backend, and the memory backend with its own clock as the model.
        # When both get the same random calls, from several consumers and for several queues, while time passes.
        # Then all answers are equal: states, ids, order, counters, refusals, listings, counts, memos and outcomes
        finished = run_walks(self.harness, self.backend, self.can)
        if finished == 0:
            self.does_not_apply("this machine could not keep up with a walk in real time")
