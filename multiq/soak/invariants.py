"""The invariants that hold for every history. Each invariant is checked separately, and reports the jobs that violate
it.

An invariant reports a violation only if the violation is certain. The invariant reports nothing if a lost reply or a
fault could explain the history.

A *verdict* settles a reservation. An *order* is a delete, reschedule or kick. A *claim* is a reservation that a
consumer recorded. The *audit* lists the jobs that the store holds at the end.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .history import FAIL, INFO, OK
from .stories import NEVER, SECOND

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .history import Event
    from .stories import Claim, Fault, Run, Said, Stories, Story

_LEAST_GROWTH = 8.0  # MiB; up to this growth, a process is not reported
_LEAST_FILES = 20.0
_GRACE = 0.05 * SECOND  # a fault may be recorded at most this time after the end of the process that it has ended


@dataclass(frozen=True, slots=True)
class Violation:
    """One breach of an invariant."""

    invariant: str
    number: int | None
    """The job, if the violation is about one job."""
    text: str
    others: tuple[int, ...] = ()
    """Other jobs whose history shows the violation."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Facts about the tested system, from the soak that made the history."""

    ends_leases_with_connection: bool = False
    """Whether a lease ends with its connection, as on beanstalkd."""
    is_durable: bool = True
    """Whether a stored job survives a kill of the server."""
    one_consumer: frozenset[str] = frozenset()
    """Queues with a single consumer, which must get the jobs in the order of the queue."""
    counts_exactly: bool = True
    """Whether attempt numbers count exactly the reservations that were not given back, even after a restart of the
    server.

    beanstalkd also counts reservations that were given back, and starts from zero after a restart. On beanstalkd, an
    attempt number may therefore be too high. After a restart of beanstalkd, an attempt number may be too low.
    """
    reschedules_by_copy: bool = False
    """beanstalkd: a reschedule puts the job again, and then deletes the old job. If the reply of a reschedule is lost,
    both jobs may exist."""
    repeats_enqueues: bool = False
    """MySQL: the backend repeats an enqueue whose reply was lost. The job may have been done before its enqueue is
    repeated."""
    locks_rows: bool = False
    """MySQL: if a client is gone, its transaction locks rows until the server has rolled the transaction back."""
    waits_for_the_stopped: bool = False
    """SQLite: a stopped process may hold the lock of the file. All other processes wait for the file's lock, and their
    leases may end during the wait.
    """
    patience: float = 10.0
    """Seconds that a due job may wait for an idle worker. The patience is longer than a lease, because a lease may have
    to end first."""
    growth: float = 1.0
    """MiB that a process may grow for every 100,000 jobs."""
    slack: float = 1.0
    """Seconds that a call may take beyond its deadline."""
    slack_of_waiting: float = 2.0
    """Seconds that a waiting reserve may take beyond its deadline, because its wakeup connection may be dead."""


# --- one job at a time -------------------------------------------------------------------------------------


def nothing_lost(stories: Stories, setting: Setting) -> Iterator[Violation]:
    """I1: a stored job has run to its end, or was deleted, or is still in the store."""
    for story in stories:
        if story.is_refused or story.at_rest or not stories.audited or _has_ended(stories, setting, story):
            continue
        # if a job was handed out, it was stored, even if its enqueue had no answer
        stored_at = min([story.stored_at, *(claim.at for claim in story.claims), *(run.at for run in story.runs)])
        if stored_at == NEVER:
            continue
        if not setting.is_durable and any(f.kind == "restart" and f.until >= stored_at for f in stories.faults):
            continue
        yield Violation("I1 nothing lost", story.number, f"stored, {_ran(story)}, never ended, and not in the store")


def nothing_invented(stories: Stories, _setting: Setting) -> Iterator[Violation]:
    """I2: every job that runs was enqueued, with the same payload."""
    for event in stories.strangers:
        yield Violation(
            "I2 nothing invented",
            event.jobs[0],
            f"{event.f} of a job that was not enqueued with this payload and queue",
        )
    for story in stories:
        if story.is_refused and (story.runs or story.claims or story.at_rest):
            yield Violation(
                "I2 nothing invented", story.number, "the job exists, although each of its enqueues was refused"
            )


