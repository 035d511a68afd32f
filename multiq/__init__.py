"""multiq: job queues behind one API, over several backends.

import multiq

app = multiq.App("sqlite:///jobs.db")

@app.task(queue="mail", max_attempts=5)
def send_reset_mail(address: str, name: str) -> None: ...

send_reset_mail.enqueue("ann@example.com", name="Ann")

multiq.Worker(app, queues=["mail"]).run()
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from . import errors, events
from .app import App
from .backend import JobRecord, QueueStats, State
from .backend.registry import open_backend
from .errors import (
    ArgumentsInvalid,
    BackendError,
    BackendFull,
    BackendTimeout,
    BackendUnavailable,
    EnqueueUncertain,
    JobNotFound,
    JobReserved,
    JobSettled,
    LeaseLost,
    MultiqError,
    NameInvalid,
    OptionInvalid,
    PayloadInvalid,
    PayloadTooLarge,
    QueueEmpty,
    SettingsInvalid,
    Unsupported,
    UrlInvalid,
)
from .job import Job, JobContext, JobHandle, JobInfo, current_job
from .queue import Queue
from .retry import BuryJob, ReleaseJob, SoftTimeout, exponential, fixed, steps
from .settings import Settings
from .task import Task

if TYPE_CHECKING:
    from .worker import Worker

__version__ = "0.1.0"

__all__ = [
    "App", "ArgumentsInvalid", "BackendError", "BackendFull", "BackendTimeout", "BackendUnavailable", "BuryJob",
    "EnqueueUncertain", "Job", "JobContext", "JobHandle", "JobInfo", "JobNotFound", "JobRecord", "JobReserved",
    "JobSettled", "LeaseLost", "MultiqError", "NameInvalid", "OptionInvalid", "PayloadInvalid", "PayloadTooLarge",
    "Queue", "QueueEmpty", "QueueStats", "ReleaseJob", "Settings", "SettingsInvalid", "SoftTimeout", "State", "Task",
    "Unsupported", "UrlInvalid", "Worker", "__version__", "current_job", "errors", "events", "exponential", "fixed",
    "open_backend", "steps",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name == "Worker":  # so that producers do not import the worker
        from .worker import Worker

        return Worker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if "MULTIQ_RELOADED" in os.environ:  # a worker has re-executed this program, with signals blocked
    from .worker.processes import reload

    reload.note_signals()
