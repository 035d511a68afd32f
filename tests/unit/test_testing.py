"""The testing kit: ``sync://``, ``null://``, the fake with its assertions and its clock, and the pytest plugin."""

from __future__ import annotations

import asyncio
import datetime as dt
import subprocess
import sys
import threading
from decimal import Decimal
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import pytest

import multiq
from multiq import State, events, testing
from multiq.async_calls import THREADS
from multiq.backend.registry import installed
from multiq.conformance.threads import HANGS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Shop:
    """An app with some tasks, and a record of what they have done."""

    def __init__(self, url: str) -> None:
        self.app = multiq.App(url)
        self.ran: list[Any] = []
        self.failures = 0
        task = self.app.task

        @task(queue="mail", max_attempts=3, backoff=60)
        def send(address: str, name: str = "") -> str:
            if self.failures:
                self.failures -= 1
                raise ValueError(f"no {address}")
            self.ran.append(address)
            return address

        @task
        async def wait(what: Any) -> None:
            await asyncio.sleep(0)
            self.ran.append(what)

        @task
        def remind(at: dt.datetime) -> None:
            self.ran.append(at)

        @task
        def both(address: str) -> None:
            send.enqueue(address)
            self.ran.append("both")

        self.send, self.wait, self.remind, self.both = send, wait, remind, both


@pytest.fixture
def shop() -> Iterator[Shop]:
    shop = Shop("sync://")
    with shop.app:
        yield shop


@pytest.fixture
def jobs(shop: Shop) -> Iterator[testing.Fake]:
    with testing.fake(shop.app) as jobs:
        yield jobs


NOON = dt.datetime(2030, 1, 2, 12, tzinfo=dt.UTC)


# --- sync:// ---


def test_a_job_runs_within_its_enqueue(shop: Shop) -> None:
    seen: list[str] = []
    shop.app.on(events.JobEvent)(lambda event: seen.append(type(event).__name__))

    @shop.app.middleware
    def around(job: multiq.JobContext) -> Iterator[None]:
        seen.append(f"begin {job.task}")
        yield
        seen.append("end")

    handle = shop.send.options(delay=3600, keep=60).enqueue("ann")
    assert shop.ran == ["ann"]
    assert seen == ["JobStarted", "begin send", "end", "JobDone"]
    assert handle.result(timeout=0) == "ann"


def test_arguments_go_through_the_envelope(shop: Shop) -> None:
    shop.remind.enqueue(NOON)
    shop.wait.enqueue((1, 2))
    assert shop.ran == [NOON, [1, 2]]
    with pytest.raises(multiq.PayloadInvalid):
        shop.wait.enqueue({1})


def test_retries_are_not_waited_for(shop: Shop) -> None:
    shop.failures = 2
    retried: list[float] = []
    shop.app.on(events.JobRetried)(lambda event: retried.append(event.delay))
    assert shop.send.enqueue("ann").state() is State.GONE
    assert (shop.ran, retried) == (["ann"], [60, 60])


def test_the_enqueue_raises_the_error_of_a_buried_job(shop: Shop) -> None:
    shop.failures = 3
    with pytest.raises(ValueError, match="no ann"):
        shop.both.options(max_attempts=1).enqueue("ann")
    (job,) = shop.app.queue("mail").jobs("buried")
    assert (job.attempt, job.reason) == (3, "ValueError: no ann")


def test_a_job_that_cannot_run_raises_its_reason(shop: Shop) -> None:
    with pytest.raises(multiq.JobFailed, match=r"task send cannot be called like this: missing a required argument"):
        shop.app.queue().enqueue({"multiq": 1, "task": "send"})


def test_all_jobs_of_a_batch_run_before_the_error_is_raised(shop: Shop) -> None:
    shop.failures = 1
    with pytest.raises(ValueError, match="no eve"):
        shop.send.options(max_attempts=1).enqueue_many([("eve",), ("ann",)])
    assert shop.ran == ["ann"]