def one_ack(stories: Stories, setting: Setting) -> Iterator[Violation]:
    """I3: the acks of only one reservation of a job are accepted. After the accepted ack, the job is not handed out
    again, and is not in the store."""
    for story in stories:
        acked = [said for said in story.verdicts if said.f == "ack" and said.type == OK]
        if not acked:
            continue
        acks = len({said.token for said in acked})
        lives = 1 + _more_lives(stories, setting, story)
        if acks > lives:
            yield Violation("I3 one ack", story.number, f"{acks} acks of this job were accepted")
        elif acks == lives:
            last = max(acked, key=_said_at)
            if any(_began_after(story, run, last) for run in story.runs):
                yield Violation("I3 one ack", story.number, "it began after its ack had been accepted")
            elif any(_came_after(claim, last) for claim in story.claims):
                yield Violation("I3 one ack", story.number, "it was handed out after its ack had been accepted")
            elif story.at_rest:
                text = f"its ack was accepted, but the store still holds it: {', '.join(story.at_rest)}"
                yield Violation("I3 one ack", story.number, text)


def lease_exclusion(stories: Stories, setting: Setting) -> Iterator[Violation]:
    """I4: while the lease of one consumer on a job lasts, the job is not handed out to another consumer."""
    for story in stories:
        if _may_be_copied(setting, story):
            continue
        claims = sorted(story.claims, key=_asked)
        for number, first in enumerate(claims):
            for second in claims[number + 1 :]:
                if _overlap(first, second) and not _connection_may_have_ended(stories, setting, first, second.at):
                    text = f"{second.proc} has it while the lease of {first.proc} lasts"
                    yield Violation("I4 lease exclusion", story.number, text)


def fence(stories: Stories, setting: Setting) -> Iterator[Violation]:
    """I5: a verdict on the newest reservation is accepted while its lease lasts. A verdict on an older reservation is
    never accepted."""
    for story in stories:
        if _may_be_copied(setting, story):
            continue
        tokens = {claim.token: claim for claim in story.claims}
        if not _more_lives(stories, setting, story):
            yield from _refused_wrongly(stories, setting, story)
        for said in story.verdicts:
            claim = tokens.get(said.token)
            if said.type != OK or claim is None:
                continue
            newer = [other for other in story.claims if other.asked > claim.at and other.at < said.asked]
            if newer:
                text = f"{said.f} of {said.proc} was accepted, though {newer[0].proc} got the job in between"
                yield Violation("I5 fence", story.number, text)


def never_early(stories: Stories, _setting: Setting) -> Iterator[Violation]:
    """I8: no job is handed out before it is due. A release or a reschedule with a delay makes the job due later."""
    for story in stories:
        handed_out = sorted([claim.at for claim in story.claims] + [run.at for run in story.runs])
        if not handed_out:
            continue
        moved = any(order.f in {"reschedule", "kick"} and order.type != FAIL for order in story.orders)
        if not moved and handed_out[0] < story.due_at:
            early = (story.due_at - handed_out[0]) / SECOND
            yield Violation("I8 never early", story.number, f"handed out {early:.3f} s before it was due")
        for said in (*story.verdicts, *story.orders):
            if said.f not in {"release", "reschedule"} or said.type != OK or not said.delay:
                continue
            if any(order is not said and order.type != FAIL for order in story.orders):
                continue
            due_at = said.asked + said.delay * SECOND
            late = [claim.at for claim in story.claims if _came_after(claim, said)]
            if not story.claims:  # only the job's runs are known
                late = [run.at for run in story.runs if run.at > said.at]
            early_at = min(late, default=NEVER)
            if early_at < due_at:
                text = f"handed out {(due_at - early_at) / SECOND:.3f} s before its delay was over"
                yield Violation("I8 never early", story.number, text)


def attempts_exact(stories: Stories, setting: Setting) -> Iterator[Violation]:
    """I9: the attempt number is one more than the number of earlier reservations that were not given back."""
    for story in stories:
        if not story.runs and not story.claims:
            continue
        if _more_lives(stories, setting, story) or _may_begin_anew(stories, setting, story):
            continue
        if setting.counts_exactly and story.claims and len(story.claims) >= len(story.runs):
            yield from _exact_attempts(stories, story)
        else:
            yield from _counted_runs(stories, setting, story)


