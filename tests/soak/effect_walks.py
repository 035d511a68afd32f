"""Random walks over plain verbs and effects, checked by a model of its own (``effect_model.py``).

Effects are held jobs and arrivals, steps, memos and details, outcomes, and notes. ``python tests/soak/effect_walks.py
--backend mysql --walks 200`` plays walks on a private server. Two backends and three consumers use one store, as two
processes would. An error names the walk's seed and has its steps; ``--seed N --walks 1`` repeats the walk.
"""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent.parent))

from soak.effect_model import LONG, Job, Model, Noted, Queue
from soak.limit_model import DiffersError
from soak.walked_stores import BACKENDS, PARTITIONS, main, play_walks

from multiq.backend import (  # fmt: skip
    STORED_STATES,
    Abandon,
    Ack,
    After,
    Arrive,
    Bury,
    Drop,
    Enqueue,
    Gate,
    GiveBack,
    NewJob,
    Put,
    Quota,
    Release,
    State,
    Terms,
    Touch,
    UniqueKey,
    Version,
)
from multiq.errors import LeaseLost, MultiqError
from multiq.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from soak.walked_stores import Store

    from multiq.backend import (
        Backend,
        Consumer,
        JobRecord,
        Lease,
        Note,
        Outcome,
        OutcomeKind,
        Step,
        UniqueUntil,
        Verdict,
    )
    from multiq.driverkit.clock import ManualClock

_VERDICTS = ("ack", "ack", "ack", "release", "release", "bury", "give_back", "abandon", "touch")
_MEMBERS = ("a", "b", "c", "aa", "A", "a ", "é", "e\u0301", "x" * 200)
_KEYS = ("k", "K", "k_", "k%", "ka", "k.a", "[k]*", "z" * 200)
_PREFIXES = ("", "k", "k_", "k%", "k?", "[k]", "*", "K", "[", "zz")
_IDS = ("j", "J", "ja", "jaa", "0", "j.-_%", "y" * 200)  # of jobs that are enqueued again and again
_BYTES = (b"", b"\0", b"a", b"\xff\xfe", b"x" * 300)
_LARGE = (b"l" * 1_100, b"m" * 9_000)  # longer than some drivers keep in a record, or return in a row
_REASONS = (None, None, "why", "wé'\\ \n%s", "")
_DELAYS = (0.0, 0.0, 0.0, 0.0, 0.999999, 1.0, 2.5, 1e-6)
_CENTURY = 99 * 365 * 86400.0  # seconds


