"""The consumer of a pair. It reserves from the primary. For each verdict, it stores the effects first and sends the
verdict after that.

====================  ======================================================================  =========================
guarantee             how                                                                     cost
====================  ======================================================================  =========================
a refused verdict     the lease is touched before its effects are stored                      a round trip, only for
stores nothing                                                                                verdicts with effects
effects are not lost  they are stored before the verdict                                      a call of the store
effects of a tracked  its ack compares and sets the note about the job                        none
job happen once
a tracked job is not  a consumer that reserves it reads the note: a job that has ended, or    a call of the store for
run again once it     of which another copy was put, is deleted and not run                   each tracked job
has ended
====================  ======================================================================  =========================

A job is *tracked* if it has been in the store: it was held, or enqueued by a step. For the first run of any other job,
the store is called only if the verdict has effects.
"""

from __future__ import annotations

import collections
import contextlib
import time
from typing import TYPE_CHECKING

import msgspec

from multiq.backend.base import Consumer
from multiq.backend.effects import MAX_STEPS, After, Drop, Version
from multiq.backend.types import Abandon, Ack, Bury, GiveBack, Release, Touch
from multiq.errors import BackendError, LeaseLost

from .layout import (
    JobNote,
    Tracked,
    attempts,
    check_size,
    decode_note,
    fingerprint,
    home_of,
    job_key,
    moving_queues,
    put_note,
    read_body,
    recounted,
    size_of,
    stored_step,
)
from .moving import is_there
from .outcomes import drop_expired, keep_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from multiq.backend.base import Backend
    from multiq.backend.effects import Note, Step
    from multiq.backend.types import Lease, Verdict

    from .layout import Header
    from .moving import Mover

_MOVE_EVERY = 5.0  # seconds between two looks for jobs that dead processes have left in the store
_RETRY_DELAY = 1.0  # seconds until a job that could not be looked up is reserved again; doubles with each attempt
_LONGEST_RETRY_DELAY = 60.0
_LATE = 1.0  # seconds; the primary may make a delayed job ready this much later
_ATTEMPTS = 20  # attempts to change a note that other processes change at the same time
_BYTES_AT_ONCE = 4_000_000
_SILENT = 0.1  # seconds; if a failed call of the store took longer, the store did not answer
_SPARED = 3.0  # after such a call, the store is not called for this multiple of the call's duration
_DROPPED_PER_KEEP = 2  # expired outcomes that each new outcome deletes: more than one, so that their number falls
_NO_AFTER = After()


class _Run(msgspec.Struct):
    """A reserved job about which the store has data."""

    lease: Lease
    """The primary's lease."""
    id: str
    nonce: str
    once: str = ""
    is_tracked: bool = False
    note: JobNote | None = None
    version: str = ""


class _Plan(msgspec.Struct):
    """A verdict with effects."""

    verdict: Verdict
    run: _Run
    after: After
    steps: list[Step]
    is_stored: bool = False
    is_lost: bool = False
    """Whether the store refuses the verdict, because the job has ended or another lease has the job."""

    @property
    def home(self) -> str:
        return home_of(self.run.lease.queue)


