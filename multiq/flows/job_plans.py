"""Plans the jobs of a flow: their ids, bodies and terms. Does no I/O."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING

import msgspec

from multiq.backend import MAX_STEPS, Arrive, Enqueue, NewJob, Terms
from multiq.envelope import END_TASK, FlowPart, Input, Tell
from multiq.errors import FlowFinished, OptionInvalid
from multiq.ids import new_id
from multiq.task import encode_builtin, places_of_results

from . import record as records
from .graph import FIRST, Node
from .record import FlowRecord, job_id
from .retention import KEPT_WHILE_OPEN
from .signature import Signature

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from multiq.app import App
    from multiq.backend import Step
    from multiq.job import JobHandle

    from .batches import Batch
    from .graph import Graph

_ADDED_AT_ONCE = MAX_STEPS - 2  # the other two are the record's ``Put`` and the arrival at the last job
_ADDING_TAKES = 60.0  # seconds; a program that takes longer than this to add members counts as dead
_BYTES_AT_ONCE = 4_000_000  # of the bodies of added members


class Planned(msgspec.Struct):
    """A job of a flow that is ready to be enqueued."""

    queue: str
    task: str
    job: NewJob

    @property
    def is_held(self) -> bool:
        """Whether the job waits for other jobs. A job that only has limits can run at once."""
        return self.job.terms is not None and self.job.terms.awaits > 0


def calls_of(flow: Graph) -> list[Signature]:
    """Return the calls of a graph in the order of their numbers, and then the graph's *catch*."""
    return [*(node.signature for node in flow.nodes), *([] if flow.catch is None else [flow.catch])]


def plan_graph(flow: Graph, app: App, flow_id: str, calls: Sequence[Signature]) -> tuple[list[Planned], FlowRecord]:
    """Return the jobs of a graph in the order of their numbers, and the flow's record.

    *calls*: the calls that ``calls_of`` returned. Their options may have changed since then.
    """
    record = FlowRecord(flow.name, "enqueuing", time.time(), flow.keep, [])
    followers: dict[Node, list[tuple[Node, str]]] = {node: [] for node in flow.nodes}
    for node in flow.nodes:
        for earlier, mode in node.after.items():
            followers[earlier].append((node, mode))
    exits = [node for node in flow.nodes if not followers[node]]
    count = len(flow.nodes)
    end = exits[0].index if len(exits) == 1 else count
    end_queue = calls[exits[0].index].options.queue
    catch_number = max(end + 1, count) if flow.catch is not None else -1
    shared: list[Tell] = []
    if flow.catch is not None:
        shared.append(Tell(calls[-1].options.queue, job_id(flow_id, catch_number), "catch"))
    planned = []
    for node in flow.nodes:
        tells = [
            Tell(calls[later.index].options.queue, job_id(flow_id, later.index), mode)  # type: ignore[arg-type]
            for later, mode in followers[node]
        ]
        if not tells and node.index != end:
            tells.append(Tell(end_queue, job_id(flow_id, end)))
        signature, inputs = calls[node.index], _inputs(node, flow_id, calls)
        if node.is_given_flow_id:
            signature, inputs = _with_flow_id(signature, flow_id), [_moved(given) for given in inputs]
        part = FlowPart(flow_id, tells + shared, inputs, ends=node.index == end)
        keep = KEPT_WHILE_OPEN if node.is_read else flow.keep if node.index == end else 0.0
        planned.append(_plan_call(signature, job_id(flow_id, node.index), part, len(node.after), keep))
    if end == count:
        planned.append(_plan_end(app, flow_id, end, end_queue, len(exits)))
    if flow.catch is not None:
        planned.append(plan_catch(calls[-1], flow_id, catch_number))
    for plan in planned:
        record.add(plan.queue, plan.task)
    record.last, record.catch = end, catch_number
    record.ends = [node.index for node in exits if node.is_read]
    read = [node for node in flow.nodes if node.is_read]
    record.reads = [node.index for node in read]
    record.reads_keep = max((calls[node.index].options.keep for node in read), default=0.0)
    return planned, record


def _plan_call(signature: Signature, own_id: str, part: FlowPart, awaits: int = 0, keep: float = 0.0) -> Planned:
    """Return the job of a call. *keep*: the shortest time in seconds for which its outcome is kept."""
    task = signature.task
    options = msgspec.structs.replace(signature.options, keep=max(keep, signature.options.keep))
    if options.unique is not None:
        raise OptionInvalid(
            "a part of a flow must not be unique, because other jobs may wait for it: call "
            f"{task.name}.options(unique=False).s(...), and enqueue the flow itself by a unique task"
        )
    args, kwargs = list(signature.args), dict(signature.kwargs)
    if any(given.where == FIRST for given in part.inputs):
        args.insert(0, None)
        part.inputs = [_moved(given) for given in part.inputs]
    for given in part.inputs:  # the results are put into these places when the job runs
        if isinstance(given.where, int):
            args[given.where] = None
        else:
            kwargs[given.where] = None
    body = task.encode(args, kwargs, options, part)
    task.app.backend.check_terms(priority=options.priority, delay=options.delay)
    job = NewJob(body, own_id, options.priority, options.delay, options.ttr, Terms(awaits) if awaits else None)
    if options.limits:
        from multiq.limits import store_limits, with_gates
        from multiq.permit_notes import by_permits

        store_limits(task.app.backend, options.queue, options.limits)
        if gates := task.gates(args, kwargs, options, places_of_results(part)):
            job = by_permits(task.app.backend, with_gates(job, gates), task.app.settings.max_body)
    return Planned(options.queue, task.name, job)


