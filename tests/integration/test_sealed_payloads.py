"""Sealed payloads on each backend: programs with the keys open jobs, results and schedules; others refuse them."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import TYPE_CHECKING, Any

import pytest
from shell import Shell
from stores import NAMES, PAIRED, STORES

import multiq
from multiq import Payloads, State
from multiq.backend import NewJob
from multiq.backend.registry import open_backend
from multiq.schedules.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from multiq.backend import Backend

CARD = "4111-1111-canary"  # the text that no store may have


def key(name: str, first: int = 0) -> str:
    return f"{name}:{base64.b64encode(bytes(range(first, first + 32))).decode()}"


SIGN, OTHER, ENCRYPT = key("s"), key("o", 32), key("e", 64)
ALL = Payloads(sign=[SIGN], encrypt=[ENCRYPT], compress=1000)


@pytest.fixture(params=[*NAMES, PAIRED])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with STORES[request.param](tmp_path) as url:
        yield url


@pytest.fixture
def app(url: str) -> Iterator[multiq.App]:
    with multiq.App(url, payloads=ALL) as app:
        yield app


@pytest.fixture
def driver(url: str) -> Iterator[Backend]:
    """The store, as a client without keys sees it."""
    with open_backend(url) as driver:
        yield driver


def drain(app: multiq.App) -> int:
    return multiq.Worker(app, stop_when_empty=True).run()


def stored_body(driver: Backend, job_id: str) -> bytes:
    return driver.peek("default", job_id).body


def test_jobs_are_sealed_in_the_store_and_opened_by_workers(app: multiq.App, driver: Backend) -> None:
    seen: list[Any] = []

    @app.task(max_attempts=2, backoff=0)
    def pay(card: str, amount: int = 1) -> None:
        seen.append((card, amount))
        if multiq.current_job().attempt == 1:
            raise ValueError(amount)

    # given jobs enqueued in each way, a large one among them
    handles = [
        pay.enqueue(CARD, 1),
        asyncio.run(_enqueue(pay, CARD, 2)),
        *pay.enqueue_many([(CARD, 3), (CARD * 200, 4)]),
    ]
    # then the store has neither their arguments nor an envelope, but the task's name
    for handle in handles:
        body = stored_body(driver, handle.id)
        assert b"canary" not in body
        assert {"multiq": 3, "task": "pay", "signed_with": "s", "encrypted_with": "e"}.items() <= json.loads(
            body
        ).items()
        assert handle.peek().value["args"][0].startswith(CARD)
    assert len(stored_body(driver, handles[3].id)) < 1000  # of 3200 bytes
    # and a worker with the keys runs them, also a second time
    assert drain(app) == 0
    assert sorted(seen, key=lambda call: call[1]) == [
        (CARD * (200 if amount == 4 else 1), amount) for amount in (1, 2, 3, 4) for _ in range(2)
    ]


async def _enqueue(task: multiq.Task[[str, int], None], *args: Any) -> multiq.JobHandle:
    return await task.aenqueue(*args)


def test_a_worker_without_the_keys_buries_sealed_jobs(app: multiq.App, url: str) -> None:
    @app.task
    def pay(card: str) -> None: ...

    handle = pay.enqueue(CARD)
    for payloads, reason in (
        (None, "the payload is sealed (aes256gcm, hmac-sha256), and this program has no keys"),
        (Payloads(sign=[OTHER], encrypt=[ENCRYPT]), "it is signed with key 's', which this program does not have"),
    ):
        with multiq.App(url, payloads=payloads) as stranger:
            ran: list[str] = []
            stranger.task(name="pay")(ran.append)
            drain(stranger)
            assert ran == []
            info = handle.peek()
            assert info.state is State.BURIED
            if info.reason is not None:  # beanstalkd stores none
                assert reason in info.reason
            handle._backend.kick_job("default", handle.id)
    assert drain(app) == 0
    assert handle.state() is State.GONE


def test_a_forged_job_is_buried_and_does_not_run(app: multiq.App, driver: Backend) -> None:
    ran: list[str] = []
    app.task(name="pay")(ran.append)
    plain = b'{"multiq":1,"task":"pay","args":["forged"]}'
    with multiq.App("memory://", payloads=Payloads(sign=[OTHER], encrypt=[ENCRYPT])) as stranger:
        stranger.task(name="pay")(ran.append)
        sealed_by_stranger = stranger.backend.inner.peek(  # type: ignore[attr-defined]
            "default", stranger.tasks["pay"].enqueue("forged").id
        ).body
    # given jobs that someone without the keys has put into the store
    for number, body in enumerate((plain, sealed_by_stranger, b"\x00raw")):
        driver.enqueue("default", [NewJob(body, f"{number:032}")])
    # then no worker runs them
    drain(app)
    assert ran == []
    assert driver.stats("default").buried == 3


def test_a_reserve_of_the_program_s_own_never_gets_a_refused_body(app: multiq.App, driver: Backend) -> None:
    queue = app.queue()
    queue.enqueue({"order": 7})
    queue.enqueue(b"\x00raw")
    driver.enqueue("default", [NewJob(b'{"order":8}', "f" * 32)])
    bodies = []
    for _ in range(2):
        with queue.reserve(timeout=1) as job:
            bodies.append(job.body)
    with pytest.raises(multiq.QueueEmpty):
        queue.reserve(timeout=0)
    assert bodies == [{"order": 7}, b"\x00raw"]
    assert driver.stats("default").buried == 1


def test_a_sealed_job_cannot_be_moved(app: multiq.App, driver: Backend) -> None:
    ran: list[int] = []
    app.task(name="pay")(ran.append)
    body = stored_body(driver, app.tasks["pay"].enqueue(1).id)
    # given copies of a sealed payload's bytes: in another queue, and under another id
    driver.enqueue("other", [NewJob(body, "a" * 32)])
    driver.enqueue("default", [NewJob(body, "b" * 32)])
    multiq.Worker(app, queues=["default", "other"], stop_when_empty=True).run()
    # then the copies are refused; where the server chooses the ids, a seal cannot have them, and a copy runs
    copies = 1 if driver.declared.client_ids else 2
    assert ran == [1] * copies
    assert driver.stats("other").buried == 1
    assert driver.stats("default").buried == (1 if driver.declared.client_ids else 0)


def test_results_progress_steps_and_failures_are_sealed(app: multiq.App, driver: Backend) -> None:
    if not driver.declared.outcomes:
        pytest.skip("this backend keeps no outcomes")

    @app.task(keep=60, max_attempts=2, backoff=3600)
    def pay(card: str) -> str:
        job = multiq.current_job()
        job.progress(0.5, CARD)
        job.step("charge", lambda: CARD)
        if card == "bad":
            raise multiq.BuryJob(f"{CARD} in a reason, which is not sealed")
        if card == "again":
            raise ValueError(card)
        return CARD

    done, failed, again = pay.enqueue("good"), pay.enqueue("bad"), pay.enqueue("again")
    drain(app)
    # then a client with the keys reads them
    assert done.result(timeout=0) == CARD
    failure = failed.peek().failure
    assert failure is None or failure.task == "pay"
    progress = again.progress()
    assert progress is not None
    assert progress.message == CARD
    # and the store has none of these values in plain text
    (outcome,) = driver.outcomes("default", [done.id])
    assert outcome is not None
    record, retried = driver.peek("default", failed.id), driver.peek("default", again.id)
    for stored in (outcome.body, record.body, record.memo, record.detail, retried.memo, retried.body):
        assert b"canary" not in (stored or b"")


def test_chains_pass_sealed_results_on(app: multiq.App, driver: Backend) -> None:
    if not driver.declared.holds:
        pytest.skip("this backend has no flows")

    @app.task(keep=60)
    def add(a: int, b: int) -> int:
        return a + b

    flow = multiq.chain(add.s(1, 2), add.s(10), add.s(100)).enqueue()
    drain(app)
    assert [job.result(timeout=0) for job in flow.jobs()] == [3, 13, 113]


def test_the_jobs_of_schedules_are_sealed(app: multiq.App, driver: Backend) -> None:
    if not driver.declared.notes:
        pytest.skip("this backend has no schedules")
    ran: list[str] = []

    @app.task
    def pay(card: str) -> None:
        ran.append(card)

    app.schedule(None, pay.s(CARD), name="often", every=3600)
    Scheduler(app).look()
    app.schedules.run("often")
    notes = driver.notes("default").notes
    assert notes
    assert all(b"canary" not in note.value for note in notes)
    assert [info.name for info in app.schedules.list()] == ["often"]
    drain(app)
    assert ran == [CARD]


def test_a_cancelled_sealed_job_leaves_its_outcome(app: multiq.App, driver: Backend) -> None:
    if not driver.declared.outcomes:
        pytest.skip("this backend keeps no outcomes")

    @app.task(keep=60)
    def pay(card: str) -> None: ...

    handle = pay.options(delay=3600).enqueue(CARD)
    handle.cancel(reason=CARD)
    outcome = handle.outcome()
    assert outcome is not None
    assert outcome.kind == "cancelled"


# --- processes and the command line ---


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    (tmp_path / "shell").mkdir()
    shell = Shell(tmp_path / "shell")
    yield shell
    shell.app.close()


KEYS: dict[str, Any] = {"MULTIQ_PAYLOAD_SIGN": SIGN, "MULTIQ_PAYLOAD_ENCRYPT": ENCRYPT}


@pytest.mark.long
def test_the_command_line_shows_what_its_keys_open(shell: Shell) -> None:
    # given a job that is enqueued by a command with keys
    told = shell.run("enqueue", "shop.tasks:app", "mail.reset", "--args", f'["{CARD}"]', **KEYS)
    assert told.code == 0, told
    # then a command with the keys shows its call, and a command without keys shows the task and the seal
    assert f'mail.reset("{CARD}")' in shell("jobs", "mail", **KEYS).out
    assert "mail.reset (sealed: aes256gcm, hmac-sha256)" in shell("jobs", "mail").out
    listed = shell("jobs", "mail", "--json")
    (job,) = listed.json["jobs"]
    assert (job["task"], job["body"]["seal"]) == ("mail.reset", ["aes256gcm", "hmac-sha256"])
    assert "canary" not in listed.out
    # and a worker with the keys runs it
    done = shell.run("worker", "shop.tasks:app", "-q", "mail", "--stop-when-empty", **KEYS)
    assert f"sent to {CARD}" in done.out


@pytest.mark.long
def test_a_sealed_job_survives_the_death_of_its_process(shell: Shell) -> None:
    # given a job that kills its process once, after a step
    (shell.folder / "shop" / "tasks.py").write_text(
        """
import os, signal
import multiq

app = multiq.App()

@app.task(keep=60, max_crashes=3)
def die_once(path: str) -> str:
    number = multiq.current_job().step("first", lambda: os.getpid())
    if not os.path.exists(path):
        open(path, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived" if number != os.getpid() else "the step was repeated"
"""
    )
    told = shell.run("enqueue", "shop.tasks:app", "die_once", "--args", f'["{shell.folder / "died"}"]', **KEYS)
    assert told.code == 0, told
    # when a worker with a supervisor runs this job
    shell.run("worker", "shop.tasks:app", "--stop-when-empty", "-p", "1", **KEYS)
    # then the sidecar, which has the keys, has given it back, and the second run has the step of the first run
    with multiq.App(shell.url, payloads=Payloads(sign=[SIGN], encrypt=[ENCRYPT])) as app:
        (outcome,) = app.backend.history("default").outcomes
        assert app.job("default", outcome.id).result(timeout=0) == "survived"