def test_a_job_that_enqueues_another_one_does_not_get_the_errors_of_jobs_beside_it(shop: Shop) -> None:
    # given a batch whose first job enqueues another job, and whose second job fails
    @shop.app.task(max_attempts=1)
    def share(number: int) -> None:
        shop.ran.append(number)
        shop.wait.enqueue(f"of {1 / number:g}")
        shop.ran.append("shared")

    # then each job runs to its end before the next, and the caller of the batch gets the error
    with pytest.raises(ZeroDivisionError):
        share.enqueue_many([(1,), (0,), (2,)])
    assert shop.ran == [1, "of 1", "shared", 0, 2, "of 0.5", "shared"]


def test_a_thread_does_not_run_the_jobs_of_another_thread(shop: Shop) -> None:
    # given two threads whose jobs run at the same time
    both = threading.Barrier(2)

    @shop.app.task(max_attempts=3, backoff=0)
    def work(name: str) -> None:
        if multiq.current_job().attempt == 1:
            both.wait(10)
            raise ValueError(name)
        assert threading.current_thread().name == name
        shop.ran.append(name)

    threads = [threading.Thread(target=work.enqueue, args=(name,), name=name) for name in ("ann", "bob")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # then each thread runs its own job, with its retries
    assert sorted(shop.ran) == ["ann", "bob"]


def test_jobs_run_within_a_running_event_loop(shop: Shop) -> None:
    async def main() -> None:
        shop.wait.enqueue(1)
        await shop.wait.aenqueue(2)
        shop.send.enqueue("ann")

    asyncio.run(main())
    assert shop.ran == [1, 2, "ann"]


def test_plain_functions_run_in_the_thread_of_the_enqueue(shop: Shop) -> None:
    @shop.app.task
    def where() -> None:
        shop.ran.append(threading.get_ident())

    where.enqueue()
    asyncio.run(_called(where.enqueue))
    assert shop.ran == [threading.get_ident()] * 2


async def _called(function: Any) -> None:
    function()


def test_flows_run_within_their_enqueue(shop: Shop) -> None:
    multiq.chain(shop.send.s("ann"), shop.wait.s()).enqueue()
    multiq.batch([shop.wait.s(1), shop.wait.s(2)], then=shop.wait.s(3)).enqueue()
    assert shop.ran == ["ann", "ann", 1, 2, 3]


def test_progress_and_steps_work(shop: Shop) -> None:
    @shop.app.task(max_attempts=2)
    def build() -> None:
        job = multiq.current_job()
        job.progress(0.5)
        job.step("once", lambda: shop.ran.append("step"))
        if job.attempt == 1:
            raise ValueError

    build.enqueue()
    assert shop.ran == ["step"]


def test_a_snoozed_job_stays_delayed(shop: Shop) -> None:
    @shop.app.task
    def later() -> None:
        raise multiq.Snooze(60)

    handle = later.enqueue()
    shop.send.enqueue("ann")
    assert handle.state() is State.DELAYED


def test_an_interrupt_is_raised_at_once(shop: Shop) -> None:
    @shop.app.task
    def stop() -> None:
        shop.ran.append(1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop.enqueue()
    assert shop.ran == [1]


def test_other_bodies_stay_in_their_queue(shop: Shop) -> None:
    shop.app.queue("raw").enqueue({"any": "json"})
    shop.app.queue("raw").enqueue(b"bytes")
    with shop.app.queue("raw").reserve() as job:
        assert job.body == {"any": "json"}


def test_the_connections_for_tests_are_a_line_of_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "multiq.toml").write_text('url = "sync://"\n')
    assert isinstance(multiq.App().backend, testing.SyncBackend)
    monkeypatch.setenv("MULTIQ_URL", "null://")
    assert isinstance(multiq.App().backend, testing.NullBackend)
    assert not {"sync", "null", "fake"} & set(installed()), "they are no backends for jobs"
    with pytest.raises(multiq.UrlInvalid, match="unknown option"):
        _ = multiq.App("sync://?retries=3").backend


# --- null:// ---


def test_null_accepts_all_and_keeps_nothing() -> None:
    shop = Shop("null://")
    handle = shop.send.enqueue("ann")
    shop.send.enqueue_many([("bob",)])
    shop.app.queue().enqueue(b"raw")
    multiq.chain(shop.send.s("ann"), shop.wait.s()).enqueue()
    multiq.batch([shop.wait.s(1)]).enqueue()
    assert (handle.state(), shop.app.backend.queues(), shop.ran) == (State.GONE, [], [])
    assert multiq.Worker(shop.app, stop_when_empty=True).run() == 0


# --- the fake: assertions ---


def test_enqueued_jobs_are_asserted_by_task_and_arguments(shop: Shop, jobs: testing.Fake) -> None:
    # given
    shop.send.enqueue("ann", name="Ann")
    shop.send.options(delay=60).enqueue("bob")
    shop.remind.enqueue(NOON)

    # when / then
    assert jobs.assert_enqueued(shop.send, ("bob",), within=60).queue == "mail"
    jobs.assert_enqueued("send", ("ann",), {"name": "Ann"}, queue="mail")
    jobs.assert_enqueued(shop.remind, (NOON,))
    jobs.assert_nothing_else_enqueued()
    assert shop.ran == []


def test_arguments_are_compared_as_the_function_takes_them(shop: Shop, jobs: testing.Fake) -> None:
    shop.send.enqueue("ann")
    jobs.assert_enqueued(shop.send, kwargs={"address": "ann", "name": ""})


def test_each_assertion_takes_one_job(shop: Shop, jobs: testing.Fake) -> None:
    shop.send.enqueue("ann")
    jobs.assert_enqueued(shop.send)
    with pytest.raises(AssertionError, match="send was not enqueued; enqueued besides 1 expected jobs: nothing"):
        jobs.assert_enqueued(shop.send)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"args": ("bob",)}, "send('bob') was not enqueued"),
        ({"within": 30}, "send, due within 30 s, was not enqueued"),
        ({"queue": "other"}, "send in queue other was not enqueued"),
        ({"args": (), "kwargs": {"address": "ann", "name": "A"}}, "send(address='ann', name='A') was not enqueued"),
    ],
)
def test_a_failed_assertion_lists_what_was_enqueued(
    shop: Shop, jobs: testing.Fake, asked: dict[str, Any], message: str
) -> None:
    shop.send.options(delay=60).enqueue("ann")
    shop.app.queue("raw").enqueue({"any": 1})
    with pytest.raises(AssertionError) as caught:
        jobs.assert_enqueued(shop.send, **asked)
    listed = "send('ann') in queue mail, due in 60 s\n  {'any': 1} in queue raw"
    assert str(caught.value) == f"{message}; enqueued:\n  {listed}"


