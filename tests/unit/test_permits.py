"""Permits: what an enqueue sends and stores, what is refused, and a worker's permits in memory."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

import multiq
from multiq.backend import Gap, GiveBack, NewJob, Quota
from multiq.backend.around import ConsumerAround
from multiq.backend.memory import MemoryBackend
from multiq.envelope import PermitGate, decode_envelope
from multiq.errors import ArgumentsInvalid, NameInvalid, OptionInvalid, PayloadInvalid, Unsupported
from multiq.limits import Limit
from multiq.permit_notes import HOME, MAX_SLOTS, states
from multiq.validation import APP_SCOPE
from multiq.worker.execution.permits import Permits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.backend import Verdict


class Noting(MemoryBackend):
    """A memory backend that records the jobs that it gets, and counts the calls about notes."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs_sent: list[NewJob] = []
        self.asked = 0

    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
        self.jobs_sent += jobs
        return super().enqueue(queue, jobs, connection=connection)

    def note(self, home: str, key: str) -> Any:
        self.asked += home == HOME
        return super().note(home, key)

    def permits(self) -> list[list[PermitGate]]:
        return [decode_envelope(job.body).permits for job in self.jobs_sent]


@pytest.fixture
def backend() -> Noting:
    return Noting()


@pytest.fixture
def app(backend: Noting) -> multiq.App:
    return multiq.App(backend=backend)


# --- enqueues --------------------------------------------------------------------------------------------


def test_a_limit_of_the_app_goes_into_the_envelope(app: multiq.App, backend: Noting) -> None:
    both = Limit("both", key="{tenant}", slots=2, scope="app")

    @app.task(limits=[both, Limit("own", slots=1)])
    def report(tenant: str) -> None: ...

    # When a job is enqueued in each way
    report.enqueue("a")
    report.enqueue_many([("b",), ("c",)])
    asyncio.run(report.aenqueue("d"))
    report.options(queue="other").enqueue("e")
    report.options(limits=[]).enqueue("f")
    # Then the worker asks for the permit of the app's limit, and the backend keeps the queue's limit
    expected = [[PermitGate("both", tenant, "app")] for tenant in "abcde"]
    assert backend.permits() == [*expected, []]
    gates = [[] if job.terms is None else [gate.limit for gate in job.terms.gates] for job in backend.jobs_sent]
    assert gates == [["own"]] * 5 + [[]]
    # And its quota is stored once, for all queues
    assert [(state.name, state.quota.slots) for state in states(backend, APP_SCOPE)] == [("both", 2)]
    assert [state.name for state in backend.limits("default")] == ["own"]
    assert {place: [state.name for state in found] for place, found in app.limits.list().items()} == {
        "@app": ["both"],
        "default": ["own"],
        "other": ["own"],
    }


def test_the_jobs_of_flows_and_schedules_need_their_permits(app: multiq.App, backend: Noting) -> None:
    @app.task(limits=[Limit("both", key="{number}", slots=2, scope="app")])
    def step(number: int) -> None: ...

    multiq.batch([step.s(1), step.s(2)]).enqueue()
    assert [PermitGate("both", "1", "app")] in [
        decode_envelope(job.body).permits for job in backend.jobs("default", multiq.State.READY).jobs
    ]
    app.schedules.add("often", step.s(7), every=60)
    app.schedules.run("often")
    assert backend.permits()[-1] == [PermitGate("both", "7", "app")]


def test_a_job_without_permits_is_sent_and_run_as_before(app: multiq.App, backend: Noting) -> None:
    @app.task(limits=[Limit("own", slots=1)])
    def limited() -> None: ...

    @app.task
    def plain() -> None: ...

    plain.enqueue()
    limited.enqueue()
    assert [job.body for job in backend.jobs_sent] == [
        b'{"multiq":1,"task":"plain"}',
        b'{"multiq":1,"task":"limited"}',
    ]
    assert backend.jobs_sent[0].terms is None
    names = set(threading.enumerate())
    multiq.Worker(app, stop_when_empty=True).run()
    assert backend.asked == 0
    assert not [thread for thread in set(threading.enumerate()) - names if thread.name == "multiq-permits"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"scope": ["app"]}, "scope of limit api must be 'queue' or 'app'"),
        ({"scope": "server"}, "scope of limit api must be 'queue' or 'app', got 'server'"),
        ({"scope": "app", "fair": True}, "fair of limit api must be False with scope='app'"),
    ],
)
def test_a_scope_is_checked_when_the_limit_is_made(options: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionInvalid, match=text):
        Limit("api", slots=1, **options)


def test_two_quotas_of_one_name_in_the_app_are_refused(app: multiq.App) -> None:
    @app.task(queue="mail", limits=[Limit("both", slots=2, scope="app")])
    def first() -> None: ...

    @app.task(queue="sms", limits=[Limit("both", slots=3, scope="app")])
    def second() -> None: ...

    first.enqueue()
    with pytest.raises(OptionInvalid, match="limit both must have the same numbers everywhere in the app"):
        second.enqueue()


