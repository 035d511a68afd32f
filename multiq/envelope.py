"""Encodes and decodes JSON, and the envelope, which is the body of a task's job.

``docs/envelope.md`` describes the envelope for programs that write or read envelopes without multiq. The module
``envelope`` uses no pickle and loads no class by its name. Decoded values are plain data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec

from .errors import PayloadInvalid, PayloadTooLarge
from .json_check import check_json, shortened

if TYPE_CHECKING:
    from collections.abc import Iterator

ENVELOPE_VERSION = 1

#: The version of an envelope with a ``flow``. Older workers bury a job of a flow, because they cannot release the
#: flow's next jobs.
FLOW_VERSION = 2

#: The version of sealed bytes, which are signed, encrypted or compressed. ``multiq.payloads`` opens sealed bytes.
SEALED_VERSION = 3

#: The built-in task of a job that does nothing. If a flow has no single last job, multiq adds a job of the built-in
#: task as the last job.
END_TASK = "multiq.flow-end"

#: The default of the setting max_body: the size in bytes of the largest JSON body that multiq makes or decodes.
MAX_BODY_DEFAULT = 256 * 1024


#: The bounds that decoding checks, because another program may have written the envelope.
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]
_Name: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}\Z")]
_Id: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"\A[!-~]{1,200}\Z")]
# the ids of a flow's jobs begin with the flow's id
_FlowId: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"\A[!-~]{1,180}\Z")]
_TELLS_MAX = 997  # the verdict has three other steps: the flow's record, the arrival at its catch, and a spare step


class Tell(msgspec.Struct, array_like=True, frozen=True):
    """A job that waits for the job that has this envelope."""

    queue: _Name
    id: _Id
    mode: Literal["wait", "go", "stop", "catch"] = "wait"
    """What the waiting job does if the job with this envelope is buried. ``wait``: the waiting job continues to wait.
    ``go``: the waiting job runs. ``stop``: the waiting job is cancelled. ``catch``: the waiting job runs. Without a
    bury, a job with ``catch`` does not run.
    """


class Input(msgspec.Struct, array_like=True, frozen=True):
    """An argument that is the result of an earlier job, or a list with the results of several earlier jobs."""

    where: _Count | str
    """The position or the name of the argument."""
    sources: Annotated[list[tuple[_Name, _Id]], msgspec.Meta(min_length=1)]
    """The queue and the id of each earlier job."""
    is_list: bool = False


class FlowPart(msgspec.Struct, omit_defaults=True):
    """The part of a job's envelope that concerns its flow."""

    id: _FlowId
    tells: Annotated[list[Tell], msgspec.Meta(max_length=_TELLS_MAX)] = []
    """The jobs that wait for this job."""
    inputs: list[Input] = []
    ends: bool = False
    """Whether the flow is finished when this job is done."""


class PermitGate(msgspec.Struct, array_like=True, frozen=True, order=True):
    """A limit for which the worker asks for a permit before it starts the job (``multiq.permit_notes``)."""

    limit: _Name
    key: Annotated[str, msgspec.Meta(max_length=200)] = ""
    scope: Literal["queue", "app"] = "queue"


class Envelope(msgspec.Struct, omit_defaults=True):
    """The stored form of a task's job. If a field is None, the task's own setting applies."""

    multiq: int
    """The version of the envelope's format. The presence of the field ``multiq`` distinguishes an envelope from other
    JSON."""
    task: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    max_attempts: _Count | None = None
    max_crashes: _Count | None = None
    retry_for: _Seconds | None = None
    timeout: _Seconds | None = None
    headers: dict[str, str] = {}
    expires: _Seconds | None = None
    """The number of seconds after the enqueue within which the job must start. 0: no limit."""
    keep: _Seconds = 0.0
    """Seconds for which the job's outcome is kept. 0: the outcome is not kept."""
    flow: FlowPart | None = None
    """The field ``flow`` exists only in version 2."""
    permits: Annotated[list[PermitGate], msgspec.Meta(max_length=4)] = []
    """The limits that the backend does not keep within the reserve."""


class _Mark(msgspec.Struct):
    """The only field that every version of the envelope has."""

    multiq: int


class _SealMark(msgspec.Struct):
    """The part of a body of version 3 that describes its seal."""

    multiq: int
    task: str = ""
    seal: list[str] = []
    refused: str | None = None


