"""Random walks: the same steps taken by a backend and by the memory backend, every answer compared.

A walk is a list of steps drawn by hypothesis; of one that shows a difference the shortest part is told. Time moves in
ticks. With a clock that is set by hand a tick is exact, and whatever is due falls together with what happens. In real
time every delay and lease ends half a tick from anything else, so that no honest backend depends on a few
milliseconds; a walk that a stalled machine could not keep up with is given up, without a verdict.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from multiq.backend import STORED_STATES, Ack, Bury, GiveBack, NewJob, Release, State, Touch
from multiq.clock import ManualClock
from multiq.errors import JobError
from multiq.ids import new_id
from multiq.memory import MemoryBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from multiq.backend import Backend, Consumer, JobRecord, Lease, QueueStats, Verdict
    from multiq.capabilities import Capabilities

    from .harness import Harness

QUEUES = 2
WAYS: tuple[tuple[int, ...], ...] = ((0, 1), (1, 0), (0,))  # each consumer's queues, in its order
PRIORITIES = (0, 5, 5, 1024, 2**32 - 1)
TICKS = (0, 0, 1, 2, 3, 5)  # delays, in steps of time
TTRS = (2, 3, 6)  # leases, in steps of time
PAGE = 3  # jobs: small, so that listings have pages
MARGIN = 0.4  # of a step: how much of it a real-time backend may take for what happens between two ticks


# --- steps: what can happen, as plain data ---------------------------------------------------------------


class Job(NamedTuple):
    """A job to enqueue. ``ticks`` and ``ttr`` are steps of time."""

    body: bytes
    priority: int
    ticks: int
    ttr: int


class Say(NamedTuple):
    """A verdict on one of the leases that a consumer has got, live or long lost."""

    kind: str
    lease: int
    ticks: int
    priority: int | None
    reason: str | None


class Enqueue(NamedTuple):
    queue: int
    jobs: list[Job]


class EnqueueAgain(NamedTuple):
    job: int


class Reserve(NamedTuple):
    consumer: int
    limit: int


class Settle(NamedTuple):
    consumer: int
    verdicts: list[Say]


class Exchange(NamedTuple):
    consumer: int
    verdicts: list[Say]
    limit: int


class Kick(NamedTuple):
    queue: int
    limit: int


class KickJob(NamedTuple):
    job: int


class Reschedule(NamedTuple):
    job: int
    ticks: int


class Delete(NamedTuple):
    job: int


class Peek(NamedTuple):
    job: int


class List(NamedTuple):
    queue: int
    state: State


class Pause(NamedTuple):
    queue: int
    ticks: int


class Resume(NamedTuple):
    queue: int


class Purge(NamedTuple):
    queue: int
    states: list[State]


class Tick(NamedTuple):
    ticks: int


Step: TypeAlias = (
    Enqueue
    | EnqueueAgain
    | Reserve
    | Settle
    | Exchange
    | Kick
    | KickJob
    | Reschedule
    | Delete
    | Peek
    | List
    | Pause
    | Resume
    | Purge
    | Tick
)


def _walks(can: Capabilities, *, real_time: bool) -> st.SearchStrategy[list[Step]]:
    """Walks of what the backend can do: stretches of steps with time between them, little of it if it is real."""
    stretches, ticks = (4, [1, 1, 2]) if real_time else (10, [1, 1, 1, 2, 3])
    queue = st.sampled_from([0, 0, 0, 1])  # few jobs are met twice where there is much room
    consumer = st.integers(0, len(WAYS) - 1)
    recent = st.integers(0, 7)  # counted from the newest, so that walks are about what is still there
    later = st.sampled_from(TICKS)
    limit = st.integers(1, 4)
    kinds = ["ack", "release", "bury", "touch", *(["give_back"] if can.give_back else [])]
    priority = st.one_of(st.none(), st.sampled_from(PRIORITIES))
    reason = st.sampled_from([None, "one", "other"])
    verdicts = st.lists(st.builds(Say, st.sampled_from(kinds), recent, later, priority, reason), min_size=1, max_size=4)
    jobs = st.builds(Job, st.binary(max_size=3), st.sampled_from(PRIORITIES), later, st.sampled_from(TTRS))
    enqueue = st.builds(Enqueue, queue, st.lists(jobs, min_size=1, max_size=6))
    reserve = st.builds(Reserve, consumer, limit)
    settle = st.builds(Settle, consumer, verdicts)
    step: st.SearchStrategy[Any] = st.one_of(
        enqueue, enqueue, enqueue, reserve, reserve, reserve, settle, settle,
        st.builds(Exchange, consumer, verdicts, limit),
        *([st.builds(EnqueueAgain, recent)] if can.client_ids else []),
        st.builds(Kick, queue, limit),
        st.builds(KickJob, recent),
        st.builds(Reschedule, recent, later),
        st.builds(Delete, recent),
        st.builds(Peek, recent),
        st.builds(List, queue, st.sampled_from(STORED_STATES)),
        st.builds(Pause, queue, st.sampled_from([1, 2, 4])),
        st.builds(Resume, queue),
        st.builds(Purge, queue, st.lists(st.sampled_from(STORED_STATES), max_size=3)),
    )  # fmt: skip
    tick = st.builds(Tick, st.sampled_from(ticks))
    stretch = st.lists(step, min_size=4, max_size=10)
    return st.lists(st.tuples(stretch, tick), min_size=min(6, stretches), max_size=stretches).map(
        lambda parts: [step for stretch, tick in parts for step in (*stretch, tick)]
    )


# --- the two sides ---------------------------------------------------------------------------------------


class Side:
    """A backend, its consumers, and what it calls the jobs. Jobs and leases are numbered as they come."""

    def __init__(self, backend: Backend, queues: Sequence[str], time: Pace) -> None:
        self.backend = backend
        self.queues = queues
        self.time = time
        self.consumers: list[Consumer] = [backend.consumer([queues[at] for at in way]) for way in WAYS]
        self.leases: list[list[Lease]] = [[] for _ in WAYS]
        self.places: list[tuple[str, NewJob]] = []  # job number -> its queue and how it was enqueued
        self.ids: list[str] = []  # job number -> the id that it goes by now
        self._numbers: dict[tuple[str, str], int] = {}

    # --- the verbs, each with an answer that can be compared ---

    def enqueue(self, step: Enqueue) -> Answer:
        queue = self.queues[step.queue]
        jobs = [NewJob(job.body, new_id(), job.priority, self.time.delay(job.ticks), self.time.ttr(job.ttr))
                for job in step.jobs]  # fmt: skip
        for job, job_id in zip(jobs, self.backend.enqueue(queue, jobs), strict=True):
            self.places.append((queue, job))
            self.ids.append("")
            self._call(len(self.ids) - 1, job_id)
        return len(jobs)

    def enqueue_again(self, step: EnqueueAgain) -> Answer:
        number = self._number(step.job)
        queue, job = self.places[number]
        # what is still there stays as it is; what is gone comes anew, at once
        ids = self.backend.enqueue(queue, [NewJob(b"again", self.ids[number], job.priority, 0, job.ttr)])
        return [self._known(queue, job_id) for job_id in ids]

    def reserve(self, step: Reserve) -> Answer:
        return self._got(step.consumer, self.consumers[step.consumer].reserve(step.limit, 0))

    def settle(self, step: Settle) -> Answer:
        holder = self._holder(step.consumer)
        return self._refusals(self.consumers[holder].settle(self._verdicts(holder, step.verdicts)))

    def exchange(self, step: Exchange) -> Answer:
        holder = self._holder(step.consumer)
        refusals, leases = self.consumers[holder].exchange(self._verdicts(holder, step.verdicts), step.limit, 0)
        return self._refusals(refusals), self._got(holder, leases)

    def kick(self, step: Kick) -> Answer:
        return self.backend.kick(self.queues[step.queue], step.limit)

    def kick_job(self, step: KickJob) -> Answer:
        return self._on_job(step.job, self.backend.kick_job)

    def reschedule(self, step: Reschedule) -> Answer:
        def reschedule(queue: str, job_id: str) -> None:
            number = self._numbers[queue, job_id]
            self._call(number, self.backend.reschedule(queue, job_id, self.time.delay(step.ticks)))

        return self._on_job(step.job, reschedule)

    def delete(self, step: Delete) -> Answer:
        return self._on_job(step.job, self.backend.delete)

    def peek(self, step: Peek) -> Answer:
        return self._on_job(step.job, lambda queue, job_id: self._record(self.backend.peek(queue, job_id)))

    def listing(self, step: List) -> Answer:
        """Page by page. What has one due time has no order among itself, so it comes as a set."""
        queue, after, seen = self.queues[step.queue], None, []
        for _ in range(1000):
            page = self.backend.jobs(queue, step.state, limit=PAGE, after=after)
            seen += [self._record(record) for record in page.jobs]
            after = page.after
            if after is None:
                return seen
        raise AssertionError("the listing does not come to an end")

    def pause(self, step: Pause) -> Answer:
        return self.backend.pause(self.queues[step.queue], self.time.delay(step.ticks))

    def resume(self, step: Resume) -> Answer:
        return self.backend.resume(self.queues[step.queue])

    def purge(self, step: Purge) -> Answer:
        return self.backend.purge(self.queues[step.queue], step.states)

    def stats(self) -> list[Answer]:
        return [self._stats(self.backend.stats(queue)) for queue in self.queues]

    def names(self) -> Answer:
        return [self.queues.index(name) for name in self.backend.queues() if name in self.queues]

    def close(self) -> None:
        for consumer, leases in zip(self.consumers, self.leases, strict=True):
            consumer.settle([Ack(lease) for lease in leases])
            consumer.close()

    # --- how ---

    def _call(self, number: int, job_id: str) -> None:
        self.ids[number] = job_id
        self._numbers[self.places[number][0], job_id] = number

    def _number(self, recent: int) -> int:
        return max(0, len(self.ids) - 1 - recent)

    def _known(self, queue: str, job_id: str) -> int:
        return self._numbers.get((queue, job_id), -1)

    def _on_job(self, recent: int, verb: Callable[[str, str], Answer]) -> Answer:
        number = self._number(recent)
        try:
            return verb(self.places[number][0], self.ids[number])
        except JobError as exc:
            return type(exc).__name__

    def _holder(self, at: int) -> int:
        """One of the consumers that have got a lease, if any has: nobody else has anything to settle."""
        holders = [consumer for consumer, leases in enumerate(self.leases) if leases]
        return holders[at % len(holders)] if holders else at

    def _verdicts(self, consumer: int, said: Sequence[Say]) -> list[Verdict]:
        leases = self.leases[consumer]
        return [self._verdict(say, leases[max(0, len(leases) - 1 - say.lease)]) for say in said if leases]

    def _verdict(self, say: Say, lease: Lease) -> Verdict:
        match say.kind:
            case "ack":
                return Ack(lease)
            case "release":
                return Release(lease, self.time.delay(say.ticks), say.priority, say.reason)
            case "bury":
                return Bury(lease, say.reason)
            case "touch":
                return Touch(lease)
            case _:
                return GiveBack(lease)

    @staticmethod
    def _refusals(answers: Sequence[Exception | None]) -> Answer:
        return [None if answer is None else type(answer).__name__ for answer in answers]

    def _got(self, consumer: int, leases: list[Lease]) -> Answer:
        self.leases[consumer] += leases
        return [self._lease(lease) for lease in leases]

    def _lease(self, lease: Lease) -> dict[str, Answer]:
        return {
            "job": self._known(lease.queue, lease.id), "body": lease.body, "priority": lease.priority,
            "ttr": lease.ttr, "attempt": lease.attempt, "crashes": lease.crashes, "kicks": lease.kicks,
            "age": Seconds(lease.age),
        }  # fmt: skip

    def _record(self, record: JobRecord) -> dict[str, Answer]:
        return {
            "job": self._known(record.queue, record.id), "state": str(record.state), "body": record.body,
            "priority": record.priority, "ttr": record.ttr, "attempt": record.attempt, "crashes": record.crashes,
            "kicks": record.kicks, "reason": record.reason,
            "due in": None if record.due_in is None else Seconds(record.due_in),
            "age": None if record.age is None else Seconds(record.age),
        }  # fmt: skip

    @staticmethod
    def _stats(stats: QueueStats) -> dict[str, Answer]:
        paused_for = None if stats.paused_for is None else Seconds(stats.paused_for)
        return {
            "ready": stats.ready, "delayed": stats.delayed, "reserved": stats.reserved, "buried": stats.buried,
            "paused for": paused_for,
        }  # fmt: skip


class Seconds(float):
    """A time that a backend tells, which is compared with the model's as exactly as the clock allows."""


