"""Outcomes of jobs. An outcome is JSON that a worker stores with the ack of a job that has ``keep``.

``docs/results.md`` describes the format for programs that read outcomes without multiq. A value that is too large or
not JSON is left out of the outcome. A job without a kept value is still done, because the job has done its work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from .envelope import encode_json, refusal_of
from .errors import PayloadInvalid, PayloadTooLarge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .annotations import Codec
    from .backend.effects import Outcome, OutcomeKind

OUTCOME_VERSION = 1

#: The default of the setting max_result: the size in bytes of the largest JSON value that is kept with an outcome.
MAX_RESULT_DEFAULT = 256 * 1024

ERRORS_KEPT = 5
"""The largest number of errors in a job's memo and in its outcome. Only the last errors are kept."""


class AttemptError(msgspec.Struct, frozen=True, omit_defaults=True):
    """The error of a failed attempt of a job."""

    attempt: int
    """The number of the attempt, from 1."""
    error: str
    """``Kind: message`` of the error."""
    at: float
    """The time of the failure, in seconds since 1970 by the worker's clock."""
    worker: str
    """``host:pid``."""
    error_class: str = ""
    """The module and the name of the error's class, like ``builtins.ValueError``. The text is empty if the class is not
    stored."""
    seconds: float | None = None
    """The duration of the attempt in seconds, or None if the duration is not stored."""


class JobOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The kept outcome of a job that is gone. ``JobHandle.outcome`` returns a ``JobOutcome``."""

    queue: str
    id: str
    kind: OutcomeKind
    """``"done"`` or ``"cancelled"``."""
    value: Any
    """The value that the task returned, decoded from JSON. A tuple becomes a list. If ``omitted`` is set, ``value`` is
    None."""
    omitted: str | None
    """The reason why the outcome has no value. None means that the outcome has a value."""
    started: float
    """The time at which the last attempt began, in seconds since 1970 by the worker's clock."""
    finished: float
    worker: str
    """``host:pid`` of the process that ran the last attempt."""
    attempt: int
    """The number of the last attempt, from 1."""
    errors: list[AttemptError]
    """The errors of the earlier attempts, at most the last five errors. An attempt that ended by a crash has no
    error."""
    expires_in: float
    """Seconds until the outcome is no longer returned."""


class _Stored(msgspec.Struct, omit_defaults=True):
    """The JSON of an outcome."""

    v: int
    value: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    omitted: str | None = None
    started: float = 0.0
    finished: float = 0.0
    worker: str = ""
    attempt: int = 0
    errors: list[AttemptError] = []


class _Version(msgspec.Struct):
    v: int


_encode = msgspec.json.Encoder().encode
_stored_decoder = msgspec.json.Decoder(_Stored)
_version_decoder = msgspec.json.Decoder(_Version)
_value_decoder = msgspec.json.Decoder()

_UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError)


def encode_value(value: Any, max_result: int, codec: Codec | None = None) -> tuple[bytes | None, str | None]:
    """Return a pair of the JSON of a task's value, and the reason why the value cannot be kept. Either the JSON or the
    reason is None. Never raises an exception.

    *codec*: the codec that encodes the value by the annotation of the task. None means that the value is JSON.
    """
    try:
        if codec is not None:
            value = codec.encode_result(value)
        return encode_json(value, max_body=max_result), None
    except PayloadTooLarge as exc:
        return None, f"the value has {exc.size_bytes:,} bytes, and max_result allows {exc.limit_bytes:,}"
    except PayloadInvalid as exc:
        return None, str(exc)
    except BaseException as exc:  # noqa: BLE001 - code of the value's class may raise any error, and the job is done
        return None, f"the value cannot be read: {type(exc).__name__}"


def encode_outcome(
    value: bytes | None,
    omitted: str | None,
    *,
    started: float,
    finished: float,
    worker: str,
    attempt: int,
    errors: Sequence[AttemptError] = (),
    most: int | None = None,
) -> tuple[bytes, str | None]:
    """Return an outcome's bytes, and the reason why the outcome has no value.

    *most*: the largest number of bytes, or None for no limit. If the outcome is larger, the value is left out. If the
    outcome without a value is still too large, the errors are left out, too.
    """
    raw = msgspec.UNSET if value is None else msgspec.Raw(value)
    stored = _Stored(OUTCOME_VERSION, raw, omitted, started, finished, worker, attempt, list(errors))
    body = _encode(stored)
    if most is not None and len(body) > most and value is not None:
        omitted = f"the outcome has {len(body):,} bytes, and the backend allows {most:,}"
        body = without_value(body, omitted)
    if most is not None and len(body) > most:
        body = without_value(body, omitted or "", with_errors=False)
    return body, omitted


def without_value(body: bytes, reason: str, *, with_errors: bool = True) -> bytes:
    """Return an outcome's bytes without the value. If the outcome has a value, *reason* replaces the value."""
    stored = _stored_decoder.decode(body)
    if stored.value is not msgspec.UNSET:
        stored.value, stored.omitted = msgspec.UNSET, reason
    if not with_errors:
        stored.errors = []
    return _encode(stored)


def decode_outcome(outcome: Outcome) -> JobOutcome:
    """Return the decoded form of a stored outcome. Raises ``PayloadInvalid``."""
    if (refusal := refusal_of(outcome.body)) is not None:
        raise PayloadInvalid(f"the outcome of job {outcome.id} cannot be read: {refusal}")
    try:
        version = _version_decoder.decode(outcome.body).v
        if version != OUTCOME_VERSION:
            raise PayloadInvalid(
                f"the outcome of job {outcome.id} is of version {version}, but this multiq reads version "
                f"{OUTCOME_VERSION}"
            )
        stored = _stored_decoder.decode(outcome.body)
        has_value = isinstance(stored.value, msgspec.Raw)
        value = _value_decoder.decode(stored.value) if isinstance(stored.value, msgspec.Raw) else None
    except _UNREADABLE as exc:
        if isinstance(exc, PayloadInvalid):
            raise
        raise PayloadInvalid(f"the outcome of job {outcome.id} cannot be read: {exc}") from exc
    return JobOutcome(
        queue=outcome.queue,
        id=outcome.id,
        kind=outcome.kind,
        value=value,
        omitted=None if has_value else stored.omitted or "",
        started=stored.started,
        finished=stored.finished,
        worker=stored.worker,
        attempt=stored.attempt,
        errors=stored.errors,
        expires_in=outcome.expires_in,
    )
