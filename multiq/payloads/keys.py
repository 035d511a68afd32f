"""Keys for signing and encrypting. A key never shows its secret."""

from __future__ import annotations

import binascii
import re

_ID = re.compile(r"[A-Za-z0-9_.-]{1,32}", re.ASCII)
_BASE64 = re.compile(rb"[A-Za-z0-9+/]*")
SECRET_BYTES = 32


class Key:
    """A secret key, and the id under which stored bytes refer to the key. Its text is ``id:secret``, with the
    secret in base64.

    Raises ``ValueError``. The message of the error never has the secret.
    """

    __slots__ = ("id", "secret")

    def __init__(self, text: str) -> None:
        self.id, colon, secret = text.partition(":") if isinstance(text, str) else ("", "", "")
        if not colon or not _ID.fullmatch(self.id):
            raise ValueError(
                "a key must be text like '2027-01:...', an id of up to 32 letters, digits, '_', '.' and '-', and a "
                "secret in base64"
            )
        try:
            plain = secret.strip().encode().translate(_STANDARD).rstrip(b"=")
            # the module base64 would be slow to import; a2b_base64 ignores other characters, and all that follows a "="
            self.secret = binascii.a2b_base64(plain + b"==") if _BASE64.fullmatch(plain) else b""
        except (binascii.Error, UnicodeEncodeError):
            self.secret = b""
        if len(self.secret) != SECRET_BYTES:
            raise ValueError(
                f"the secret of key {self.id!r} must be {SECRET_BYTES} random bytes in base64 (openssl rand -base64 "
                f"{SECRET_BYTES}), got {len(self.secret)} bytes"
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and (self.id, self.secret) == (other.id, other.secret)

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"Key({self.id!r})"


_STANDARD = bytes.maketrans(b"-_", b"+/")


def read_keys(value: object) -> tuple[Key, ...]:
    """Return keys from a list of texts or keys. Raises ``ValueError``."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise ValueError("must be a list of keys, the key for new payloads first")  # noqa: TRY004 - as the other settings
    keys = tuple(entry if isinstance(entry, Key) else Key(entry) for entry in value)
    ids = [key.id for key in keys]
    if len(set(ids)) < len(ids):
        raise ValueError(f"the ids of keys must differ, got {', '.join(ids)}")
    return keys