Answer: TypeAlias = Any  # None, a number, a word, or lists and dicts of these: whatever two sides can be compared by


class Pace:
    """How long a tick is, and how delays and leases are measured in ticks."""

    def __init__(self, harness: Harness, can: Capabilities) -> None:
        self.is_real = harness.real_time
        if self.is_real:
            self.step = 2 * max(can.delay_resolution, 0.3)  # half of it is a delay that the backend can tell
        else:
            # no round number of seconds, if the backend can tell others: what cuts or rounds them is found out
            self.step = max(can.delay_resolution, 0.75)
        self._shortest = can.min_ttr

    def delay(self, ticks: int) -> float:
        return self._length(ticks) if ticks else 0.0

    def ttr(self, ticks: int) -> float:
        while self._length(ticks) < max(1.0, self._shortest):
            ticks += 1
        return self._length(ticks)

    def _length(self, ticks: int) -> float:
        """In real time an end lies in the middle between two ticks, so that nothing happens close to it."""
        # rounded: a store that counts microseconds cannot give 1.2000000000000002 back
        return round((ticks - 0.5) * self.step, 6) if self.is_real else ticks * self.step


# --- the walk --------------------------------------------------------------------------------------------


class Walk:
    """One backend and its model, step by step."""

    def __init__(self, harness: Harness, backend: Backend, can: Capabilities) -> None:
        self._harness = harness
        self._can = can
        self._pace = Pace(harness, can)
        self._clock = ManualClock()
        queues = [harness.fresh_queue() for _ in range(QUEUES)]
        self._real = Side(backend, queues, self._pace)
        self._model = Side(MemoryBackend(clock=self._clock), queues, self._pace)
        self._started = harness.now()
        self._ticks = 0
        self._told: list[str] = []

    def take(self, steps: Sequence[Step]) -> bool:
        """Take all steps. Returns False if this machine could not keep up with real time.

        Raises ``AssertionError`` with the story of the walk at the first difference.
        """
        try:
            for step in (*steps, *_AT_THE_END):
                if isinstance(step, Tick):
                    self._tick(step.ticks)
                elif self._takes_place(step):
                    self._take(step)
                real, model = self._real.stats(), self._model.stats()
                if self._is_behind():
                    return False
                self._compare("stats", real, model)
            self._compare("names", self._real.names(), self._model.names())
            return True
        finally:
            self._leave()

    def _take(self, step: Step) -> None:
        verb = _VERBS[type(step)]
        # told before it is tried: an exception is part of the story, too
        self._told.append(f"{step}")
        try:
            real = getattr(self._real, verb)(step)
        except Exception as exc:
            exc.add_note(self._story())
            raise
        model = getattr(self._model, verb)(step)
        if self._is_behind():  # nobody knows on which side of a due time this happened
            return
        if isinstance(step, List):
            real, model = _in_groups(real, model, step.state)
        self._told[-1] += f"\n      -> {real}"
        self._compare(f"{step}", real, model)

    def _takes_place(self, step: Step) -> bool:
        if isinstance(step, List):
            return bool(self._can.lists_jobs)
        about_a_job = isinstance(step, EnqueueAgain | KickJob | Reschedule | Delete | Peek)
        return not about_a_job or bool(self._model.ids)

    def _tick(self, ticks: int) -> None:
        self._told.append(f"{ticks * self._pace.step:g} s pass")
        self._ticks += ticks
        self._clock.advance(ticks * self._pace.step)
        target = self._started + self._ticks * self._pace.step
        self._harness.advance(ticks * self._pace.step if not self._pace.is_real else target - self._harness.now())

    def _is_behind(self) -> bool:
        """Whether real time has run away from the model's, so that the two cannot be compared any more."""
        if not self._pace.is_real:
            return False
        late = self._harness.now() - (self._started + self._ticks * self._pace.step)
        return late > MARGIN * self._pace.step

    # --- comparing ---

    def _compare(self, what: str, real: Answer, model: Answer) -> None:
        for path, ours, theirs in _differences(real, model):
            if not self._agree(path, ours, theirs):
                raise AssertionError(
                    f"{what}: {path or 'the answer'} is {ours!r}, and should be {theirs!r}\n{self._story()}"
                )

    def _agree(self, path: str, real: Answer, model: Answer) -> bool:
        field = path.rpartition(".")[2]
        if real is None and model is not None and field in _UNKNOWN_WITHOUT:
            return not self._can.claim(_UNKNOWN_WITHOUT[field])
        if isinstance(real, Seconds) and isinstance(model, Seconds):
            tolerance = self._pace.step / 2 + self._can.delay_resolution if self._pace.is_real else 1e-5
            return abs(real - model) <= tolerance
        return bool(real == model)

    def _story(self) -> str:
        lines = [f"{number:4}. {told}" for number, told in enumerate(self._told, 1)]
        return "the walk, with this backend's answers:\n" + "\n".join(lines)

    def _leave(self) -> None:
        """Nothing of a walk stays in the store; the next one has other queues."""
        self._real.close()
        for queue in self._real.queues:
            self._real.backend.resume(queue)
            self._real.backend.purge(queue, [State.READY, State.DELAYED, State.BURIED])