def test_jobs_that_must_not_be_there_are_found(shop: Shop, jobs: testing.Fake) -> None:
    jobs.assert_not_enqueued(shop.send)
    jobs.assert_nothing_else_enqueued()
    shop.send.enqueue("ann")
    with pytest.raises(AssertionError, match="send was enqueued"):
        jobs.assert_not_enqueued(shop.send)
    with pytest.raises(AssertionError, match="more was enqueued than expected"):
        jobs.assert_nothing_else_enqueued()


def test_many_coroutines_whose_jobs_enqueue_jobs_do_not_wait_for_each_other_forever() -> None:
    # given more enqueues at a time than multiq has threads for a backend
    app = multiq.App("sync://")
    sent: list[int] = []

    @app.task
    async def begin(order: int) -> None:
        await send.aenqueue(order)

    @app.task
    async def send(order: int) -> None:
        sent.append(order)

    async def main() -> None:
        async with asyncio.timeout(HANGS):
            await asyncio.gather(*(begin.aenqueue(order) for order in range(2 * THREADS)))

    asyncio.run(main())
    assert sorted(sent) == list(range(2 * THREADS))


def test_a_coroutine_that_enqueues_itself_ends_with_an_error() -> None:
    app = multiq.App("sync://")

    @app.task(max_attempts=1)
    async def again(depth: int) -> None:
        await again.aenqueue(depth + 1)

    async def main() -> None:
        async with asyncio.timeout(HANGS):
            await again.aenqueue(1)

    with pytest.raises(RecursionError, match="must be nested at most 100 deep"):
        asyncio.run(main())


