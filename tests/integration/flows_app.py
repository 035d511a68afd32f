"""The app that ``flow_losses.py`` has workers run: ``multiq worker flows_app:app``.

Each job writes a line to a file that is opened for appending, when it begins and when it ends. A line that was written
survives any end of the process, and is written without multiq.
"""

from __future__ import annotations

import os
import signal
import time

import multiq

TTR = 2.0  # seconds: a job whose worker has died is due again after this
QUEUES = ("left", "right")

app = multiq.App()
_FOLDER = os.environ.get("FLOWS_FOLDER", ".")
_DYING_EVERY = int(os.environ.get("FLOWS_DYING_EVERY", "0"))


def _note(word: str, what: str) -> None:
    job = multiq.current_job()
    line = f"{word} {what} {job.attempt} {time.monotonic_ns()} {os.getpid()}\n"
    handle = os.open(f"{_FOLDER}/diary", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(handle, line.encode())
    os.close(handle)


def _step(chain: int, number: int) -> int:
    _note("begin", f"{chain}.{number}")
    time.sleep(0.001)
    _note("end", f"{chain}.{number}")
    return chain


@app.task(queue="left", ttr=TTR, max_crashes=0, max_attempts=0)
def left(chain: int, number: int) -> int:
    return _step(chain, number)


@app.task(queue="right", ttr=TTR, max_crashes=0, max_attempts=0)
def right(chain: int, number: int) -> int:
    return _step(chain, number)


@app.task(queue="left", ttr=TTR, max_crashes=0, max_attempts=0)
def member(number: int) -> None:
    """Do the work of a member. The first attempt of each n-th member dies after its work, before its ack."""
    _note("begin", f"0.{number}")
    _note("end", f"0.{number}")
    if _DYING_EVERY and number % _DYING_EVERY == 0 and multiq.current_job().attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@app.task(queue="right", ttr=TTR, max_crashes=0, max_attempts=0)
def grower(number: int) -> None:
    """Add two members to the batch of this job, in two queues. A worker that dies meanwhile may add them again."""
    _note("begin", f"0.{number}")
    envelope = multiq.current_job().envelope
    assert envelope is not None
    assert envelope.flow is not None
    app.flows.get(envelope.flow.id).add([added.s(number), added.options(queue="right").s(number)])
    _note("end", f"0.{number}")


@app.task(queue="left", ttr=TTR, max_crashes=0, max_attempts=0)
def added(number: int) -> None:
    _note("added", f"{multiq.current_job().id}.{number}")


@app.task(queue="right", ttr=TTR, max_crashes=0, max_attempts=0)
def after_all(flow_id: str) -> None:
    _note("begin", f"then.{flow_id}")
    _note("end", f"then.{flow_id}")