#: everything that is left is looked at and handed out, so that no difference stays unseen
_AT_THE_END: tuple[Step, ...] = (
    *(List(queue, state) for queue in range(QUEUES) for state in STORED_STATES),
    *(Resume(queue) for queue in range(QUEUES)),
    Reserve(consumer=0, limit=1000),
)

_VERBS: dict[type, str] = {
    Enqueue: "enqueue", EnqueueAgain: "enqueue_again", Reserve: "reserve", Settle: "settle", Exchange: "exchange",
    Kick: "kick", KickJob: "kick_job", Reschedule: "reschedule", Delete: "delete", Peek: "peek", List: "listing",
    Pause: "pause", Resume: "resume", Purge: "purge",
}  # fmt: skip

#: what a backend may answer None to, and the power that would make that a lie
_UNKNOWN_WITHOUT = {
    "attempt": "durable_attempts", "crashes": "durable_attempts", "kicks": "durable_attempts", "reason": "reasons",
}  # fmt: skip


def _differences(real: Answer, model: Answer, path: str = "") -> Iterator[tuple[str, Answer, Answer]]:
    """Each place where two answers have something to compare, with the way to it."""
    if isinstance(real, dict) and isinstance(model, dict) and real.keys() == model.keys():
        for name in model:
            yield from _differences(real[name], model[name], f"{path}.{name}".lstrip("."))
    elif isinstance(real, list | tuple) and isinstance(model, list | tuple) and len(real) == len(model):
        for at, (ours, theirs) in enumerate(zip(real, model, strict=True)):
            yield from _differences(ours, theirs, f"{path}[{at}]")
    else:
        yield path, real, model


