"""The soak's producers and plain consumers: ``python -m multiq.soak.clients ROLE NAME`` starts a client.

A client records each call in the history before it makes the call. The client takes the URL from ``MULTIQ_URL``. A
client ends when its parent process has ended, or when the soak's folder has a file ``stop-<role>``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import multiq
from multiq.backend import Abandon, Ack, Bury, GiveBack, NewJob, Release, State, Touch
from multiq.backend.registry import open_backend
from multiq.errors import (
    EnqueuePartial,
    EnqueueUncertain,
    JobNotFound,
    JobReserved,
    LeaseLost,
    MultiqError,
    Unsupported,
)
from multiq.ids import new_id

from .history import Recorder
from .load import MARK, MAX_ATTEMPTS, MAX_CRASHES, TTR, of_this_process
from .tasks import KINDS, app

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from multiq.backend import Backend, Consumer, Lease, Verdict

_load = of_this_process()
_folder = Path(_load.folder)
_parent = os.getppid()
_OF_LANE = 3  # the most jobs in one enqueue to ``lane``, whose only consumer takes jobs one by one
_VERBS = {Ack: "ack", Release: "release", Bury: "bury", GiveBack: "give_back", Touch: "touch", Abandon: "abandon"}


class Caller:
    """Makes calls, and records each call with its arguments and its result."""

    def __init__(self, role: str, name: str) -> None:
        self.recorder = Recorder(_folder, f"{role}-{name}")
        self.chance = random.Random(f"{_load.seed} {role} {name}")  # noqa: S311 - random choices of a test
        self._role = role

    @property
    def goes_on(self) -> bool:
        return os.getppid() == _parent and not (_folder / f"stop-{self._role}").exists()

    def call(
        self, f: str, work: Callable[[], Any], *, told: Callable[[Any], dict[str, Any]] | None = None, **asked: Any
    ) -> Any:
        """Return the result of *work*. If *work* raises an error, record the error and return None.

        The fields *asked* are stored with the call in the history. *told* makes the fields of the answer from the
        result.
        """
        op = self.recorder.invoke(f, **asked)
        watch = _Stopwatch()
        try:
            result = work()
        except Exception as exc:  # noqa: BLE001 - the history records the exception
            type_, fields = _failure(exc)
            self.recorder.answer(type_, f, op, seconds=watch.seconds, **fields)  # type: ignore[arg-type]
            time.sleep(0.05)  # keeps the history small during an outage
            return None
        self.recorder.answer("ok", f, op, seconds=watch.seconds, **(told(result) if told else {}))
        return result


class _Stopwatch:
    """Measures the duration of a call. A stopwatch is made after the call's ``invoke`` was written. The stopwatch is
    read before the call's answer is written, because writing an event can wait for a busy disk."""

    def __init__(self) -> None:
        self._begin = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begin


def _failure(exc: Exception) -> tuple[str, dict[str, Any]]:
    """Return the event type and the fields for a call that has raised an error.

    The type is always ``info``, because the effect of a failed call is unknown. After a ``BackendError`` of a settle,
    it is unknown whether the server has carried out the verdicts.
    """
    fields = {"err": f"{type(exc).__name__}: {exc}"[:300], "is_typed": isinstance(exc, MultiqError)}
    return "info", fields


def produce(name: str) -> None:
    caller, start = Caller("produce", name), int(name) * 1_000_000_000
    app.connect(os.environ["MULTIQ_URL"])
    raw = open_backend(os.environ["MULTIQ_URL"])
    number = start + 1
    while caller.goes_on:
        size = caller.chance.choice([1, 1, 1, 5, 20])
        numbers = range(number, number + size)
        number += size
        which = caller.chance.random()
        if which < 0.6:
            _produce_tasks(caller, numbers)
        elif which < 0.85:
            _produce_raw(caller, raw, _load.raw, numbers)
        else:
            _produce_raw(caller, raw, _load.lane, numbers[:_OF_LANE])
        time.sleep(caller.chance.random() * 2 * _load.pace)


def _produce_tasks(caller: Caller, numbers: Sequence[int]) -> None:
    weights = [_load.weights.get(kind, usual) for kind, (_, usual) in KINDS.items()]
    kind = caller.chance.choices(list(KINDS), weights)[0]
    if kind in {"kill", "leave", "hang", "ahang", "long", "along"}:
        numbers = numbers[:1]
    task = KINDS[kind][0]
    delay = round(caller.chance.random() * 3, 2) if caller.chance.random() < 0.1 else 0.0
    digests = tuple(_digest(number) for number in numbers)
    calls = [(MARK.format(number), digest) for number, digest in zip(numbers, digests, strict=True)]
    asked = {
        "jobs": tuple(numbers), "digests": digests, "queue": _load.tasks, "delay": delay, "ttr": TTR,
        "max_attempts": MAX_ATTEMPTS, "max_crashes": MAX_CRASHES, "deadline": _load.timeout, "kind": kind,
    }  # fmt: skip
    _enqueue(caller, lambda: task.options(delay=delay).enqueue_many(calls), asked)