def retry_budget(stories: Stories, setting: Setting) -> Iterator[Violation]:
    """I10: a job fails at most ``max_attempts`` times, and is not buried earlier."""
    for story in stories:
        if not story.max_attempts or any(order.f == "kick" and order.type != FAIL for order in story.orders):
            continue
        if not _more_lives(stories, setting, story) and _is_given_up_early(stories, story):
            most = max((run.attempt for run in story.runs), default=0)
            text = f"it is buried after attempt {most}, and was allowed {story.max_attempts}"
            yield Violation("I10 retry budget", story.number, text)
        if _may_begin_anew(stories, setting, story):
            continue
        raised = sum(run.outcome == "raised" and not _may_be_given_back(stories, run) for run in story.runs)
        if raised > story.max_attempts:
            text = f"it has failed {raised} times, and was allowed to {story.max_attempts} times"
            yield Violation("I10 retry budget", story.number, text)


def explained_duplicates(stories: Stories, setting: Setting) -> Iterator[Violation]:
    """I11: a job runs again only after a failure, a release, the end of its lease or process, or a fault."""
    for story in stories:
        if len(story.runs) < 2:
            continue
        runs = sorted(story.runs, key=_run_at)
        for first, second in itertools.pairwise(runs):
            if not _is_explained(stories, setting, story, first, second):
                text = f"began in {first.proc}, and {(second.at - first.at) / SECOND:.3f} s later in {second.proc}"
                yield Violation("I11 explained duplicates", story.number, f"{text}, for no reason in the history")


# --- all jobs together -------------------------------------------------------------------------------------


def first_in_first_out(stories: Stories, setting: Setting) -> Iterator[Violation]:
    """I6: with equal priority, jobs are handed out in the order of their enqueues.

    The order of two jobs is certain if one job was stored before the enqueue of the other job began.
    """
    latest: dict[tuple[str, int], tuple[int, int]] = {}
    for claim, story in _first_claims(stories, setting.one_consumer):
        if story.delay or story.orders or len(story.claims) > 1:
            continue
        lane = (story.queue, story.priority)
        asked, number = latest.get(lane, (0, 0))
        other = stories.jobs[number].claims[0] if number else claim
        was_passed_over = story.stored_at < asked and claim.at > other.asked
        if (
            was_passed_over
            and not _may_have_been_taken(stories, setting, story)
            and not _may_have_been_locked(stories, setting, story, other)
        ):
            text = f"claimed after job {number}, whose enqueue began when this job was stored already"
            yield Violation("I6 first in, first out", story.number, text, (number,))
        if story.asked > asked:
            latest[lane] = (story.asked, story.number)


def priority_first(stories: Stories, setting: Setting) -> Iterator[Violation]:
    """I7: no job is handed out while a more urgent job of its queue is ready."""
    claims = _first_claims(stories, setting.one_consumer)
    waiting: dict[str, list[tuple[int, float, int]]] = {}
    ready = sorted(
        (story.stored_at, story.number)
        for story in stories
        if story.claims
        and not story.delay
        and story.queue in setting.one_consumer
        and not _may_have_been_taken(stories, setting, story)
    )
    place = 0
    for claim, story in claims:
        while place < len(ready) and ready[place][0] < claim.since:
            other = stories.jobs[ready[place][1]]
            heapq.heappush(waiting.setdefault(other.queue, []), (other.priority, ready[place][0], other.number))
            place += 1
        heap = waiting.get(story.queue, [])
        while heap and stories.jobs[heap[0][2]].claims[0].asked <= claim.asked:
            heapq.heappop(heap)  # the other job was claimed earlier, or in the same call
        is_less_urgent = bool(heap) and heap[0][0] < story.priority
        if is_less_urgent and not _may_have_been_locked(stories, setting, stories.jobs[heap[0][2]], claim):
            text = f"claimed with priority {story.priority} while job {heap[0][2]} with {heap[0][0]} was ready"
            yield Violation("I7 priority first", story.number, text, (heap[0][2],))


