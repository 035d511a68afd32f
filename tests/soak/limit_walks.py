"""Random walks over unique keys and limits, checked by a model of its own (``limit_model.py``).

``python tests/soak/limit_walks.py --backend mysql --walks 200`` plays walks on a private server. Two backends and three
consumers use one store, as two processes would. An error names the walk's seed and has its steps;
``--seed N --walks 1`` repeats the walk.

All backends get a clock that the walk sets, so delays and leases end exactly at the moments of steps. On Redis, the
scripts read this clock from a key instead of the command TIME.
"""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent.parent))

from soak.limit_model import FAIR, LONG, DiffersError, Job, Limit, Model, New
from soak.walked_stores import main, play_walks

from multiq.backend import (  # fmt: skip
    STORED_STATES,
    Abandon,
    Ack,
    After,
    Arrive,
    Bury,
    Enqueue,
    Gate,
    GiveBack,
    NewJob,
    Quota,
    Release,
    State,
    Terms,
    Touch,
    UniqueKey,
)
from multiq.errors import LeaseLost, MultiqError
from multiq.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from soak.walked_stores import Store

    from multiq.backend import Backend, Consumer, Lease, Verdict
    from multiq.driverkit.clock import ManualClock

_KEYS = (b"a", b"b", b"c")
_VERDICTS = ("ack", "ack", "release", "bury", "give_back", "abandon", "touch")