def test_a_job_of_a_task_that_the_app_does_not_have_cannot_be_denied(shop: Shop, jobs: testing.Fake) -> None:
    # given a name with a typing mistake, and a task of another app
    other = multiq.App("memory://")

    @other.task
    def elsewhere() -> None: ...

    for unknown in ("sned", elsewhere):
        # then the assertion does not hold because of the mistake
        with pytest.raises(multiq.errors.TaskNotFound, match=r"there is no task .* in this app; registered: .*send"):
            jobs.assert_not_enqueued(unknown)

    # but a job of another program's task, which only its body names, is found
    shop.app.queue("raw").enqueue({"multiq": 1, "task": "foreign", "args": []})
    with pytest.raises(AssertionError, match="foreign was enqueued"):
        jobs.assert_not_enqueued("foreign")


def test_a_repeated_id_counts_once(shop: Shop, jobs: testing.Fake) -> None:
    for _ in range(2):
        shop.send.options(id="one").enqueue("ann")
    assert len(jobs.enqueued) == 1
    jobs.assert_enqueued(shop.send)
    with pytest.raises(AssertionError):
        jobs.assert_enqueued(shop.send)


def test_a_repeated_id_is_a_new_job_after_the_first_job_is_done(shop: Shop, jobs: testing.Fake) -> None:
    shop.send.options(id="one").enqueue("ann")
    jobs.assert_enqueued(shop.send, ("ann",))
    jobs.run()
    shop.send.options(id="one").enqueue("bob")
    jobs.assert_enqueued(shop.send, ("bob",))
    jobs.assert_nothing_else_enqueued()


def test_a_duplicate_of_a_unique_job_was_not_enqueued(shop: Shop, jobs: testing.Fake) -> None:
    @shop.app.task(unique=multiq.Unique(by=["shelf"]))
    def tidy(shelf: int) -> None: ...

    first = tidy.enqueue(1)
    assert tidy.enqueue(1).id == first.id
    jobs.assert_enqueued(tidy, (1,))
    jobs.assert_nothing_else_enqueued()


def test_a_unique_job_that_replaces_another_one_was_enqueued(shop: Shop, jobs: testing.Fake) -> None:
    @shop.app.task(unique=multiq.Unique(by=["shelf"], on_conflict="replace"))
    def tidy(shelf: int, label: str) -> None: ...

    tidy.options(delay=9).enqueue(1, "old")
    tidy.options(delay=9).enqueue(1, "new")
    jobs.assert_enqueued(tidy, (1, "new"))


def test_equal_sets_are_equal_in_assertions(shop: Shop, jobs: testing.Fake) -> None:
    # given two equal sets whose members have different orders, as many equal sets do
    @shop.app.task
    def stock(shelves: set[int], price: Decimal = Decimal(1)) -> None: ...

    @shop.app.task
    def tidy(_done: None, shelves: set[int]) -> None: ...

    mine, theirs = {8}, {0}
    mine.add(0)
    theirs.add(8)
    assert list(mine) != list(theirs)
    # then assertions hold, as for other equal values
    stock.enqueue(mine)
    jobs.assert_enqueued(stock, (theirs,))
    stock.enqueue({1}, Decimal("1.5"))
    jobs.assert_enqueued(stock, ([1], "1.5"))
    multiq.chain(stock.s(mine), tidy.s(shelves=mine)).enqueue()
    jobs.assert_chained(stock.s(theirs), tidy.s(shelves=theirs))
    multiq.group(stock.s(mine)).enqueue()
    jobs.assert_batched([stock.s(theirs)])
    # and a value that no enqueue accepts is not found
    shop.app.queue().enqueue({"multiq": 1, "task": "stock", "args": [[1], "1", 7]})
    for absent in ({9}, "no set"):
        with pytest.raises(AssertionError, match="was not enqueued"):
            jobs.assert_enqueued(stock, (absent,))


