"""The work of a worker for the job of a flow: it fetches the job's inputs, and adds steps to the job's verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from multiq.backend import Arrive, State
from multiq.errors import JobNotFound, PayloadInvalid
from multiq.outcome import decode_outcome

from . import record as records

if TYPE_CHECKING:
    from multiq.backend import Backend, Outcome, Step
    from multiq.envelope import Envelope, FlowPart

End: TypeAlias = Literal["done", "failed", "cancelled"]
"""How a run of a job ended. ``failed``: the job is buried, and may be kicked."""

NOT_NEEDED = "no job of the flow has failed"


class InputMissing(Exception):
    """The result of an earlier job is missing: the job has failed, or its result has expired."""


class InputNotYet(Exception):
    """An earlier job has no result yet: it is being deleted, or was kicked and runs again."""


def steps_after(
    flow: FlowPart, own_id: str, end: End, reason: str, record: records.FlowRecord | None
) -> tuple[Step, ...]:
    """Return the steps of the verdict that ends a run.

    - *own_id*: the job's id, which is the member that arrives.
    - *reason*: why the job failed or was cancelled.
    - *record*: the flow's record, if this job ends the flow. None: another job ends the flow, or the record is gone.
    """
    steps: list[Step] = []
    for tell in sorted(flow.tells, key=lambda tell: tell.mode != "catch"):  # the last job removes an unused catch
        if tell.mode == "catch":
            if end != "done":
                steps.append(Arrive(tell.queue, tell.id, own_id))
        elif end == "done" or tell.mode == "go":
            steps.append(Arrive(tell.queue, tell.id, own_id))
        elif end == "cancelled" or tell.mode == "stop":
            steps.append(Arrive(tell.queue, tell.id, own_id, doom=reason or "a job before it has failed"))
    if flow.ends and end != "failed" and record is not None:
        if record.catch >= 0:
            catch = records.job_id(flow.id, record.catch)
            steps.append(Arrive(record.queue_of(record.catch), catch, own_id, doom=NOT_NEEDED))
        if record.state != "cancelled":
            state: Literal["finished", "cancelled"] = "finished" if end == "done" else "cancelled"
            steps += records.ending(flow.id, records.ended(record, state))
    return tuple(steps)


def fetch(backend: Backend, envelope: Envelope, flow: FlowPart) -> None:
    """Put the results of earlier jobs into the arguments of an envelope.

    Raises ``InputMissing``, ``InputNotYet``, ``BackendError``.
    """
    for given in flow.inputs:
        if isinstance(given.where, int) and given.where >= len(envelope.args):
            raise InputMissing(f"the job has no argument {given.where}, in which its flow puts a result")
    wanted: dict[str, dict[str, None]] = {}
    for given in flow.inputs:
        for queue, own_id in given.sources:
            wanted.setdefault(queue, {})[own_id] = None
    found = _outcomes(backend, wanted)
    missing = [(queue, own_id) for queue, ids in wanted.items() for own_id in ids if (queue, own_id) not in found]
    if missing:
        if any(_has_not_ended(backend, *job) for job in missing):
            raise InputNotYet
        found = _outcomes(backend, wanted)  # the other jobs may have ended meanwhile
    for given in flow.inputs:
        values = [_value(found.get((queue, own_id)), own_id) for queue, own_id in given.sources]
        value = values if given.is_list else values[0]
        if isinstance(given.where, int):
            envelope.args[given.where] = value
        else:
            envelope.kwargs[given.where] = value


def find_record(backend: Backend, flow: FlowPart) -> records.FlowRecord | None:
    """Return the record of a flow. None: the record is gone. Raises ``PayloadInvalid``, ``BackendError``."""
    note = backend.note(records.HOME, records.key_of(flow.id))
    return None if note is None else records.decode(note)


def _outcomes(backend: Backend, wanted: dict[str, dict[str, None]]) -> dict[tuple[str, str], Outcome]:
    return {
        (queue, outcome.id): outcome
        for queue, ids in wanted.items()
        for outcome in backend.outcomes(queue, list(ids))
        if outcome is not None
    }


def _has_not_ended(backend: Backend, queue: str, own_id: str) -> bool:
    try:
        return backend.peek(queue, own_id).state is not State.BURIED
    except JobNotFound:
        return False


def _value(outcome: Outcome | None, own_id: str) -> Any:
    if outcome is None:
        raise InputMissing(
            f"this job needs the result of job {own_id}: that job is not done, or its result has expired"
        )
    try:
        decoded = decode_outcome(outcome)
    except PayloadInvalid as exc:
        raise InputMissing(str(exc)) from exc
    if decoded.kind != "done":
        return None  # that job never ran, and this job runs anyway
    if decoded.omitted is not None:
        raise InputMissing(f"this job needs the result of job {own_id}, which was not kept: {decoded.omitted}")
    return decoded.value
