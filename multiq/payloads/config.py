"""The keys of a program, and the size from which payloads are compressed."""

from __future__ import annotations

from collections.abc import Sequence  # noqa: TC003 - Sphinx resolves the annotations

import msgspec

from multiq.errors import ExtraNotInstalled, OptionInvalid

from .keys import Key, read_keys


class Payloads(msgspec.Struct, frozen=True, kw_only=True):
    """The options of payloads: ``App(payloads=Payloads(sign=[...], encrypt=[...], compress=1024))``.

    Each key is a text ``id:secret``. The secret is 32 random bytes in base64. New payloads use the first key of a list.
    All keys of the list are used for reading.

    - *sign*: keys for HMAC-SHA256. If there is a key, a job without a valid signature is not run but buried.
    - *encrypt*: keys for AES-256-GCM. Needs ``multiq[crypto]``. Without *sign*, a job that is not encrypted is buried.
    - *compress*: payloads of at least this many bytes are compressed by zlib. None: never.
    - *accept_unsigned*: accept payloads that are not signed or not encrypted. Use this option while you introduce keys.

    Raises ``OptionInvalid``, ``ExtraNotInstalled``.
    """

    sign: Sequence[str | Key] = ()
    encrypt: Sequence[str | Key] = ()
    compress: int | None = None
    accept_unsigned: bool = False

    def __post_init__(self) -> None:
        for name in ("sign", "encrypt"):
            try:
                msgspec.structs.force_setattr(self, name, read_keys(getattr(self, name)))
            except ValueError as exc:
                raise OptionInvalid(f"{name}: {exc}") from None  # the cause could contain the secret
        if self.compress is not None and (type(self.compress) is not int or self.compress < 0):
            raise OptionInvalid(f"compress must be a number of bytes from 0, or None, got {_shown(self.compress)}")
        if not isinstance(self.accept_unsigned, bool):
            raise OptionInvalid(f"accept_unsigned must be True or False, got {_shown(self.accept_unsigned)}")
        if self.encrypt:
            check_crypto()

    @property
    def is_used(self) -> bool:
        """Whether payloads are changed in any way."""
        return bool(self.sign or self.encrypt) or self.compress is not None

    @property
    def sign_keys(self) -> tuple[Key, ...]:
        return read_keys(self.sign)

    @property
    def encrypt_keys(self) -> tuple[Key, ...]:
        return read_keys(self.encrypt)


def _shown(value: object) -> str:
    """Return the text of a number, or else the name of the value's type. A text may be a key."""
    return repr(value) if isinstance(value, int | float) else f"a {type(value).__name__}"


def check_crypto() -> None:
    """Raise ``ExtraNotInstalled`` unless AES is available."""
    try:
        import cryptography.hazmat.primitives.ciphers.aead  # noqa: F401
    except ImportError as exc:
        raise ExtraNotInstalled("encryption needs cryptography: pip install 'multiq[crypto]'") from exc