def _produce_raw(caller: Caller, backend: Backend, queue: str, numbers: Sequence[int]) -> None:
    priority = caller.chance.choice([100, 500, 1024]) if queue == _load.lane else 1024
    jobs = [
        NewJob(f"{MARK.format(number)} {_digest(number)}".encode(), new_id(), priority=priority, ttr=TTR)
        for number in numbers
    ]
    asked = {
        "jobs": tuple(numbers), "digests": tuple(map(_digest, numbers)), "queue": queue, "priority": priority,
        "ttr": TTR, "deadline": _load.timeout,
    }  # fmt: skip
    _enqueue(caller, lambda: backend.enqueue(queue, jobs), asked)


def _enqueue(caller: Caller, work: Callable[[], Any], asked: dict[str, Any]) -> Any:
    op = caller.recorder.invoke("enqueue", **asked)
    watch = _Stopwatch()
    try:
        result = work()
    except (EnqueueUncertain, EnqueuePartial) as exc:
        caller.recorder.answer("info", "enqueue", op, seconds=watch.seconds, err=f"{type(exc).__name__}: {exc}"[:300])
        time.sleep(0.05)
    except multiq.MultiqError as exc:  # after any other documented error, no job of the call is stored
        caller.recorder.answer("fail", "enqueue", op, seconds=watch.seconds, err=f"{type(exc).__name__}: {exc}"[:300])
        time.sleep(0.05)
    except Exception as exc:  # noqa: BLE001 - the history records the exception
        caller.recorder.answer("info", "enqueue", op, seconds=watch.seconds, err=repr(exc)[:300], is_typed=False)
    else:
        caller.recorder.answer("ok", "enqueue", op, seconds=watch.seconds)
        return result
    return None


def consume(name: str) -> None:
    """Reserve jobs of the raw queue, run them, and settle them with all kinds of verdicts. Some verdicts are late."""
    caller = Caller("consume", name)
    with open_backend(os.environ["MULTIQ_URL"]) as backend, backend.consumer([_load.raw]) as consumer:
        while caller.goes_on:
            leases = _claim(caller, consumer, _load.raw, caller.chance.choice([1, 3, 10]))
            for lease in leases:
                _run(caller, lease)
            if leases and caller.chance.random() < _load.late:
                time.sleep(TTR * caller.chance.uniform(0.8, _load.oversleep))  # some of the leases end during the sleep
            elif leases and caller.chance.random() < 0.05:
                _settle(caller, consumer, [Touch(lease) for lease in leases])
            _settle(caller, consumer, [_verdict(caller, lease) for lease in leases])


def lane(name: str) -> None:
    """Reserve jobs of the queue ``lane`` one at a time, in the order of the store. The queue ``lane`` has no other
    consumer."""
    caller = Caller("lane", name)
    with open_backend(os.environ["MULTIQ_URL"]) as backend, backend.consumer([_load.lane]) as consumer:
        while caller.goes_on:
            leases = _claim(caller, consumer, _load.lane, 1)
            for lease in leases:
                _run(caller, lease)
            _settle(caller, consumer, [Ack(lease) for lease in leases])


def _claim(caller: Caller, consumer: Consumer, queue: str, limit: int) -> list[Lease]:
    def told(leases: Sequence[Lease]) -> dict[str, Any]:
        read = [lease.body.decode().split() for lease in leases]
        return {
            "jobs": tuple(int(mark.split("#")[1]) for mark, _ in read),
            "digests": tuple(digest for _, digest in read),
            "tokens": tuple(lease.token for lease in leases),
            "attempts": tuple(lease.attempt for lease in leases),
        }

    return (
        caller.call("claim", lambda: consumer.reserve(limit, 0.5), told=told, queue=queue, deadline=_load.timeout + 0.5)
        or []
    )


def _run(caller: Caller, lease: Lease) -> None:
    number = _number(lease)
    op = caller.recorder.invoke("start", jobs=(number,), attempts=(lease.attempt,))
    caller.recorder.answer("ok", "end", op, jobs=(number,), outcome="done")


def _verdict(caller: Caller, lease: Lease) -> Verdict:
    which = caller.chance.random()
    if which < _load.released:
        return Release(lease, delay=caller.chance.choice([0.0, 0.5, 1.0]))
    if which < _load.released + 0.01:
        return Bury(lease, "the soak buries some")
    if which < _load.released + 0.03:
        return GiveBack(lease)
    return Ack(lease)


