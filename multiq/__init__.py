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
    EnqueueRefused,
    EnqueueUncertain,
    FlowFinished,
    FlowInvalid,
    FlowNotFound,
    JobAwaited,
    JobCancelled,
    JobEnded,
    JobExists,
    JobFailed,
    JobHeld,
    JobNotFound,
    JobReserved,
    JobSettled,
    LeaseLost,
    MultiqError,
    NameInvalid,
    OptionInvalid,
    OutcomeUnknown,
    PayloadInvalid,
    PayloadTooLarge,
    QueueEmpty,
    ResultOmitted,
    ResultTimeout,
    ScheduleExists,
    ScheduleInvalid,
    ScheduleNotFound,
    SettingsInvalid,
    UniqueTaken,
    Unsupported,
    UrlInvalid,
)
from .job import Job, JobContext, JobHandle, JobInfo, current_job
from .memo import Progress
from .middleware import Ending, Middleware, Outgoing, Sending
from .outcome import JobOutcome
from .queue import Queue
from .registry import Tasks
from .retry import BuryJob, ReleaseJob, Snooze, SoftTimeout, exponential, fixed, steps
from .settings import Settings
from .task import Task

if TYPE_CHECKING:
    from .flows import Flow, FlowHandle, batch, chain, group
    from .limits import Limit
    from .payloads import Payloads
    from .unique import Unique
    from .worker import Worker

__version__ = "0.1.0"

__all__ = [
    "App", "ArgumentsInvalid", "BackendError", "BackendFull", "BackendTimeout", "BackendUnavailable", "BuryJob",
    "Ending", "EnqueueRefused", "EnqueueUncertain", "Flow", "FlowFinished", "FlowHandle", "FlowInvalid",
    "FlowNotFound", "Job", "JobAwaited", "JobCancelled", "JobContext", "JobEnded", "JobExists", "JobFailed",
    "JobHandle", "JobHeld", "JobInfo", "JobNotFound", "JobOutcome", "JobRecord", "JobReserved", "JobSettled",
    "LeaseLost", "Limit", "Middleware", "MultiqError", "NameInvalid", "OptionInvalid", "OutcomeUnknown", "Outgoing",
    "PayloadInvalid", "PayloadTooLarge", "Payloads", "Progress", "Queue", "QueueEmpty", "QueueStats", "ReleaseJob",
    "ResultOmitted", "ResultTimeout", "ScheduleExists", "ScheduleInvalid", "ScheduleNotFound", "Sending",
    "Settings", "SettingsInvalid", "Snooze", "SoftTimeout", "State", "Task", "Tasks", "Unique", "UniqueTaken",
    "Unsupported", "UrlInvalid", "Worker", "__version__", "batch", "chain", "current_job", "errors", "events",
    "exponential", "fixed", "group", "open_backend", "steps",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name == "Worker":  # imported late, because producers do not need the worker
        from .worker import Worker

        return Worker
    if name == "Payloads":
        from .payloads import Payloads

        return Payloads
    if name == "Unique":  # imported late, because few programs have unique jobs
        from .unique import Unique

        return Unique
    if name in {"Flow", "FlowHandle", "batch", "chain", "group"}:  # imported late, because few programs have flows
        from . import flows

        return getattr(flows, name)
    if name == "Limit":  # imported late, because few programs have limits
        from .limits import Limit

        return Limit
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# set by a worker that reloads, which has re-executed this program with signals blocked
if "MULTIQ_RELOADED" in os.environ:
    from .worker.processes import reload

    reload.note_signals()