def conservation(stories: Stories, setting: Setting) -> Iterator[Violation]:
    """I12: the counts that multiq reports are the counts of the jobs in the store. I12 also requires that each job is
    in the store only once."""
    for story in stories:
        if len(story.at_rest) > 1 + _copies(setting, story):  # repeated enqueues of the same id store only one job
            yield Violation("I12 conservation", story.number, f"it is in the store {len(story.at_rest)} times")
    held: Counter[tuple[str, str]] = Counter()
    for story in stories:
        held.update({(story.queue, _counted_as(stories, state)) for state in story.at_rest})
    counted: Counter[tuple[str, str]] = Counter()
    for event in stories.notes["count"]:
        counted[event.queue, _counted_as(stories, event.kind)] += round(event.value)
    for (queue, kind), value in counted.items():
        if held[queue, kind] != value:
            text = f"queue {queue!r} holds {held[queue, kind]} {kind} jobs, and stats says {value}"
            yield Violation("I12 conservation", None, text)


def no_residue(stories: Stories, _setting: Setting) -> Iterator[Violation]:
    """I13: at the end no lease, no process and no key is left."""
    for story in stories:
        if "reserved" in story.at_rest:
            yield Violation("I13 no residue", story.number, "it is still reserved")
    for event in stories.notes["residue"]:
        yield Violation("I13 no residue", None, f"{event.kind}: {event.err or event.target}")


def liveness(stories: Stories, setting: Setting) -> Iterator[Violation]:
    """I14: after the faults, a due job does not wait too long while no job of its queue runs. The longest allowed wait
    is the setting's ``patience``."""
    healed = stories.notes["healed"]
    if not healed:
        return
    since, stopped = healed[-1].t, stories.notes["drained"]
    patience = setting.patience * SECOND
    by_queue: dict[str, list[Story]] = {}
    for story in stories:
        by_queue.setdefault(story.queue, []).append(story)
    for found in by_queue.values():  # each queue has its own consumers
        yield from _waited_in_vain(found, since, stopped[-1].t if stopped else NEVER, patience)
        if stopped:
            yield from _left_waiting(found, stopped[-1].t - patience)


def _waited_in_vain(found: Sequence[Story], since: int, stopped: float, patience: float) -> Iterator[Violation]:
    runs = sorted((run.at, run.ended_at) for story in found for run in story.runs)
    waits = [wait for story in found if not story.orders for wait in _waits(story)]
    for begin, end in _gaps(runs, since, stopped, patience):
        if not runs or runs[-1][0] < end:
            continue  # no job began after the gap, so _left_waiting judges the remaining jobs
        for story, due_at, begun_at in waits:
            if begun_at >= end and begun_at - max(due_at, begin) > patience:
                waited = (min(begun_at, end) - max(due_at, begin)) / SECOND
                text = f"waited {waited:.1f} s or more while no job of its queue ran"
                yield Violation("I14 liveness", story.number, text)
                break


def _left_waiting(found: Sequence[Story], latest: float) -> Iterator[Violation]:
    busy_at = itertools.chain.from_iterable(
        (*(run.at for run in story.runs), *(claim.at for claim in story.claims)) for story in found
    )
    if any(at > latest for at in busy_at):
        return  # the queue's consumers were busy to the end, but had too little time for all jobs
    for story in found:
        is_waiting = "ready" in story.at_rest or "delayed" in story.at_rest
        if is_waiting and _last_touched(story) < latest:
            yield Violation("I14 liveness", story.number, f"still {story.at_rest[0]} after the time for draining")


def typed(stories: Stories, setting: Setting) -> Iterator[Violation]:
    """I15: calls raise only documented errors. Calls end within their deadline plus the setting's slack."""
    for begun, answer in stories.calls:
        number = begun.jobs[0] if len(begun.jobs) == 1 else None
        if answer is None:
            continue
        if answer.err and not answer.is_typed:
            yield Violation("I15 typed", number, f"{begun.f} of {begun.proc} raised {answer.err}")
        took = answer.seconds or (answer.t - begun.t) / SECOND
        slack = setting.slack_of_waiting if begun.f == "claim" else setting.slack
        if not begun.deadline or took <= begun.deadline + slack:
            continue
        faults = stories.faults_between(begun.t, answer.t, {begun.proc})
        if not any(fault.kind == "stop" for fault in faults):
            text = f"{begun.f} of {begun.proc} took {took:.2f} s for a deadline of {begun.deadline:g} s"
            yield Violation("I15 typed", number, text)
    for event in stories.notes["untyped"]:
        yield Violation("I15 typed", None, f"{event.proc}: {event.err}")