def test_chains_are_asserted(shop: Shop, jobs: testing.Fake) -> None:
    multiq.chain(shop.send.s("ann"), shop.wait.s(), catch=shop.wait.s("failed")).enqueue()
    for wrong in (
        [shop.send.s("ann")],
        [shop.send.s("bob"), shop.wait.s()],
        [shop.wait.s(), shop.send.s("ann")],
        [shop.send.s("ann"), shop.wait.s(1)],
    ):
        with pytest.raises(AssertionError, match=r"the chain send|the chain wait"):
            jobs.assert_chained(*wrong)
    assert [job.task for job in jobs.assert_chained(shop.send.s("ann"), shop.wait.s())] == ["send", "wait"]
    jobs.assert_nothing_else_enqueued()


def test_batches_are_asserted(shop: Shop, jobs: testing.Fake) -> None:
    multiq.batch([shop.wait.s(1), shop.send.s("ann")], then=shop.wait.s()).enqueue()
    multiq.batch([shop.remind.s(NOON)]).enqueue()
    multiq.group(shop.wait.s(5), shop.wait.s(6)).enqueue()
    for wrong, then in (
        ([shop.wait.s(1)], shop.wait.s()),
        ([shop.wait.s(1), shop.send.s("ann")], None),
        ([shop.wait.s(1), shop.send.s("ann")], shop.send.s("ann")),
        ([shop.wait.s(1), shop.wait.s(1)], shop.wait.s()),
    ):
        with pytest.raises(AssertionError, match="the batch wait"):
            jobs.assert_batched(wrong, then=then)
    jobs.assert_batched([shop.send.s("ann"), shop.wait.s(1)], then=shop.wait.s())
    jobs.assert_batched([shop.remind.s(NOON)])
    jobs.assert_batched([shop.wait.s(6), shop.wait.s(5)])
    jobs.assert_nothing_else_enqueued()


# --- the fake: time ---


def test_delays_end_when_the_test_moves_the_clock(shop: Shop, jobs: testing.Fake) -> None:
    handle = shop.send.options(delay=3600).enqueue("ann")
    jobs.run()
    jobs.advance(3599)
    assert (handle.state(), shop.ran) == (State.DELAYED, [])
    jobs.assert_enqueued(shop.send, within=1)
    jobs.advance(1)
    assert (handle.state(), shop.ran) == (State.GONE, ["ann"])


def test_jobs_run_in_the_order_of_their_times(shop: Shop, jobs: testing.Fake) -> None:
    for minutes in (30, 10, 20):
        shop.wait.options(delay=minutes * 60).enqueue(minutes)
    shop.both.options(delay=900).enqueue("ann")
    jobs.advance(3600)
    assert shop.ran == [10, "both", "ann", 20, 30]


def test_jobs_run_when_the_pause_of_their_queue_ends(shop: Shop, jobs: testing.Fake) -> None:
    shop.app.queue("default").pause(100)
    shop.wait.enqueue("ready")
    shop.wait.options(delay=50).enqueue("delayed")
    shop.send.options(delay=99).enqueue("before")  # in a queue that is not paused
    jobs.advance(99.5)
    assert shop.ran == ["before"]
    jobs.advance(1)
    assert shop.ran == ["before", "ready", "delayed"]


def test_retries_wait_for_the_clock(shop: Shop, jobs: testing.Fake) -> None:
    shop.failures = 2
    shop.send.enqueue("ann")
    jobs.run()
    assert shop.failures == 1
    jobs.advance(59)
    assert shop.failures == 1
    jobs.advance(61)
    assert (shop.failures, shop.ran) == (0, ["ann"])


def test_the_error_of_a_buried_job_is_raised(shop: Shop, jobs: testing.Fake) -> None:
    shop.failures = 3
    handle = shop.send.enqueue("ann")
    shop.wait.options(delay=200).enqueue(1)
    with pytest.raises(ValueError, match="no ann"):
        jobs.advance(300)
    assert (handle.state(), shop.ran) == (State.BURIED, [1])


def test_an_expired_job_does_not_run(shop: Shop, jobs: testing.Fake) -> None:
    shop.failures = 1
    shop.send.options(expires=30).enqueue("ann")
    jobs.advance(3600)
    assert shop.ran == []


