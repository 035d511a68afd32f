"""F-20: a process that dies at any of its calls, and a server that restarts, lose no job and run no follow-up twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from servers.beanstalk import BeanstalkServer

from multiq.backend import Ack, After, Arrive, Enqueue, NewJob, State, Terms
from multiq.backend.memory import MemoryBackend
from multiq.backend.paired.backend import paired_class
from multiq.backend.paired.layout import MOVE_TTR
from multiq.backend.registry import load_driver, open_backend
from multiq.driverkit.clock import ManualClock
from multiq.settings.url import with_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from multiq.backend import Backend, Lease
    from multiq.backend.paired.backend import Paired

QUEUE = "steps"
KEEP = 1000.0
FOLLOWERS = ("held", "new")


class Death(BaseException):
    """The error that simulates the death of a process."""


class Fate:
    """Lets a process die at its call number *at*, before or after the call is carried out."""

    def __init__(self, at: int, *, is_done: bool) -> None:
        self._left = at
        self._is_done = is_done
        self.has_died = False

    def call(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if self.has_died:
            raise Death
        self._left -= 1
        if self._left == 0 and not self._is_done:
            self.has_died = True
            raise Death
        result = method(*arguments, **options)
        if self._left == 0:
            self.has_died = True
            raise Death
        return result


class Mortal:
    """A backend or a consumer whose process may die."""

    def __init__(self, thing: Any, fate: Fate) -> None:
        self._thing = thing
        self._fate = fate

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._thing, name)
        if not callable(found) or name in {"close", "check_terms"}:
            return found
        if name == "consumer":
            return lambda queues: Mortal(found(queues), self._fate)
        return lambda *arguments, **options: self._fate.call(found, *arguments, **options)


@pytest.fixture(scope="module")
def server() -> Iterator[BeanstalkServer]:
    with BeanstalkServer() as server:
        yield server


def _pair(url: str, store: Backend, fate: Fate | None = None) -> Paired:
    primary: Any = open_backend(url)
    made = paired_class(load_driver("beanstalk"), MemoryBackend)
    return made(primary, store) if fate is None else made(Mortal(primary, fate), Mortal(store, fate))  # type: ignore[arg-type]


def _after(lease: Lease) -> After:
    """What the ack of a job stores: the first job releases a held job, and enqueues another job."""
    if lease.id in FOLLOWERS:
        return After(keep=KEEP, outcome=lease.token.encode())
    steps = (Arrive(QUEUE, "held", "first"), Enqueue(QUEUE, NewJob(b"new", "new")))
    return After(keep=KEEP, outcome=b"first", steps=steps)


def _work(pair: Backend, runs: list[str]) -> None:
    """Run jobs until none is ready."""
    with pair.consumer([QUEUE]) as consumer:
        while leases := consumer.reserve(1, 0):
            runs.append(leases[0].id)
            consumer.settle([Ack(leases[0], _after(leases[0]))])


def _enqueue(pair: Backend) -> str:
    (held, first) = pair.enqueue(QUEUE, [_held(), NewJob(b"first", "any")])
    assert held == "held"
    return first


def _held() -> NewJob:
    return NewJob(b"held", "held", terms=Terms(1))


@pytest.mark.parametrize("is_done", [False, True], ids=["before the call", "after the call"])
def test_a_process_that_dies_at_any_call_loses_no_step_and_ends_no_follow_up_twice(
    server: BeanstalkServer, is_done: bool
) -> None:
    at = 0
    while True:
        at += 1
        # Given a job that arrives at a held job and enqueues another one, and a worker that dies at one of its calls
        clock = ManualClock()
        store = MemoryBackend(clock=clock)
        with _pair(server.url, store) as pair:
            first = _enqueue(pair)
        fate, runs = Fate(at, is_done=is_done), list[str]()
        dying = _pair(server.url, store, fate)
        try:
            _work(dying, runs)
        except Death:
            pass
        finally:
            dying.close()
        with _pair(server.url, store) as pair:
            kept = pair.outcomes(QUEUE, FOLLOWERS)
            # When another process carries on, at once and after the lease of a job that was about to be put
            later: list[str] = []
            for _ in range(2):
                pair.relay([QUEUE])
                _work(pair, later)
                clock.advance(MOVE_TTR + 1)
            # Then each job has an outcome, and a follow-up whose ack was stored is not run again
            assert all(pair.outcomes(QUEUE, [first, *FOLLOWERS])), f"lost after call {at}"
            for job_id, outcome in zip(FOLLOWERS, kept, strict=True):
                assert later.count(job_id) == (outcome is None), f"{job_id} after call {at}: {runs}, then {later}"
            stats = pair.stats(QUEUE)
            assert (stats.ready, stats.delayed, stats.reserved, stats.buried, stats.held) == (0, 0, 0, 0, 0)
            assert pair.queues() == []
        if not fate.has_died:
            break
    assert at > 15, "the worker made fewer calls than this test is about"


def test_a_copy_of_a_released_job_is_not_run(server: BeanstalkServer) -> None:
    # Given a released job that is put to the server, and no note of its number, because the process died
    clock = ManualClock()
    store = MemoryBackend(clock=clock)
    with _pair(server.url, store) as pair:
        pair.enqueue(QUEUE, [_held()])
    store.carry_out([Arrive(f"+{QUEUE}", "held", "first")])
    fate = Fate(4, is_done=True)  # relay in the store, reserve, look at the note, put
    dying = _pair(server.url, store, fate)
    with pytest.raises(Death):
        dying.relay([QUEUE])
    dying.close()
    with _pair(server.url, store) as pair:
        # When it is put a second time, so that the server has two copies
        clock.advance(MOVE_TTR + 1)
        pair.relay([QUEUE])
        assert pair.primary.stats(QUEUE).ready == 2
        # Then one copy is reserved, and the other copy is deleted
        with pair.consumer([QUEUE]) as one, pair.consumer([QUEUE]) as other:
            leases = one.reserve(1, 0)
            assert [lease.id for lease in leases] == ["held"]
            assert other.reserve(1, 0) == []
            assert pair.primary.stats(QUEUE).ready == 0
            assert one.settle([Ack(leases[0])]) == [None]
        assert pair.queues() == []


def test_a_server_with_a_log_that_is_killed_loses_no_step(tmp_path: Path) -> None:
    with BeanstalkServer(binlog=True) as server:
        url = with_store(server.url, f"sqlite:///{tmp_path}/store.db")
        # Given a held job, and one that was released and put
        with open_backend(url) as pair:
            first = _enqueue(pair)
            pair.carry_out([Enqueue(QUEUE, NewJob(b"put", "put", delay=0))])
            assert pair.peek(QUEUE, "put").state is State.READY
        # When the server is killed and started again, before and after the jobs have run
        runs: list[str] = []
        server.kill()
        server.start()
        with open_backend(url) as pair:
            _work(pair, runs)
        server.kill()
        server.start()
        # Then each job has run once
        with open_backend(url) as pair:
            _work(pair, runs)
            assert sorted(runs) == sorted([first, "held", "new", "put"])
            assert all(pair.outcomes(QUEUE, [first, "held", "new"]))
