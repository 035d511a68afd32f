"""The record of a flow: a note with the jobs and the state of the flow."""

from __future__ import annotations

import contextlib
import random
import time
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from multiq.backend import DELAY_MAX, Drop, Put, Version
from multiq.errors import FlowInvalid, FlowNotFound, PayloadInvalid, PayloadTooLarge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from multiq.backend import Backend, Note, Step

_CHANGES_MAX = 1000  # attempts to change a record that other programs change at the same time
_ROOM = 100  # bytes by which a record grows when the flow ends or is cancelled

#: the records of all flows have the same home, so that listing flows needs no queue names
HOME = "multiq.flows"

SEAL = "seal"
"""The member that arrives at the last job of a batch when all members are enqueued."""

FlowState: TypeAlias = Literal["enqueuing", "open", "finished", "cancelled"]


class Run(msgspec.Struct, array_like=True):
    """Jobs of a flow with consecutive numbers, the same queue and the same task."""

    queue: str
    task: str
    count: int


class FlowRecord(msgspec.Struct, omit_defaults=True):
    """A flow as it is stored."""

    name: str
    state: FlowState
    created: float
    """Seconds since 1970."""
    keep: float
    """Seconds for which the record is kept after the flow has finished."""
    runs: list[Run]
    """All jobs, in the order of their numbers. The first number is 0."""
    last: int = -1
    """The number of the job whose end finishes the flow."""
    catch: int = -1
    """The number of the job that runs if another job fails. -1: there is no such job."""
    finished: float | None = None
    is_batch: bool = False
    done: int = -1
    """The number of jobs that had ended when the flow was cancelled. -1: the flow was not cancelled, or one of its jobs
    cancelled it."""
    reads: list[int] = []
    """The numbers of the jobs whose outcomes are kept until the flow ends, for later jobs."""
    reads_keep: float = 0.0
    """Seconds for which these outcomes are kept after the flow has ended, if this time is longer than ``keep``."""
    ends: list[int] = []
    """The numbers of the jobs whose results are the result of a group. Empty: the flow is not a group."""

    def total(self) -> int:
        """Return the number of jobs."""
        return sum(run.count for run in self.runs)

    def queue_of(self, number: int) -> str:
        """Return the queue of a job."""
        return self._run_of(number).queue

    def task_of(self, number: int) -> str:
        """Return the name of a job's task."""
        return self._run_of(number).task

    def jobs(self, flow_id: str) -> Iterator[tuple[str, str, str]]:
        """Yield the queue, the id and the task of each job."""
        number = 0
        for run in self.runs:
            for _ in range(run.count):
                yield run.queue, job_id(flow_id, number), run.task
                number += 1

    def add(self, queue: str, task: str) -> None:
        """Add a job with the next number."""
        if self.runs and (self.runs[-1].queue, self.runs[-1].task) == (queue, task):
            self.runs[-1].count += 1
        else:
            self.runs.append(Run(queue, task, 1))

    def _run_of(self, number: int) -> Run:
        for run in self.runs:
            if number < run.count:
                return run
            number -= run.count
        raise IndexError(number)


class FlowInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A flow, as ``FlowHandle.info`` and ``Flows.list`` return it."""

    id: str
    name: str
    state: FlowState
    """``enqueuing``: the producer has not enqueued all jobs. It still works, or has died. ``open``: not all jobs are
    done.
    """
    jobs: int
    """The number of the flow's jobs, including the jobs of *then* and *catch*."""
    created: float
    """Seconds since 1970."""
    finished: float | None


def job_id(flow_id: str, number: int | str) -> str:
    """Return the id of a flow's job. *number* is a text for a job that is not in the record."""
    return f"{flow_id}.{number}"


def key_of(flow_id: str) -> str:
    """Return the key of the note with a flow's record."""
    return f"flow/{flow_id}"


def encode(record: FlowRecord) -> bytes:
    return _encoder.encode(record)


def decode(note: Note) -> FlowRecord:
    """Return the record in a note. Raises ``PayloadInvalid``."""
    try:
        return _decoder.decode(note.value)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        flow_id = note.key.removeprefix(key_of(""))
        raise PayloadInvalid(
            f"the record of flow {flow_id} cannot be read: {exc}; it was written by a newer multiq, or by another "
            f"program: to delete it, use multiq flows forget {flow_id}"
        ) from exc


def put(flow_id: str, record: FlowRecord) -> Put:
    """Return the step that stores the record. The record of a flow expires only if the flow has ended."""
    has_ended = record.state in {"finished", "cancelled"}
    return Put(HOME, key_of(flow_id), encode(record), record.keep if has_ended else None)


def check_size(backend: Backend, record: FlowRecord) -> None:
    """Raise ``PayloadTooLarge`` if the record of a flow is too large for the backend, or may be at the flow's end.

    If the verdict of the last job were refused, a worker would send it again and again.
    """
    limit = backend.capabilities.max_body
    size = len(encode(record)) + _ROOM
    if limit is not None and size > limit:
        raise PayloadTooLarge(
            size,
            limit,
            "it is the record of a flow, which grows with each change of queue or task from one job to the next: add "
            "the jobs of one queue and task together, or enqueue several flows",
        )


