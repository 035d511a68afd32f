"""Planted bugs for the soak: ``SOAK_MUTANT=name`` puts one into every process of a soak, by patching what it imports.

None of these bugs is in the library. Each mutant names the invariant that must be violated, the backends that it
applies to, and the load that makes it visible: which faults, how many late consumers. ``python tests/soak/mutants.py``
runs a soak for each, which ends as soon as its invariant is violated, and reports which mutants were caught, by which
invariant, and after how long.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pkgutil
import random
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

BACKENDS = ("sqlite", "redis", "beanstalk", "mysql")
_WITH_SIDECAR = ("sqlite", "redis", "mysql")  # on beanstalkd a lease ends with its connection
_CLASSES = {
    "sqlite": ("multiq_sqlite", "SqliteBackend", "SqliteConsumer"),
    "redis": ("multiq_redis", "RedisBackend", "RedisConsumer"),
    "beanstalk": ("multiq_beanstalk", "BeanstalkBackend", "BeanstalkConsumer"),
    "mysql": ("multiq_mysql", "MysqlBackend", "MysqlConsumer"),
}
_chance = random.Random()


@dataclass(frozen=True)
class Mutant:
    """A bug, and the invariant that must find it."""

    invariant: str
    plant: Callable[[Any, Any], None]
    """Plants the bug, given the driver's backend class and its consumer class."""
    backends: tuple[str, ...] = BACKENDS
    faults: tuple[str, ...] | None = None
    """The faults to make, if other faults would only explain the bug's effects; None: all."""
    load: dict[str, Any] = field(default_factory=dict)
    """Fields of ``multiq.soak.load.Load`` that differ from the usual load."""


def apply() -> None:
    """Plant the bug that the environment names, if it names one."""
    name = os.environ.get("SOAK_MUTANT")
    if name:
        package, backend, consumer = _CLASSES[_driver()]
        backend_class = getattr(importlib.import_module(f"{package}.backend"), backend)
        consumer_class = getattr(importlib.import_module(f"{package}.consumer"), consumer)
        MUTANTS[name].plant(backend_class, consumer_class)


def _driver() -> str:
    return os.environ["MULTIQ_URL"].split(":")[0]


def _edit(file: str, old: str, new: str) -> None:
    """Replace text in a driver's Lua or SQL file as it is read."""
    original = pkgutil.get_data

    edited = _CLASSES[_driver()][0]

    def get_data(package: str, resource: str) -> bytes | None:
        data = original(package, resource)
        if (package, resource) == (edited, file):
            assert data is not None
            return data.replace(old.encode(), new.encode())
        return data

    assert old.encode() in (original(edited, file) or b""), f"{edited}/{file} does not have {old!r} any more"
    pkgutil.get_data = get_data


