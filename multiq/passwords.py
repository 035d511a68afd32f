"""Passwords that a URL does not hold but names: command lines are seen by all users of a machine."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import UrlInvalid


def password_of_file(path: str) -> str:
    """What a file holds, without its last line's end. Raises ``UrlInvalid``."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8"
        # not chained for a ValueError: its message may quote the password
        raise UrlInvalid(f"the password cannot be read from password_file={path}: {why}") from (
            exc if isinstance(exc, OSError) else None
        )
    return text.rstrip("\r\n")


def password_of_environment(name: str) -> str:
    """The variable of this name. Raises ``UrlInvalid`` if it is not set."""
    value = os.environ.get(name)
    if value is None:
        raise UrlInvalid(f"password_env={name} names an environment variable that is not set: set it, or name another")
    return value