def _moved(given: Input) -> Input:
    """Return the input with its new position, after an argument was inserted in front of the others."""
    if isinstance(given.where, str):
        return given
    return Input(0 if given.where == FIRST else given.where + 1, given.sources, given.is_list)


def plan_catch(catch: Signature, flow_id: str, number: int) -> Planned:
    return _plan_call(_with_flow_id(catch, flow_id), job_id(flow_id, number), FlowPart(flow_id), awaits=1)


def _plan_end(app: App, flow_id: str, number: int, queue: str, awaits: int) -> Planned:
    body = encode_builtin(END_TASK, FlowPart(flow_id, ends=True), max_body=app.settings.max_body)
    return Planned(queue, END_TASK, NewJob(body, job_id(flow_id, number), terms=Terms(awaits)))


def plan_last_of_batch(batch: Batch, app: App, flow_id: str, queue: str, then: Signature | None) -> Planned:
    awaits = len(batch.members) + 1  # the members, and the arrival of ``SEAL`` when all members are enqueued
    if then is None:
        return _plan_end(app, flow_id, 0, queue, awaits)
    part = FlowPart(flow_id, ends=True)
    return _plan_call(_with_flow_id(then, flow_id), job_id(flow_id, 0), part, awaits, batch.flow.keep)


def _with_flow_id(signature: Signature, flow_id: str) -> Signature:
    """Return the call. If the call lacks its first argument, the returned call has the flow's id in this place."""
    if not signature.lacks_argument():
        return signature
    return Signature(signature.task, (flow_id, *signature.args), signature.kwargs, signature.options)


def _inputs(node: Node, flow_id: str, calls: Sequence[Signature]) -> list[Input]:
    inputs = []
    for where, value in node.inputs:
        sources = value if isinstance(value, list) else [value]
        refs = [(calls[source.index].options.queue, job_id(flow_id, source.index)) for source in sources]
        inputs.append(Input(where, refs, isinstance(value, list)))
    return inputs


def plan_growth(
    calls: Sequence[Signature], flow_id: str, record: FlowRecord
) -> list[Callable[[FlowRecord], list[Step]]]:
    """Plan additional members of a batch. Raises the errors of ``Flow.enqueue``.

    Returns one function for each part of the members. Each function takes a record, and adds the members of its part to
    the record. It returns the steps that store the record, let the last job wait for the members, and enqueue the
    members. It may raise ``FlowFinished``.
    """
    tells = [Tell(record.queue_of(record.last), job_id(flow_id, record.last))]
    if record.catch >= 0:
        tells.append(Tell(record.queue_of(record.catch), job_id(flow_id, record.catch), "catch"))
    return [functools.partial(_grown, part, flow_id) for part in _in_parts(plan_members(calls, flow_id, tells))]


def plan_guard(app: App, flow_id: str, last: JobHandle) -> NewJob:
    """Return a job that does nothing. The last job of a batch can wait for this job."""
    own_id = job_id(flow_id, f"adder-{new_id()}")
    body = encode_builtin(END_TASK, FlowPart(flow_id, [Tell(last.queue, last.id)]), max_body=app.settings.max_body)
    return NewJob(body, own_id, delay=_ADDING_TAKES)


def _in_parts(planned: Sequence[Planned]) -> Iterator[Sequence[Planned]]:
    """Divide members into parts. One call of ``carry_out`` accepts one part."""
    start = size = 0
    for at, plan in enumerate(planned):
        size += len(plan.job.body)
        if at - start == _ADDED_AT_ONCE or (size > _BYTES_AT_ONCE and at > start):
            yield planned[start:at]
            start, size = at, len(plan.job.body)
    yield planned[start:]


def _grown(planned: Sequence[Planned], flow_id: str, record: FlowRecord) -> list[Step]:
    if record.state in {"finished", "cancelled"}:
        raise FlowFinished(f"flow {flow_id} is {record.state}: enqueue another batch")
    enqueues = [Enqueue(plan.queue, plan.job) for plan in numbered_members(planned, flow_id, record)]
    last = Arrive(record.queue_of(record.last), job_id(flow_id, record.last), f"add-{new_id()}", len(planned) + 1)
    return [records.put(flow_id, record), last, *enqueues]  # no member can arrive before the last job waits for it


def plan_members(calls: Sequence[Signature], flow_id: str, tells: list[Tell]) -> list[Planned]:
    """Return the jobs of members, which get their ids from ``numbered_members``."""
    return [_plan_call(call, "", FlowPart(flow_id, tells)) for call in calls]


def numbered_members(planned: Sequence[Planned], flow_id: str, record: FlowRecord) -> list[Planned]:
    """Add members to a record, and return them with their ids, in the same order.

    Members of the same queue and task get consecutive numbers, so that the record stays short.
    """
    first = record.total()
    numbered = list(planned)
    for rank, at in enumerate(sorted(range(len(planned)), key=lambda at: (planned[at].queue, planned[at].task))):
        plan = planned[at]
        record.add(plan.queue, plan.task)
        numbered[at] = Planned(
            plan.queue, plan.task, msgspec.structs.replace(plan.job, id=job_id(flow_id, first + rank))
        )
    return numbered
