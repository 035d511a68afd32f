"""Limits by permits on real servers: over several queues, and beside beanstalkd, with workers in several processes."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import pytest
from modes import worker_of
from permits_app import (
    TTR,
    app,
    free,
    mail,
    mail_beside_another,
    one,
    own,
    rated,
    sms,
    sms_beside_another,
    ssms,
    three,
)
from processes import until
from stores import PAIRED, STORES
from worker_app import read_diary

from multiq import open_backend
from multiq.backend import Lease, Quota
from multiq.errors import Unsupported
from multiq.ids import new_id
from multiq.permit_notes import Granted, PermitBook, PermitPlace, change_quotas, states
from multiq.validation import APP_SCOPE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from multiq.backend import Backend

SERVERS = ["sqlite", PAIRED, *(pytest.param(name, marks=pytest.mark.long) for name in ("redis", "mysql"))]
STORED = ["memory", "sqlite", "redis", *(pytest.param(name, marks=pytest.mark.long) for name in ("mysql", PAIRED))]
PLACE = PermitPlace(APP_SCOPE, "api", "")
SLACK = 1e-3  # seconds: a store's clock counts in microseconds, and does not advance during a call


@pytest.fixture(params=SERVERS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with STORES[request.param](tmp_path) as url:
        app.connect(url)
        yield url
        app.close()


@pytest.fixture(params=STORED)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Backend]]:
    """Opens backends on one empty store. They are closed at the end."""
    with contextlib.ExitStack() as stack:
        url = f"memory://{new_id()}"
        if request.param != "memory":
            url = stack.enter_context(STORES[request.param](tmp_path))
        yield lambda: stack.enter_context(open_backend(url))


def lease_of(job_id: str, ttr: float = 600.0) -> Lease:
    return Lease("q", job_id, new_id(), b"", 0, ttr, 1, 0, 0, 0.0)


# --- workers ---------------------------------------------------------------------------------------------


class Line(NamedTuple):
    word: str
    number: int
    at: int


def lines(folder: Path) -> list[Line]:
    diary = folder / "diary"
    found = read_diary(diary) if diary.exists() else []
    return [Line(word.split(":")[0], number, at) for word, number, _, at in found]


def entries(folder: Path, word: str) -> list[tuple[int, int]]:
    """The numbers and the times in the diary's lines with this word."""
    return [(one.number, one.at) for one in lines(folder) if one.word == word]


def most_at_once(found: list[Line]) -> int:
    changes = sorted((one.at, 1 if one.word == "start" else -1) for one in found)
    running = most = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most


def attempts(folder: Path) -> set[str]:
    return {word for word, *_ in read_diary(folder / "diary") if word.startswith("start")}


@pytest.mark.long
def test_two_workers_share_the_slots_of_a_limit_over_two_queues(url: str, tmp_path: Path) -> None:
    # Given jobs of one limit in two queues, and jobs without limits. Two jobs run until another one runs beside them
    mail_beside_another.enqueue(50)
    sms_beside_another.enqueue(150)
    for number in range(4):
        mail.enqueue(number, 0.05)
        sms.enqueue(100 + number, 0.05)
        ssms.enqueue(200 + number, 0.05, "acme")
        free.enqueue(300 + number)
    # When two workers run them
    arguments = "queues=['mail', 'sms'], threads=4"
    with worker_of("permits_app", tmp_path, url, arguments), worker_of("permits_app", tmp_path, url, "concurrency=4"):
        until(lambda: len(entries(tmp_path, "end")) == 18)
        # Then the limit is changed without a restart
        (state,) = [one for one in app.limits.list(APP_SCOPE)[APP_SCOPE] if one.name == "both"]
        assert (state.quota.slots, state.is_pinned) == (2, False)
        app.limits.set(APP_SCOPE, "both", slots=0)
        mail.enqueue(500, 0.05)
        free.enqueue(501)
        until(lambda: any(number == 501 for number, _ in entries(tmp_path, "end")))
        assert 500 not in [number for number, _ in entries(tmp_path, "start")]
        app.limits.set(APP_SCOPE, "both", slots=2)
        until(lambda: any(number == 500 for number, _ in entries(tmp_path, "end")))
        until(lambda: all(one.running == 0 for one in app.limits.list(APP_SCOPE)[APP_SCOPE]))
    # And never more jobs have run at a time than there are slots
    limited = [one for one in lines(tmp_path) if not 300 <= one.number < 400 and one.number != 501]
    assert most_at_once(limited) == 2
    assert sum(one.word == "start" for one in limited) == 15


