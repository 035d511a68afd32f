"""Workers call ``relay``: the backend then carries out the steps in other queues that dead processes have left
behind."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from servers.process import until

import multiq
from multiq.backend import Gap
from multiq.backend.memory import MemoryBackend
from multiq.errors import BackendUnavailable
from multiq.flows.record import HOME
from multiq.flows.retention import AT_ONCE
from multiq.worker.processes import flow_upkeep
from multiq.worker.processes.flow_upkeep import FlowUpkeep

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

    from multiq.backend import Capabilities

TWO_STEPS = Gap("never", "a test")


class Noting(MemoryBackend):
    """A backend that records the queues for which ``relay`` is called."""

    declared: ClassVar[Capabilities] = msgspec.structs.replace(MemoryBackend.declared, one_step_everywhere=TWO_STEPS)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.relayed: list[list[str]] = []
        self.failure: str | None = None

    def relay(self, queues: Sequence[str]) -> int:
        self.relayed.append(list(queues))
        if self.failure is not None:
            raise BackendUnavailable(self.failure)
        return 0


class OneStep(Noting):
    declared: ClassVar[Capabilities] = MemoryBackend.declared


def test_worker_relays_for_its_queues_and_the_home_of_flows_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a worker's upkeep of flows
    backend = Noting()
    relays = FlowUpkeep(multiq.App(backend=backend), ["a", "b"])
    # When a relay is due many times within the interval, then the worker relays once
    for _ in range(10):
        relays.relay_if_due()
    assert backend.relayed == [["a", "b", HOME]]
    # And after the interval, the worker relays again
    now = time.monotonic() + flow_upkeep.EVERY
    monkeypatch.setattr("multiq.worker.processes.flow_upkeep.time.monotonic", lambda: now)
    relays.relay_if_due()
    assert len(backend.relayed) == 2


def test_backend_that_carries_out_all_steps_with_their_verdicts_is_not_asked_to_relay() -> None:
    backend = OneStep()
    FlowUpkeep(multiq.App(backend=backend), ["a"]).relay_if_due()
    assert backend.relayed == []


def test_relay_that_fails_again_and_again_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a backend that cannot relay
    monkeypatch.setattr(flow_upkeep, "EVERY", 0.0)
    backend = Noting()
    relays = FlowUpkeep(multiq.App(backend=backend), ["a"])
    backend.failure = "no answer"
    # When it is called several times, then the error is logged once, and again after a success
    with caplog.at_level(logging.WARNING, "multiq.worker"):
        relays.relay_if_due()
        relays.relay_if_due()
        assert [record.getMessage().endswith("no answer") for record in caplog.records] == [True]
        backend.failure = None
        relays.relay_if_due()
        backend.failure = "no answer"
        relays.relay_if_due()
    assert len(caplog.records) == 2
    assert len(backend.relayed) == 4


def test_worker_without_a_sidecar_relays_itself() -> None:
    # Given a worker in this process
    backend = Noting()
    worker = multiq.Worker(multiq.App(backend=backend), queues=["mail"], processes=0)
    # When it runs, then it relays
    working = threading.Thread(target=worker.run)
    working.start()
    until(lambda: bool(backend.relayed), "the worker relays")
    worker.stop()
    working.join()
    assert backend.relayed[0] == ["mail", HOME]


def test_results_of_many_ended_flows_are_deleted_one_part_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given more ended flows than a worker looks at in one go
    app = multiq.App("memory://")

    @app.task
    def same(value: int) -> int:
        return value

    for number in range(2 * AT_ONCE + 1):
        multiq.chain(same.s(number), same.s(), keep=1).enqueue()
    multiq.Worker(app, stop_when_empty=True).run()
    later = time.time() + 10
    monkeypatch.setattr(time, "time", lambda: later)
    # When a worker tidies up, then it soon continues, until no data of ended flows is left
    now = [time.monotonic() + 2 * flow_upkeep.TIDY_EVERY]
    tidies = FlowUpkeep(app, ["default"])
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    left = []
    for _ in range(4):
        tidies.tidy_if_due()
        left.append(len(app.backend.notes(HOME, "ended/").notes))
        now[0] += flow_upkeep.TIDY_AGAIN
    assert left == [AT_ONCE + 1, 1, 0, 0]
    first = [outcome.id for outcome in app.backend.history("default").outcomes if outcome.id.endswith(".0")]
    assert first == []
