"""Sentry: errors of jobs, and traces by Sentry's conventions for queues. ``docs/sentry.md`` describes the events."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Literal

from multiq.app import App
from multiq.errors import ArgumentsInvalid, ExtraNotInstalled, OptionInvalid
from multiq.events import JobCrashed, JobOverdue, WorkerStopped
from multiq.formatting import shown
from multiq.job import first_wait
from multiq.middleware import Middleware
from multiq.retry import ReleaseJob, Snooze, SoftTimeout

try:
    import sentry_sdk
    from sentry_sdk import tracing_utils, utils
    from sentry_sdk.consts import OP, SPANDATA
    from sentry_sdk.integrations.logging import ignore_logger
    from sentry_sdk.scope import should_send_default_pii, use_isolation_scope, use_scope
    from sentry_sdk.tracing import BAGGAGE_HEADER_NAME, SENTRY_TRACE_HEADER_NAME, TransactionSource
except ImportError as exc:
    if not (exc.name or "").startswith("sentry_sdk"):
        raise
    raise ExtraNotInstalled("multiq.contrib.sentry needs sentry-sdk: pip install 'multiq[sentry]'") from exc

traces: Any = None
with contextlib.suppress(ImportError):  # older SDKs have no span streaming
    from sentry_sdk import traces

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sentry_sdk.scope import Scope

    from multiq.job import JobContext
    from multiq.middleware import Ending, Outgoing, Sending

__all__ = ["Sentry", "instrument"]

ORIGIN = "auto.queue.multiq"
OP_TASK = "queue.task.multiq"

_STATE = "multiq.sentry"  # the key of a run's scopes in the job's state
_LAST_EVENTS = 1.5  # seconds that a worker process has at its end to send its last events
_REPORTS = ("buried", "all", "none")


def instrument(app: App, *, errors: Literal["buried", "all", "none"] = "buried") -> Sentry:
    """Report the failed jobs of *app* to Sentry, and trace its jobs if Sentry's tracing is on.

    ``sentry_sdk.init`` may be called before or after this function. Call this function before other middleware is
    registered.

    *errors*: which errors of jobs are reported. ``"buried"``: errors after which the job is not tried again. ``"all"``:
    the error of each attempt. ``"none"``: no errors, for programs that report errors by themselves.

    Raises ``OptionInvalid`` if *app* is instrumented already. Raises ``ArgumentsInvalid``.
    """
    if not isinstance(app, App):
        raise ArgumentsInvalid(f"instrument must have a multiq.App, got {shown(app)}")
    if errors not in _REPORTS:
        raise OptionInvalid(f"errors must be one of {', '.join(_REPORTS)}, got {shown(errors)}")
    if any(isinstance(member, Sentry) for member in app.chain.members):
        raise OptionInvalid("an app must be instrumented once, got a second call: it would report all errors twice")
    middleware = Sentry(errors)
    app.middleware(middleware)
    app.events.subscribe(JobCrashed, _report_crash)
    app.events.subscribe(JobOverdue, _report_overdue)
    app.events.subscribe(WorkerStopped, _flush)
    app.events.last_calls.append(_flush)
    ignore_logger("multiq.worker")  # else the log records of failed jobs would be reported as well
    return middleware


class Sentry(Middleware):
    """Middleware that reports and traces jobs. ``instrument`` makes and registers this middleware."""

    def __init__(self, errors: Literal["buried", "all", "none"]) -> None:
        self._reported = {"buried": ("buried",), "all": ("buried", "retried"), "none": ()}[errors]

    def enqueue(self, sending: Sending) -> Iterator[None]:
        if not sentry_sdk.get_client().is_active() or not sending.jobs:
            yield
            return
        first = sending.jobs[0]
        is_one = len(sending.jobs) == 1
        with _publishing(first.task if is_one else first.options.queue) as span:
            for job in sending.jobs:
                _propagate(job, span)
            yield
            _note(span, SPANDATA.MESSAGING_SYSTEM, "multiq")
            _note(span, SPANDATA.MESSAGING_DESTINATION_NAME, first.options.queue)
            if is_one and first.id is not None:
                _note(span, SPANDATA.MESSAGING_MESSAGE_ID, first.id)

    def run(self, job: JobContext) -> Iterator[None]:
        if not sentry_sdk.get_client().is_active():
            yield
            return
        with _scope_of_a_job() as scope:
            _describe_job(scope, job)
            with _processing(job) as spans:
                _describe_span(spans[-1], job)
                # ended() reports the error, because only ended() knows whether the job is tried again
                job.state[_STATE] = (scope, sentry_sdk.get_current_scope().fork())
                error = yield from _caught(spans)
            if error is not None:
                raise error

    def ended(self, job: JobContext, ending: Ending) -> None:
        scopes = None if job.kept is None else job.kept.pop(_STATE, None)
        if ending.verdict not in self._reported or not sentry_sdk.get_client().is_active():
            return
        if ending.verdict == "retried" and isinstance(ending.error, ReleaseJob):
            return
        with contextlib.ExitStack() as stack:
            if scopes is None:  # the task was not called, or ran in a process that was killed
                _describe_job(stack.enter_context(_scope_of_a_job()), job)
            else:
                isolation, current = scopes
                stack.enter_context(use_isolation_scope(isolation))
                stack.enter_context(use_scope(current))
            if ending.error is None:
                task = job.task or "a job without a task"
                sentry_sdk.capture_message(f"{task} is {ending.verdict}: {ending.reason}", level="error")
                return
            event, hint = utils.event_from_exception(
                ending.error,
                client_options=sentry_sdk.get_client().options,
                mechanism={"type": "multiq", "handled": False},
            )
            if isinstance(ending.error, SoftTimeout):  # without this, all tasks that take too long would be one issue
                event["fingerprint"] = ["multiq", "SoftTimeout", job.task or ""]
            sentry_sdk.capture_event(event, hint=hint)


def _caught(spans: Sequence[Any]) -> Any:
    """Run the task at the ``yield``. Returns the task's error. The spans end before this error is raised again."""
    error: BaseException | None = None
    status = "ok"
    try:
        yield
    except (Snooze, ReleaseJob) as exc:
        error, status = exc, "aborted"
    except BaseException as exc:  # noqa: BLE001 - raised again
        error, status = exc, "internal_error"
    for span in spans:
        if _is_streamed(span):
            span.status = "error" if status == "internal_error" else "ok"
        else:
            span.set_status(status)
    return error