class Walk:
    """Takes random steps, and checks every answer."""

    def __init__(self, backends: Sequence[Backend], clock: ManualClock, seed: int) -> None:
        self._any = random.Random(seed)
        self._backends, self._clock = backends, clock
        self._now = 0.0
        unique = f"{seed}-{new_id()}"
        self._queues = [f"{unique}-{number}" for number in range(2)]
        # Some walks also have jobs with unique keys and gates, because drivers have other code for such jobs.
        self._uniques, self._gated = self._any.choice([0.0, 0.0, 0.3, 0.8]), self._any.choice([0.0, 0.0, 0.3, 0.8])
        self._has_conflicts = self._any.random() < 0.5
        self._has_quota = self._any.random() < 0.5
        able = backends[0].capabilities
        self._pauses_expire = able.backend == "redis"  # in real time: the key of a pause has a time to live
        self._has_partitions = able.total_order is not True
        self._has_conflicts = self._has_conflicts and not self._has_partitions
        ranks = not self._has_partitions and not (self._gated and able.backend == "mysql")  # see limit_walks.py
        self._steps_later = able.one_step_everywhere is not True
        self._model = Model(self._queues, steps_later=self._steps_later, ranks=ranks)
        first, second = self._queues
        self._orders = [[first, second], [second, first], [first]]
        self._consumers = [
            backend.consumer(order) for backend, order in zip((*backends, backends[0]), self._orders, strict=True)
        ]
        self._ids = itertools.count(1)
        self._prefix = f"{seed & 0xFFFFFFFF:08x}-0000-7000-8000-"
        self._known = ["none", *_IDS]
        self._leases: list[Lease] = []
        self._first_now: float | None = None
        self._story: list[str] = []

    def run(self, steps: int) -> None:
        """Raises ``DiffersError``."""
        acts: list[Callable[[], None]] = [
            *4 * [self._enqueue], *4 * [self._reserve], *5 * [self._settle], *2 * [self._exchange], self._delete,
            self._reschedule, self._kick_job, self._kick, self._delete_many, *5 * [self._carry_out], self._relay,
            self._purge, self._pause, *3 * [self._pass_time], self._outcomes, self._history, self._forget,
            self._notes, self._peek,
        ]  # fmt: skip
        acts += 6 * [self._any.choice(acts)]  # each walk does something more often than the others
        try:
            if self._gated and self._has_quota:
                acts += [self._limit, self._limit]
                for queue in self._model.queues.values():
                    self._store_limits(queue, {"a": 10_000, "b": 1})
            for number in range(steps):
                self._any.choice(acts)()
                self._look(closely=number % 15 == 0)
            self._leave()
        except Exception as exc:
            exc.add_note("the walk:\n  " + "\n  ".join(self._story))
            raise
        finally:
            for consumer in self._consumers:
                consumer.close()

    # --- drawing ---

    def _queue(self) -> Queue:
        return self._model.queues[self._any.choice([self._queues[0], *self._queues])]

    def _backend(self) -> Backend:
        return self._any.choice(self._backends)

    def _new(self) -> NewJob:
        if self._any.random() < 0.1:
            job_id = self._any.choice(self._known[-12:])
        elif self._any.random() < 0.4:
            job_id = self._any.choice(_IDS)
        else:
            job_id = f"{self._prefix}{next(self._ids):012x}"
            self._known.append(job_id)
        awaits = self._any.choice([0, 0, 0, 1, 1, 2, 3])
        delay = self._any.choice(_DELAYS) if self._any.random() < 0.98 else _CENTURY
        return NewJob(
            self._bytes() + b"%d" % self._any.randrange(10**6), job_id, self._any.choice([5, 5, 5, 0, 9, 2**32 - 1]),
            delay, self._any.choice([2.0, 2.0, 5.0, 1.000001]), self._terms(job_id, awaits),
        )  # fmt: skip

    def _terms(self, job_id: str, awaits: int) -> Terms | None:
        """Draw a key and gates."""
        unique = None
        is_special = self._any.random() < self._uniques
        if self._has_partitions:  # a job with a key or gates is in another partition than a plain job of its id
            is_special = self._uniques > 0 and sum(job_id.encode()) % 3 == 0
        if is_special:
            conflict: Literal["keep", "replace"] = self._any.choice(["keep", "replace"])
            until: UniqueUntil = self._any.choice(["gone", "buried", "reserved"])
            if self._has_conflicts:
                hold, most = self._any.choice([0.0, 0.0, 0.0, 2.5]), self._any.choice([None, 0.0, 3.0])
                unique = UniqueKey(self._any.choice([b"a", b"A", b"\0"]), until, conflict, hold, most)
            else:
                unique = UniqueKey(job_id.encode()[-60:], until, conflict)
        gates: tuple[Gate, ...] = ()
        if self._any.random() < self._gated and (is_special or not self._has_partitions):
            gates = tuple(Gate(name, "") for name in self._any.choice([["a"], ["b"], ["a", "b"]]))
        return Terms(awaits, unique, gates) if awaits or unique or gates else None

    def _bytes(self) -> bytes:
        return self._any.choice(_BYTES if self._any.random() < 0.97 else _LARGE)

    def _some_job(self, queue: Queue, *states: State) -> str:
        """The id of a job of the queue, if possible in one of the states. Or an id that the queue may lack."""
        found = [job.id for job in queue.jobs.values() if job.state in states]
        if found and self._any.random() < 0.8:
            return self._any.choice(found)
        return self._any.choice([*queue.jobs, *_IDS[:4], *self._known[-3:]])

    def _some_steps(self, queue: Queue | None = None) -> tuple[Step, ...]:
        """*queue*: the queue of the first step."""
        steps: list[Step] = []
        for _ in range(self._any.choice([1, 1, 2, 3, 6])):
            steps.append(self._step(self._queue() if steps or queue is None else queue, steps))
        return tuple(steps)

    def _step(self, queue: Queue, earlier: Sequence[Step]) -> Step:
        kind = self._any.choice(["enqueue", "arrive", "arrive", "arrive", "put", "put", "drop"])
        if kind == "enqueue":
            new = self._new()
            if self._leases and self._any.random() < 0.2:  # perhaps the id of the verdict's job
                job_id = self._any.choice(self._leases[-8:]).id
                new = NewJob(new.body, job_id, new.priority, new.delay, new.ttr, self._terms(job_id, 0))
            # An arrival may look for its job in several partitions, and come there after a later enqueue of the job.
            arrivals = [(step.queue, step.id) for step in earlier if isinstance(step, Arrive)]
            if not self._has_partitions or (queue.name, new.id) not in arrivals:
                return Enqueue(queue.name, new)
            kind = "drop"
        if kind == "arrive":
            added = [step.job.id for step in earlier if isinstance(step, Enqueue) and step.queue == queue.name]
            job_id = (
                self._any.choice(added) if added and self._any.random() < 0.5 else self._some_job(queue, State.HELD)
            )
            return Arrive(
                queue.name, job_id, self._any.choice([*_MEMBERS[:3], *_MEMBERS]),
                self._any.choice([0, 0, 0, 0, 1, 2]), self._any.choice([*15 * [""], "doom", "dö 'om"]),
            )  # fmt: skip
        key = self._any.choice([*_KEYS[:2], *_KEYS])
        if kind == "put":
            return Put(queue.name, key, self._bytes(), self._any.choice([None, None, 0.999999, 1.0, 2.5, LONG]))
        return Drop(queue.name, key)

    def _after(self) -> After | None:
        """Draw an ``After``. The verdict ignores the fields that do not apply to it."""
        if self._any.random() < 0.4:
            return None
        kind: OutcomeKind = self._any.choice(["done", "cancelled"])
        steps = self._some_steps() if self._any.random() < 0.6 else ()
        memo, detail = self._any.choice([None, self._bytes()]), self._any.choice([None, self._bytes()])
        return After(self._keep(), self._bytes(), kind, memo, detail, steps, self._any.random() < 0.1)

    def _keep(self) -> float:
        return self._any.choice([0.0, 0.999999, 1.0, 2.5, 6.0, LONG, _CENTURY])

    # --- comparing ---

    def _say(self, *parts: object) -> None:
        story = " ".join(str(part).replace(self._prefix, "").replace(self._queues[0][:-1], "q") for part in parts)
        self._story.append(
            f"[{self._now}] {story}".replace("x" * 200, "X")
            .replace("y" * 200, "Y")
            .replace("l" * 1_100, "L")
            .replace("m" * 9_000, "M")
        )

    def _same(self, got: object, wanted: object, what: str) -> None:
        if got != wanted:
            raise DiffersError(f"{what} should be {wanted}, got {got}")

    def _about(self, got: float | None, wanted: float | None, what: str) -> None:
        self._same(None if got is None else round(got, 3), None if wanted is None else round(wanted, 3), what)

    # --- steps: producing and consuming ---

    def _pass_time(self) -> None:
        seconds = self._any.choice([0.5, 1.0, 1.0, 2.0, 5.0]) if self._any.random() < 0.95 else 50.0
        self._clock.advance(seconds)
        self._now += seconds
        self._model.promote(self._now)
        self._say("seconds pass:", seconds)

    def _enqueue(self) -> None:
        queue = self._queue()
        jobs = [self._new() for _ in range(self._any.choice([1, 1, 1, 2, 4]))]
        self._say("enqueue", queue.name, *jobs)
        got = self._backend().enqueue(queue.name, jobs)
        self._same(got, [self._model.enqueue(queue.name, job) for job in jobs], "the ids")

    def _reserve(self) -> None:
        consumer, limit, order = self._draw_reserve()
        self._model.late = set()
        self._check_leases(consumer, consumer.reserve(limit, 0, order), limit, order)

    def _draw_reserve(self) -> tuple[Consumer, int, list[str] | None]:
        consumer, limit = self._any.choice(self._consumers), self._any.choice([1, 1, 2, 3, 8])
        own = self._order_of(consumer)
        order = self._any.sample(own, len(own)) if self._any.random() < 0.3 else None
        self._say("reserve", limit, "of", order or own)
        return consumer, limit, order

    def _order_of(self, consumer: Consumer) -> list[str]:
        return self._orders[self._consumers.index(consumer)]

    def _check_leases(self, consumer: Consumer, leases: list[Lease], limit: int, order: list[str] | None) -> None:
        """Check the leases of a call. A call may return fewer jobs than there are: then reserve again."""
        queues = order or self._order_of(consumer)
        while True:
            self._say("->", *[lease.id for lease in leases])
            self._leases += leases
            self._same(len(leases) <= limit, True, "whether the leases are within the limit")
            for lease in leases:
                job = self._model.hand_out(lease, queues)
                self._same(_of_lease(lease), _of_job(job), f"the lease of {job.id}")
                self._about(lease.age, self._now - job.born, f"the age in the lease of {job.id}")
            limit -= len(leases)
            if not limit:
                return
            if not leases:
                left = [job.id for _, job in self._model.eligible(queues)]
                self._same(left, [], "the jobs that were not handed out")
                return
            self._model.late = set()
            leases = consumer.reserve(limit, 0, order)

    def _settle(self) -> None:
        if verdicts := self._verdicts():
            got = _names(self._any.choice(self._consumers).settle(verdicts))
            self._same(got, self._wanted(verdicts), "the answers")

    def _exchange(self) -> None:
        verdicts = self._verdicts()
        consumer, limit, order = self._draw_reserve()
        if self._steps_later and self._has_conflicts and any(map(_has_key_elsewhere, verdicts)):
            # The reserve may come before or after the steps, and decides whether a job has its key.
            self._same(_names(consumer.settle(verdicts)), self._wanted(verdicts), "the answers")
            verdicts = []
        answers, leases = consumer.exchange(verdicts, limit, 0, order)
        self._model.late = set()
        self._same(_names(answers), self._wanted(verdicts), "the answers")
        self._check_leases(consumer, leases, limit, order)

    def _verdicts(self) -> list[Verdict]:
        """Draw verdicts. Some of their leases have ended, and a lease may have two verdicts."""
        self._leases = self._leases[-40:]
        if not self._leases:
            return []
        live = [lease for lease in self._leases if self._model.leased(lease)]
        verdicts: list[Verdict] = []
        for _ in range(self._any.choice([1, 1, 2, 3, 5])):
            lease = self._any.choice(live if live and self._any.random() < 0.8 else self._leases)
            verdict = self._verdict(lease)
            if self._has_partitions and verdicts and _steps_of(*verdicts, verdict):
                break  # between partitions, the contract gives no order of verdicts and steps
            verdicts.append(verdict)
            self._say(verdicts[-1])
        return verdicts

    def _verdict(self, lease: Lease) -> Verdict:
        kind, delay, reason = self._any.choice(_VERDICTS), self._any.choice(_DELAYS), self._any.choice(_REASONS)
        after = self._after()
        if kind == "ack":
            return Ack(lease, after)
        if kind == "release":
            return Release(lease, delay, self._any.choice([None, None, 3, 5]), reason, after)
        if kind == "bury":
            return Bury(lease, reason, after)
        if kind == "give_back":
            return GiveBack(lease, delay, after)
        return Touch(lease, after) if kind == "touch" else Abandon(lease, reason)

    def _wanted(self, verdicts: Sequence[Verdict]) -> list[str | None]:
        return [None if accepted else LeaseLost.__name__ for accepted in self._model.settle(verdicts)]

    # --- steps: management ---

    def _delete(self) -> None:
        queue = self._queue()
        job = self._check_call("delete", queue, self._some_job(queue))
        if job is not None:
            del queue.jobs[job.id]

    def _delete_many(self) -> None:
        queue = self._queue()
        ids = list(dict.fromkeys(self._some_job(queue) for _ in range(self._any.choice([1, 2, 4]))))
        kind: OutcomeKind = self._any.choice(["done", "cancelled"])
        after = After(self._keep(), self._bytes(), kind) if self._any.random() < 0.6 else None
        self._say("delete_many", queue.name, *ids, after)
        got = _names(self._backend().delete_many(queue.name, ids, after=after))
        self._same(got, [self._error(queue, job_id) for job_id in ids], "the answers")
        for job_id in ids:
            if self._error(queue, job_id) is None:
                self._model.keep(queue, queue.jobs.pop(job_id), after)

    def _reschedule(self) -> None:
        queue, delay = self._queue(), self._any.choice(_DELAYS)
        job_id = self._some_job(queue)
        job = queue.jobs.get(job_id)
        error = None
        if job is not None:
            error = (
                "JobHeld" if job.state is State.HELD else "UniqueTaken" if self._model.is_taken(queue, job) else None
            )
        if (job := self._check_call("reschedule", queue, job_id, delay, wanted=error)) is not None:
            self._model.reschedule(queue, job, delay)

    def _kick_job(self) -> None:
        queue = self._queue()
        self._kick_one(queue, self._some_job(queue, State.BURIED, State.DELAYED, State.HELD))

    def _kick_one(self, queue: Queue, job_id: str) -> Job | None:
        """Returns the job if it was kicked."""
        job = queue.jobs.get(job_id)
        is_taken = job is not None and job.state is State.BURIED and self._model.is_taken(queue, job)
        kicked = self._check_call("kick_job", queue, job_id, wanted="UniqueTaken" if is_taken else None)
        if kicked is not None:
            self._model.kick(queue, kicked)
        return kicked

    def _peek(self) -> None:
        queue = self._queue()
        job_id = self._some_job(queue)
        self._say("peek", queue.name, job_id)
        try:
            self._check_record(self._backend().peek(queue.name, job_id), queue.jobs.get(job_id))
        except MultiqError as exc:
            self._same(type(exc).__name__, None if job_id in queue.jobs else "JobNotFound", "the error of peek")

    def _error(self, queue: Queue, job_id: str) -> str | None:
        """The name of the error that a call about a job must raise."""
        job = queue.jobs.get(job_id)
        return "JobNotFound" if job is None else "JobReserved" if job.state is State.RESERVED else None

    def _check_call(self, verb: str, queue: Queue, job_id: str, *more: float, wanted: str | None = None) -> Job | None:
        """Call a verb. Returns the job if the verb must succeed. *wanted*: the error for a job that is not reserved."""
        wanted = self._error(queue, job_id) or wanted
        self._say(verb, queue.name, job_id, *more)
        got = None
        try:
            answer = getattr(self._backend(), verb)(queue.name, job_id, *more)
            self._same(answer, job_id if verb == "reschedule" else None, f"the answer of {verb}")
        except MultiqError as exc:
            got = type(exc).__name__
        self._same(got, wanted, f"the error of {verb}")
        return queue.jobs[job_id] if wanted is None else None

    def _kick(self) -> None:
        queue, most = self._queue(), self._any.choice([1, 2, 50])
        self._say("kick", queue.name, most)
        kicked = self._backend().kick(queue.name, most)
        if self._has_partitions:  # these may be any of the buried jobs
            left = {record.id for record in self._backend().jobs(queue.name, State.BURIED, limit=1000).jobs}
            gone = [job for job in queue.buried() if job.id not in left]
            self._same(len(gone), min(most, len(queue.buried())), "the number of jobs that are not buried any more")
            wanted = sum(self._model.kick(queue, job) for job in gone)
        else:
            wanted = self._model.kick_many(queue, most)
        self._same(kicked, wanted, "the number of kicked jobs")

    def _purge(self) -> None:
        if self._any.random() < 0.7:
            return
        queue = self._queue()
        states = self._any.sample(STORED_STATES, self._any.choice([1, 2]))
        self._say("purge", queue.name, *states)
        gone = [job.id for job in queue.jobs.values() if job.state in states and job.state is not State.RESERVED]
        self._same(self._backend().purge(queue.name, states), len(gone), "the number of purged jobs")
        for job_id in gone:
            del queue.jobs[job_id]

    def _pause(self) -> None:
        queue, seconds = self._queue(), self._any.choice([0.0, 0.0, 0.0, 1.0, 2.5, 40.0])
        if seconds and self._pauses_expire:
            seconds = 40.0
        self._say("pause" if seconds else "resume", queue.name, seconds)
        queue.paused_until = self._now + seconds if seconds else 0.0
        if seconds:
            self._backend().pause(queue.name, seconds)
        else:
            self._backend().resume(queue.name)

    def _limit(self) -> None:
        self._store_limits(self._queue(), {self._any.choice("ab"): self._any.choice([None, 0, 1, 1, 2, 10_000])})

    def _store_limits(self, queue: Queue, slots: dict[str, int | None]) -> None:
        self._say("limits", queue.name, slots)
        self._backend().limits(
            queue.name, {name: None if most is None else Quota(most) for name, most in slots.items()}
        )
        for name, most in slots.items():
            queue.slots.pop(name, None)
            if most is not None:
                queue.slots[name] = most

    # --- steps: effects ---

    def _carry_out(self) -> None:
        home = self._queue()
        steps = self._some_steps(home)
        when = tuple(self._condition(home) for _ in range(self._any.choice([0, 0, 1, 1, 2])))
        self._say("carry_out", *steps, "when", *when)
        got = self._backend().carry_out(steps, when=when)
        self._same(got, self._model.carry_out(steps, when), "the answer of carry_out")

    def _condition(self, home: Queue) -> Version:
        key = self._any.choice(_KEYS[:3])
        self._check_note(home, key)
        note = home.notes.get(key)
        present = (note.version or "") if note is not None else ""
        old = sorted(home.versions.get(key, ()))
        return Version(home.name, key, self._any.choice([present, present, present, "", *old[:1]]))

    def _relay(self) -> None:
        queues = self._any.sample(self._queues, self._any.choice([1, 2]))
        self._same(self._backend().relay(queues), 0, "the number of steps that remain")

    def _outcomes(self) -> None:
        queue = self._queue()
        ids = [
            self._any.choice([*queue.outcomes, *_IDS, *self._known[-6:]]) for _ in range(self._any.choice([1, 3, 8]))
        ]
        self._say("outcomes", queue.name, *ids)
        for job_id, outcome in zip(ids, self._backend().outcomes(queue.name, ids), strict=True):
            self._check_outcome(queue, job_id, outcome)

    def _check_outcome(self, queue: Queue, job_id: str, outcome: Outcome | None) -> None:
        kept = queue.outcomes.get(job_id)
        if outcome is None or kept is None:
            self._same(outcome, kept, f"the outcome of {job_id}")
            return
        shown = outcome.queue, outcome.id, outcome.kind, outcome.body, outcome.attempt
        self._same(shown, (queue.name, job_id, kept.kind, kept.body, kept.attempt), f"the outcome of {job_id}")
        self._about(outcome.age, self._now - kept.at, f"the age of the outcome of {job_id}")
        self._about(outcome.expires_in, kept.end - self._now, f"the time that the outcome of {job_id} has left")

    def _history(self) -> None:
        queue, limit = self._queue(), self._any.choice([1, 2, 100])
        kind: OutcomeKind | None = self._any.choice([None, "done", "cancelled"])
        self._say("history", queue.name, kind, limit)
        listed: list[Outcome] = []
        after: str | None = None
        while True:
            page = self._backend().history(queue.name, kind=kind, limit=limit, after=after)
            self._same(len(page.outcomes) <= limit, True, "whether the page is within the limit")
            listed += page.outcomes
            if (after := page.after) is None:
                break
        wanted = {job_id: kept for job_id, kept in queue.outcomes.items() if kind in {None, kept.kind}}
        self._same(sorted(outcome.id for outcome in listed), sorted(wanted), "the ids of the history")
        for outcome in listed:
            self._check_outcome(queue, outcome.id, outcome)
        ends = [wanted[outcome.id].end for outcome in listed]
        self._same(ends, sorted(ends, reverse=True), "the ends of the history's outcomes")

    def _forget(self) -> None:
        queue, backend = self._queue(), self._backend()
        if self._any.random() < 0.5:
            ids = [self._any.choice([*queue.outcomes, *_IDS]) for _ in range(self._any.choice([1, 2, 3]))]
            self._say("forget", queue.name, *ids)
            gone = {job_id for job_id in ids if job_id in queue.outcomes}
            self._same(backend.forget(queue.name, ids), len(gone), "the number of forgotten outcomes")
            for job_id in gone:
                del queue.outcomes[job_id]
            queue.fewest_expired = max(0, queue.fewest_expired - len({*ids} - gone))  # they may be expired ones
            return
        limit = self._any.choice([1, 3, 1000])
        self._say("forget up to", limit, "of", queue.name)
        got = backend.forget(queue.name, limit=limit)
        fewest, most = min(limit, queue.fewest_expired), min(limit, queue.most_expired)
        if not fewest <= got <= most:
            raise DiffersError(f"the number of forgotten outcomes should be {fewest} to {most}, got {got}")
        queue.fewest_expired = max(0, queue.fewest_expired - got)
        queue.most_expired = queue.most_expired - got if got == limit else 0

    def _notes(self) -> None:
        queue, prefix, limit = self._queue(), self._any.choice(_PREFIXES), self._any.choice([1, 2, 100])
        self._say("notes", queue.name, repr(prefix), limit)
        listed: list[Note] = []
        after: str | None = None
        while True:
            page = self._backend().notes(queue.name, prefix, limit=limit, after=after)
            self._same(len(page.notes) <= limit, True, "whether the page is within the limit")
            listed += page.notes
            if (after := page.after) is None:
                break
        wanted = sorted(key for key in queue.notes if key.startswith(prefix))
        self._same([note.key for note in listed], wanted, "the keys of the notes")
        for note in listed:
            self._compare_note(queue, note.key, note, queue.notes[note.key])

    def _check_note(self, queue: Queue, key: str) -> None:
        self._compare_note(queue, key, self._backend().note(queue.name, key), queue.notes.get(key))

    def _compare_note(self, queue: Queue, key: str, note: Note | None, noted: Noted | None) -> None:
        if note is None or noted is None:
            self._same(note, noted, f"the note {key}")
            return
        self._same((note.key, note.value), (key, noted.value), f"the note {key}")
        self._about(note.expires_in, noted.end and noted.end - self._now, f"the time that the note {key} has left")
        seen = queue.versions.setdefault(key, set())
        if noted.version is None:
            self._same(note.version in seen or not note.version, False, f"whether the version of {key} was used before")
            noted.version = note.version
            seen.add(note.version)
        self._same(note.version, noted.version, f"the version of the note {key}")

    # --- looking ---

    def _look(self, *, closely: bool) -> None:
        backend = self._backend()
        for queue in self._model.queues.values():
            stats = backend.stats(queue.name)
            for state in STORED_STATES:
                wanted = sum(job.state is state for job in queue.jobs.values())
                self._same(getattr(stats, state.value), wanted, f"the number of {state} jobs of {queue.name[-1]}")
            left = queue.paused_until - self._now
            self._about(stats.paused_for, left if left > 0 else None, "the time that the pause has left")
            if closely:
                self._look_closely(backend, queue)
        if closely:
            listed = {*backend.queues()} & {*self._queues}
            queues = [*self._model.queues.values()]
            if self._pauses_expire:
                listed -= {one.name for one in queues if 0 < one.paused_until <= self._now and not one.jobs}
            wanted_queues = {one.name for one in queues if one.jobs or one.paused_until > self._now}
            self._same(sorted(listed), sorted(wanted_queues), "the queues")
            now = backend.now(self._queues[0])
            if self._first_now is None:
                self._first_now = now - self._now
            self._about(now - self._first_now, self._now, "the time")

    def _look_closely(self, backend: Backend, queue: Queue) -> None:
        for state in STORED_STATES:
            limit, after = self._any.choice([1, 3, 1000]), None
            listed: list[JobRecord] = []
            while True:
                page = backend.jobs(queue.name, state, limit=limit, after=after)
                listed += page.jobs
                if (after := page.after) is None:
                    break
            wanted = {job.id: job for job in queue.jobs.values() if job.state is state}
            self._same(sorted(record.id for record in listed), sorted(wanted), f"the {state} jobs")
            for record in listed:
                self._check_record(record, wanted[record.id])
            if self._has_partitions or (self._gated and state is State.READY):
                continue  # parked jobs may be listed after the others
            places = [_place(wanted[record.id]) for record in listed]
            self._same(places, sorted(places), f"the order of the {state} jobs {[record.id for record in listed]}")
        for key in _KEYS:
            self._check_note(queue, key)

    def _check_record(self, record: JobRecord, job: Job | None) -> None:
        assert job is not None, "the backend shows a job that is gone"
        what = f"the record of {job.id}"
        shown = (
            record.id, record.state, record.body, record.priority, record.attempt, record.crashes, record.kicks,
            record.reason, record.memo, record.detail, record.awaits, record.unique_key,
        )  # fmt: skip
        wanted = (
            job.id, job.state, job.body, job.priority, job.attempt, job.crashes, job.kicks,
            job.reason, job.memo, job.detail, job.awaits, job.unique.key if job.unique else None,
        )  # fmt: skip
        self._same(shown, wanted, what)
        self._about(record.ttr, job.ttr, f"the ttr in {what}")
        self._about(record.age, self._now - job.born, f"the age in {what}")
        due_in = job.end - self._now if job.state in {State.DELAYED, State.RESERVED} else None
        self._about(record.due_in, 0.0 if job.state is State.READY else due_in, f"the due time in {what}")

    def _leave(self) -> None:
        """End everything: each job that is left is handed out once, and then the store has no job."""
        self._say("the end")
        consumer, backend = self._consumers[0], self._backends[0]
        live = [lease for lease in {lease.token: lease for lease in self._leases}.values() if self._model.leased(lease)]
        for queue in self._model.queues.values():
            backend.resume(queue.name)
            queue.paused_until = 0.0
            self._store_limits(queue, {"a": None, "b": None})
            for job in list(queue.jobs.values()):
                if job.state is not State.RESERVED and self._kick_one(queue, job.id) is None:
                    self._check_call("delete", queue, job.id)
                    del queue.jobs[job.id]
        acks = [Ack(lease) for lease in live]
        self._same(_names(consumer.settle(acks)), self._wanted(acks), "the last answers")
        self._clock.advance(10)
        self._now += 10
        self._model.promote(self._now)
        self._model.late = set()
        while leases := consumer.reserve(50, 0):
            self._check_leases(consumer, leases, len(leases), None)
            acks = [Ack(lease) for lease in leases]
            self._same(_names(consumer.settle(acks)), self._wanted(acks), "the last answers")
        self._same([[*queue.jobs] for queue in self._model.queues.values()], [[], []], "the jobs that never came")
        self._look(closely=True)
        for queue in self._model.queues.values():
            steps = [Drop(queue.name, key) for key in queue.notes]
            self._same(backend.carry_out(steps), self._model.carry_out(steps, ()), "the answer of carry_out")
            self._same(backend.notes(queue.name).notes, [], "the notes that are left")
            self._same(backend.forget(queue.name, [*queue.outcomes]), len(queue.outcomes), "the forgotten outcomes")
            self._same(backend.history(queue.name).outcomes, [], "the outcomes that are left")


