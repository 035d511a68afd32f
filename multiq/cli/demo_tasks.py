"""The tasks of ``multiq demo``. Each run leaves a line in the file that ``MULTIQ_DEMO_LEDGER`` names."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import multiq
from multiq.settings.model import DEFAULT_URL

URL = "MULTIQ_URL"
LEDGER = "MULTIQ_DEMO_LEDGER"
FIXED = "fixed"
"""A file beside that of ``LEDGER``. While it exists, ``doomed`` succeeds."""


def make_app(url: str) -> multiq.App:
    """The demo's app. It reads no configuration: the show must not depend on where it is given."""
    app = multiq.App(settings=multiq.Settings(url=url))
    app.task(queue="demo", ttr=2)(greet)
    app.task(queue="demo", ttr=2, max_attempts=5, backoff=[0.3, 0.6])(flaky)
    app.task(queue="demo", ttr=2, max_attempts=2, backoff=0.2)(doomed)
    app.task(queue="demo", ttr=1)(crash)
    return app


def greet(name: str) -> None:
    """Works at once."""
    _note(name, "done")


def flaky(name: str) -> None:
    """Works the third time."""
    if multiq.current_job().attempt < 3:
        _note(name, "failed")
        raise ConnectionError("451 try again later")
    _note(name, "done")


def doomed(name: str) -> None:
    """Fails until the cause is repaired."""
    if not (_ledger().parent / FIXED).exists():
        _note(name, "failed")
        raise ValueError("550 no such mailbox")
    _note(name, "done")


def crash(name: str) -> None:
    """The first time, its whole worker is killed under it."""
    if multiq.current_job().attempt == 1:
        _note(name, "killed")
        os.kill(os.getpid(), signal.SIGKILL)
    _note(name, "done")


def _note(name: str, outcome: str) -> None:
    line = {"name": name, "attempt": multiq.current_job().attempt, "outcome": outcome, "at": time.time()}
    with _ledger().open("a", encoding="utf-8") as ledger:
        ledger.write(json.dumps(line) + "\n")


def _ledger() -> Path:
    return Path(os.environ[LEDGER])


app = make_app(os.environ.get(URL, DEFAULT_URL))
