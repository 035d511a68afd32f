"""The inputs of a flow's job: results of earlier jobs, which a worker puts into the job's arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from multiq.backend import State
from multiq.errors import JobNotFound, PayloadInvalid
from multiq.outcome import decode_outcome

if TYPE_CHECKING:
    from multiq.backend import Backend, Outcome
    from multiq.envelope import Envelope, FlowPart


class InputMissing(Exception):
    """The result of an earlier job is missing: the job has failed, or its result has expired."""


class InputNotYet(Exception):
    """An earlier job has no result yet: it is being deleted, or was kicked and runs again."""


def fetch_inputs(backend: Backend, envelope: Envelope, flow: FlowPart) -> None:
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