class Walk:
    """Takes random steps, and checks every answer."""

    def __init__(self, backends: Sequence[Backend], clock: ManualClock, seed: int) -> None:
        self._any = random.Random(seed)
        self._backends, self._clock = backends, clock
        self._is_fair = self._any.random() < 0.4
        self._now = 0
        unique = f"{seed}-{new_id()}"
        self._queues = [f"{unique}-{number}" for number in range(2)]
        finds_late = backends[0].declared.backend == "redis"
        self._models = {queue: Model(finds_late=finds_late) for queue in self._queues}
        self._consumers = [backend.consumer(self._queues) for backend in (*backends, backends[0])]
        self._ids = itertools.count(1)
        self._prefix = f"{seed & 0xFFFFFFFF:08x}-0000-7000-8000-"
        self._known: dict[str, list[str]] = {queue: [] for queue in self._queues}
        self._leases: list[Lease] = []
        self._story: list[str] = []

    def run(self, steps: int) -> None:
        """Raises ``DiffersError``."""
        acts: list[Callable[[], None]] = [
            *5 * [self._enqueue], *5 * [self._reserve], *6 * [self._settle], self._exchange, self._delete,
            self._reschedule, self._kick_job, self._kick, self._delete_many, *2 * [self._limit], self._arrive,
            self._purge, self._pause, *2 * [self._pass_time],
        ]  # fmt: skip
        try:
            if self._is_fair:
                self._start_fair()
            for number in range(steps):
                self._any.choice(acts)()
                self._look(closely=number % 15 == 0)
            self._pass_time()
            self._leave()
        except Exception as exc:
            exc.add_note("the walk:\n  " + "\n  ".join(self._story))
            raise
        finally:
            for consumer in self._consumers:
                consumer.close()

    def _start_fair(self) -> None:
        for queue, model in self._models.items():
            limit = Limit(None, None, 1, fair=True, pinned=True)
            self._backends[0].limits(queue, {FAIR: self._quota(limit)})
            model.limit(FAIR, limit, pinned=True)

    # --- drawing ---

    def _queue(self) -> str:
        return self._any.choice([self._queues[0], *self._queues])

    def _backend(self) -> Backend:
        return self._any.choice(self._backends)

    def _new(self, queue: str) -> New:
        known = self._known[queue]
        again = known and self._any.random() < 0.05
        job_id = self._any.choice(known) if again else f"{self._prefix}{next(self._ids):012x}"
        known.append(job_id)
        unique = None
        if self._any.random() < 0.6:
            unique = UniqueKey(
                self._any.choice(_KEYS),
                self._any.choice(["gone", "buried", "reserved"]),
                self._any.choice(["keep", "replace"]),
                self._any.choice([0.0, 0.0, 0.0, 2.0]),
                self._any.choice([None, 0.0, 3.0]),
            )
        gates = self._gates()
        return New(
            job_id, b"%d" % self._any.randrange(10**9), self._any.choice([5, 5, 5, 1, 9]),
            self._any.choice([0.0, 0.0, 0.0, 1.0, 3.0]), self._any.choice([2.0, 2.0, 5.0]),
            self._any.choice([0, 0, 0, 0, 0, 0, 2]), unique, gates,
        )  # fmt: skip

    def _gates(self) -> tuple[Gate, ...]:
        names = self._any.sample(["s", FAIR, "r", "none"], self._any.choice([0, 0, 1, 1, 2, 3]))
        gates = {Gate(name, self._any.choice(["", "x", "ä b"])) for name in names}
        if "s" in names and self._any.random() < 0.2:
            gates.add(Gate("s", "second"))
        return tuple(sorted(gates))

    def _real(self, new: New) -> NewJob:
        terms = Terms(new.awaits, new.unique, new.gates) if new.awaits or new.unique or new.gates else None
        return NewJob(new.body, new.id, new.priority, new.delay, new.ttr, terms)

    def _some_job(self, queue: str) -> str:
        known = [*self._models[queue].jobs, *self._known[queue][-3:]]
        return self._any.choice(known) if known else "none"

    # --- comparing ---

    def _say(self, *parts: object) -> None:
        self._story.append(f"[{self._now}] " + " ".join(str(part).replace(self._prefix, "") for part in parts))

    def _same(self, got: object, wanted: object, what: str) -> None:
        if got != wanted:
            raise DiffersError(f"{what} should be {wanted}, got {got}")

    # --- steps ---

    def _pass_time(self) -> None:
        seconds = self._any.choice([1, 1, 2, 5])
        self._clock.advance(seconds)
        self._now += seconds
        for model in self._models.values():
            model.promote(self._now)
        self._say("seconds pass:", seconds)

    def _enqueue(self) -> None:
        queue = self._queue()
        jobs = [self._new(queue) for _ in range(self._any.choice([1, 1, 2, 4]))]
        self._say("enqueue", queue[-1], *jobs)
        got = self._backend().enqueue(queue, [self._real(job) for job in jobs])
        self._same(got, [self._models[queue].enqueue(job) for job in jobs], "the ids")

    def _reserve(self) -> None:
        limit, most = self._draw_reserve()
        consumer = self._any.choice(self._consumers)
        consumer.most_gated = most
        self._check_leases(consumer, consumer.reserve(limit, 0), limit, most)

    def _draw_reserve(self) -> tuple[int, int | None]:
        limit, most = self._any.choice([1, 1, 2, 3, 8]), self._any.choice([None, None, 0, 1, 2])
        self._say("reserve", limit, "most gated", most)
        return limit, most

    def _check_leases(self, consumer: Consumer, leases: list[Lease], limit: int, most: int | None) -> None:
        """Check the leases of a call. A call may return fewer jobs than there are: then reserve again."""
        while True:
            self._say("->", *[lease.id for lease in leases])
            self._leases += leases
            self._same(len(leases) <= limit, True, "whether the leases are within the limit")
            gated = 0
            rest = list(leases)
            for queue, model in self._models.items():
                model.begin_call()
                while rest and rest[0].queue == queue:
                    lease = rest.pop(0)
                    job = model.hand_out(lease, with_gates=most is None or gated < most)
                    gated += bool(job.gates)
                    self._same(_of_lease(lease), _of_job(job), f"the lease of {job.id[-4:]}")
                left = model.eligible(with_gates=most is None or gated < most)
                if rest or not leases:
                    self._same([job.id[-4:] for job in left], [], "the jobs that were not handed out")
            self._same(rest, [], "leases of later queues")
            limit -= len(leases)
            if not leases or not limit:
                return
            if most is not None:
                most = consumer.most_gated = most - gated
            leases = consumer.reserve(limit, 0)

    def _settle(self) -> None:
        verdicts, wanted = self._verdicts(with_reserve=False)
        if verdicts:
            self._same(_names(self._any.choice(self._consumers).settle(verdicts)), wanted, "the answers")

    def _exchange(self) -> None:
        verdicts, wanted = self._verdicts(with_reserve=True)
        limit, most = self._draw_reserve()
        consumer = self._any.choice(self._consumers)
        consumer.most_gated = most
        answers, leases = consumer.exchange(verdicts, limit, 0)
        self._same(_names(answers), wanted, "the answers")
        self._check_leases(consumer, leases, limit, most)

    def _verdicts(self, *, with_reserve: bool) -> tuple[list[Verdict], list[str | None]]:
        """Draw verdicts on different leases, and apply them to the model. Some of the leases have ended."""
        chosen = self._any.sample(self._leases, min(len(self._leases), self._any.choice([1, 1, 2, 3])))
        verdicts: list[Verdict] = []
        wanted: list[str | None] = []
        leases = {lease.id: lease for lease in chosen}.values()
        for lease in leases:
            kind, delay = self._any.choice(_VERDICTS), self._any.choice([0.0, 0.0, 1.0])
            # a step for another queue may come after the call's other verdicts, and after its reserve
            queue = lease.queue if with_reserve or len(leases) > 1 else self._queue()
            new = self._new(queue) if kind in {"ack", "release", "bury"} and self._any.random() < 0.3 else None
            after = After(steps=(Enqueue(queue, self._real(new)),)) if new is not None else None
            self._say(kind, lease.id, "attempt", lease.attempt, "delay", delay, "then", new)
            verdicts.append(_verdict(kind, lease, delay, after))
            model = self._models[lease.queue]
            job = model.leased(lease)
            wanted.append(LeaseLost.__name__ if job is None else None)
            if kind != "touch" or job is None:
                self._leases.remove(lease)
            if job is not None:
                _apply(kind, model, job, delay)
                if new is not None:
                    self._models[queue].enqueue(new)
        return verdicts, wanted

    def _delete(self) -> None:
        queue = self._queue()
        job_id = self._some_job(queue)
        job, error = self._found(queue, job_id)
        self._check_error("delete", queue, job_id, error)
        if error is None and job is not None:
            self._models[queue].delete(job)

    def _delete_many(self) -> None:
        queue = self._queue()
        ids = list(dict.fromkeys(self._some_job(queue) for _ in range(3)))
        found = [self._found(queue, job_id) for job_id in ids]
        self._say("delete_many", queue[-1], *ids)
        self._same(_names(self._backend().delete_many(queue, ids)), [error for _, error in found], "the answers")
        for job, error in found:
            if error is None and job is not None:
                self._models[queue].delete(job)

    def _reschedule(self) -> None:
        queue, delay = self._queue(), self._any.choice([0.0, 0.0, 2.0])
        job_id, model = self._some_job(queue), self._models[queue]
        job, error = self._found(queue, job_id)
        if error is None and job is not None:
            error = "JobHeld" if job.state is State.HELD else "UniqueTaken" if model.is_taken(job) else None
        self._check_error("reschedule", queue, job_id, error, delay)
        if error is None and job is not None:
            model.reschedule(job, delay)

    def _kick_job(self) -> None:
        queue = self._queue()
        job_id, model = self._some_job(queue), self._models[queue]
        job, error = self._found(queue, job_id)
        if error is None and job is not None and not model.kick(job):
            error = "UniqueTaken"
        self._check_error("kick_job", queue, job_id, error)

    def _found(self, queue: str, job_id: str) -> tuple[Job | None, str | None]:
        """A job, and the name of the error that a call about it must raise."""
        job = self._models[queue].jobs.get(job_id)
        if job is None:
            return None, "JobNotFound"
        return job, "JobReserved" if job.state is State.RESERVED else None

    def _check_error(self, verb: str, queue: str, job_id: str, wanted: str | None, *more: float) -> None:
        self._say(verb, queue[-1], job_id, *more)
        got = None
        try:
            getattr(self._backend(), verb)(queue, job_id, *more)
        except MultiqError as exc:
            got = type(exc).__name__
        self._same(got, wanted, f"the error of {verb}")

    def _kick(self) -> None:
        queue, most = self._queue(), self._any.choice([1, 2, 50])
        self._say("kick", queue[-1], most)
        self._same(self._backend().kick(queue, most), self._models[queue].kick_many(most), "the number of kicked jobs")

    def _limit(self) -> None:
        queue, name = self._queue(), self._any.choice(["s", "s", FAIR, "r"])
        slots = self._any.choice([None, 0, 1, 1, 2, 3])
        interval, burst = None, 1
        if name == "r":
            interval, burst = self._any.choice([(1.0, 1), (LONG, 1), (LONG, 3)])
        fair = name == FAIR and self._is_fair
        pinned = self._any.random() < 0.8
        limit: Limit | None = Limit(slots, interval, burst, fair, pinned)
        if (self._any.random() < 0.2 and not fair) or (slots is None and interval is None and not fair):
            limit = None
        self._say("limit", queue[-1], name, limit, "pinned", pinned)
        self._backend().limits(queue, {name: self._quota(limit)}, pinned=pinned)
        self._models[queue].limit(name, limit, pinned=pinned)

    def _quota(self, limit: Limit | None) -> Quota | None:
        if limit is None:
            return None
        if limit.interval is None:
            return Quota(limit.slots, fair=limit.fair)
        return Quota(limit.slots, 1.0, limit.interval, limit.burst, limit.fair)

    def _arrive(self) -> None:
        queue, member = self._queue(), self._any.choice(["m0", "m1"])
        held = [job.id for job in self._models[queue].jobs.values() if job.state is State.HELD]
        job_id = self._any.choice(held or [self._some_job(queue)])
        self._say("arrive", queue[-1], job_id, member)
        self._same(self._backend().carry_out([Arrive(queue, job_id, member)]), True, "the answer of carry_out")
        self._models[queue].arrive(job_id, member)

    def _purge(self) -> None:
        if self._any.random() < 0.8:
            return
        queue = self._queue()
        model = self._models[queue]
        states = self._any.sample([State.READY, State.DELAYED, State.BURIED, State.HELD], self._any.choice([1, 2]))
        self._say("purge", queue[-1], *states)
        gone = [job for job in model.jobs.values() if job.state in states]
        self._same(self._backend().purge(queue, states), len(gone), "the number of purged jobs")
        for job in gone:
            model.delete(job)

    def _pause(self) -> None:
        queue = self._queue()
        model, backend = self._models[queue], self._backend()
        model.paused = self._any.random() < 0.2
        self._say("pause" if model.paused else "resume", queue[-1])
        if model.paused:
            backend.pause(queue, LONG)
        else:
            backend.resume(queue)

    # --- looking ---

    def _look(self, *, closely: bool) -> None:
        for queue, model in self._models.items():
            backend = self._backend()
            stats = backend.stats(queue)
            for state in STORED_STATES:
                wanted = sum(job.state is state for job in model.jobs.values())
                self._same(getattr(stats, state.value), wanted, f"the number of {state} jobs")
            if closely:
                self._look_closely(backend, queue, model)

    def _look_closely(self, backend: Backend, queue: str, model: Model) -> None:
        for state in STORED_STATES:
            listed = {record.id: record for record in backend.jobs(queue, state, limit=1000).jobs}
            wanted = {job.id: job for job in model.jobs.values() if job.state is state}
            self._same(sorted(listed), sorted(wanted), f"the {state} jobs")
            for job_id, record in listed.items():
                job = wanted[job_id]
                shown = record.body, record.attempt, record.crashes, record.kicks, record.unique_key
                self._same(shown, (job.body, job.attempt, job.crashes, job.kicks, job.key), f"the job {job_id[-4:]}")
                if record.held_by is not None:
                    self._same(record.held_by in map(str, job.gates), True, f"whether {record.held_by} is a gate")
        states = backend.limits(queue)
        shown_limits = [(state.name, state.quota, state.is_pinned) for state in states]
        limits = sorted(model.limits.items())
        self._same(shown_limits, [(name, self._quota(one), one.pinned) for name, one in limits], "the limits")
        for limit in states:
            gates = {gate for job in model.jobs.values() for gate in job.gates if gate.limit == limit.name}
            live = sum(map(model.running, gates))
            self._same(limit.running, live, f"the live leases of limit {limit.name}")
            waiting = [job for job in model.jobs.values() if job.state is State.READY and gates & set(job.gates)]
            self._same(limit.parked <= len(waiting), True, f"whether {limit.parked} jobs can be parked at {limit.name}")

    def _leave(self) -> None:
        """End everything: each job that is left is handed out once, and then the store has no job."""
        self._say("the end")
        consumer, backend = self._consumers[0], self._backends[0]
        consumer.most_gated = None
        live = [lease for lease in self._leases if self._models[lease.queue].leased(lease)]
        self._same(_names(consumer.settle([Ack(lease) for lease in live])), [None] * len(live), "the last answers")
        for lease in live:
            self._models[lease.queue].delete(self._models[lease.queue].jobs[lease.id])
        for queue, model in self._models.items():
            for name in ("s", FAIR, "r"):
                backend.limits(queue, {name: None})
                model.limit(name, None, pinned=True)
            backend.resume(queue)
            model.paused = False
            for job in list(model.jobs.values()):
                is_kicked = model.kick(job)
                self._check_error("kick_job", queue, job.id, None if is_kicked else "UniqueTaken")
                if not is_kicked:
                    backend.delete(queue, job.id)
                    model.delete(job)
        while leases := consumer.reserve(50, 0):
            self._check_leases(consumer, leases, 50, None)
            consumer.settle([Ack(lease) for lease in leases])
            for lease in leases:
                self._models[lease.queue].delete(self._models[lease.queue].jobs[lease.id])
        self._same([job for model in self._models.values() for job in model.jobs], [], "the jobs that never came")
        self._same(sorted({*backend.queues()} & {*self._queues}), [], "the queues that are left")


