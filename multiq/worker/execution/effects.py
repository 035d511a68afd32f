"""Adds outcomes, memos and steps of flows to the verdicts of a worker."""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from multiq.backend import DELAY_MAX, Ack, After, Bury, GiveBack, Release
from multiq.errors import PayloadInvalid
from multiq.failure_record import class_path
from multiq.memo import decode_memo, readable_memo
from multiq.outcome import AttemptError, encode_outcome, encode_value

from .running_memos import failed_memo

if TYPE_CHECKING:
    from multiq.annotations import Codec
    from multiq.app import App
    from multiq.backend.effects import OutcomeKind
    from multiq.flows.followers import End
    from multiq.flows.record import FlowRecord
    from multiq.job import JobContext

    from .running_memos import JobMemos

_log = logging.getLogger("multiq.worker")

V = TypeVar("V", Ack, Bury)


class Effects:
    """Adds outcomes, memos and steps to verdicts. *memos* is None in a process that runs no jobs."""

    def __init__(self, app: App, memos: JobMemos | None) -> None:
        self._backend = app.backend
        self._settings = app.settings
        self._memos = memos
        self._worker = f"{socket.gethostname()}:{os.getpid()}"
        self.has_kept = False
        """Whether this process has kept an outcome."""

    def ack(
        self,
        job: JobContext,
        value: Any,
        seconds: float,
        record: FlowRecord | None = None,
        codec: Codec | None = None,
    ) -> Ack:
        """Return the ack of a successful job. If the task has ``keep``, the ack stores the outcome. Never raises.

        - *seconds*: how long the job ran.
        - *record*: the record of the flow that this job ends. None: the job ends no flow.
        - *codec*: encodes the value by the annotation of the task. None: the value is JSON.
        """
        if job.envelope is None or not job.envelope.keep:
            return self._with_steps(job, Ack(job.lease), "done", "", record)
        encoded, omitted = encode_value(value, self._settings.max_result, codec)
        return self._with_steps(job, self._ack(job, "done", encoded, omitted, seconds), "done", "", record)

    def cancelled(
        self,
        job: JobContext,
        reason: str,
        seconds: float = 0.0,
        record: FlowRecord | None = None,
        *,
        releases: bool = False,
    ) -> Ack:
        """Return the ack of a cancelled job. If the task has ``keep``, the ack stores an outcome.

        *releases*: with True, the jobs that wait for this job are released, and run. With False, they are
        cancelled, too.
        """
        is_kept = job.envelope is not None and job.envelope.keep
        ack = self._ack(job, "cancelled", None, reason, seconds) if is_kept else Ack(job.lease)
        return self._with_steps(job, ack, "done" if releases else "cancelled", reason, record)

    def failed(
        self,
        job: JobContext,
        verdict: Release | Bury,
        error: BaseException | None = None,
        seconds: float | None = None,
    ) -> Release | Bury:
        """Return the verdict on a failed run, with the job's memo if it has changed.

        If the task has ``keep``, the error is added to the memo.

        - *error*: the error that the task has raised. None: the task has not run.
        - *seconds*: how long the task ran. None: the task has not run.
        """
        memo = self._failed_memo(job, verdict, error, seconds)
        if memo is not None:
            after = msgspec.structs.replace(verdict.after or After(), memo=memo)
            verdict = msgspec.structs.replace(verdict, after=after)
        if isinstance(verdict, Release):
            return verdict
        return self._with_steps(job, verdict, "failed", verdict.reason or "", None)

    def snoozed(self, job: JobContext, verdict: Release | GiveBack) -> Release | GiveBack:
        """Return the verdict on a job that has snoozed, with the job's memo if it has changed."""
        running = None if self._memos is None else self._memos.current(job.lease)
        memo = None if running is None else running.with_error(None)
        return verdict if memo is None else msgspec.structs.replace(verdict, after=After(memo=memo))

    def _with_steps(self, job: JobContext, verdict: V, end: End, reason: str, record: FlowRecord | None) -> V:
        """Add the steps for the jobs of the flow that wait for this job, and for the flow's record."""
        flow = None if job.envelope is None else job.envelope.flow
        if flow is None:
            return verdict
        from multiq.flows.followers import steps_after

        steps = steps_after(flow, job.id, end, reason, record)
        if not steps:
            return verdict
        return msgspec.structs.replace(verdict, after=msgspec.structs.replace(verdict.after or After(), steps=steps))

    def _ack(self, job: JobContext, kind: OutcomeKind, value: bytes | None, omitted: str | None, seconds: float) -> Ack:
        lease, envelope = job.lease, job.envelope
        capabilities = self._backend.capabilities
        if envelope is None or not capabilities.outcomes:  # the job was moved here from another backend
            return Ack(lease)
        finished = time.time()
        body, left_out = encode_outcome(
            value,
            omitted,
            started=finished - seconds,
            finished=finished,
            worker=self._worker,
            attempt=lease.attempt,
            errors=readable_memo(lease.memo).errors,
            most=capabilities.max_body,
        )
        if left_out is not None and kind == "done":
            _log.warning(
                "[%s] %s %s is done, and its outcome has no value: %s", lease.queue, lease.id, job.task, left_out
            )
        self.has_kept = True
        return Ack(lease, After(keep=min(envelope.keep, DELAY_MAX), outcome=body, kind=kind))

    def _failed_memo(
        self, job: JobContext, verdict: Release | Bury, raised: BaseException | None, seconds: float | None
    ) -> bytes | None:
        is_kept = job.envelope is not None and job.envelope.keep > 0
        running = None if self._memos is None else self._memos.current(job.lease)
        if (running is None and not is_kept) or not self._backend.capabilities.memos:
            return None
        error = None
        if is_kept:
            error = AttemptError(
                job.attempt,
                verdict.reason or "no reason",
                time.time(),
                self._worker,
                "" if raised is None else class_path(raised),
                None if seconds is None else round(seconds, 6),
            )
        if running is not None:
            return running.with_error(error)
        try:
            memo = decode_memo(job.lease.memo)
        except PayloadInvalid:  # another program stored this memo, so it stays unchanged
            return None
        most = self._backend.capabilities.max_body
        limit = self._settings.max_body if most is None else min(self._settings.max_body, most)
        return failed_memo(memo, error, limit, is_changed=False)
