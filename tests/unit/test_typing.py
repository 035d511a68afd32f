"""The types of the public API: right calls pass ``mypy --strict``, and wrong calls do not."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

PRELUDE = """\
from __future__ import annotations

import datetime as dt
from typing import assert_type

import multiq
from multiq import events

app = multiq.App("sqlite:///jobs.db")


@app.task
def plain(address: str, count: int = 1) -> int:
    return count


@app.task(queue="mail", priority=100, timeout=30, max_attempts=5, backoff=multiq.exponential(base=2, cap=3600))
def send(address: str, name: str, *, urgent: bool = False) -> None: ...


@app.task(retry_for=60, backoff=[1, 5, 30])
async def fetch(url: str) -> bytes:
    return b""


"""

# the API, line by line, as the documentation shows it
RIGHT = """\
assert_type(plain("ann@example.com"), int)
assert_type(send("ann@example.com", name="Ann"), None)

handle = send.enqueue("ann@example.com", name="Ann")
handle = send.options(delay=30, priority=0).enqueue("ann@example.com", name="Ann", urgent=True)
handle = send.options(at=dt.datetime.now(dt.timezone.utc)).enqueue("ann@example.com", "Ann")
handle = send.options(delay=dt.timedelta(minutes=30), queue="slow", ttr=120, max_attempts=3).enqueue("a", "A")
assert_type(handle, multiq.JobHandle)
handles = send.enqueue_many([("a@x.org", "A"), ("b@x.org", "B")])
handles = send.enqueue_many([{"address": "a@x.org", "name": "A"}])
assert_type(handles, list[multiq.JobHandle])


async def produce() -> None:
    assert_type(await send.aenqueue("ann@example.com", name="Ann"), multiq.JobHandle)
    await send.options(delay=1).aenqueue("ann@example.com", name="Ann")
    assert_type(await send.aenqueue_many([("a@x.org", "A")]), list[multiq.JobHandle])
    queue = app.queue("mail")
    assert_type(await queue.aenqueue({"any": "json"}, delay=1), multiq.JobHandle)
    assert_type(await queue.astats(), multiq.QueueStats)
    assert_type(await queue.akick(10), int)
    async with await queue.areserve(timeout=5) as job:
        assert_type(job, multiq.Job)
        await job.atouch()
    assert_type(await handle.astate(), multiq.State)
    assert_type(await handle.astatus() == "queued", bool)
    assert_type(await multiq.chain(send.s("a", "A")).aenqueue(), multiq.FlowHandle)
    async for failed in app.failed.list(queue="mail"):
        assert_type(failed, multiq.JobInfo)
    async for flow in app.flows.alist():
        assert_type(flow.name, str)
    await app.aclose()
    await fetch.aenqueue("https://example.com")
    assert_type(await fetch("https://example.com"), bytes)


tasks = multiq.Tasks(prefix="mail")


@tasks.task(queue="mail")
def reset(address: str) -> int:
    return 1


app.include(tasks)
reset.enqueue("ann@example.com")
assert_type(reset.for_app(app)("ann@example.com"), int)

handle.cancel()
handle.reschedule(delay=300)
handle.reschedule(at=dt.datetime.now(dt.timezone.utc))
assert_type(handle.state(), multiq.State)
assert_type(handle.peek(), multiq.JobInfo)

queue = app.queue("mail")
assert_type(queue, multiq.Queue)
assert_type(queue.enqueue({"any": "json"}, delay=5), multiq.JobHandle)
queue.enqueue(b"raw bytes")
with queue.reserve(timeout=5) as job:
    print(job.body, job.attempt)
    assert_type(job, multiq.Job)
    assert_type(job.attempt, int)
job.ack()
job.release(delay=10)
job.bury("why")
job.touch()
assert_type(queue.stats(), multiq.QueueStats)
assert_type(queue.kick(10), int)
assert_type(queue.peek(handle.id), multiq.JobInfo)
for info in queue.jobs("buried"):
    print(info.reason)
    assert_type(info, multiq.JobInfo)
queue.delete(handle.id)
queue.pause(60)
queue.resume()
assert_type(queue.purge(), int)


@app.on(events.JobBuried)
def report(event: events.JobBuried) -> None:
    print(event.job.id, event.reason)


assert_type(multiq.current_job(), multiq.JobContext)
assert_type(multiq.Worker(app, queues=["high", "default"], processes=2, threads=4).run(), int)
"""

# each line is wrong in one way: mypy's code for it, and a part of mypy's message
WRONG = {
    'send.enqueue(1, name="Ann")': ("arg-type", 'expected "str"'),
    'send.enqueue("ann@example.com")': ("call-arg", "name"),
    'send.enqueue("ann@example.com", nme="Ann")': ("call-arg", "nme"),
    'send.enqueue("ann@example.com", "Ann", True)': ("call-arg", "Too many positional arguments"),
    'send.options(delay=3).enqueue("ann@example.com", name=3)': ("arg-type", 'expected "str"'),
    'send.options(dealy=3).enqueue("ann@example.com", name="Ann")': ("call-arg", "dealy"),
    "send.aenqueue(1, name=2)": ("arg-type", 'expected "str"'),
    'plain.enqueue("a", count="many")': ("arg-type", 'expected "int"'),
    "fetch.enqueue(3)": ("arg-type", 'expected "str"'),
    'app.task(quue="mail")': ("call-overload", "quue"),
    'app.task(max_attempts="5")': ("call-overload", "No overload variant"),
    "app.queue(3)": ("arg-type", 'expected "str"'),
    'multiq.Worker(app, queues="mail", proceses=2)': ("call-arg", "proceses"),
    "handle.state().upper().nothing": ("attr-defined", "nothing"),
}


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The complaints of ``mypy --strict`` by file name, for all files in one run."""
    folder = tmp_path_factory.mktemp("typed")
    right = PRELUDE + RIGHT
    wrong = PRELUDE + 'handle = plain.enqueue("a")\n' + "".join(f"_ = {line}\n" for line in WRONG)
    (folder / "right.py").write_text(right)
    (folder / "wrong.py").write_text(wrong)
    command = [sys.executable, "-m", "mypy", "--strict", "--hide-error-context", "--no-error-summary", "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    found: dict[str, list[str]] = {"right.py": [], "wrong.py": []}
    for line in done.stdout.splitlines():
        found[line.partition(":")[0]].append(line)
    return found


@pytest.fixture(scope="module")
def first_wrong_line() -> int:
    return PRELUDE.count("\n") + 2


@pytest.mark.long
def test_every_line_of_the_api_passes_mypy_strict(complaints: dict[str, list[str]]) -> None:
    assert complaints["right.py"] == []


@pytest.mark.long
@pytest.mark.parametrize("line", WRONG)
def test_mypy_refuses(complaints: dict[str, list[str]], first_wrong_line: int, line: str) -> None:
    number = first_wrong_line + list(WRONG).index(line)
    code, part = WRONG[line]
    said = [text for text in complaints["wrong.py"] if re.match(rf"wrong\.py:{number}: error:", text)]
    assert any(text.endswith(f"[{code}]") and part in text for text in said), said


@pytest.mark.long
def test_mypy_says_nothing_of_the_lines_around_them(complaints: dict[str, list[str]], first_wrong_line: int) -> None:
    numbers = {int(text.split(":")[1]) for text in complaints["wrong.py"]}
    assert numbers == set(range(first_wrong_line, first_wrong_line + len(WRONG)))