def _has_key_elsewhere(verdict: Verdict) -> bool:
    """Whether the verdict enqueues a job with a unique key in another queue."""
    return any(
        isinstance(step, Enqueue) and step.queue != verdict.lease.queue and step.job.terms and step.job.terms.unique
        for step in _steps_of(verdict)
    )


def _steps_of(*verdicts: Verdict) -> list[Step]:
    afters = [None if isinstance(verdict, Abandon) else verdict.after for verdict in verdicts]
    return [step for after in afters if after is not None for step in after.steps]


def _place(job: Job) -> tuple[float, ...]:
    """The place of a job among the listed jobs of its state."""
    if job.state is State.READY:
        return job.rank
    if job.state is State.BURIED:
        return (job.buried,)
    return (job.place if job.state is State.HELD else job.end,)


def _of_lease(lease: Lease) -> tuple[Any, ...]:
    return (
        lease.body, lease.priority, lease.attempt, lease.crashes, lease.kicks, round(lease.ttr, 3), lease.memo,
        lease.doomed,
    )  # fmt: skip


def _of_job(job: Job) -> tuple[Any, ...]:
    return job.body, job.priority, job.attempt, job.crashes, job.kicks, round(job.ttr, 3), job.memo, job.doomed


def _names(answers: Sequence[object]) -> list[str | None]:
    return [None if answer is None else type(answer).__name__ for answer in answers]


# --- many walks ------------------------------------------------------------------------------------------


def play(store: Store, seeds: Sequence[int], steps: int) -> None:
    """Play a walk for each seed. Raises ``DiffersError``."""
    play_walks(Walk, store, seeds, steps)


if __name__ == "__main__":
    main(play, __doc__, (*BACKENDS, PARTITIONS))