def test_the_app_gets_its_connection_back(shop: Shop) -> None:
    with testing.fake(shop.app) as jobs:
        shop.send.enqueue("ann")
        assert shop.app.url == "fake://"
    shop.send.enqueue("bob")
    assert (shop.app.url, shop.ran, len(jobs.enqueued)) == ("sync://", ["bob"], 1)
    with pytest.raises(ZeroDivisionError), testing.sync(shop.app):
        raise ZeroDivisionError
    assert shop.app.url == "sync://"


# --- pytest ---

CONFTEST = """
import pytest, multiq

app = multiq.App("redis://nobody.invalid")

@app.task
def work(n):
    ran.append(n)

ran = []
"""

TESTS = """
from shop import app, ran, work

def test_fake(multiq_fake):
    work.options(delay=60).enqueue(1)
    multiq_fake.assert_enqueued(work, (1,), within=60)
    multiq_fake.assert_nothing_else_enqueued()
    assert ran == []
    multiq_fake.advance(60)
    assert ran == [1]

def test_sync(multiq_sync):
    assert multiq_sync is app
    work.enqueue(2)
    assert ran == [1, 2]
"""


@pytest.mark.long
def test_the_fixtures_need_no_server(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(CONFTEST)
    (tmp_path / "multiq.toml").write_text('app = "shop:app"\n')
    (tmp_path / "test_shop.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error"]
    # installed before the package had a plugin
    if "multiq" not in {point.name for point in entry_points(group="pytest11")}:
        command += ["-p", "multiq.testing.plugin"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_an_assertion_about_something_else_than_a_task_is_refused() -> None:
    # given a test that names the function, or a call, in place of the task
    shop = Shop("memory://")

    def send() -> None: ...

    with testing.fake(shop.app) as jobs:
        shop.send.enqueue("ann@example.com")
        for wrong in (send, shop.send.options(delay=5), shop.send.s("ann@example.com"), None, 5):
            # then no assertion holds because of the mistake
            for check in (jobs.assert_enqueued, jobs.assert_not_enqueued):
                with pytest.raises(multiq.ArgumentsInvalid, match="must have a task of multiq, or the name"):
                    check(wrong)  # type: ignore[arg-type]
        for seconds in (-1, None, float("nan")):
            with pytest.raises(multiq.OptionInvalid, match="seconds must be"):
                jobs.advance(seconds)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (lambda jobs, send: jobs.assert_enqueued(send, 1), "args must be a tuple"),
        (lambda jobs, send: jobs.assert_enqueued(send, "ann@example.com"), "args must be a tuple"),
        (lambda jobs, send: jobs.assert_enqueued(send, (object(),)), "arguments that can be enqueued"),
        (lambda jobs, send: jobs.assert_enqueued(send, kwargs=["ann"]), "kwargs must be a dict"),
        (lambda jobs, send: jobs.assert_enqueued(send, within="1"), "within must be a number of seconds"),
        (lambda jobs, send: jobs.assert_enqueued(send, queue=5), "a queue name must have"),
        (lambda jobs, send: jobs.assert_chained([send.s("ann@example.com")]), "must have calls like"),
        (lambda jobs, send: jobs.assert_batched(send.s("ann@example.com")), "members must be a list of calls"),
        (lambda jobs, send: jobs.assert_batched([send.s("ann@example.com")], then=send), "must have calls like"),
    ],
)
def test_wrong_arguments_of_an_assertion_are_refused(
    shop: Shop, jobs: testing.Fake, wrong: Callable[[testing.Fake, Any], object], what: str
) -> None:
    shop.send.enqueue("ann@example.com")
    with pytest.raises((multiq.ArgumentsInvalid, multiq.OptionInvalid, multiq.NameInvalid), match=what):
        wrong(jobs, shop.send)


@pytest.mark.parametrize("kit", [testing.fake, testing.sync])
def test_the_fake_of_something_else_than_an_app_is_refused(kit: Any) -> None:
    with pytest.raises(multiq.ArgumentsInvalid, match=r"must have a multiq\.App, got 'memory://'"), kit("memory://"):
        pass