def test_a_limit_of_the_app_is_changed_and_pinned(app: multiq.App, backend: Noting) -> None:
    @app.task(limits=[Limit("both", slots=2, scope="app")])
    def task() -> None: ...

    # Given a limit that an operator has set
    assert app.limits.set(APP_SCOPE, "both", slots=5).is_pinned
    # When code with other numbers enqueues, then the operator's numbers stay
    task.enqueue()
    (state,) = app.limits.list(APP_SCOPE)[APP_SCOPE]
    assert (state.quota.slots, state.is_pinned, state.running, state.parked) == (5, True, 0, 0)
    assert app.limits.set(APP_SCOPE, "both", rate=3, per=60).quota == Quota(slots=5, rate=3, per=60)
    # When the limit is removed, then there is no limit
    assert app.limits.remove(APP_SCOPE, "both")
    assert app.limits.list(APP_SCOPE) == {}
    assert not app.limits.remove(APP_SCOPE, "both")
    # And options that permits cannot keep are refused
    with pytest.raises(Unsupported, match="fair"):
        app.limits.set(APP_SCOPE, "both", fair=True)
    with pytest.raises(OptionInvalid, match="slots of limit both must be at most 500"):
        app.limits.set(APP_SCOPE, "both", slots=MAX_SLOTS + 1)
    for place in ("@all", "a b", ""):
        with pytest.raises(NameInvalid):
            app.limits.set(place, "both", slots=1)


def test_a_key_of_a_limit_of_the_app_is_checked(app: multiq.App, backend: Noting) -> None:
    @app.task(limits=[Limit("both", key="{order[customer]}", slots=2, scope="app")])
    def task(order: Any) -> None: ...

    with pytest.raises(ArgumentsInvalid, match="cannot be made of these arguments"):
        task.enqueue({})
    with pytest.raises(PayloadInvalid):
        task.enqueue({"customer": "\ud800"})
    task.enqueue({"customer": "x" * 500})
    assert [len(gate.key) for gates in backend.permits() for gate in gates] == [200]


def test_a_backend_without_notes_refuses_a_limit_of_the_app() -> None:
    gap = Gap("never", "it stores jobs only")

    class Bare(MemoryBackend):
        pass

    Bare.declared = _without(limits=gap, notes=gap)
    app = multiq.App(backend=Bare())

    @app.task(limits=[Limit("both", slots=2, scope="app")])
    def task() -> None: ...

    with pytest.raises(Unsupported, match="limits"):
        task.enqueue()
    assert app.queue().stats().ready == 0
    assert app.backend.declared.limits_kept_by == "nothing"


def test_a_queues_limit_goes_into_the_envelope_where_the_backend_has_no_gates() -> None:
    class Pair(Noting):
        pass

    Pair.declared = _without(limits=Gap("cannot today", "two systems"), unique=Gap("cannot today", "two systems"))
    backend = Pair()
    app = multiq.App(backend=backend)

    @app.task(limits=[Limit("own", key="{number}", slots=1), Limit("both", slots=2, scope="app")])
    def task(number: int) -> None: ...

    @app.task(limits=[Limit("turns", fair=True)])
    def turns() -> None: ...

    task.enqueue(1)
    asyncio.run(task.aenqueue(2))
    app.schedules.add("often", task.s(3), every=60)
    app.schedules.run("often")
    assert backend.permits() == [
        [PermitGate("both", "", "app"), PermitGate("own", str(number))] for number in (1, 2, 3)
    ]
    assert [job.terms for job in backend.jobs_sent] == [None] * 3
    assert sorted(app.limits.list()) == ["@app", "default"]
    assert app.limits.set("default", "own", slots=4).quota.slots == 4
    with pytest.raises(Unsupported, match="fair"):
        turns.enqueue()


def _without(**gaps: Gap) -> Any:
    import msgspec

    return msgspec.structs.replace(MemoryBackend.declared, **gaps)


# --- workers ---------------------------------------------------------------------------------------------


def test_a_worker_never_runs_more_jobs_than_there_are_slots(app: multiq.App, backend: Noting) -> None:
    lock, running, most, ran = threading.Lock(), [0], [0], list[int]()
    pause = threading.Event()

    @app.task(limits=[Limit("both", slots=2, scope="app")], max_attempts=1)
    def task(number: int) -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        pause.wait(0.02)
        with lock:
            running[0] -= 1
            ran.append(multiq.current_job().attempt)
            if len(ran) == 12:
                worker.stop()

    for number in range(12):
        task.enqueue(number)
    worker = multiq.Worker(app, threads=5)
    assert worker.run() == 0
    # Then all jobs have run in their first attempts, and all permits are free
    assert ran == [1] * 12
    assert most[0] == 2
    assert [state.running for state in states(backend, APP_SCOPE)] == [0]


