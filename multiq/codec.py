"""Values to bytes and back: JSON, and the envelope that a task's job travels in.

``docs/envelope.md`` describes the envelope for those who write or read it without multiq. No pickle, no classes by
name: what comes out of a queue is data.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from .errors import PayloadInvalid, PayloadTooLarge

ENVELOPE_VERSION = 1

#: bytes of JSON that multiq makes or decodes, unless the settings say otherwise: larger things belong beside the queue
MAX_BODY_DEFAULT = 256 * 1024

_MAX_DEPTH = 100
_PLAIN = frozenset({str, int, bool, type(None)})


class Envelope(msgspec.Struct, omit_defaults=True):
    """A task's job as it is stored. Fields that are None were not set for this job: the task's own hold."""

    multiq: int
    """The version of this format. It is also the mark that tells an envelope from any other JSON."""
    task: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    max_attempts: int | None = None
    max_crashes: int | None = None
    retry_for: float | None = None
    timeout: float | None = None
    headers: dict[str, str] = {}


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder()
_envelope_decoder = msgspec.json.Decoder(Envelope)


def encode_json(value: Any, *, max_body: int = MAX_BODY_DEFAULT) -> bytes:
    """*value* as JSON. Raises ``PayloadInvalid`` with the path of what is not JSON, ``PayloadTooLarge``."""
    check_json(value)
    return _encode(value, max_body)


def encode_envelope(envelope: Envelope, *, max_body: int = MAX_BODY_DEFAULT) -> bytes:
    """The bytes of a task's job; its arguments were checked with ``check_json``."""
    return _encode(envelope, max_body)


def decode_json(body: bytes) -> Any:
    """The value of a JSON body; the bytes themselves if they are not JSON."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body


def decode_envelope(body: bytes, *, max_body: int = MAX_BODY_DEFAULT) -> Envelope:
    """The envelope in a body. Raises ``PayloadInvalid`` saying what is wrong with it."""
    if len(body) > max_body:
        raise PayloadTooLarge(len(body), max_body, "it was not decoded; raise max_body in the settings")
    try:
        envelope = _envelope_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise PayloadInvalid(f"the body is not a task's envelope: {exc}") from exc
    if envelope.multiq != ENVELOPE_VERSION:
        raise PayloadInvalid(
            f"the body is an envelope of version {envelope.multiq}, this multiq reads version {ENVELOPE_VERSION}"
        )
    return envelope


def check_json(value: Any, path: str = "value") -> None:
    """Raise ``PayloadInvalid``, with the path of the culprit, unless *value* comes back from JSON as it went in.

    A tuple comes back as a list, and that is all that is forgiven.
    """
    if type(value) not in _PLAIN:
        _check(value, path, 0)


def _encode(value: Any, max_body: int) -> bytes:
    try:
        body = _encoder.encode(value)
    except (msgspec.MsgspecError, TypeError, OverflowError, UnicodeError) as exc:
        raise PayloadInvalid(f"the value cannot be written as JSON: {exc}") from exc
    if len(body) > max_body:
        raise PayloadTooLarge(
            len(body), max_body, "store the data elsewhere and enqueue its key, or raise max_body in the settings"
        )
    return body


def _check(value: Any, path: str, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise PayloadInvalid(f"{_short(path)} is nested more than {_MAX_DEPTH} deep, or contains itself")
    if type(value) in _PLAIN or isinstance(value, str | int):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise PayloadInvalid(f"{_short(path)} is {value}, which JSON cannot say: pass None or a string")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check(item, f"{path}[{index}]", depth + 1)
    elif isinstance(value, dict):
        _check_dict(value, path, depth)
    else:
        raise PayloadInvalid(
            f"{_short(path)} is of type {type(value).__qualname__}, which is not JSON: "
            "pass strings, numbers, booleans, None, lists and dicts"
        )


def _check_dict(value: dict[Any, Any], path: str, depth: int) -> None:
    for key, item in value.items():
        if not isinstance(key, str):
            raise PayloadInvalid(f"{_short(path)} has the key {key!r}: JSON's keys are strings")
        _check(item, f"{path}.{key}", depth + 1)


def _short(path: str) -> str:
    return path if len(path) <= 80 else path[:77] + "..."