@contextlib.contextmanager
def _scope_of_a_job() -> Iterator[Scope]:
    """An isolation scope without the breadcrumbs of the worker, which tell about other jobs."""
    with sentry_sdk.isolation_scope() as scope:
        scope.clear_breadcrumbs()
        yield scope


@contextlib.contextmanager
def _publishing(name: str) -> Iterator[Any]:
    """The span of an enqueue. With span streaming, the result is None if no other span is open. Sentry's own
    integrations do the same."""
    if not _streams():
        with sentry_sdk.start_span(op=OP.QUEUE_PUBLISH, name=name, origin=ORIGIN) as span:
            yield span
    elif traces.get_current_span() is None:
        yield None
    else:
        with traces.start_span(name, {"sentry.op": OP.QUEUE_PUBLISH, "sentry.origin": ORIGIN}) as streamed:
            yield streamed


@contextlib.contextmanager
def _processing(job: JobContext) -> Iterator[tuple[Any, Any]]:
    """The transaction of a run, and the span within it."""
    name = job.task or ""
    if _streams():
        traces.continue_trace(job.headers)
        own = {"sentry.op": OP_TASK, "sentry.origin": ORIGIN, "sentry.segment.name.source": "task"}
        inner = {"sentry.op": OP.QUEUE_PROCESS, "sentry.origin": ORIGIN}
        with traces.start_span(name, own, None) as segment, traces.start_span(name, inner) as streamed:
            yield segment, streamed
        return
    continued = sentry_sdk.continue_trace(
        job.headers, op=OP_TASK, name=name, source=TransactionSource.TASK, origin=ORIGIN
    )
    sampling = {"multiq_job": {"task": job.task, "queue": job.queue}}
    with (
        sentry_sdk.start_transaction(continued, custom_sampling_context=sampling) as transaction,
        sentry_sdk.start_span(op=OP.QUEUE_PROCESS, name=name, origin=ORIGIN) as span,
    ):
        yield transaction, span


