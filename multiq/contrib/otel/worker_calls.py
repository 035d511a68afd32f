"""Spans and durations of a worker's calls: the consumer that reserves and settles jobs, with telemetry around it."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, TypeVar

from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode

from multiq.backend import Ack, Bury, Touch
from multiq.backend.around import ConsumerAround
from multiq.errors import BackendError
from multiq.job import describe

from . import conventions as conv

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.backend import Consumer, Lease, Verdict
    from multiq.errors import LeaseLost

    from .tracing import OpenTelemetry


T = TypeVar("T")

_MOST_NOTED = 10_000  # jobs; a worker holds fewer, but a job whose lease is lost may never be settled


class WorkerCalls:
    """Makes the spans of one app's consumers. The public methods raise no error of the SDK."""

    def __init__(self, middleware: OpenTelemetry) -> None:
        self._middleware = middleware
        self._received: dict[str, tuple[int, int]] = {}  # token -> begin and end of the call, in nanoseconds
        self._creations: dict[str, SpanContext] = {}  # token -> the context of the job's creation

    def around(self, consumer: Consumer) -> Consumer:
        return TracedConsumer(consumer, self)

    def received(self, leases: Sequence[Lease], began: int) -> None:
        """Note a call that has reserved jobs. The spans are made when the jobs begin, as the conventions demand."""
        now = time.time_ns()
        for lease in leases:
            _note(self._received, lease.token, (began, now))
        for queue in {lease.queue for lease in leases}:
            self._measure("receive", "receive", queue, began, now)

    def receive_failed(self, queue: str, error: BaseException, began: int) -> None:
        self._measure("receive", "receive", queue, began, time.time_ns(), _name(error))

    def handed_on(self, lease: Lease, creation: SpanContext | None) -> None:
        """Make the receive span of a job that begins."""
        if creation is not None:
            _note(self._creations, lease.token, creation)
        times = self._received.pop(lease.token, None)
        if times is None:
            return
        try:
            self._receive_span(lease, creation, times)
        except Exception:  # noqa: BLE001 - an SDK that fails must not fail a job
            self._middleware.note_failure()

    def _receive_span(self, lease: Lease, creation: SpanContext | None, times: tuple[int, int]) -> None:
        attributes = self._middleware.attributes("receive", "receive", lease.queue)
        attributes |= {conv.MESSAGE_ID: lease.id, conv.CLIENT_ID: self._middleware.client()}
        span = self._middleware.tracer.start_span(
            f"receive {lease.queue}",
            kind=SpanKind.CLIENT,
            attributes=attributes,
            links=() if creation is None else (Link(creation),),
            start_time=times[0],
        )
        span.end(times[1])

    def settled(
        self, verdicts: Sequence[Verdict], lost: Sequence[LeaseLost | None] | BaseException, began: int
    ) -> None:
        """Make the spans of verdicts: one for each queue, kind of verdict, and error."""
        now = time.time_ns()
        answers = [lost] * len(verdicts) if isinstance(lost, BaseException) else lost
        groups: dict[tuple[str, str, str | None], list[tuple[Lease, BaseException | None]]] = {}
        for verdict, error in zip(verdicts, answers, strict=True):
            if not isinstance(verdict, Touch):
                kind = None if error is None else _name(error)
                group = groups.setdefault((_operation(verdict), verdict.lease.queue, kind), [])
                group.append((verdict.lease, error))
        for (operation, queue, kind), members in groups.items():
            try:
                self._settle_span(operation, queue, kind, members, (began, now))
            except Exception:  # noqa: BLE001 - as in handed_on
                self._middleware.note_failure()
            self._measure(operation, "settle", queue, began, now, kind)
            if not isinstance(members[0][1], BackendError):  # after a BackendError, the verdict is sent again
                for lease, _ in members:
                    self._received.pop(lease.token, None)
                    self._creations.pop(lease.token, None)

    def _settle_span(
        self,
        operation: str,
        queue: str,
        kind: str | None,
        members: list[tuple[Lease, BaseException | None]],
        times: tuple[int, int],
    ) -> None:
        began, now = times
        attributes = self._middleware.attributes(operation, "settle", queue)
        attributes[conv.CLIENT_ID] = self._middleware.client()
        if len(members) == 1:
            attributes[conv.MESSAGE_ID] = members[0][0].id
        else:
            attributes[conv.BATCH_COUNT] = len(members)
        if kind is not None:
            attributes[conv.ERROR_TYPE] = kind
        creations = [self._creations.get(lease.token) for lease, _ in members]
        span = self._middleware.tracer.start_span(
            f"{operation} {queue}",
            kind=SpanKind.CLIENT,
            attributes=attributes,
            links=[Link(creation) for creation in creations if creation is not None],
            start_time=began,
        )
        error = members[0][1]
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, describe(error)))
        span.end(now)

    def _measure(  # noqa: PLR0917 - what is measured
        self, operation: str, kind: str, queue: str, began: int, now: int, error_type: str | None = None
    ) -> None:
        try:
            _, attributes = self._middleware.labels(operation, kind, queue, error_type)
            self._middleware.instruments.operation_duration.record((now - began) / 1e9, attributes)
        except Exception:  # noqa: BLE001 - as in handed_on
            self._middleware.note_failure()


class TracedConsumer(ConsumerAround):
    """A consumer whose calls have spans."""

    def __init__(self, inner: Consumer, calls: WorkerCalls) -> None:
        super().__init__(inner)
        self._calls = calls

    def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
        return self.exchange((), limit, timeout, queues)[1]

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        began = time.time_ns()
        try:
            lost = super().settle(verdicts)
        except BackendError as exc:
            self._calls.settled(verdicts, exc, began)
            raise
        self._calls.settled(verdicts, lost, began)
        return lost

    def exchange(
        self, verdicts: Sequence[Verdict], limit: int, timeout: float, queues: Sequence[str] | None = None
    ) -> tuple[list[LeaseLost | None], list[Lease]]:
        """Like the inner consumer's ``exchange``, but a call with verdicts does not wait for jobs, because the duration
        of the call would include the wait."""
        began = time.time_ns()
        wait = 0.0 if verdicts else timeout
        try:
            lost, leases = super().exchange(verdicts, limit, wait, queues)
        except BackendError as exc:
            self._calls.settled(verdicts, exc, began)
            if not verdicts:
                self._calls.receive_failed(self.queues[0] if len(self.queues) == 1 else "", exc, began)
            raise
        self._calls.settled(verdicts, lost, began)
        if leases:
            self._calls.received(leases, began)
        return lost, leases


def _note(notes: dict[str, T], token: str, value: T) -> None:
    if len(notes) >= _MOST_NOTED:
        with contextlib.suppress(StopIteration, RuntimeError, KeyError):  # another thread has changed the dict
            del notes[next(iter(notes))]  # the oldest
    notes[token] = value


def _operation(verdict: Verdict) -> str:
    if isinstance(verdict, Ack):
        return "ack"
    return "bury" if isinstance(verdict, Bury) else "release"


def _name(error: BaseException) -> str:
    from .tracing import type_name

    return type_name(error)