def _verdict(kind: str, lease: Lease, delay: float, after: After | None) -> Verdict:
    if kind == "ack":
        return Ack(lease, after)
    if kind == "release":
        return Release(lease, delay, after=after)
    if kind == "bury":
        return Bury(lease, after=after)
    if kind == "give_back":
        return GiveBack(lease, delay)
    return Touch(lease) if kind == "touch" else Abandon(lease)


def _apply(kind: str, model: Model, job: Job, delay: float) -> None:
    if kind == "ack":
        model.delete(job)
    elif kind == "bury":
        model.bury(job)
    elif kind == "touch":
        job.end = model.now + job.ttr
    else:
        job.attempt -= kind == "give_back"
        job.crashes += kind == "abandon"
        model.put_back(job, 0.0 if kind == "abandon" else delay)


def _of_lease(lease: Lease) -> tuple[Any, ...]:
    return lease.body, lease.priority, lease.attempt, lease.crashes, lease.kicks, round(lease.ttr, 3)


def _of_job(job: Job) -> tuple[Any, ...]:
    return job.body, job.priority, job.attempt, job.crashes, job.kicks, round(job.ttr, 3)


def _names(answers: Sequence[object]) -> list[str | None]:
    return [None if answer is None else type(answer).__name__ for answer in answers]


# --- many walks ------------------------------------------------------------------------------------------


def play(store: Store, seeds: Sequence[int], steps: int) -> None:
    """Play a walk for each seed. Raises ``DiffersError``."""
    play_walks(Walk, store, seeds, steps)


if __name__ == "__main__":
    main(play, __doc__)