class PairedConsumer(Consumer):
    """Reserves from the primary."""

    def __init__(
        self, primary: Backend, store: Backend, mover: Mover, queues: Sequence[str], limit: Callable[[], int | None]
    ) -> None:
        """*limit*: a function that returns the largest number of bytes of a body, outcome, memo, detail or note. None:
        memory is the limit."""
        self.queues = tuple(queues)
        self._backend = primary
        self._store = store
        self._mover = mover
        self._primary = primary.consumer(queues)
        self._limit = limit
        self._runs: dict[str, _Run] = {}  # token -> run
        self._move_at = 0.0  # monotonic
        self._failure = BackendError("")  # of the store's last failed call
        self._spared_until = 0.0  # monotonic; until then the store is not called, so that leases are touched in time
        self._dropped = 0  # copies among the jobs that were reserved last
        self._has_moved = True  # whether the last attempt to move jobs has succeeded
        self._has_put_off_until = 0.0  # monotonic

    @property
    def asked_at(self) -> float:  # type: ignore[override]
        return self._primary.asked_at

    @property
    def sees_all(self) -> bool:  # type: ignore[override]
        """Whether no job has to wait for the store. False: the store did not answer, and may have jobs to hand out,
        or reserved jobs could not be looked up in it.
        """
        return self._has_moved and time.monotonic() >= self._has_put_off_until and self._primary.sees_all

    def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
        give_up_at = time.monotonic() + timeout
        while True:
            self._before_reserve()
            leases = self._dress(self._primary.reserve(limit, max(0.0, give_up_at - time.monotonic()), queues))
            if leases or not self._dropped:  # if all reserved jobs were copies, other jobs may be ready
                return leases

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        plans = self._plans(verdicts)
        if not plans:
            answers = self._primary.settle([self._real(one) for one in verdicts])
            self._forget_runs(verdicts)
            return self._named(verdicts, answers)
        return self._settle_planned(verdicts, plans)

    def exchange(
        self, verdicts: Sequence[Verdict], limit: int, timeout: float, queues: Sequence[str] | None = None
    ) -> tuple[list[LeaseLost | None], list[Lease]]:
        if not verdicts:
            return [], self.reserve(limit, timeout, queues) if limit > 0 else []
        if self._plans(verdicts) or self._is_move_due():
            return super().exchange(verdicts, limit, timeout, queues)
        answers, leases = self._primary.exchange([self._real(one) for one in verdicts], limit, timeout, queues)
        self._forget_runs(verdicts)
        answers = self._named(verdicts, answers)
        try:
            dressed = self._dress(leases)
            if self._dropped and not dressed:  # all reserved jobs were copies, and other jobs may be ready
                dressed = self.reserve(limit, 0, queues)
        except BackendError:
            return answers, []  # the next call raises the error
        else:
            return answers, dressed

    def interrupt(self) -> None:
        self._primary.interrupt()

    def close(self) -> None:
        self._primary.close()
        self._runs.clear()

    # --- reserving ---

    def _before_reserve(self) -> None:
        if self._is_move_due():
            self._move_at = time.monotonic() + _MOVE_EVERY
            self._has_moved = False
            with contextlib.suppress(BackendError), self._calling_store():  # a worker's sidecar logs it
                self._mover.move(self.queues)
                self._has_moved = True

    @contextlib.contextmanager
    def _calling_store(self) -> Iterator[None]:
        """Call the store in the block. If the store must not be called because of an earlier error, raise this error
        again without a call. These errors are partial, because plain jobs do not need the store."""
        began = time.monotonic()
        if began < self._spared_until:
            self._failure.settled = {}
            raise self._failure.with_traceback(None)
        try:
            yield
        except BackendError as exc:
            if exc.is_of_primary:  # the store has answered
                raise
            exc.is_partial = True
            now = time.monotonic()
            if now - began > _SILENT:
                self._failure, self._spared_until = exc, now + _SPARED * (now - began)
            raise

    def _is_move_due(self) -> bool:
        return time.monotonic() >= self._move_at

    def _dress(self, leases: list[Lease]) -> list[Lease]:
        """Return the leases with the ids, memos and bodies that the caller knows. Copies of jobs are deleted, and the
        result does not have their leases."""
        self._dropped = 0
        dressed: list[Lease] = []
        failure: BackendError | None = None
        for lease in leases:
            try:
                one = self._dressed(lease)
            except BackendError as exc:
                failure = exc
                if not self._put_off(lease):
                    break
                continue
            if one is None:
                self._dropped += 1
            else:
                dressed.append(one)
        if failure is not None and not dressed:
            raise failure
        return dressed

    def _put_off(self, lease: Lease) -> bool:
        """Release a job that cannot be looked up in the store, so that other jobs run. Returns False if the primary is
        down, too."""
        self._runs.pop(lease.token, None)
        delay = min(_LONGEST_RETRY_DELAY, _RETRY_DELAY * 2.0 ** min(lease.attempt, 10))  # each reserve is an attempt
        self._has_put_off_until = max(self._has_put_off_until, time.monotonic() + delay + _LATE)
        try:
            self._primary.settle([Release(lease, delay)])
        except BackendError:
            return False
        return True

    def _dressed(self, lease: Lease) -> Lease | None:
        found = read_body(lease.body)
        if isinstance(found, Tracked):
            with self._calling_store():
                run = self._claim(lease, found.header)
            if run is None:
                self._primary.settle([Ack(lease)])
                return None
            header, note = found.header, run.note
            self._runs[lease.token] = run
            doomed, age = (header.doomed, header.age) if note is None or not note.restarted else ("", 0.0)
            memo = b"" if note is None else note.memo
            return msgspec.structs.replace(
                lease,
                id=header.id,
                body=found.body,
                doomed=doomed,
                age=lease.age + age,
                memo=memo,
                attempt=attempts(lease.attempt, note),
            )
        known = None
        if lease.attempt > 1:
            with self._calling_store():
                known = self._look_up(lease, fingerprint(found))
        if known is None:
            return lease if found is lease.body else msgspec.structs.replace(lease, body=found)
        return msgspec.structs.replace(lease, body=found, memo=known.memo, attempt=attempts(lease.attempt, known))

    def _look_up(self, lease: Lease, nonce: str) -> JobNote | None:
        """Return the note about a job that is not tracked. None: there is no note."""
        stored = self._store.note(home_of(lease.queue), job_key(lease.id))
        note = None if stored is None else decode_note(stored)
        if stored is None or note is None or note.nonce != nonce:
            return None
        note = recounted(note, lease.attempt)
        run = self._runs[lease.token] = _Run(lease, lease.id, nonce, note=note, version=stored.version)
        self._write(run, msgspec.structs.replace(note, token=lease.token))
        return note

    def _claim(self, lease: Lease, header: Header) -> _Run | None:
        """Return the run of a tracked job. None: the job must not run, because it has ended, or because the reserved
        job is a copy."""
        run = _Run(lease, header.id, header.nonce, header.once, is_tracked=True)
        mine = JobNote(header.nonce, lease.id, header.once, token=lease.token)
        for _ in range(_ATTEMPTS):
            stored = self._read(run)
            note = run.note
            if stored is not None and note is not None:
                if note.nonce == header.nonce and note.ended:
                    return None
                if note.ended and header.once and note.once == header.once:
                    return None
                if note.nonce > header.nonce:
                    return None  # a copy of an earlier job of the same id
                if note.nonce == header.nonce:
                    if note.number != lease.id and is_there(self._backend, lease.queue, note):
                        return None
                    known = recounted(note, lease.attempt)
                    if known is note and note.number == lease.id and (lease.attempt == 1 or note.token == lease.token):
                        return run
                    mine = msgspec.structs.replace(known, number=lease.id, token=lease.token)
            if self._write(run, mine):
                return run
        raise BackendError(
            f"the note about job {header.id} in the store was changed by other processes {_ATTEMPTS} times"
        )

    def _read(self, run: _Run) -> Note | None:
        stored = self._store.note(home_of(run.lease.queue), job_key(run.id))
        run.note = None if stored is None else decode_note(stored)
        run.version = "" if stored is None else stored.version
        return stored

    def _write(self, run: _Run, note: JobNote, others: Iterable[Step] = ()) -> bool:
        """If no other process has changed the note, store it."""
        home = home_of(run.lease.queue)
        steps = [put_note(home, run.id, note), *others]
        if not self._store.carry_out(steps, when=[Version(home, job_key(run.id), run.version)]):
            return False
        self._read(run)
        return True

    # --- settling ---

    def _plans(self, verdicts: Sequence[Verdict]) -> list[_Plan | None]:
        """Return the plan of each verdict. The plan of a verdict without effects is None. The list is empty if no
        verdict has effects.

        Raises ``PayloadTooLarge``, ``OptionInvalid``.
        """
        if not self._runs and all(_is_bare(verdict) for verdict in verdicts):
            return []
        plans: list[_Plan | None] = []
        ended: set[str] = set()  # tokens; the primary refuses a later verdict about the same lease
        planned: dict[str, _Run] = {}  # by token: a later verdict begins with what an earlier one of the call stores
        for verdict in verdicts:
            token = verdict.lease.token
            plan = None if token in ended else self._plan(verdict, planned.get(token))
            plans.append(plan)
            if plan is not None:
                planned[token] = plan.run
            if not isinstance(verdict, Touch):
                ended.add(token)
        return plans if any(plan is not None for plan in plans) else []

    def _plan(self, verdict: Verdict, planned: _Run | None) -> _Plan | None:
        """Return the plan of a verdict. *planned*: the run as an earlier verdict in the same call leaves it,
        if there is such a verdict about this lease."""
        run = planned or self._runs.get(verdict.lease.token)
        if run is None and _is_bare(verdict):
            return None
        after = verdict.after or _NO_AFTER
        if run is None:
            lease = verdict.lease
            run = _Run(lease, lease.id, fingerprint(lease.body))
        if isinstance(verdict, Ack):
            if not (planned or run.is_tracked or run.note is not None or after.keep > 0 or after.steps):
                return None
            if after.keep > 0:
                check_size(len(after.outcome), self._limit())
        else:
            has_detail = isinstance(verdict, Release | Bury) and after.detail
            check_size(max(len(after.memo or b""), len(after.detail or b"") if has_detail else 0), self._limit())
            if planned is None and _changed(run, verdict, after) is None and not after.steps:
                return None
        for step in after.steps:
            check_size(size_of(step), self._limit())
        once = f"{run.lease.queue}/{run.id}/{run.nonce}"
        steps = [stored_step(step, f"{once}/{at}") for at, step in enumerate(after.steps)]
        return _Plan(verdict, run, after, steps)

    def _settle_planned(self, verdicts: Sequence[Verdict], plans: Sequence[_Plan | None]) -> list[LeaseLost | None]:
        answers: list[LeaseLost | None] = [None] * len(verdicts)
        planned = [at for at, plan in enumerate(plans) if plan is not None]
        touches = self._primary.settle([Touch(self._real(verdicts[at]).lease) for at in planned])
        alive: dict[int, _Plan] = {}  # by the place of the verdict
        for at, lost in zip(planned, touches, strict=True):
            plan = plans[at]
            answers[at] = lost
            if lost is None and plan is not None:
                alive[at] = plan
        try:
            with self._calling_store():
                self._store_effects(list(alive.values()))
        except BackendError as exc:
            exc.settled = self._settle_without_store(verdicts, plans)
            raise
        sent = []
        for at, (verdict, plan) in enumerate(zip(verdicts, plans, strict=True)):
            if plan is None or (at in alive and not (isinstance(verdict, Touch) or _is_foreign(plan))):
                sent.append(at)
        for at, lost in zip(sent, self._primary.settle([self._real(verdicts[at]) for at in sent]), strict=True):
            plan = plans[at]
            if plan is None or not (isinstance(plan.verdict, Ack) and plan.run.is_tracked):
                answers[at] = lost  # a tracked job has ended if its note says this
        for at in planned:
            plan = plans[at]
            if plan is not None and plan.is_lost:
                answers[at] = LeaseLost(verdicts[at].lease.queue, verdicts[at].lease.id)
        self._after_settle(list(alive.values()))
        self._forget_runs(verdicts)
        return self._named(verdicts, answers)

    def _settle_without_store(
        self, verdicts: Sequence[Verdict], plans: Sequence[_Plan | None]
    ) -> dict[str, LeaseLost | None]:
        """Settle the verdicts without effects first, so that they do not wait for the store. Returns ``settled``."""
        waiting = {plan.run.lease.token for plan in plans if plan is not None}
        bare = [one for one in verdicts if one.lease.token not in waiting and not isinstance(one, Touch)]
        if not bare:
            return {}
        answers = self._named(bare, self._primary.settle([self._real(verdict) for verdict in bare]))
        for verdict in bare:
            self._runs.pop(verdict.lease.token, None)
        settled: dict[str, LeaseLost | None] = {}
        for verdict, lost in zip(bare, answers, strict=True):
            settled.setdefault(verdict.lease.token, lost)  # a second verdict on a lease is refused
        return settled

    def _store_effects(self, plans: Sequence[_Plan]) -> None:
        """Store the effects of verdicts in their order. Effects in the same home are stored together, in one step."""
        together: list[tuple[_Plan, list[Step]]] = []
        size = count = 0
        for plan in plans:
            if any(plan.run is before.run for before, _ in together):
                self._store_together(together)
                together, size, count = [], 0, 0
            steps = self._effects(plan)
            own = sum(map(size_of, steps))
            is_full = count + len(steps) > MAX_STEPS or size + own > _BYTES_AT_ONCE
            if together and (is_full or together[0][0].home != plan.home):
                self._store_together(together)
                together, size, count = [], 0, 0
            if steps:
                together.append((plan, steps))
                size, count = size + own, count + len(steps)
        if together:
            self._store_together(together)

    def _store_together(self, together: list[tuple[_Plan, list[Step]]]) -> None:
        conditions = [
            Version(plan.home, job_key(plan.run.id), plan.run.version)
            for plan, _ in together
            if self._note_after(plan) is not None
        ]
        steps = [step for _, own in together for step in own]
        ids = [plan.run.id for plan, _ in together]
        begins_at_home = not conditions or self._note_after(together[0][0]) is not None
        is_one = len(together) > 1 and len(set(ids)) == len(ids) and begins_at_home
        if is_one and self._store.carry_out(steps, when=conditions):
            for plan, _ in together:
                self._is_now_stored(plan)
            return
        for plan, _ in together:
            self._store_one(plan)

    def _store_one(self, plan: _Plan) -> None:
        run, token = plan.run, plan.run.lease.token
        for _ in range(_ATTEMPTS):
            steps = self._effects(plan)  # with the data of an earlier verdict about the same lease
            note = self._note_after(plan)
            if note is None:
                self._carry_out_all(plan, steps, [])
                plan.is_stored = True
                return
            if self._carry_out_all(plan, steps, [Version(plan.home, job_key(run.id), run.version)]):
                self._is_now_stored(plan)
                return
            self._read(run)
            if run.note is not None and not run.is_tracked and run.lease.attempt == 1 and run.note.token != token:
                run.note = None  # about an earlier job with this number that the primary has lost
            if run.note is not None and run.note.nonce == run.nonce and run.note.ended:
                plan.is_lost = run.note.token != token  # equal: the reply of an earlier attempt was lost
                plan.is_stored = not plan.is_lost
                return
            if self._primary.settle([Touch(run.lease)])[0] is not None:
                plan.is_lost = True
                return
        raise BackendError(f"the note about job {run.id} in the store was changed by other processes {_ATTEMPTS} times")

    def _carry_out_all(self, plan: _Plan, steps: list[Step], when: list[Version]) -> bool:
        """Carry out the steps of a verdict together with the steps of the pair. Together, there may be a few more steps
        than one call takes.

        The steps that exceed the limit are carried out first. If the process dies after these steps, the job runs
        again, because its note does not say that it has ended.
        """
        own, excess = len(steps) - len(plan.steps), len(steps) - MAX_STEPS
        if excess > 0:
            self._store.carry_out(plan.steps[:excess])
            steps = [*steps[:own], *plan.steps[excess:]]
        return self._store.carry_out(steps, when=when)

    def _effects(self, plan: _Plan) -> list[Step]:
        """Return the steps that carry out a verdict in the store."""
        verdict, run = plan.verdict, plan.run
        steps: list[Step] = []
        note = self._note_after(plan)
        if note is not None:
            steps.append(put_note(plan.home, run.id, note))
        if isinstance(verdict, Ack) and plan.after.keep > 0:
            steps += keep_steps(run.lease.queue, run.id, attempts(run.lease.attempt, run.note), plan.after)
        return [*steps, *plan.steps]

    def _note_after(self, plan: _Plan) -> JobNote | None:
        """Return the note about the job after the verdict. None: the verdict does not change the note."""
        run, verdict = plan.run, plan.verdict
        if isinstance(verdict, Ack):
            if not run.is_tracked:
                return None  # the note is dropped after the ack
            return JobNote(run.nonce, "", run.once, ended=True, token=run.lease.token)
        changed = _changed(run, verdict, plan.after)
        if changed is None and run.is_tracked and plan.steps:
            return run.note or JobNote(run.nonce, run.lease.id, run.once, token=run.lease.token)
        return changed

    def _is_now_stored(self, plan: _Plan) -> None:
        plan.is_stored = True
        if self._note_after(plan) is not None:
            if isinstance(plan.verdict, Ack):
                plan.run.note = self._note_after(plan)
                plan.run.version = ""
            else:
                self._read(plan.run)

    def _after_settle(self, plans: Sequence[_Plan]) -> None:
        """Drop the notes about jobs that are gone. Put the released jobs to the primary."""
        drops: list[Step] = [
            Drop(plan.home, job_key(plan.run.id))
            for plan in plans
            if isinstance(plan.verdict, Ack) and not plan.run.is_tracked and plan.run.note is not None
        ]
        kept = collections.Counter(
            plan.home for plan in plans if isinstance(plan.verdict, Ack) and plan.after.keep > 0 and plan.is_stored
        )
        queues = [queue for plan in plans if plan.is_stored for queue in moving_queues(plan.after.steps)]
        for plan in plans:
            if isinstance(plan.verdict, Touch) and plan.run.note is not None:
                self._runs[plan.run.lease.token] = plan.run
        has_moved, self._has_moved = self._has_moved, False
        with contextlib.suppress(BackendError):  # the verdicts are settled; the relay carries on
            for home, count in kept.items():
                drops += drop_expired(self._store, home, _DROPPED_PER_KEEP * count)
            for start in range(0, len(drops), MAX_STEPS):
                self._store.carry_out(drops[start : start + MAX_STEPS])
            self._mover.move(queues)
            self._has_moved = has_moved

    def _forget_runs(self, verdicts: Sequence[Verdict]) -> None:
        """Drop the runs that have ended with these verdicts."""
        if self._runs:
            for verdict in verdicts:
                if not isinstance(verdict, Touch):
                    self._runs.pop(verdict.lease.token, None)

    def _real(self, verdict: Verdict) -> Verdict:
        """Return the verdict for the primary, without effects."""
        run = self._runs.get(verdict.lease.token)
        lease = verdict.lease if run is None else run.lease
        if run is None and _is_bare(verdict):
            return verdict
        if isinstance(verdict, Ack):
            return Ack(lease)
        if isinstance(verdict, Release):
            return Release(lease, verdict.delay, verdict.priority)
        if isinstance(verdict, Bury):
            return Bury(lease)
        if isinstance(verdict, GiveBack):
            return GiveBack(lease, verdict.delay)
        return Touch(lease) if isinstance(verdict, Touch) else Abandon(lease)

    def _named(self, verdicts: Sequence[Verdict], answers: Sequence[LeaseLost | None]) -> list[LeaseLost | None]:
        """Return the answers with the ids that the caller knows."""
        return [
            None if lost is None else LeaseLost(verdict.lease.queue, verdict.lease.id)
            for verdict, lost in zip(verdicts, answers, strict=True)
        ]