def _in_groups(real: Answer, model: Answer, state: State) -> tuple[Answer, Answer]:
    """Two listings; jobs that the model has due at one moment are put into one order, because no one is promised."""
    if state not in {State.DELAYED, State.RESERVED} or len(real) != len(model):
        return real, model
    real_sorted: list[Answer] = []
    model_sorted: list[Answer] = []
    for _, group in itertools.groupby(model, key=lambda record: round(record["due in"], 3)):
        theirs = list(group)
        ours = real[len(real_sorted) : len(real_sorted) + len(theirs)]
        real_sorted += sorted(ours, key=lambda record: int(record["job"]))
        model_sorted += sorted(theirs, key=lambda record: int(record["job"]))
    return real_sorted, model_sorted


def run_walks(harness: Harness, backend: Backend, can: Capabilities, *, derandomize: bool = False) -> int:
    """Take ``harness.walks`` random walks. Returns how many were finished in time.

    Raises with the story of a short one that shows a difference.
    """
    finished = 0
    failed: list[tuple[list[Step], Exception]] = []

    def take(steps: Sequence[Step]) -> None:
        nonlocal finished
        finished += Walk(harness, backend, can).take(steps)

    @settings(
        max_examples=harness.walks,
        deadline=None,
        database=None,
        derandomize=derandomize,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],  # a walk is shortened below, by whole steps
        report_multiple_bugs=False,
        print_blob=False,
    )
    @given(_walks(can, real_time=harness.real_time))
    def walk(steps: list[Step]) -> None:
        try:
            take(steps)
        except Exception as exc:
            failed.append((steps, exc))
            raise

    try:
        walk()
    except Exception:
        if not failed:
            raise
        # hypothesis may call it flaky, because it took the same walk twice: what went wrong is what counts
        steps, error = failed[0]
        # in real time a second try costs as much as the first, and need not fail again
        if not harness.real_time:
            take(_shortened(steps, take))
        raise error from None
    return finished


def _shortened(steps: list[Step], take: Callable[[Sequence[Step]], None]) -> list[Step]:
    """Leave out all that the failure does not need: large parts first, then step by step."""
    size = len(steps)
    while size:
        at = 0
        while at < len(steps):
            shorter = steps[:at] + steps[at + size :]
            if _fails(shorter, take):
                steps = shorter
            else:
                at += size
        size //= 2
    return steps


def _fails(steps: Sequence[Step], take: Callable[[Sequence[Step]], None]) -> bool:
    try:
        take(steps)
    except Exception:  # noqa: BLE001 - whatever goes wrong, the shortest way to it is what helps
        return True
    return False
