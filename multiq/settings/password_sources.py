"""Reads passwords from files and environment variables that a URL names.

All users of a machine can see its command lines, so a URL in a command line should not contain a password.
"""

from __future__ import annotations

import os
from pathlib import Path

from multiq.errors import UrlInvalid


def password_of_file(path: str) -> str:
    """Return the content of a file without the line ends after the last line. Raises ``UrlInvalid``."""
    refused = f"the password cannot be read from password_file={path}"
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as exc:  # ValueError means that the path is not valid
        raise UrlInvalid(f"{refused}: {exc.strerror if isinstance(exc, OSError) else exc}") from exc
    text = data.decode(errors="replace")  # errors="replace", because a UnicodeDecodeError would contain the password
    if text.encode() != data:
        raise UrlInvalid(f"{refused}: it is not UTF-8")
    return text.rstrip("\r\n")


def password_of_environment(name: str) -> str:
    """Return the value of an environment variable. Raises ``UrlInvalid`` if the variable is not set."""
    value = os.environ.get(name)
    if value is None:
        raise UrlInvalid(f"password_env={name} names an environment variable that is not set: set it, or name another")
    return value