@pytest.mark.long
def test_a_refused_job_is_not_run_and_costs_no_attempt(url: str, tmp_path: Path) -> None:
    # Given a job whose limit is closed
    app.limits.set(APP_SCOPE, "both", slots=0)
    refused = mail.options(max_attempts=2).enqueue(1, 0.0)
    with worker_of("permits_app", tmp_path, url, "queues=['mail']") as process:
        # When a worker has reserved the job several times
        until(lambda: process.log.count("limited") >= 2)
        assert entries(tmp_path, "start") == []
        until(lambda: (refused.peek().attempt or 0) == 0)
        # Then the job runs in its first attempt after the limit is open
        app.limits.set(APP_SCOPE, "both", slots=1)
        until(lambda: entries(tmp_path, "end"))
    assert attempts(tmp_path) == {"start:1"}


def test_the_permit_of_a_killed_worker_ends_with_the_lease(url: str, tmp_path: Path) -> None:
    # Given a job that holds the only permit, and another job
    one.enqueue(1, 600.0)
    with worker_of("permits_app", tmp_path, url, "") as first:
        until(lambda: entries(tmp_path, "start"))
        one.enqueue(2, 0.0)
        with worker_of("permits_app", tmp_path, url, ""):
            # When the worker is killed
            first.kill()
            killed = time.monotonic_ns()
            # Then the other job starts, but not before the permit has ended
            until(lambda: entries(tmp_path, "end"))
    ((number, started),) = entries(tmp_path, "start")[1:]
    assert number == 2
    assert started - killed > (TTR * 2 / 3 - 1.0) * 1e9


@pytest.mark.long
def test_a_rate_over_two_workers_is_kept(url: str, tmp_path: Path) -> None:
    began = time.monotonic_ns()
    for number in range(15):
        rated.enqueue(number)
    with worker_of("permits_app", tmp_path, url, "threads=3"), worker_of("permits_app", tmp_path, url, "threads=3"):
        until(lambda: len(entries(tmp_path, "end")) == 15)
    last = max(at for _, at in entries(tmp_path, "start"))
    assert (last - began) / 1e9 >= (15 - 2) / 10


@pytest.mark.parametrize("url", [PAIRED], indirect=True)
def test_a_queues_limit_beside_beanstalkd_is_kept_by_permits(url: str, tmp_path: Path) -> None:
    assert app.backend.declared.limits_kept_by == "permits"
    for number in range(4):
        own.enqueue(number, 0.1)
    with (
        worker_of("permits_app", tmp_path, url, "threads=2"),
        worker_of("permits_app", tmp_path, url, "threads=2"),
    ):
        until(lambda: len(entries(tmp_path, "end")) == 4)
        assert [state.name for state in app.limits.list()["mail"]] == ["own"]
    assert most_at_once(lines(tmp_path)) == 1


@pytest.mark.parametrize("url", ["beanstalk"], indirect=True)
def test_beanstalkd_without_a_store_refuses_limits(url: str) -> None:
    for task, arguments in ((own, (1, 0.0)), (mail, (1, 0.0))):
        with pytest.raises(Unsupported, match="limits"):
            task.enqueue(*arguments)
    with pytest.raises(Unsupported, match="limits"):
        app.limits.list()
    with pytest.raises(Unsupported, match="limits"):
        app.limits.set(APP_SCOPE, "both", slots=1)
    assert app.queue("mail").stats().ready == 0


@pytest.mark.long
def test_workers_that_hang_or_are_killed_never_run_more_jobs_than_there_are_slots(url: str, tmp_path: Path) -> None:
    # Given eight workers and three slots
    total, choices = 400, random.Random(5)
    for number in range(total):
        three.enqueue(number)
    stops: dict[int, list[tuple[int, int]]] = {}  # by pid: when the worker was stopped or killed, and when it continued
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(worker_of("permits_app", tmp_path, url, "")) for _ in range(8)]
        until(lambda: entries(tmp_path, "start"))
        end = time.monotonic() + 40
        while time.monotonic() < end:
            # When some workers hang for longer than their leases, and some are killed and replaced
            at = choices.randrange(8)
            pid, began = running[at].process.pid, time.monotonic_ns()
            if choices.random() < 0.5:
                running[at].send(signal.SIGSTOP)
                time.sleep(2 * TTR * 1.5)
                stops.setdefault(pid, []).append((began, time.monotonic_ns()))
                running[at].send(signal.SIGCONT)
            else:
                running[at].kill()
                stops.setdefault(pid, []).append((began, NEVER))
                running[at] = stack.enter_context(worker_of("permits_app", tmp_path, url, ""))
            time.sleep(choices.random())
        # Then all jobs end
        until(lambda: len({number for number, _ in entries(tmp_path, "end")}) == total, timeout=200)
        until(lambda: all(state.running == 0 for state in app.limits.list(APP_SCOPE)[APP_SCOPE]))
    # And never more than three jobs have run at a time within their leases
    runs = live_runs(tmp_path, stops)
    assert len(runs) >= total - sum(map(len, stops.values()))
    found = [Line("start", 0, began) for began, _ in runs] + [Line("end", 0, ended) for _, ended in runs]
    assert 1 < most_at_once(found) <= 3