def test_refused_jobs_come_back_one_after_another() -> None:
    from multiq.permit_notes import PermitPlace, Refused

    permits = Permits(MemoryBackend(), None)  # type: ignore[arg-type]  # no lease is held
    slots = Refused(PermitPlace(APP_SCOPE, "api", ""), 60.0, 0.0)
    delays = [permits._delay(slots) for _ in range(1000)]
    # Then the first job comes back soon, none comes back later than after some seconds, and they are spread
    assert 0.1 <= delays[0] < 1
    assert max(delays) <= 16.5
    assert len({round(delay, 3) for delay in delays[:200]}) > 150
    # When the slots stay in use for long, then they come back less often
    for _ in range(500):
        permits._note_closed(slots)
    permits._next.clear()
    assert 1 < permits._delay(slots) <= 2.2
    # And jobs that wait for a rate come back with its turns
    rate = Refused(PermitPlace(APP_SCOPE, "smtp", ""), 2.0, 1.0)
    first, second, third = (permits._delay(rate) for _ in range(3))
    assert 2 <= first < second < third <= 4.5


def test_a_program_that_starts_does_not_shorten_the_waits_of_a_pinned_slower_rate(backend: Noting) -> None:
    from multiq.permit_notes import Granted, PermitBook, PermitPlace, Refused, change_quotas

    # Given a rate that an operator has made slower, and a key that has used its turn
    change_quotas(backend, APP_SCOPE, {"api": Quota(rate=1, per=3600)}, pinned=True)
    place = PermitPlace(APP_SCOPE, "api", "")
    backend.enqueue("q", [NewJob(b"", name) for name in ("one", "two")])
    with backend.consumer(["q"]) as consumer:
        one, two = consumer.reserve(2, 0)
        assert isinstance(PermitBook(backend).ask(one, [place]), Granted)
        # When programs start whose code has a faster rate, then the key waits as before, and no key is read
        for _ in range(2):
            backend.asked = 0
            change_quotas(backend, APP_SCOPE, {"api": Quota(rate=10)}, pinned=False)
            assert backend.asked == 1
        refused = PermitBook(backend).ask(two, [place])
        assert isinstance(refused, Refused)
        assert refused.opens_in is not None
        assert refused.opens_in > 3500
        # When the operator changes the rate, then the wait becomes shorter
        change_quotas(backend, APP_SCOPE, {"api": Quota(rate=1, per=60)}, pinned=True)
        refused = PermitBook(backend).ask(two, [place])
        assert isinstance(refused, Refused)
        assert refused.opens_in is not None
        assert refused.opens_in <= 60


def test_a_job_that_was_cancelled_while_a_worker_asked_for_its_permits_does_not_run(
    app: multiq.App, backend: Noting
) -> None:
    ran: list[int] = []

    @app.task(limits=[Limit("api", slots=1, scope="app")], keep=60)
    def call(number: int) -> None:
        ran.append(number)

    # Given a job that was reserved, cancelled, and given back without an attempt, as a worker does it without a permit
    handle = call.enqueue(1)
    with backend.consumer(["default"]) as consumer:
        (lease,) = consumer.reserve(1, 0)
        assert handle.cancel() == "requested"
        consumer.settle([GiveBack(lease)])
    # When the next worker reserves the job, then the job ends as cancelled
    assert multiq.Worker(app, stop_when_empty=True).run() == 0
    assert ran == []
    assert handle.status() == "cancelled"


class _Telling(ConsumerAround):
    """Records the call by which each verdict was sent."""

    sent: ClassVar[list[str]] = []

    def settle(self, verdicts: Sequence[Verdict]) -> list[Any]:
        self.sent.extend(["settle"] * len(verdicts))
        return super().settle(verdicts)

    def exchange(
        self, verdicts: Sequence[Verdict], limit: int, timeout: float, queues: Sequence[str] | None = None
    ) -> Any:
        self.sent.extend(["exchange"] * len(verdicts))
        return super().exchange(verdicts, limit, timeout, queues)


def test_a_permit_does_not_wait_for_the_next_job_to_be_reserved() -> None:
    class Backend(MemoryBackend):
        def consumer(self, queues: Sequence[str]) -> Any:
            return _Telling(super().consumer(queues))

    app = multiq.App(backend=Backend())

    @app.task(limits=[Limit("both", slots=2, scope="app")])
    def limited() -> None: ...

    @app.task
    def plain() -> None: ...

    # When jobs with and without a permit have run
    for task, expected in ((plain, "exchange"), (limited, "settle"), (plain, "exchange")):
        _Telling.sent.clear()
        task.enqueue()
        multiq.Worker(app, stop_when_empty=True).run()
        # Then only the verdict on the job with a permit has a call of its own, before the worker waits for its next job
        assert _Telling.sent == [expected]