def _plain(value: Any) -> Any:
    """Convert an instance of a subclass, such as a framework's safe string or a numeric library's float."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    raise TypeError(f"{type(value).__qualname__} is not JSON")


_encoder = msgspec.json.Encoder(enc_hook=_plain)
_decoder = msgspec.json.Decoder()
_envelope_decoder = msgspec.json.Decoder(Envelope)
_mark_decoder = msgspec.json.Decoder(_Mark)
_seal_decoder = msgspec.json.Decoder(_SealMark)

# Python raises a ValueError for an integer with too many digits
_UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError)
_UNWRITABLE = (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError)


def encode_json(value: Any, *, max_body: int = MAX_BODY_DEFAULT) -> bytes:
    """Return *value* as JSON. Raises ``PayloadTooLarge``. Raises ``PayloadInvalid`` with the path of the wrong part."""
    check_json(value)
    return _encode(value, max_body)


def encode_envelope(envelope: Envelope, max_body: int = MAX_BODY_DEFAULT) -> bytes:
    """Return the body of a task's job. The arguments must have been checked with ``check_json``."""
    return _encode(envelope, max_body)


def decode_json(body: bytes) -> Any:
    """Return the value of a JSON body. A body that is not JSON is returned unchanged."""
    try:
        return _decoder.decode(body)
    except _UNREADABLE:
        return body


def decode_envelope(body: bytes, *, max_body: int = MAX_BODY_DEFAULT) -> Envelope:
    """Return the envelope in a body. Raises ``PayloadInvalid`` with the reason why the body is not an envelope."""
    if len(body) > max_body:
        raise PayloadTooLarge(len(body), max_body, "it was not decoded; raise max_body in the settings")
    try:
        envelope = _envelope_decoder.decode(body)
    except _UNREADABLE as exc:
        _check_version(body)  # fields of another version may have other types
        raise PayloadInvalid(f"the body is not a task's envelope: {exc}") from exc
    if envelope.multiq == ENVELOPE_VERSION:
        if envelope.flow is not None:
            envelope.flow = None  # version 1 has no field flow, and unknown fields are ignored
    elif envelope.multiq != FLOW_VERSION:
        _check_version(body)
    return envelope


def refused_body(reason: str) -> bytes:
    """Return a body to replace a body that cannot be opened. A program that decodes the new body gets an error with
    *reason*, and does not run the job."""
    return _encoder.encode({"multiq": SEALED_VERSION, "refused": reason})


def refusal_of(body: bytes) -> str | None:
    """Return the reason why the sealed bytes *body* cannot be read. None means that *body* is not sealed."""
    if not body.startswith((b'{"multiq":3', b'{"multiq": 3')):
        return None
    try:
        mark = _seal_decoder.decode(body)
    except _UNREADABLE:
        return None
    if mark.refused is not None:
        return f"the payload is refused: {shortened(mark.refused, 500)}"
    return (
        f"the payload is sealed ({shortened(', '.join(mark.seal)) or 'unknown'}), and this program has no keys: set "
        "payload.sign and payload.encrypt, or payload.compress"
    )


def _encode(value: Any, max_body: int) -> bytes:
    try:
        body = _encoder.encode(value)
    except _UNWRITABLE as exc:
        culprits = _culprits(value, "value")
        raise PayloadInvalid(f"{shortened(next(culprits, 'value'))} cannot be written as JSON: {exc}") from exc
    if len(body) > max_body:
        raise PayloadTooLarge(
            len(body), max_body, "store the data elsewhere and enqueue its key, or raise max_body in the settings"
        )
    return body


def _check_version(body: bytes) -> None:
    try:
        version = _mark_decoder.decode(body).multiq
    except _UNREADABLE:
        return
    if version == SEALED_VERSION and (refusal := refusal_of(body)) is not None:
        raise PayloadInvalid(refusal)
    if version not in {ENVELOPE_VERSION, FLOW_VERSION}:
        raise PayloadInvalid(
            f"the body is an envelope of version {version}, but this multiq reads versions {ENVELOPE_VERSION} and "
            f"{FLOW_VERSION}"
        )


def _culprits(value: Any, path: str) -> Iterator[str]:
    """Yield the paths of the parts of *value* that JSON cannot encode, such as broken Unicode or enormous numbers."""
    if isinstance(value, Envelope):
        yield from _culprits(value.args, "args")
        for name, part in {**value.kwargs, "headers": value.headers}.items():
            yield from _culprits(part, name)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _culprits(key, f"{path}'s key {key}")
            yield from _culprits(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _culprits(item, f"{path}[{index}]")
    else:
        try:
            _encoder.encode(value)
        except _UNWRITABLE:
            yield path