def _wrap(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Replace a method by a function that gets the original method as its first argument."""

    def replace(function: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        setattr(owner, name, call)

    return replace


def _each_settle(consumer: Any, change: Callable[..., Any]) -> None:
    """Change the verdicts of settle and exchange, and the answers: ``change(self, verdicts, settle)``."""

    @_wrap(consumer, "settle")
    def _settle(original: Any, self: Any, verdicts: Any) -> Any:
        return change(self, verdicts, lambda some: original(self, some))

    @_wrap(consumer, "exchange")
    def _exchange(original: Any, self: Any, verdicts: Any, limit: int, timeout: float) -> Any:
        leases: list[Any] = []

        def settle(some: Any) -> Any:
            nonlocal leases
            lost, leases = original(self, some, limit, timeout)
            return lost

        return change(self, verdicts, settle), leases


def _leaving_out(is_left_out: Callable[[Any], bool]) -> Callable[..., Any]:
    """A change that does not send these verdicts, and answers as if they had counted."""

    def change(_self: Any, verdicts: Any, settle: Any) -> Any:
        places = [at for at, verdict in enumerate(verdicts) if not is_left_out(verdict)]
        lost = dict(zip(places, settle([verdicts[at] for at in places]), strict=True))
        return [lost.get(at) for at in range(len(verdicts))]

    return change


def _each_lease(consumer: Any, change: Callable[[Any], Any]) -> None:
    @_wrap(consumer, "reserve")
    def _reserve(original: Any, self: Any, limit: int, timeout: float) -> Any:
        return [change(lease) for lease in original(self, limit, timeout)]

    @_wrap(consumer, "exchange")
    def _exchange(original: Any, self: Any, verdicts: Any, limit: int, timeout: float) -> Any:
        lost, leases = original(self, verdicts, limit, timeout)
        return lost, [change(lease) for lease in leases]


def _each_new_job(backend: Any, change: Callable[[Any], Any]) -> None:
    @_wrap(backend, "enqueue")
    def _enqueue(original: Any, self: Any, queue: str, jobs: Any, **more: Any) -> Any:
        return original(self, queue, [change(job) for job in jobs], **more)


# --- the bugs ----------------------------------------------------------------------------------------------


def _drops_a_job(backend: Any, _consumer: Any) -> None:
    """An enqueue of several jobs stores all but the last one."""

    @_wrap(backend, "enqueue")
    def _enqueue(original: Any, self: Any, queue: str, jobs: Any, **more: Any) -> Any:
        if len(jobs) < 5:
            return original(self, queue, jobs, **more)
        return [*original(self, queue, jobs[:-1], **more), jobs[-1].id]


def _acks_for_the_dead(_backend: Any, _consumer: Any) -> None:
    """The sidecar acks jobs that a dead child had fetched and not begun, as if marks were kept by ``id()``."""
    from multiq.backend import Ack
    from multiq.worker.processes import dead_children

    dead_children._pending_verdict = lambda lease, _entry: Ack(lease)  # type: ignore[assignment]


def _acks_what_crashed(_backend: Any, _consumer: Any) -> None:
    """A job that a dead child was running counts as done, as if the exit were the job's end."""
    from multiq.backend import Ack
    from multiq.worker.processes.dead_children import Recovery

    Recovery._crashed = lambda _self, lease, _reason: (Ack(lease), lambda: None)  # type: ignore[method-assign, assignment]


def _denies_what_it_did(backend: Any, _consumer: Any) -> None:
    """An enqueue stores its jobs, and then raises the error that the store is full."""
    from multiq.errors import BackendFull

    @_wrap(backend, "enqueue")
    def _enqueue(original: Any, *args: Any, **more: Any) -> Any:
        ids = original(*args, **more)
        if _chance.random() < 0.02:
            raise BackendFull("planted")
        return ids


def _changes_a_body(backend: Any, _consumer: Any) -> None:
    def change(job: Any) -> Any:
        if _chance.random() > 0.02 or b"soak#" not in job.body:
            return job
        number = job.body.split(b"#")[1]
        return msgspec.structs.replace(job, body=job.body.replace(number, str(int(number) + 500_000_000).encode()))

    _each_new_job(backend, change)


def _believes_stale_verdicts(_backend: Any, consumer: Any) -> None:
    """A refused verdict is reported as accepted."""

    def change(_self: Any, verdicts: Any, settle: Any) -> Any:
        return [None for _ in settle(verdicts)]

    _each_settle(consumer, change)


def _forgets_answers(_backend: Any, consumer: Any) -> None:
    """An accepted verdict is reported as refused."""
    from multiq.errors import LeaseLost

    def change(_self: Any, verdicts: Any, settle: Any) -> Any:
        lost = settle(verdicts)
        return [
            LeaseLost(verdict.lease.queue, verdict.lease.id) if _chance.random() < 0.02 else error
            for verdict, error in zip(verdicts, lost, strict=True)
        ]

    _each_settle(consumer, change)


def _forgets_acks(_backend: Any, consumer: Any) -> None:
    """Some acks are never sent, and answered as if they were."""

    _each_settle(consumer, _leaving_out(lambda verdict: type(verdict).__name__ == "Ack" and _chance.random() < 0.02))


def _short_leases(backend: Any, _consumer: Any) -> None:
    """The store ends leases long before their ttr is over."""
    _each_new_job(backend, lambda job: msgspec.structs.replace(job, ttr=1.0))


def _hands_out_the_second(_backend: Any, consumer: Any) -> None:
    """A reserve of one job takes two, and gives the first one back."""
    from multiq.backend import GiveBack

    @_wrap(consumer, "reserve")
    def _reserve(original: Any, self: Any, limit: int, timeout: float) -> Any:
        if limit != 1:
            return original(self, limit, timeout)
        leases = original(self, 2, timeout)
        if len(leases) > 1:
            self.settle([GiveBack(leases[0])])
        return leases[-1:]


def _forgets_priorities(backend: Any, _consumer: Any) -> None:
    _each_new_job(backend, lambda job: msgspec.structs.replace(job, priority=1024))


def _hurries(backend: Any, _consumer: Any) -> None:
    """Delays are a second too short."""
    _each_new_job(backend, lambda job: msgspec.structs.replace(job, delay=max(0.0, job.delay - 1.0)))


def _hurries_releases(_backend: Any, consumer: Any) -> None:
    def change(_self: Any, verdicts: Any, settle: Any) -> Any:
        return settle(
            [
                msgspec.structs.replace(verdict, delay=0.0) if type(verdict).__name__ == "Release" else verdict
                for verdict in verdicts
            ]
        )

    _each_settle(consumer, change)


def _counts_no_attempts(_backend: Any, consumer: Any) -> None:
    _each_lease(consumer, lambda lease: msgspec.structs.replace(lease, attempt=1))


def _counts_too_many(_backend: Any, consumer: Any) -> None:
    _each_lease(consumer, lambda lease: msgspec.structs.replace(lease, attempt=lease.attempt + 1))


def _never_gives_up(_backend: Any, consumer: Any) -> None:
    """No attempt is marked as the last one."""
    _each_lease(consumer, lambda lease: msgspec.structs.replace(lease, attempt=min(lease.attempt, 3)))


def _gives_up_at_once(_backend: Any, _consumer: Any) -> None:
    """Each attempt is marked as the last one."""
    from multiq.retry import RetryPolicy

    @_wrap(RetryPolicy, "after_failure")
    def _after_failure(original: Any, self: Any, lease: Any, *args: Any, **more: Any) -> Any:
        return original(self, msgspec.structs.replace(lease, attempt=lease.attempt + 100), *args, **more)


def _loses_what_is_released(_backend: Any, consumer: Any) -> None:
    """Some jobs that are released are deleted."""
    from multiq.backend import Ack

    def change(_self: Any, verdicts: Any, settle: Any) -> Any:
        return settle(
            [
                Ack(verdict.lease) if type(verdict).__name__ == "Release" and _chance.random() < 0.3 else verdict
                for verdict in verdicts
            ]
        )

    _each_settle(consumer, change)


def _hurries_what_is_put_off(backend: Any, _consumer: Any) -> None:
    """A rescheduled job is due at once."""

    @_wrap(backend, "reschedule")
    def _reschedule(original: Any, self: Any, queue: str, job_id: str, _delay: float) -> Any:
        return original(self, queue, job_id, 0.0)


def _runs_again(_backend: Any, consumer: Any) -> None:
    """Some acks become releases."""
    from multiq.backend import Release

    def change(_self: Any, verdicts: Any, settle: Any) -> Any:
        return settle(
            [
                Release(verdict.lease) if type(verdict).__name__ == "Ack" and _chance.random() < 0.02 else verdict
                for verdict in verdicts
            ]
        )

    _each_settle(consumer, change)


def _miscounts(backend: Any, _consumer: Any) -> None:
    @_wrap(backend, "stats")
    def _stats(original: Any, self: Any, queue: str) -> Any:
        stats = original(self, queue)
        return msgspec.structs.replace(stats, buried=(stats.buried or 0) + 1)


def _keeps_leases(backend: Any, consumer: Any) -> None:
    """Some jobs are reserved for an hour and never settled."""
    _each_new_job(backend, lambda job: msgspec.structs.replace(job, ttr=3600.0) if _chance.random() < 0.01 else job)

    _each_settle(consumer, _leaving_out(lambda verdict: verdict.lease.ttr >= 3600))


def _is_late(backend: Any, _consumer: Any) -> None:
    """Some jobs become due an hour too late."""
    _each_new_job(
        backend, lambda job: msgspec.structs.replace(job, delay=job.delay + 3600) if _chance.random() < 0.01 else job
    )


def _raises_its_own(_backend: Any, consumer: Any) -> None:
    def change(_self: Any, verdicts: Any, settle: Any) -> Any:
        if _chance.random() < 0.02:
            raise KeyError("planted")
        return settle(verdicts)

    @_wrap(consumer, "settle")
    def _settle(original: Any, self: Any, verdicts: Any) -> Any:
        return change(self, verdicts, lambda some: original(self, some))


def _takes_its_time(_backend: Any, consumer: Any) -> None:
    @_wrap(consumer, "settle")
    def _settle(original: Any, self: Any, verdicts: Any) -> Any:
        if _chance.random() < 0.02:
            time.sleep(4)
        return original(self, verdicts)


def _believes_in_tickets(_backend: Any, _consumer: Any) -> None:
    """MySQL: after a lost reply, an ack is reported as accepted, whatever its ticket says."""
    from multiq_mysql.receipts import Ticket

    Ticket.done = lambda _self, _rows: 1  # type: ignore[method-assign, assignment]


def _ignores_tickets(_backend: Any, _consumer: Any) -> None:
    """MySQL: after a lost reply, an ack is reported as refused, whatever its ticket says."""
    from multiq_mysql.receipts import Ticket

    Ticket.done = lambda _self, _rows: None  # type: ignore[method-assign, assignment]


def _deletes_another(backend: Any, _consumer: Any) -> None:
    """A delete also deletes another job of the queue."""
    from multiq.backend import State

    @_wrap(backend, "delete")
    def _delete(original: Any, self: Any, queue: str, job_id: str) -> Any:
        page = self.jobs(queue, State.READY, limit=1)
        for info in page.jobs:
            original(self, queue, info.id)
        if not any(info.id == job_id for info in page.jobs):
            original(self, queue, job_id)


def _runs_what_it_acked(_backend: Any, consumer: Any) -> None:
    """A job is acked when it is handed out, as by a DELETE before its handler has run."""
    from multiq.backend import Ack

    settle = consumer.settle
    _each_settle(consumer, _leaving_out(lambda verdict: True))

    def acked(self: Any, leases: Any) -> Any:
        if leases:
            settle(self, [Ack(lease) for lease in leases])
        return leases

    @_wrap(consumer, "reserve")
    def _reserve(original: Any, self: Any, limit: int, timeout: float) -> Any:
        return acked(self, original(self, limit, timeout))

    @_wrap(consumer, "exchange")
    def _exchange(original: Any, self: Any, verdicts: Any, limit: int, timeout: float) -> Any:
        lost, leases = original(self, verdicts, limit, timeout)
        return lost, acked(self, leases)


def _loses_what_it_takes(_backend: Any, consumer: Any) -> None:
    """Some jobs are taken out of the store and lost on the way, as by a pop before the lease is registered."""
    from multiq.backend import Ack

    settle = consumer.settle

    def arrived(self: Any, leases: Any) -> Any:
        lost = [lease for lease in leases if _chance.random() < 0.02]
        if lost:
            settle(self, [Ack(lease) for lease in lost])
        return [lease for lease in leases if lease not in lost]

    @_wrap(consumer, "reserve")
    def _reserve(original: Any, self: Any, limit: int, timeout: float) -> Any:
        return arrived(self, original(self, limit, timeout))

    @_wrap(consumer, "exchange")
    def _exchange(original: Any, self: Any, verdicts: Any, limit: int, timeout: float) -> Any:
        lost, leases = original(self, verdicts, limit, timeout)
        return lost, arrived(self, leases)


def _hands_out_to_two(_backend: Any, consumer: Any) -> None:
    """Some leases are given back without the knowledge of the consumer that has them."""
    from multiq.backend import GiveBack

    @_wrap(consumer, "reserve")
    def _reserve(original: Any, self: Any, limit: int, timeout: float) -> Any:
        leases = original(self, limit, timeout)
        shared = [GiveBack(lease) for lease in leases if _chance.random() < 0.2]
        if shared:
            self.settle(shared)
        return leases


def _takes_of_other_queues(backend: Any, _consumer: Any) -> None:
    @_wrap(backend, "consumer")
    def _of(original: Any, self: Any, queues: Any) -> Any:
        others = [queue[:-3] + "lane" for queue in queues if queue.endswith("raw")]
        return original(self, [*queues, *others])


def _stores_twice(backend: Any, _consumer: Any) -> None:
    """An enqueue stores its jobs a second time under new ids, as a repetition with new ids would."""
    from multiq.ids import new_id

    @_wrap(backend, "enqueue")
    def _enqueue(original: Any, self: Any, queue: str, jobs: Any, **more: Any) -> Any:
        ids = original(self, queue, jobs, **more)
        if _chance.random() < 0.05:
            original(self, queue, [msgspec.structs.replace(job, id=new_id()) for job in jobs], **more)
        return ids


def _no_fence(_backend: Any, _consumer: Any) -> None:
    """A verdict counts even if another consumer has the job by now.

    (Not on beanstalkd, whose server refuses verdicts on jobs that another connection holds.)
    """
    driver = _driver()
    if driver == "redis":
        _edit("lua/include/settle.lua", "or sub(record, 42, 53) ~= sub(verdict, 1, 12) or is_over(place) then", "then")
    elif driver == "mysql":
        _edit("sql/ack.sql", "AND token = {token} ", "")
        _edit("sql/ack_with_ticket.sql", "AND token = {token} ", "")
    else:
        import multiq_sqlite.consumer

        class AnyToken:
            __hash__ = None  # type: ignore[assignment]

            def __eq__(self, _other: object) -> bool:
                return True

        held = multiq_sqlite.consumer._held
        patched: Any = lambda *args: dict.fromkeys(held(*args), AnyToken())  # noqa: E731
        multiq_sqlite.consumer._held = patched


def _releases_what_others_hold(_backend: Any, _consumer: Any) -> None:
    """Redis: a release does not check whether the job was reserved."""
    _edit(
        "lua/include/settle.lua",
        "or sub(record, 42, 53) ~= sub(verdict, 1, 12) or is_over(place) then",
        "or sub(verdict, 13, 13) ~= 'r' and (sub(record, 42, 53) ~= sub(verdict, 1, 12) or is_over(place)) then",
    )


def _promotes_twice(_backend: Any, _consumer: Any) -> None:
    """Redis: a due job becomes ready, and also stays among the due jobs."""
    _edit("lua/include/promote.lua", "redis.call('ZREMRANGEBYRANK', delayed, 0, #places - 1)", "")


def _forgets_calls(_backend: Any, _consumer: Any) -> None:
    """Redis: a call that is repeated after a lost reply is carried out again, as without call numbers."""
    old = "local function earlier_answer()"
    _edit("lua/include/once.lua", old, f"{old}\n do return nil end")


def _crashes_are_no_attempts(_backend: Any, _consumer: Any) -> None:
    """When a lease has ended, its attempt is not counted."""
    driver = _driver()
    if driver == "redis":
        old, new = "sub(record, 1, 32) .. u32(", "sub(record, 1, 28) .. u32(count_at(record, 29) - 1) .. u32("
        _edit("lua/include/promote.lua", old, new)
    elif driver == "mysql":
        _edit("sql/promote.sql", ", token = 0,", ", attempt = attempt - (state = 2), token = 0,")
    else:
        old = "crashes = crashes + (state = 2) WHERE"
        _edit("sql/moves.sql", old, old.replace(" WHERE", ", attempt = attempt - (state = 2) WHERE"))


def _clock_runs_ahead(backend: Any, _consumer: Any) -> None:
    """One of the consumers uses a clock of its own, which is ten seconds ahead."""
    if sys.argv[1:3] != ["consume", "4"]:
        return
    driver = _driver()
    if driver == "redis":
        old = "local now = clock[1] * 1000000 + clock[2]"
        _edit("lua/include/clock.lua", old, f"{old} + 10000000")
    elif driver == "mysql":
        from multiq_mysql.pool import Pool
        from multiq_mysql.statements import NOW, Sql

        Pool.now = property(lambda _self: Sql(f"({NOW} + 10000000)"))  # type: ignore[assignment]
    else:

        @_wrap(backend, "__init__")
        def _init(original: Any, self: Any, *args: Any, **more: Any) -> None:
            original(self, *args, **more)
            self._clock = lambda: time.time_ns() + 10_000_000_000


def _never_touches(_backend: Any, _consumer: Any) -> None:
    """The thread that extends leases is dead."""
    from multiq.worker.execution.fetcher import Fetcher
    from multiq.worker.processes.stuck_process_leases import StuckProcesses

    Fetcher._touch = lambda _self, _now: None  # type: ignore[method-assign, assignment]
    StuckProcesses.touch = lambda _self: None  # type: ignore[method-assign, assignment]


def _acks_into_the_void(_backend: Any, consumer: Any) -> None:
    """Verdicts that could not be sent to the server are reported as accepted."""
    from multiq.errors import BackendError

    @_wrap(consumer, "settle")
    def _settle(original: Any, self: Any, verdicts: Any) -> Any:
        try:
            return original(self, verdicts)
        except BackendError:
            return [None] * len(verdicts)


_leaked: list[bytes] = []


def _leaks(_backend: Any, consumer: Any) -> None:
    def change(_self: Any, verdicts: Any, settle: Any) -> Any:
        _leaked.append(b"x" * 200_000)
        return settle(verdicts)

    _each_settle(consumer, change)


_LATE = {"late": 0.5}
_LATE_AND_RELEASED = {"late": 0.6, "released": 0.4, "oversleep": 2.0}
_IDLE = {"late": 0.0, "pace": 0.1}  # so that plain consumers take due jobs at once
_HARMLESS = ("kill job process",)  # has no effect on plain consumers
_CALM = {"weights": {"kill": 0, "leave": 0, "hang": 0, "ahang": 0}}

MUTANTS = {
    "drops a job": Mutant("I1", _drops_a_job),
    "acks for the dead": Mutant("I1", _acks_for_the_dead, _WITH_SIDECAR),
    "acks what crashed": Mutant("I1", _acks_what_crashed, _WITH_SIDECAR),
    "deletes another": Mutant("I1", _deletes_another),
    "denies what it did": Mutant("I2", _denies_what_it_did),
    "changes a body": Mutant("I2", _changes_a_body),
    "runs what it acked": Mutant("I1", _runs_what_it_acked),
    "loses what it takes": Mutant("I1", _loses_what_it_takes),
    "loses what is released": Mutant("I1", _loses_what_is_released),
    "takes of other queues": Mutant("I2", _takes_of_other_queues),
    "forgets acks": Mutant("I3", _forgets_acks),
    "stores twice": Mutant("I3", _stores_twice),
    "acks into the void": Mutant(
        "I3", _acks_into_the_void, ("redis", "mysql"), ("swallow", "freeze server", "restart server")
    ),
    "hands out to two": Mutant("I4", _hands_out_to_two, faults=("slow down", "kill job process"), load=_LATE),
    "promotes twice": Mutant("I4", _promotes_twice, ("redis",), load=_LATE_AND_RELEASED),
    "clock runs ahead": Mutant("I4", _clock_runs_ahead, _WITH_SIDECAR, load=_LATE),
    "short leases": Mutant("I4", _short_leases, _WITH_SIDECAR, faults=_HARMLESS, load=_LATE),
    "believes stale verdicts": Mutant("I5", _believes_stale_verdicts),
    "forgets answers": Mutant("I5", _forgets_answers),
    "believes in tickets": Mutant("I3", _believes_in_tickets, ("mysql",), ("lose requests", "cut", "lose acks")),
    "ignores tickets": Mutant("I5", _ignores_tickets, ("mysql",), ("lose acks",)),
    "forgets calls": Mutant("I5", _forgets_calls, ("redis",), ("lose acks",)),
    "no fence": Mutant("I5", _no_fence, _WITH_SIDECAR, faults=_HARMLESS, load=_LATE_AND_RELEASED),
    "releases what others hold": Mutant(
        "I5", _releases_what_others_hold, ("redis",), _HARMLESS, load=_LATE_AND_RELEASED
    ),
    "hands out the second": Mutant("I6", _hands_out_the_second, faults=_HARMLESS),
    "forgets priorities": Mutant("I7", _forgets_priorities, faults=_HARMLESS),
    "hurries": Mutant("I8", _hurries),
    "hurries releases": Mutant("I8", _hurries_releases),
    "hurries what is put off": Mutant("I8", _hurries_what_is_put_off, faults=_HARMLESS, load=_IDLE),
    "counts no attempts": Mutant("I9", _counts_no_attempts),
    "counts too many": Mutant("I9", _counts_too_many, ("sqlite", "redis", "mysql")),
    "crashes are no attempts": Mutant("I9", _crashes_are_no_attempts, _WITH_SIDECAR, load=_LATE),
    "never gives up": Mutant("I10", _never_gives_up),
    "gives up at once": Mutant("I10", _gives_up_at_once, faults=("kill consumer",), load=_CALM),
    "runs again": Mutant("I11", _runs_again, faults=("kill consumer",)),
    "never touches": Mutant("I11", _never_touches, faults=("kill consumer",), load=_CALM),
    "miscounts": Mutant("I12", _miscounts),
    "keeps leases": Mutant("I13", _keeps_leases, _WITH_SIDECAR),
    "is late": Mutant("I14", _is_late),
    "raises its own": Mutant("I15", _raises_its_own),
    "takes its time": Mutant("I15", _takes_its_time),
    "leaks": Mutant("I18", _leaks, faults=("kill consumer",), load=_CALM),
}


def table(results: list[dict[str, Any]]) -> str:
    """The mutants that were caught on each backend, and after how many seconds; the last result of each counts."""
    seconds = {
        (result["mutant"], result["backend"]): f"{result['seconds']}" if result["caught"] else "**missed**"
        for result in results
    }
    lines = [f"| planted bug | found by | {' | '.join(BACKENDS)} |", "| --- | --- |" + " --- |" * len(BACKENDS)]
    for name, mutant in MUTANTS.items():
        cells = [seconds.get((name, backend), "?") if backend in mutant.backends else "-" for backend in BACKENDS]
        lines.append(f"| {name} | {mutant.invariant} | {' | '.join(cells)} |")
    return "Seconds until it was found (-: the bug cannot be there; ?: not run):\n\n" + "\n".join(lines)


def main() -> int:
    """Run a short soak for each requested mutant and backend. Returns 1 if its invariant missed one of them."""
    import argparse
    import shutil
    import tempfile
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from soak.page import renew
    from soak.run_soak import keep, soak

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("backends", nargs="*", default=["sqlite"])
    parser.add_argument("--mutant", action="append", choices=list(MUTANTS), help="default: all; may be given again")
    parser.add_argument("--seconds", type=float, default=20.0, help="of load with faults, at most (default: 20)")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--into", type=Path, help="append a line of JSON for each to this file")
    parser.add_argument("--keep", type=Path, help="keep the histories in this folder, cut down")
    parser.add_argument("--page", action="store_true", help="renew the table of docs/reliability.md, by all of --into")
    options = parser.parse_args()
    if options.page and options.into is None:
        parser.error("--page needs --into")
    missed = 0
    for name in options.mutant or MUTANTS:
        mutant = MUTANTS[name]
        for backend in options.backends:
            if backend not in mutant.backends:
                continue
            folder = Path(tempfile.mkdtemp(prefix="multiq-mutant-"))
            began = time.monotonic()
            os.environ["SOAK_MUTANT"] = name
            verdict = soak(
                backend, folder, seconds=options.seconds, seed=options.seed, faults=mutant.faults, plant="soak.planted",
                drain=15.0, until=mutant.invariant, **mutant.load,
            )  # fmt: skip
            took = time.monotonic() - began
            shutil.rmtree(folder)
            found = {each: len(violations) for each, violations in verdict.violations.items()}
            is_caught = mutant.invariant in found
            missed += not is_caught
            says = "caught" if is_caught else "MISSED"
            print(f"{name:26} {backend:10} {says} by {mutant.invariant}; red: {found}; {took:.0f} s", flush=True)
            if options.into is not None:
                line = {"mutant": name, "backend": backend, "invariant": mutant.invariant, "caught": is_caught}
                with options.into.open("a") as file:
                    file.write(json.dumps({**line, "seconds": round(took), "red": found}) + "\n")
            if options.keep is not None and is_caught:
                violations = {mutant.invariant: verdict.violations[mutant.invariant]}
                keep(dataclasses.replace(verdict, violations=violations), backend, name, options.keep)
    if options.page:
        renew("mutants", table([json.loads(line) for line in options.into.read_text().splitlines()]))
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