def _streams() -> bool:
    """Whether Sentry's span streaming is on. Span streaming has its own functions for spans."""
    is_enabled = getattr(tracing_utils, "has_span_streaming_enabled", None)
    return is_enabled is not None and bool(is_enabled(sentry_sdk.get_client().options))


def _is_streamed(span: Any) -> bool:
    return not hasattr(span, "set_data")


def _note(span: Any, name: str, value: Any) -> None:
    if span is not None:
        (span.set_attribute if _is_streamed(span) else span.set_data)(name, value)


def _propagate(job: Outgoing, span: Any) -> None:
    """If the caller has not set a trace in a job's headers, put the trace into these headers."""
    headers = job.headers
    if SENTRY_TRACE_HEADER_NAME in headers:
        return
    for name, value in sentry_sdk.get_current_scope().iter_trace_propagation_headers(span=span):
        known = headers.get(name)
        headers[name] = f"{known},{value}" if known and name == BAGGAGE_HEADER_NAME else value


def _describe_job(scope: Scope, job: JobContext) -> None:
    _tag(scope, job.task, job.queue, job.id)
    details: dict[str, Any] = {"task": job.task, "queue": job.queue, "job_id": job.id, "attempt": job.attempt}
    if job.envelope is not None and _may_have_arguments():
        details |= {"args": job.envelope.args, "kwargs": job.envelope.kwargs}
    scope.set_context("multiq", details)


def _may_have_arguments() -> bool:
    """Whether Sentry's own options allow sending the arguments of jobs."""
    options = sentry_sdk.get_client().options
    is_enabled = getattr(utils, "has_data_collection_enabled", None)  # older SDKs have only send_default_pii
    if is_enabled is not None and is_enabled(options):
        return bool(options["data_collection"]["queues"])
    return should_send_default_pii()


def _tag(scope: Scope, task: str | None, queue: str, job_id: str) -> None:
    scope.set_tag("multiq.task", task or "")
    scope.set_tag("multiq.queue", queue)
    scope.set_tag("multiq.job_id", job_id)


def _describe_span(span: Any, job: JobContext) -> None:
    _note(span, SPANDATA.MESSAGING_SYSTEM, "multiq")
    _note(span, SPANDATA.MESSAGING_DESTINATION_NAME, job.queue)
    _note(span, SPANDATA.MESSAGING_MESSAGE_ID, job.id)
    _note(span, SPANDATA.MESSAGING_MESSAGE_RETRY_COUNT, job.attempt - 1)
    _note(span, "messaging.message.body.size", len(job.lease.body))
    wait = first_wait(job)
    if wait is not None:
        _note(span, SPANDATA.MESSAGING_MESSAGE_RECEIVE_LATENCY, round(wait * 1000, 3))


def _report_crash(event: JobCrashed) -> None:
    _report(event.task, event.queue, event.job_id, f"its process has died while it ran: {event.reason}")


def _report_overdue(event: JobOverdue) -> None:
    job = event.job
    _report(job.task, job.queue, job.id, f"it runs on after its timeout of {event.timeout:g} s")


def _report(task: str | None, queue: str, job_id: str, text: str) -> None:
    if not sentry_sdk.get_client().is_active():
        return
    with _scope_of_a_job() as scope:
        _tag(scope, task, queue, job_id)
        sentry_sdk.capture_message(f"{task or 'a job without a task'}: {text}", level="error")


def _flush(_event: WorkerStopped | None = None) -> None:
    sentry_sdk.flush(timeout=_LAST_EVENTS)
