"""Seals bytes, and opens them: compression, encryption, signature. ``docs/payloads.md`` describes the format.

=====================  =====================================================================  =======================
guarantee              how                                                                    cost
=====================  =====================================================================  =======================
sealed bytes belong    queue, id, task, and what the bytes are (job, memo, outcome...) are    none
to one job             part of what is signed, and of what AES-GCM authenticates
nothing is opened      the signature is checked first, then AES-GCM, then the size that       none
that was changed       the data may expand to
=====================  =====================================================================  =======================
"""

from __future__ import annotations

import base64
import binascii
import hmac
import os
import zlib
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from multiq.envelope import SEALED_VERSION
from multiq.errors import PayloadInvalid

if TYPE_CHECKING:
    from .config import Payloads
    from .keys import Key

Use: TypeAlias = Literal["job", "memo", "detail", "outcome", "note"]

ZLIB = "zlib"
AES = "aes256gcm"
HMAC = "hmac-sha256"
_ORDER = (ZLIB, AES, HMAC)
_NONCE = 12  # bytes
_LABEL = "multiq-seal-1"

OVERHEAD = 700  # bytes that a seal adds at most, besides base64


class SealBroken(PayloadInvalid):
    """Stored bytes cannot be opened: they are unsigned, changed, moved from another job, or sealed by another key."""


class _Sealed(msgspec.Struct, omit_defaults=True):
    multiq: int
    seal: list[str]
    task: str = ""
    signed_with: str = ""
    encrypted_with: str = ""
    unique: str = ""
    body: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    data: str | None = None
    sig: str | None = None


class _Mark(msgspec.Struct):
    multiq: int | None = None
    task: str = ""


_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(_Sealed)
_mark_decoder = msgspec.json.Decoder(_Mark)
_UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError)


class Seal:
    """Seals and opens bytes with the keys of a program. Thread-safe.

    *most*: a number of bytes. Larger data is not compressed. Compressed data that would expand to more bytes is
    refused.
    """

    def __init__(self, payloads: Payloads, most: int) -> None:
        self._signing = payloads.sign_keys
        self._encrypting = payloads.encrypt_keys
        self._ciphers: dict[str, Any] = {key.id: _cipher(key) for key in self._encrypting}
        self._compress = payloads.compress
        self._demands: str | None = None  # the step that a payload must have
        if not payloads.accept_unsigned:
            self._demands = HMAC if self._signing else AES if self._encrypting else None
        self._most = most

    def close(self, use: Use, queue: str, own_id: str, plain: bytes, unique: str = "") -> bytes:
        """Return the bytes to store. If nothing is to be done, *plain* is returned.

        *unique*: a unique key in hexadecimal, if the job may replace the body of another job with this key. The bytes
        then belong to the key instead of the job's id, because the other job keeps its own id.
        """
        mark = _mark(plain)
        data, steps = self._compressed(plain)
        if self._encrypting:
            steps.append(AES)
        if self._signing:
            steps.append(HMAC)
        if not steps:
            return plain
        sealed = _Sealed(SEALED_VERSION, steps, "" if mark is None else mark.task)
        sealed.encrypted_with = self._encrypting[0].id if self._encrypting else ""
        sealed.signed_with = self._signing[0].id if self._signing else ""
        sealed.unique = unique
        context = _context(use, queue, own_id, sealed)
        if self._encrypting:
            nonce = os.urandom(_NONCE)
            data = nonce + self._ciphers[sealed.encrypted_with].encrypt(nonce, data, context)
        if data is plain and mark is not None:
            sealed.body = msgspec.Raw(data)
        else:
            sealed.data = base64.b64encode(data).decode()
        if self._signing:
            sealed.sig = base64.b64encode(_signature(self._signing[0], context, data)).decode()
        return _encode(sealed)

    def _compressed(self, plain: bytes) -> tuple[bytes, list[str]]:
        """Return the bytes and the steps of the seal so far. The bytes are compressed if this makes them smaller."""
        if self._compress is not None and self._compress <= len(plain) <= self._most:
            smaller = zlib.compress(plain)
            if len(smaller) * 4 // 3 < len(plain):
                return smaller, [ZLIB]
        return plain, []

    def open(self, use: Use, queue: str, own_id: str, stored: bytes) -> bytes:
        """Return the plain bytes. Raises ``SealBroken``."""
        sealed = read_seal(stored)
        if sealed is None:
            self._check_demand([])
            return stored
        steps = sealed.seal
        if [step for step in _ORDER if step in steps] != steps:
            raise SealBroken(f"it is sealed by {_shown(steps)}, and this multiq knows {', '.join(_ORDER)}")
        data = bytes(sealed.body) if isinstance(sealed.body, msgspec.Raw) else _from_base64(sealed.data)
        context = _context(use, queue, own_id, sealed)
        if HMAC in steps:
            key = _find(self._signing, sealed.signed_with, "signed")
            if not hmac.compare_digest(_signature(key, context, data), _from_base64(sealed.sig)):
                raise SealBroken("its signature is wrong: it was changed, or belongs to another job or queue")
        self._check_demand(steps)
        if AES in steps:
            _find(self._encrypting, sealed.encrypted_with, "encrypted")
            data = _decrypt(self._ciphers[sealed.encrypted_with], data, context)
        return _expand(data, self._most) if ZLIB in steps else data

    def _check_demand(self, steps: list[str]) -> None:
        if self._demands is not None and self._demands not in steps:
            word = "signed" if self._demands == HMAC else "encrypted"
            raise SealBroken(f"it is not {word}, and this program accepts only {word} payloads")