@pytest.mark.long
def test_eight_workers_start_no_more_jobs_in_any_window_than_the_rate_allows(url: str, tmp_path: Path) -> None:
    rate, burst, total = 10, 2, 150
    for number in range(total):
        rated.enqueue(number)
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(worker_of("permits_app", tmp_path, url, "threads=2"))
        until(lambda: len(entries(tmp_path, "end")) == total, timeout=200)
    starts = sorted(at / 1e9 for _, at in entries(tmp_path, "start"))
    for first, began in enumerate(starts):
        for count, ended in enumerate(starts[first:], start=1):
            # a permit is given within a second after the look at the clock
            assert count <= burst + rate * (ended - began + 1.0)


NEVER = 2**63


def live_runs(folder: Path, stops: dict[int, list[tuple[int, int]]]) -> list[tuple[int, int]]:
    """The times in which a run was certainly within its lease. Each process runs one job at a time.

    A process that hangs loses its leases. The first run afterwards may have got its permit before that.
    """
    runs = []
    begun: dict[int, int] = {}
    late = {pid: [ended for _, ended in times] for pid, times in stops.items()}
    for word, _, pid, at in sorted(read_diary(folder / "diary"), key=lambda line: line[3]):
        if word.startswith("start"):
            if late.get(pid) and late[pid][0] < at:
                late[pid].pop(0)
                begun.pop(pid, None)
                continue
            begun[pid] = at
        elif (began := begun.pop(pid, None)) is not None:
            runs.append((began, min([at, *(stopped for stopped, _ in stops.get(pid, []) if stopped > began)])))
    for pid, began in begun.items():  # killed
        runs.append((began, min([stopped for stopped, _ in stops.get(pid, []) if stopped > began], default=began)))
    return runs


# --- permits ---------------------------------------------------------------------------------------------


@pytest.mark.one_row
def test_racing_processes_never_hold_more_permits_than_there_are_slots(opened: Callable[[], Backend]) -> None:
    # Given eight processes that ask for three slots, and some of them never free their permits
    change_quotas(opened(), APP_SCOPE, {"api": Quota(slots=3)}, pinned=False)
    held: list[tuple[float, float]] = []
    end = time.monotonic() + 1.5
    ttr = 0.5

    def work(backend: Backend, seed: int) -> None:
        book, choices = PermitBook(backend), random.Random(seed)
        while time.monotonic() < end:
            before = time.monotonic()
            got = book.ask(lease_of(new_id(), ttr), [PLACE])
            if not isinstance(got, Granted):
                time.sleep(0.01)
                continue
            began = time.monotonic()
            hangs = choices.random() < 0.1
            time.sleep(choices.choice([0.001, 0.02]) if not hangs else ttr * 1.2)
            held.append((began, min(time.monotonic(), before + ttr)))
            if not hangs:
                book.free([got])

    with ThreadPoolExecutor(8) as pool:
        for running in [pool.submit(partial(work, opened(), seed)) for seed in range(8)]:
            running.result()
    # Then at no time more than three permits are held
    changes = sorted(
        [(began, 1) for began, ended in held if ended > began] + [(ended, -1) for began, ended in held if ended > began]
    )
    live = [sum(change for _, change in changes[: at + 1]) for at in range(len(changes))]
    assert max(live) <= 3
    assert len(held) > 3


@pytest.mark.one_row
def test_no_window_has_more_turns_than_the_burst_and_its_share(opened: Callable[[], Backend]) -> None:
    burst, rate = 5, 50
    change_quotas(opened(), APP_SCOPE, {"api": Quota(rate=rate, burst=burst)}, pinned=False)
    starts: list[tuple[float, float]] = []
    give_up_at = time.monotonic() + 60

    def work(backend: Backend) -> None:
        book = PermitBook(backend)
        while len(starts) < 60 and time.monotonic() < give_up_at:
            time.sleep(0.001)
            before = time.monotonic()
            if isinstance(book.ask(lease_of(new_id()), [PLACE]), Granted):
                starts.append((before, time.monotonic()))

    with ThreadPoolExecutor(4) as pool:
        for running in [pool.submit(partial(work, opened())) for _ in range(4)]:
            running.result()
    assert len(starts) >= 60
    starts.sort()
    for at, (began, _) in enumerate(starts):
        inside = sorted(after for before, after in starts[at:])
        for count, ended in enumerate(inside, start=1):
            assert count <= burst + rate * (ended - began + SLACK) + 1e-6