def _is_bare(verdict: Verdict) -> bool:
    """Whether a verdict stores nothing in the store. Callers use this function only if the store has no data about the
    verdict's job."""
    if isinstance(verdict, Abandon):
        return verdict.reason is None
    if isinstance(verdict, Release | Bury) and verdict.reason is not None:
        return False
    return verdict.after is None


def _is_foreign(plan: _Plan) -> bool:
    """Whether the verdict must not reach the primary, because the store has refused it and the job has not ended."""
    return plan.is_lost and not (plan.run.note is not None and plan.run.note.ended)


def _changed(run: _Run, verdict: Verdict, after: After) -> JobNote | None:
    """Return the note about a job after a verdict other than an ack. None: the note does not change."""
    note = run.note
    if note is None or note.nonce != run.nonce:  # there is no note, or it is about an earlier job with the same number
        note = JobNote(run.nonce, run.lease.id, run.once)
    memo = note.memo if after.memo is None else after.memo
    detail, reason = note.detail, note.reason
    if isinstance(verdict, Release | Bury | Abandon):
        detail, reason = after.detail or b"", verdict.reason
    is_uncounted = isinstance(verdict, GiveBack) and after.is_uncounted
    changed = msgspec.structs.replace(note, memo=memo, detail=detail, reason=reason, token=run.lease.token)
    if is_uncounted:
        changed = msgspec.structs.replace(changed, uncounted=note.uncounted + 1)
    is_same = (changed.memo, changed.detail, changed.reason) == (note.memo, note.detail, note.reason)
    return None if is_same and not is_uncounted else changed
