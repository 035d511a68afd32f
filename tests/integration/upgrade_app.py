"""The app of ``test_upgrades.py``, for the multiq of today and for one that knows neither results nor flows.

Each run of a job adds a line to a file: what ran, its attempt, and which multiq ran it.
"""

from __future__ import annotations

import os
import sys
import time

import multiq

QUEUE = "home"
app = multiq.App()


def _note(word: str) -> None:
    version = "new" if hasattr(multiq, "chain") else "old"
    handle = os.open(os.environ["UPGRADE_DIARY"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(handle, f"{word} {multiq.current_job().attempt} {version}\n".encode())
    os.close(handle)


@app.task(queue=QUEUE)
def work(word: str) -> str:
    _note(word)
    return word


@app.task(queue=QUEUE, max_attempts=1)
def fail(word: str) -> None:
    _note(word)
    raise ValueError(word)


@app.task(queue=QUEUE, ttr=1.0, max_crashes=0)
def hang(word: str) -> None:
    """Hangs in its first attempt, until its worker is killed."""
    _note(word)
    if multiq.current_job().attempt == 1:
        time.sleep(3600)


@app.task(queue=QUEUE)
def finish(_flow_id: str) -> None:
    _note("then")


def enqueue_old() -> None:
    """The jobs that an old producer enqueues, too."""
    for number in range(10):
        work.enqueue(f"plain-{number}")
        work.options(delay=1).enqueue(f"later-{number}")
    for number in range(3):
        fail.enqueue(f"fails-{number}")


def enqueue_new() -> None:
    for number in range(10):
        work.enqueue(f"second-{number}")
        work.options(keep=3600).enqueue(f"kept-{number}")
    multiq.chain(*(work.s(f"chain-{at}") for at in range(3)), name="chain").enqueue()
    multiq.batch([work.s(f"member-{at}") for at in range(5)], then=finish.s(), name="batch").enqueue()


if __name__ == "__main__":
    import upgrade_app  # the module that the worker imports, so that the tasks have its name

    if sys.argv[1] == "hang":
        upgrade_app.hang.enqueue("hangs")
    elif sys.argv[1] == "old":
        upgrade_app.enqueue_old()
    else:
        upgrade_app.enqueue_new()