def test_a_job_gets_all_of_its_permits_or_none(opened: Callable[[], Backend]) -> None:
    # Given a limit with a free slot, and a limit without a free slot
    backend = opened()
    change_quotas(backend, APP_SCOPE, {"free": Quota(slots=1), "full": Quota(slots=0)}, pinned=False)
    book = PermitBook(backend)
    free_place, full = PermitPlace(APP_SCOPE, "free", "k"), PermitPlace(APP_SCOPE, "full", "k")
    # When a job needs permits of both, then it holds no permit
    assert not isinstance(book.ask(lease_of("a"), [free_place, full]), Granted)
    assert [state.running for state in states(backend, APP_SCOPE)] == [0, 0]
    # When the slot is used, then another job does not get a permit, but a later lease of the same job does
    assert isinstance(book.ask(lease_of("b"), [free_place]), Granted)
    assert not isinstance(book.ask(lease_of("c"), [free_place]), Granted)
    assert isinstance(book.ask(lease_of("b"), [free_place]), Granted)
    # When the limit is removed, then its jobs can start
    change_quotas(backend, APP_SCOPE, {"full": None}, pinned=True)
    later = PermitBook(backend)
    assert isinstance(later.ask(lease_of("d"), [full]), Granted)


def test_the_permit_of_an_ended_lease_is_not_freed_twice(opened: Callable[[], Backend]) -> None:
    backend = opened()
    change_quotas(backend, APP_SCOPE, {"api": Quota(slots=1)}, pinned=False)
    book = PermitBook(backend)
    # Given a permit that has ended, and another job that has the slot
    first = book.ask(lease_of("a", 0.05), [PLACE])
    assert isinstance(first, Granted)
    second: list[Granted] = []

    def taken() -> bool:
        got = book.ask(lease_of("b"), [PLACE])
        second.extend([got] if isinstance(got, Granted) else [])
        return bool(second)

    wait_until(taken)
    # When the first job frees or extends its permit, then the other job keeps the slot
    book.free([first])
    assert book.extend([(first, time.monotonic() + 60)]) == [first]
    assert not isinstance(book.ask(lease_of("c"), [PLACE]), Granted)
    # And after the other job has ended, one slot is free
    book.free(second)
    book.free(second)
    assert [state.running for state in states(backend, APP_SCOPE)] == [0]


def wait_until(condition: Callable[[], object]) -> None:
    until(condition)


def test_a_slower_rate_is_forgotten_when_the_rate_changes(opened: Callable[[], Backend]) -> None:
    backend = opened()
    change_quotas(backend, APP_SCOPE, {"api": Quota(rate=1, per=3600)}, pinned=False)
    book = PermitBook(backend)
    assert isinstance(book.ask(lease_of("a"), [PLACE]), Granted)
    assert not isinstance(book.ask(lease_of("b"), [PLACE]), Granted)
    change_quotas(backend, APP_SCOPE, {"api": Quota(rate=10)}, pinned=True)
    wait_until(lambda: isinstance(PermitBook(backend).ask(lease_of("b"), [PLACE]), Granted))
    # a quota in code does not change a pinned quota
    change_quotas(backend, APP_SCOPE, {"api": Quota(rate=1, per=3600)}, pinned=False)
    assert states(backend, APP_SCOPE)[0].quota.rate == 10


def test_threads_of_one_process_ask_at_the_same_time(opened: Callable[[], Backend]) -> None:
    backend = opened()
    change_quotas(backend, APP_SCOPE, {"api": Quota(slots=20)}, pinned=False)
    book, got, start = PermitBook(backend), list[object](), threading.Barrier(30)

    def ask(number: int) -> None:
        start.wait(60)
        got.append(book.ask(lease_of(str(number)), [PLACE]))

    with ThreadPoolExecutor(30) as pool:
        for running in [pool.submit(ask, number) for number in range(30)]:
            running.result()
    assert sum(isinstance(one, Granted) for one in got) == 20
    assert states(backend, APP_SCOPE)[0].running == 20