def flat(stories: Stories, setting: Setting) -> Iterator[Violation]:
    """I18: the memory and the open files of a process do not grow with the number of jobs that it has run."""
    runs: dict[str, list[int]] = {}
    for run in sorted((run for story in stories for run in story.runs), key=_run_at):
        runs.setdefault(run.proc, []).append(run.at)
    for what, unit, least, rate in (
        ("memory", "MiB", _LEAST_GROWTH, setting.growth),
        ("files", "open files", _LEAST_FILES, 0.0),
    ):
        samples: dict[str, list[Event]] = {}
        for event in stories.notes[what]:
            samples.setdefault(event.target, []).append(event)
        for target, taken in samples.items():
            some = taken[len(taken) // 5 :]  # modules that a process loads in its first moments are not growth
            done = runs.get(target, [])
            jobs = bisect.bisect(done, some[-1].t) - bisect.bisect(done, some[0].t)
            # A single sample may come from a moment with much work, so minima are compared.
            half = max(1, len(some) // 2)
            grown = min(event.value for event in some[-half:]) - min(event.value for event in some[:half])
            if grown > max(least, rate * jobs / 100_000):
                yield Violation("I18 flat", None, f"{target} has grown by {grown:.1f} {unit} over {jobs} jobs")


INVARIANTS: dict[str, Callable[[Stories, Setting], Iterator[Violation]]] = {
    "I1": nothing_lost,
    "I2": nothing_invented,
    "I3": one_ack,
    "I4": lease_exclusion,
    "I5": fence,
    "I6": first_in_first_out,
    "I7": priority_first,
    "I8": never_early,
    "I9": attempts_exact,
    "I10": retry_budget,
    "I11": explained_duplicates,
    "I12": conservation,
    "I13": no_residue,
    "I14": liveness,
    "I15": typed,
    "I18": flat,
}
"""The invariants by name. I16 and I17 do not exist: the numbers are reserved for unique jobs and schedules."""


# --- readings ----------------------------------------------------------------------------------------------


def _counted_as(stories: Stories, state: str) -> str:
    """The state under which I12 counts a job.

    If jobs were left undone, delays may end between the count and the audit. If jobs were left undone, I12 does not
    distinguish the unfinished states.
    """
    return "unfinished" if stories.left_undone and state != "buried" else state


def _has_ended(stories: Stories, setting: Setting, story: Story) -> bool:
    if any(order.f in {"delete", "purge"} and order.type in {OK, INFO} for order in story.orders):
        return True
    acks = [said for said in story.verdicts if said.f == "ack"]
    if any(said.type in {OK, INFO} or _may_have_counted(stories, setting, said) for said in acks):
        return True
    if story.claims:
        return False  # a consumer that records claims also records verdicts, so a job that ran may have been released
    return any(run.outcome == "done" for run in story.runs)


def _may_have_counted(stories: Stories, setting: Setting, said: Said) -> bool:
    """Whether a verdict that was reported as refused may have taken effect.

    On beanstalkd, a verdict whose reply was lost is reported as refused, even if the server carried it out.
    """
    return setting.ends_leases_with_connection and any(
        True for _ in stories.faults_between(said.asked, said.at, {said.proc})
    )


def _copies(setting: Setting, story: Story) -> int:
    """The number of additional copies of the job that may exist.

    If the effect of a reschedule is unknown, the old job and the new job may both exist.
    """
    orders = (order.f == "reschedule" and order.type == INFO for order in story.orders)
    return sum(orders) if setting.reschedules_by_copy else 0


def _may_be_copied(setting: Setting, story: Story) -> bool:
    return _copies(setting, story) > 0


def _more_lives(stories: Stories, setting: Setting, story: Story) -> int:
    """How many additional times the job may be done. A job may be done again as a copy, or because its enqueue was
    repeated.

    The store forgets a job that is done. An enqueue without an answer is repeated with the same id. If the job was done
    between the two enqueues, the second enqueue stores the job once more. For each run that was done before the end of
    the last enqueue, one more run is allowed.
    """
    copies = _copies(setting, story)
    if not (story.is_repeated or setting.repeats_enqueues):
        return copies
    until = _last_effect_at(setting, story)
    done = sum(run.outcome == "done" and run.ended_at < until for run in story.runs)
    if not done or all(fault.kind == "slow" for fault in stories.faults_between(story.asked, until, set())):
        return copies
    return copies + done


def _last_effect_at(setting: Setting, story: Story) -> float:
    """The last moment at which an enqueue of the job may take effect.

    A request may still be on its way to the server after its caller has stopped waiting.
    """
    return story.stored_at if story.is_stored else story.over_at + setting.patience * SECOND


def _may_begin_anew(stories: Stories, setting: Setting, story: Story) -> bool:
    """Whether a restart of the server may have made the store count the job's attempts from the beginning."""
    if setting.counts_exactly:
        return False
    last = max([*(run.at for run in story.runs), *(claim.at for claim in story.claims)], default=story.asked)
    return any(fault.kind == "restart" for fault in stories.faults_between(story.asked, last, set()))


def _is_given_up_early(stories: Stories, story: Story) -> bool:
    """Whether the job was buried too early. A burial may be explained by failures, or by attempts that a fault has used
    up."""
    if "buried" not in story.at_rest or story.verdicts or not stories.audited:
        return False
    if max((run.attempt for run in story.runs), default=0) >= story.max_attempts:
        return False
    last = max((run.at for run in story.runs), default=story.asked)
    # a fault may end a reservation, and use up its attempt, in a process that has not begun the job yet
    return not _were_workers_hurt(stories, last, NEVER)


def _were_workers_hurt(stories: Stories, begin: float, end: float) -> bool:
    return any(
        fault.at <= end and fault.until >= begin
        for fault in stories.faults
        if fault.target in {"store", "link"} or fault.target.startswith(("job.", "worker"))
    )


def stored_again(stories: Stories, setting: Setting) -> int:
    """How many jobs were done more than once because an enqueue was repeated after the job was done."""
    return sum(
        sum(run.outcome == "done" for run in story.runs) > 1
        and _more_lives(stories, setting, story) > _copies(setting, story)
        for story in stories
    )


def _ran(story: Story) -> str:
    return f"began {len(story.runs)} times" if story.runs else "never began"


def _came_after(claim: Claim, said: Said) -> bool:
    """Whether a job was certainly handed out after a verdict or an order had taken effect.

    A consumer that was stopped for longer than a lease may record a lease only after that lease has ended.
    """
    return claim.at > said.at and claim.since + claim.ttr > said.asked


def _began_after(story: Story, run: Run, said: Said) -> bool:
    lease = story.lease_of(run)
    if lease is None or lease.token == said.token:
        return run.at > said.at
    # a consumer that does not check the time runs jobs whose leases have ended
    return run.at > said.at and lease.since + lease.ttr > min(said.asked, run.at)


def _said_at(said: Said) -> float:
    return said.at


def _asked(claim: Claim) -> int:
    return claim.asked


def _run_at(run: Run) -> int:
    return run.at


def _overlap(first: Claim, second: Claim) -> bool:
    """Whether the second lease certainly began before the first lease could end."""
    if second.asked < first.at:  # the order of the two events is unknown
        return False
    return second.at < min(first.extended + first.ttr, first.over)


def _connection_may_have_ended(stories: Stories, setting: Setting, claim: Claim, until: float) -> bool:
    kinds = {"kill", "cut", "restart", "freeze"} if setting.ends_leases_with_connection else {"restart", "kill"}
    return any(fault.kind in kinds for fault in stories.faults_between(claim.asked, until, {claim.proc}))


def _refused_wrongly(stories: Stories, setting: Setting, story: Story) -> Iterator[Violation]:
    """The verdicts that were refused although their lease lasted. A worker would report a job with a refused verdict as
    lost."""
    for claim in story.claims:
        said = next((said for said in story.verdicts if said.token == claim.token), None)
        if said is None or said.type != FAIL or said.at >= claim.extended + claim.ttr:
            continue
        if not _connection_may_have_ended(stories, setting, claim, said.at):
            text = f"{said.f} of {said.proc} was refused, though its lease lasted"
            yield Violation("I5 fence", story.number, text)


def _exact_attempts(stories: Stories, story: Story) -> Iterator[Violation]:
    given_back = {said.token for said in story.verdicts if said.f == "give_back" and said.type != FAIL}
    claims = sorted(story.claims, key=_asked)
    if any(second.asked < first.at for first, second in itertools.pairwise(claims)):
        return  # two claims overlap, so their order is unknown
    kicked = any(order.f in {"kick", "reschedule"} and order.type != FAIL for order in story.orders)
    for number, claim in enumerate(claims):
        before = sum(other.token not in given_back for other in claims[:number])
        lost = any(True for _ in stories.faults_between(story.asked, claim.at, {other.proc for other in claims}))
        if claim.attempt and claim.attempt != before + 1 and not (kicked or (lost and claim.attempt > before)):
            text = f"attempt {claim.attempt} after {before} counted reservations"
            yield Violation("I9 attempts exact", story.number, text)


def _counted_runs(stories: Stories, setting: Setting, story: Story) -> Iterator[Violation]:
    """Check I9 for a job if only its runs are known.

    Each run counts, except a run that a worker gave back during a fault or at the worker's end.
    """
    counted: list[Run] = []  # runs that certainly count
    last = len(story.runs) - 1
    for place, run in enumerate(sorted(story.runs, key=_run_at)):
        least = sum(not _may_have_begun_late(stories, setting, story, run, other) for other in counted)
        moved = any(order.f == "reschedule" and order.type != FAIL for order in story.orders)
        is_too_low = run.attempt <= least and not moved
        is_too_high = run.attempt > place + 1 and setting.counts_exactly and not story.orders
        # a reservation may have ended in a process that had not begun the job yet
        is_too_high = is_too_high and not _were_workers_hurt(stories, story.asked, run.at)
        if run.attempt and (is_too_low or is_too_high):
            text = f"handed out as attempt {run.attempt} after {least if is_too_low else place} counted runs"
            yield Violation("I9 attempts exact", story.number, text)
        if place == last:  # most jobs have one run
            return
        hurt = any(True for _ in stories.faults_between(run.at, run.ended_at, {run.proc}))
        if not (_may_be_given_back(stories, run) if run.ended_at < NEVER else hurt):
            counted.append(run)


def _may_have_begun_late(stories: Stories, setting: Setting, story: Story, run: Run, other: Run) -> bool:
    """Whether the job may have been handed out for *run* before it was handed out for *other*, although *run* began
    later.

    A fault may delay the beginning of a run until the run's lease has ended.
    """
    since = run.at - (story.ttr or setting.patience) * SECOND
    return run.attempt < other.attempt and any(True for _ in stories.faults_between(since, run.at, {run.proc}))


def _may_be_given_back(stories: Stories, run: Run) -> bool:
    """Whether the count may lack a run, because the run's process was killed before it reported the end of the run.

    The kill may come up to a second after the run's end.
    """
    faults = stories.faults_between(run.at, run.ended_at + SECOND, {run.proc})
    return any(fault.kind == "kill" and fault.target == run.proc for fault in faults)


def _is_explained(stories: Stories, setting: Setting, story: Story, first: Run, second: Run) -> bool:
    if first.outcome == "raised" and first.ended_at <= second.at:
        return True
    is_stored_again = first.outcome == "done" and first.ended_at < _last_effect_at(setting, story)
    if is_stored_again and _more_lives(stories, setting, story):
        return True
    lease, own = story.lease_of(first), story.lease_of(second)
    is_over = lease is not None and lease.extended + lease.ttr <= second.at  # the first lease had ended
    # or the second consumer claimed the job before *first* began, was stopped, and ran the job after its own lease
    is_stale = own is not None and own.since < first.at and own.since + own.ttr <= second.at
    since = first.at - (story.ttr or setting.patience) * SECOND if lease is None else lease.since
    if is_over or is_stale or _were_all_stopped(stories, setting, since, second.at):
        return True
    if _is_put_back(stories, story, first, second, since):
        return True
    ends_by_time_only = lease is not None and not setting.ends_leases_with_connection
    end = min(second.at, first.ended_at + setting.patience * SECOND) + _GRACE
    faults = stories.faults_between(since, end, {first.proc, second.proc})
    return any(_explains(fault, first, ends_by_time_only=ends_by_time_only) for fault in faults)


def _were_all_stopped(stories: Stories, setting: Setting, begin: float, end: float) -> bool:
    stops = (fault for fault in stories.faults if fault.kind == "stop")
    return setting.waits_for_the_stopped and any(stop.at <= end and stop.until >= begin for stop in stops)


def _explains(fault: Fault, first: Run, *, ends_by_time_only: bool) -> bool:
    """Whether a fault may have taken a job from the process that had it."""
    if ends_by_time_only:
        return fault.kind == "restart"
    if fault.kind == "kill":
        return fault.target == first.proc and fault.until >= first.at
    return fault.target in {"store", "link", first.proc} or fault.kind == "stop"


def _is_put_back(stories: Stories, story: Story, first: Run, second: Run, since: float) -> bool:
    """Whether a verdict or an order put the job back between the two runs."""
    for order in story.orders:
        is_effective = order.f in {"kick", "reschedule"} and order.type != FAIL and order.asked <= second.at
        if is_effective and (order.type == INFO or order.at >= since):  # an unanswered order may still be on its way
            return True
    for said in story.verdicts:
        if not first.at <= said.asked <= second.at:
            continue
        if said.f in VERDICTS_THAT_RETURN or (said.f == "bury" and _is_kicked(stories, said.asked, second.at)):
            return True
    return False


def _is_kicked(stories: Stories, after: float, before: float) -> bool:
    """Whether buried jobs were kicked between *after* and *before*."""
    return any(
        begun.t <= before and (answer is None or answer.type != OK or answer.t >= after)
        for begun, answer in stories.calls
        if begun.f == "kick_any"
    )


VERDICTS_THAT_RETURN = frozenset({"release", "give_back", "abandon"})


def _first_claims(stories: Stories, queues: frozenset[str]) -> list[tuple[Claim, Story]]:
    found = [
        (story.claims[0], story, number)
        for number, story in enumerate(stories)
        if story.claims and story.queue in queues
    ]
    found.sort(key=lambda one: (one[0].asked, one[0].at, one[2]))
    return [(claim, story) for claim, story, _ in found]


def _may_have_been_taken(stories: Stories, setting: Setting, story: Story) -> bool:
    """Whether an earlier claim may have taken this job before its first known claim. The reply of the earlier claim was
    lost."""
    claim = story.claims[0]
    if claim.attempt <= 1 and setting.counts_exactly:
        return False
    kinds = {fault.kind for fault in stories.faults_between(story.asked, claim.at, {claim.proc})}
    return bool(kinds) and (claim.attempt > 1 or (not setting.counts_exactly and "restart" in kinds))


def _may_have_been_locked(stories: Stories, setting: Setting, story: Story, claim: Claim) -> bool:
    """Whether a lost client's transaction may have locked this job, so that a claim did not see the job.

    A restarted server locks the rows of unfinished transactions again. The server rolls unfinished transactions back in
    the background, while it already serves clients. InnoDB rolls back in the background, and MariaDB logs "Starting in
    background the rollback of recovered transactions".
    """
    faults = stories.faults_between(story.stored_at, claim.at, set())
    return setting.locks_rows and any(fault.kind in {"freeze", "restart"} for fault in faults)


def _gaps(runs: Sequence[tuple[int, float]], begin: int, end: float, shortest: float) -> Iterator[tuple[float, float]]:
    """Periods after *begin* in which no job ran. Each period is longer than *shortest* nanoseconds."""
    free_from: float = begin
    for at, ended_at in runs:
        if at - free_from > shortest:
            yield free_from, at
        free_from = max(free_from, at if ended_at == NEVER else ended_at)
    if end is not NEVER and end - free_from > shortest:
        yield free_from, end


def _waits(story: Story) -> Iterator[tuple[Story, float, float]]:
    """The job's first wait, and its wait after each release. A wait lasts from the due time of the job until the job
    begins."""
    starts = sorted(run.at for run in story.runs)
    if story.is_stored:
        yield story, max(story.due_at, story.stored_at), starts[0] if starts else NEVER
    for said in story.verdicts:
        if said.f == "release" and said.type == OK:
            due_at = said.at + said.delay * SECOND
            yield story, due_at, next((at for at in starts if at > said.asked), NEVER)


def _last_touched(story: Story) -> float:
    """The last moment at which something happened to the job: a run, a lease, a verdict, an order or the end of a
    delay.
    """
    moments = [story.due_at, story.over_at]
    moments += [run.at if run.ended_at == NEVER else run.ended_at for run in story.runs]
    moments += [claim.extended + claim.ttr for claim in story.claims]
    moments += [said.asked + said.delay * SECOND for said in (*story.verdicts, *story.orders)]
    return max(moments)