def _settle(caller: Caller, consumer: Consumer, verdicts: Sequence[Verdict]) -> None:
    """Settle several leases in one call. The history gets an ``invoke`` and an answer for each verdict."""
    if not verdicts:
        return
    ops = []
    for verdict in verdicts:
        asked = {"jobs": (_number(verdict.lease),), "tokens": (verdict.lease.token,), "deadline": _load.timeout}
        if isinstance(verdict, Release):
            asked["delay"] = verdict.delay
        ops.append((_VERBS[type(verdict)], caller.recorder.invoke(_VERBS[type(verdict)], **asked)))
    watch = _Stopwatch()
    try:
        lost: Sequence[LeaseLost | None] = consumer.settle(verdicts)
    except Exception as exc:  # noqa: BLE001 - the history records the exception
        seconds = watch.seconds
        _, fields = _failure(exc)
        for f, op in ops:
            caller.recorder.answer("info", f, op, seconds=seconds, **fields)
        time.sleep(0.05)
        return
    seconds = watch.seconds
    for (f, op), error in zip(ops, lost, strict=True):
        caller.recorder.answer("ok" if error is None else "fail", f, op, seconds=seconds)


def manage(name: str) -> None:
    """Enqueue jobs, and delete, reschedule or kick them while consumers may reserve the same jobs.

    After every tenth job, the client also kicks buried jobs.
    """
    caller = Caller("manage", name)
    number = int(name) * 1_000_000_000
    with open_backend(os.environ["MULTIQ_URL"]) as backend:
        while caller.goes_on:
            number += 1
            delay = caller.chance.choice([0.0, 0.5, 1.0])
            job = NewJob(f"{MARK.format(number)} {_digest(number)}".encode(), new_id(), delay=delay, ttr=TTR)
            asked = {
                "jobs": (number,),
                "digests": (_digest(number),),
                "queue": _load.raw,
                "delay": delay,
                "ttr": TTR,
                "deadline": _load.timeout,
            }
            ids = _enqueue(caller, functools.partial(backend.enqueue, _load.raw, [job]), asked)
            time.sleep(caller.chance.random() * 0.5)
            if ids:
                _order(caller, backend, number, ids[0])
            if number % 10 == 0:
                caller.call("kick_any", lambda: backend.kick(_load.raw, 10), deadline=_load.timeout)


def _order(caller: Caller, backend: Backend, number: int, job_id: str) -> None:
    f = caller.chance.choice(["delete", "reschedule", "kick"])
    delay = 0.5 if f == "reschedule" else 0.0
    op = caller.recorder.invoke(f, jobs=(number,), delay=delay, deadline=_load.timeout)
    watch = _Stopwatch()
    try:
        if f == "delete":
            backend.delete(_load.raw, job_id)
        elif f == "reschedule":
            backend.reschedule(_load.raw, job_id, delay)
        else:
            backend.kick_job(_load.raw, job_id)
    except (JobNotFound, JobReserved):
        caller.recorder.answer("fail", f, op, seconds=watch.seconds)
    except Exception as exc:  # noqa: BLE001 - the history records the exception
        _, fields = _failure(exc)
        caller.recorder.answer("info", f, op, seconds=watch.seconds, **fields)
    else:
        caller.recorder.answer("ok", f, op, seconds=watch.seconds)


def count(name: str) -> None:
    """Record the job counts that multiq reports for each queue, once."""
    recorder = Recorder(_folder, f"count-{name}")
    with open_backend(os.environ["MULTIQ_URL"]) as backend:
        for queue in _load.queues:
            with contextlib.suppress(Unsupported):
                backend.jobs(queue, State.READY, limit=1)  # some stores make due jobs ready only when jobs are listed
            stats = backend.stats(queue)
            for state in ("ready", "delayed", "reserved", "buried"):
                value = getattr(stats, state)
                if value is not None:
                    recorder.note("count", queue=queue, kind=state, value=float(value))


def _number(lease: Lease) -> int:
    number = _number_in(lease.body)
    assert number is not None  # noqa: S101 - every job has a number
    return number


def _number_in(body: bytes) -> int | None:
    parts = body.split(b"#")
    return int(parts[1]) if len(parts) > 2 else None


def _digest(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()[:8]


ROLES = {"produce": produce, "consume": consume, "lane": lane, "manage": manage, "count": count}


def main() -> None:
    role, name = sys.argv[1:]
    _import_client_library()
    ROLES[role](name)


def _import_client_library() -> None:
    """Make a call that is not recorded, so that the driver imports its client library now.

    A deadline does not count this import. redis-py takes 0.2 seconds, and a second or more on a busy machine.
    """
    with open_backend(os.environ["MULTIQ_URL"]) as backend, contextlib.suppress(MultiqError):
        backend.queues()


if __name__ == "__main__":
    main()
