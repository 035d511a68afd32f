"""Replaces each ``${NAME}`` in the settings by the value of the environment variable NAME."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from .url import redact

if TYPE_CHECKING:
    from collections.abc import Mapping

_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_AUTHORITY_END = re.compile("[/?#]")


def expand_url(template: str, where: str, env: Mapping[str, str], problems: list[str]) -> str:
    """Replace each ``${NAME}`` in a URL by the value of the environment variable NAME.

    In the user name and the password, the value is percent-encoded. In other parts of the URL, the value is inserted
    unchanged.
    """
    scheme, colon, rest = template.partition("://")
    authority = _AUTHORITY_END.split(rest, maxsplit=1)[0] if colon else ""
    credentials_end = len(scheme) + len(colon) + authority.rfind("@") if "@" in authority else -1

    def value_of(match: re.Match[str]) -> str:
        value = env.get(match[1])
        if value is None:
            problems.append(f"{where}: {redact(template)!r} refers to ${{{match[1]}}}, which is not set")
            return ""
        return quote(value, safe="") if match.start() < credentials_end else value

    return _REFERENCE.sub(value_of, template)


def expand_key(entry: Any, where: str, env: Mapping[str, str], problems: list[str]) -> Any:
    """Replace each ``${NAME}`` in a key by the value of the environment variable NAME."""
    if not isinstance(entry, str):
        return entry
    missing = [match[1] for match in _REFERENCE.finditer(entry) if match[1] not in env]
    problems += [f"{where}: a key refers to ${{{name}}}, which is not set" for name in missing]
    return _REFERENCE.sub(lambda match: env.get(match[1], ""), entry)
