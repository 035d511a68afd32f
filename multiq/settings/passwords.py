"""Passwords that stand in a file or an environment variable, which a URL names.

In the URL itself, a password would be visible to all users of the machine when the URL stands in a command line.
"""

from __future__ import annotations

import os
from pathlib import Path

from multiq.errors import UrlInvalid


def password_of_file(path: str) -> str:
    """The content of a file, without the line end of its last line. Raises ``UrlInvalid``."""
    refused = f"the password cannot be read from password_file={path}"
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as exc:  # ValueError: not a valid path
        raise UrlInvalid(f"{refused}: {exc.strerror if isinstance(exc, OSError) else exc}") from exc
    text = data.decode(errors="replace")  # a decoding error would carry the password as its context
    if text.encode() != data:
        raise UrlInvalid(f"{refused}: it is not UTF-8")
    return text.rstrip("\r\n")


def password_of_environment(name: str) -> str:
    """The variable of this name. Raises ``UrlInvalid`` if it is not set."""
    value = os.environ.get(name)
    if value is None:
        raise UrlInvalid(f"password_env={name} names an environment variable that is not set: set it, or name another")
    return value