def read_seal(stored: bytes) -> _Sealed | None:
    """Return the seal of stored bytes. None: they are not sealed."""
    if b'"seal"' not in stored:
        return None
    try:
        sealed = _decoder.decode(stored)
    except _UNREADABLE:
        return None
    return sealed if sealed.multiq == SEALED_VERSION else None


def _context(use: Use, queue: str, own_id: str, sealed: _Sealed) -> bytes:
    """Return the context. It is signed and authenticated together with the data. The context ends with a byte that
    never occurs within JSON."""
    owner = f"unique {sealed.unique}" if sealed.unique else own_id  # no id has a space
    parts = [_LABEL, use, queue, owner, sealed.task, sealed.seal, sealed.encrypted_with, sealed.signed_with]
    return _encode(parts) + b"\n"


def _signature(key: Key, context: bytes, data: bytes) -> bytes:
    return hmac.digest(key.secret, context + data, "sha256")


def _cipher(key: Key) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key.secret)


def _decrypt(cipher: Any, data: bytes, context: bytes) -> bytes:
    from cryptography.exceptions import InvalidTag

    try:
        return bytes(cipher.decrypt(data[:_NONCE], data[_NONCE:], context))
    except (InvalidTag, ValueError, OverflowError):
        raise SealBroken(
            "it cannot be decrypted: it was changed, belongs to another job or queue, or its key has another secret"
        ) from None


def _expand(data: bytes, most: int) -> bytes:
    expander = zlib.decompressobj()
    try:
        plain = expander.decompress(data, most + 1)
    except zlib.error as exc:
        raise SealBroken(f"it cannot be decompressed: {exc}") from exc
    if len(plain) > most:
        raise SealBroken(f"it expands to more than {most:,} bytes")
    if not expander.eof:
        raise SealBroken("it cannot be decompressed: its end is missing")
    return plain


def _find(keys: tuple[Key, ...], key_id: str, how: str) -> Key:
    for key in keys:
        if key.id == key_id:
            return key
    known = ", ".join(key.id for key in keys) or "none"
    raise SealBroken(f"it is {how} with key {_shown([key_id])}, which this program does not have (it has: {known})")


def _from_base64(text: str | None) -> bytes:
    try:
        return base64.b64decode(text or "", validate=True)
    except (binascii.Error, ValueError):
        raise SealBroken("it is not base64") from None


def _mark(plain: bytes) -> _Mark | None:
    """Return the mark of a JSON object. None: the bytes cannot be inserted unchanged into another JSON object."""
    if plain[:1] != b"{" or plain[-1:] != b"}":
        return None
    try:
        return _mark_decoder.decode(plain)
    except _UNREADABLE:
        return None


def _shown(steps: list[str]) -> str:
    text = ", ".join(steps)
    return repr(text if len(text) <= 60 else text[:57] + "...")
