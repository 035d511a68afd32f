"""Enqueues jobs of tasks that have middleware, a unique key or limits. Enqueues without middleware, a unique key or
limits do not use this module."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from .backend import NewJob
from .enqueue import add_jobs, make_job
from .errors import EnqueueUncertain, JobExists, OptionInvalid
from .ids import check_new_ids, new_id, new_ids
from .job import JobHandle, handles_of
from .middleware import AroundEnqueue, Outgoing, Sending
from .validation import check_headers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from .app import App
    from .backend import Backend, Terms
    from .call_options import CallOptions
    from .envelope import Envelope
    from .flows.signature import Signature
    from .limits import Limit
    from .task import Task


def send(
    task: Task[..., Any],
    calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
    options: CallOptions,
    ids: Iterable[str] | None = None,
    *,
    is_one: bool,
) -> list[JobHandle]:
    """Enqueue calls of a task. *is_one*: whether ``enqueue`` was called. With *is_one*, ``EnqueueUncertain.repeat``
    returns one handle, and not a list."""
    backend = task.app.backend
    parcel = _Parcel(task, calls, options, ids, is_one=is_one)
    with parcel.around():
        if is_one and not parcel.has_terms:  # the common case, without loops for speed
            job = parcel.encode_one(backend)
            (job_id,) = add_jobs(backend, parcel.queue, [job], options.connection, is_one=True)
            return [parcel.stored_one(backend, job_id)]
        jobs = parcel.encode(backend)
        if limits := parcel.limits():
            from .limits import store_limits

            store_limits(backend, parcel.queue, limits, options.connection)
        try:
            stored = add_jobs(backend, parcel.queue, jobs, options.connection, is_one=is_one) if jobs else []
        except EnqueueUncertain as error:
            parcel.refuse_existing_later(error)
            raise
        return parcel.stored(backend, jobs, stored)


async def asend(
    task: Task[..., Any],
    calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
    options: CallOptions,
    ids: Iterable[str] | None = None,
    *,
    is_one: bool,
) -> list[JobHandle]:
    """``send`` without blocking the event loop. Middleware runs on the event loop, in the context of the caller."""
    from .async_enqueue import aopen, asend_jobs, astore_limits

    parcel = _Parcel(task, calls, options, ids, is_one=is_one)
    with parcel.around():
        # encode first, because the caller may change the arguments while the backend is opened
        bodies = parcel.bodies()
        backend = await aopen(task.app, parcel.queue)
        parcel.check(backend)
        jobs = parcel.jobs(backend, bodies)
        if limits := parcel.limits():
            await astore_limits(backend, parcel.queue, limits, options.connection)
        has_own_ids = ids is not None or options.id is not None
        try:
            stored = (
                await asend_jobs(
                    backend, parcel.queue, jobs, connection=options.connection, is_one=is_one, has_own_ids=has_own_ids
                )
                if jobs
                else []
            )
        except EnqueueUncertain as error:
            parcel.refuse_existing_later(error)
            raise
        return parcel.stored(backend, jobs, stored)


class _Parcel:
    """The calls of one task during their enqueue."""

    def __init__(
        self,
        task: Task[..., Any],
        calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
        options: CallOptions,
        ids: Iterable[str] | None,
        *,
        is_one: bool,
    ) -> None:
        self._task = task
        self._sent = [Outgoing(task.name, args, kwargs, options, task) for args, kwargs in calls]
        if ids is None:
            self._own_ids: list[str] | None = None if options.id is None else [options.id]
        else:
            self._own_ids = check_new_ids(ids, len(self._sent))
            for job, own_id in zip(self._sent, self._own_ids, strict=True):
                job.id = own_id
        self._is_one = is_one
        self._terms: list[Terms | None] = []
        self._sending = Sending(task.app, "one" if is_one else "many", self._sent)
        self.queue = options.queue

    def around(self) -> AroundEnqueue:
        return AroundEnqueue(self._sending, self._task.app.chain, self._task.chain)

    @property
    def has_terms(self) -> bool:
        """Whether a job has a unique key or limits after the changes by middleware."""
        for job in self._sent:  # noqa: SIM110 - a loop is faster than a generator
            if job.options.has_terms:
                return True
        return False

    def encode_one(self, backend: Backend) -> NewJob:
        """``encode`` for a single job without a unique key and without limits."""
        (job,) = self._sent
        options = final_options(job)
        self.queue = options.queue
        body = self._task.encode(job.args, job.kwargs, options)
        if options.keep and not backend.declared.outcomes:
            raise backend.unsupported("outcomes")
        own_id = None if self._own_ids is None else self._own_ids[0]
        return make_job(backend, body, priority=options.priority, delay=options.delay, ttr=options.ttr, own_id=own_id)

    def stored_one(self, backend: Backend, job_id: str) -> JobHandle:
        self._sent[0].id = job_id
        return JobHandle(backend, self.queue, job_id)

    def encode(self, backend: Backend) -> list[NewJob]:
        """Return the jobs, with the changes by middleware. Raises the errors of ``Task.enqueue``."""
        bodies = self.bodies()
        self.check(backend)
        return self.jobs(backend, bodies)

    def bodies(self) -> list[bytes]:
        queues = {job.options.queue for job in self._sent}
        if len(queues) > 1:
            raise OptionInvalid(
                f"middleware must leave the jobs of one enqueue_many in one queue, got {', '.join(sorted(queues))}"
            )
        self.queue = queues.pop() if queues else self.queue
        if not self._is_one:
            for job in self._sent:
                _refuse_error(job.options)
        self._terms = []
        bodies = [self._task.encode(job.args, job.kwargs, final_options(job)) for job in self._sent]
        for job in self._sent:
            terms = self._task.terms(job.args, job.kwargs, job.options) if job.options.has_terms else None
            self._terms.append(terms if terms is not None and (terms.gates or terms.unique is not None) else None)
        return bodies

    def limits(self) -> list[Limit]:
        """Return the limits of the jobs."""
        if not self.has_terms:
            return []
        from .limits import limits_of

        return list(dict.fromkeys(limit for job in self._sent for limit in limits_of(job.options)))

    def check(self, backend: Backend) -> None:
        """Raises ``Unsupported``, ``OptionInvalid``."""
        for job in self._sent:
            options = job.options
            backend.check_terms(priority=options.priority, delay=options.delay)
            if options.keep and not backend.declared.outcomes:
                raise backend.unsupported("outcomes")
            if options.unique is not None and not backend.declared.unique:
                raise backend.unsupported("unique")
            follows = options.unique is not None and options.unique.follows
            if follows and not backend.declared.limits:
                raise backend.unsupported("limits")
            if options.limits:
                from .limits import check_supported

                check_supported(backend, options.limits)
        if self._own_ids is not None and not backend.declared.client_ids:
            raise backend.unsupported("client_ids")

    def jobs(self, backend: Backend, bodies: list[bytes]) -> list[NewJob]:
        count = len(self._sent)
        ids = self._own_ids or ([new_id()] if count == 1 else new_ids(count))
        jobs = [
            NewJob(body, job_id, job.options.priority, job.options.delay, job.options.ttr, terms)
            for job, body, job_id, terms in zip(self._sent, bodies, ids, self._terms, strict=True)
        ]
        if backend.declared.limits or not any(job.options.limits for job in self._sent):
            return jobs
        from .permit_notes import by_permits

        return [by_permits(backend, job, self._task.app.settings.max_body) for job in jobs]

    def stored(self, backend: Backend, jobs: Sequence[NewJob], ids: list[str]) -> list[JobHandle]:
        """Return the handles. Raises ``JobExists``."""
        for job, job_id in zip(self._sent, ids, strict=True):
            job.id = job_id
        handles = handles_of(backend, self.queue, jobs, ids)
        self._refuse_existing(handles)
        return handles

    def refuse_existing_later(self, error: EnqueueUncertain) -> None:
        """Let the method ``repeat`` of *error* raise ``JobExists``, as the enqueue does."""
        again = error.repeated
        if again is None or not self._is_one:  # on_conflict="error" is refused for several jobs
            return

        def repeat() -> JobHandle:
            handle: JobHandle = again()
            self._refuse_existing([handle])
            return handle

        error.repeat_by(repeat)

    def _refuse_existing(self, handles: Sequence[JobHandle]) -> None:
        for job, handle in zip(self._sent, handles, strict=True):
            unique = job.options.unique
            if not handle.was_new and unique is not None and unique.on_conflict == "error":
                raise JobExists(handle.queue, handle.id)


def _refuse_error(options: CallOptions) -> None:
    """Raise ``OptionInvalid`` for ``on_conflict="error"`` in a call that enqueues several jobs."""
    if options.unique is not None and options.unique.on_conflict == "error":
        raise OptionInvalid(
            "on_conflict of enqueue_many must be 'keep', 'replace' or 'follow', got 'error': some of the jobs "
            "would be added; look at was_new of each handle"
        )


def final_options(job: Outgoing) -> CallOptions:
    """Return the options of a job. The headers include the changes by middleware. Raises ``ArgumentsInvalid``."""
    headers = check_headers(job.headers)
    return job.options if headers == job.options.headers else msgspec.structs.replace(job.options, headers=headers)


@contextmanager
def around_calls(
    app: App, calls: Sequence[Signature], flow_id: str
) -> Iterator[tuple[list[Signature], list[Outgoing]]]:
    """Run middleware around the enqueue of a flow. Yields the calls and their jobs, with the changes by middleware.

    The caller's ``with`` block sets the jobs' ids. A task's own middleware gets only the jobs of this task.
    """
    from .flows.signature import Signature

    sent = [Outgoing(call.task.name, call.args, call.kwargs, call.options, call.task) for call in calls]
    of_tasks: dict[Task[..., Any], list[Outgoing]] = {}
    for call, job in zip(calls, sent, strict=True):
        if call.task.chain is not None and call.task.chain.enqueue:
            of_tasks.setdefault(call.task, []).append(job)
    sending = Sending(app, "flow", sent)
    sending.flow = flow_id
    with AroundEnqueue(sending, app.chain), _around_tasks(app, flow_id, list(of_tasks.items())):
        changed = [
            Signature(call.task, call.args, call.kwargs, final_options(job))
            for call, job in zip(calls, sent, strict=True)
        ]
        yield changed, sent


@contextmanager
def _around_tasks(app: App, flow_id: str, tasks: list[tuple[Task[..., Any], list[Outgoing]]]) -> Iterator[None]:
    if not tasks:
        yield
        return
    (task, jobs), *others = tasks
    sending = Sending(app, "flow", jobs)
    sending.flow = flow_id
    with AroundEnqueue(sending, task.chain), _around_tasks(app, flow_id, others):
        yield


@contextmanager
def around_occurrences(app: App, jobs: Sequence[tuple[Envelope, CallOptions]]) -> Iterator[list[Outgoing]]:
    """Run middleware around the jobs of a schedule, and put the headers that middleware has set into the envelopes."""
    sent = [Outgoing(envelope.task, envelope.args, envelope.kwargs, options, None) for envelope, options in jobs]
    with AroundEnqueue(Sending(app, "schedule", sent), app.chain):
        for job, (envelope, _) in zip(sent, jobs, strict=True):
            envelope.headers = final_options(job).headers
        yield sent