def ending(flow_id: str, record: FlowRecord) -> list[Put]:
    """Return the steps that store the record of a flow that ends, and let the outcomes of its jobs expire."""
    steps = [put(flow_id, record)]
    if record.reads:
        by_queue: dict[str, list[str]] = {}
        for number in record.reads:
            by_queue.setdefault(record.queue_of(number), []).append(job_id(flow_id, number))
        leftover = Leftover(by_queue, max(record.keep, record.reads_keep))
        steps.append(put_leftover(flow_id, leftover, record.finished or time.time()))
    return steps


#: The prefix of the keys of notes that outlast the verdict of the last job. After the prefix, a key has the flow's id.
_CANCELS = "cancelled/"
_CANCEL_KEPT = 86400.0  # seconds for which such a note is kept after the flow's record


def put_cancel(flow_id: str, record: FlowRecord) -> Put:
    """Return the step that keeps a flow cancelled although the verdict of its last job may replace the record.

    A worker prepares this verdict before the cancel, and stores it after the cancel. *record*: the cancelled flow.
    """
    keep = min(record.keep + _CANCEL_KEPT, DELAY_MAX)
    return Put(HOME, _cancel_key(flow_id), encode(record), keep)


def drops(flow_id: str) -> list[Drop]:
    """Return the steps that delete all that is stored about the state of a flow. The first deletes its record."""
    return [Drop(HOME, key_of(flow_id)), Drop(HOME, _cancel_key(flow_id))]


def cancels(backend: Backend) -> dict[str, FlowRecord]:
    """Return the flows that were cancelled while their last jobs may have ended, by their ids."""
    found = {}
    after: str | None = None
    while True:
        page = backend.notes(HOME, _CANCELS, after=after)
        for note in page.notes:
            with contextlib.suppress(PayloadInvalid):
                found[note.key.removeprefix(_CANCELS)] = decode(note)
        if page.after is None:
            return found
        after = page.after


def _cancel_key(flow_id: str) -> str:
    return f"{_CANCELS}{flow_id}"


class Leftover(msgspec.Struct, frozen=True):
    """The outcomes of the jobs of a flow that has ended. They are deleted later."""

    jobs: dict[str, list[str]]
    """The ids of the jobs, by queue."""
    keep: float


#: The prefix of the keys of leftovers. After the prefix, a key has the time at which the leftover is due, and then the
#: flow's id.
_LEFTOVERS = "ended/"


def put_leftover(flow_id: str, leftover: Leftover, now: float) -> Put:
    return Put(HOME, f"{_LEFTOVERS}{now + leftover.keep:017.3f}/{flow_id}", _encoder.encode(leftover))


def due_leftovers(backend: Backend, limit: int) -> list[tuple[Note, str, Leftover]]:
    """Return leftovers that are due, each with its note and the id of its flow. Raises ``BackendError``."""
    found: list[tuple[Note, str, Leftover]] = []
    after: str | None = None
    while len(found) < limit:
        page = backend.notes(HOME, _LEFTOVERS, limit=limit, after=after)
        for note in page.notes:
            due, _, flow_id = note.key.removeprefix(_LEFTOVERS).partition("/")
            try:
                if float(due) > time.time():
                    return found[:limit]
                found.append((note, flow_id, _leftover_decoder.decode(note.value)))
            except (ValueError, msgspec.DecodeError):  # another version of multiq wrote it
                continue
        if page.after is None:
            break
        after = page.after
    return found[:limit]


def read(backend: Backend, flow_id: str) -> tuple[FlowRecord, str]:
    """Return a flow's record, and the version of its note. Raises ``FlowNotFound``."""
    note = backend.note(HOME, key_of(flow_id))
    if note is None:
        raise not_found(flow_id)
    record = decode(note)
    if record.state == "finished":
        cancel = backend.note(HOME, _cancel_key(flow_id))
        if cancel is not None:
            with contextlib.suppress(PayloadInvalid):
                record = decode(cancel)
    return record, note.version


def change(backend: Backend, flow_id: str, steps_for: Callable[[FlowRecord], list[Step]]) -> None:
    """Carry out the steps that *steps_for* returns for the record. The first step must be the record's ``Put``.

    If the record has changed meanwhile, *steps_for* is called again with the new record. Raises ``FlowNotFound``,
    ``FlowInvalid``.
    """
    for attempt in range(_CHANGES_MAX):
        record, version = read(backend, flow_id)
        steps = steps_for(record)
        if not steps or backend.carry_out(steps, when=[Version(HOME, key_of(flow_id), version)]):
            return
        time.sleep(random.uniform(0, 0.001 * min(attempt, 50)))  # noqa: S311 - spreads attempts, guards nothing
    raise FlowInvalid(f"the record of flow {flow_id} changed during each of {_CHANGES_MAX} attempts: try again")


def not_found(flow_id: str) -> FlowNotFound:
    return FlowNotFound(f"there is no flow {flow_id}: it was never enqueued, or it has ended and is no longer kept")


def info(flow_id: str, record: FlowRecord) -> FlowInfo:
    return FlowInfo(
        id=flow_id,
        name=record.name,
        state=record.state,
        jobs=record.total(),
        created=record.created,
        finished=record.finished,
    )


def ended(record: FlowRecord, state: FlowState) -> FlowRecord:
    """Return the record of a flow that ends now."""
    return msgspec.structs.replace(record, state=state, finished=time.time())


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(FlowRecord)
_leftover_decoder = msgspec.json.Decoder(Leftover)
