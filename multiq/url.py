"""Backends' URLs: parsed once, options checked, passwords never shown."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

import msgspec

from .errors import UrlInvalid

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MASK = "***"


class Option(NamedTuple):
    """One option of a driver's URLs: how its text is read (raises ``ValueError``), its default, and what it does."""

    read: Callable[[str], Any]
    default: Any
    meaning: str


class BackendUrl(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """A URL in parts. ``str()`` masks the password; ``text`` is the original, for the driver alone."""

    scheme: str
    """As written, ``redis+sentinel``; ``driver`` is what stands before the plus."""
    host: str | None = None
    port: int | None = None
    username: str | None = None
    password: str | None = None
    path: str = ""
    options: dict[str, Any]
    text: str

    @property
    def driver(self) -> str:
        return self.scheme.partition("+")[0]

    def __str__(self) -> str:
        return redact(self.text)

    def __repr__(self) -> str:
        return f"BackendUrl({str(self)!r})"


def parse_url(text: str, options: Mapping[str, Option]) -> BackendUrl:
    """Parse *text* and check its query string against a driver's *options*, missing ones set to their default.

    Raises ``UrlInvalid`` with every mistake in it.
    """
    parts = split(text)
    try:
        port = parts.port
    except ValueError as exc:
        raise UrlInvalid(f"{redact(text)!r} cannot be used: the port must be a number from 0 to 65535") from exc
    return BackendUrl(
        scheme=parts.scheme,
        host=parts.hostname,
        port=port,
        username=unquote(parts.username) if parts.username is not None else None,
        password=unquote(parts.password) if parts.password is not None else None,
        path=unquote(parts.path),
        options=_read_options(text, parts.query, options),
        text=text,
    )


def split(text: str) -> SplitResult:
    """``urlsplit``, with a typed error for what has no scheme."""
    try:
        parts = urlsplit(text)
    except ValueError as exc:
        raise UrlInvalid(f"{redact(text)!r} is no URL: {exc}") from exc
    if not parts.scheme or "://" not in text:
        raise UrlInvalid(f"{redact(text)!r} is no URL: write it like 'sqlite:///jobs.db' or 'redis://localhost'")
    return parts


def redact(text: str) -> str:
    """*text* with the password of a URL, and options that sound like one, masked."""
    head, scheme_end, rest = text.partition("://")
    if not scheme_end:
        return text
    place, question_mark, query = rest.partition("?")
    # the password may hold '/' or '@' unquoted: everything up to the last '@' before the query is credentials
    credentials, at, address = place.rpartition("@")
    if at:
        user, colon, _ = credentials.partition(":")
        place = f"{user}{colon}{MASK if colon else ''}@{address}"
    if query:
        query = "&".join(_mask_option(pair) for pair in query.split("&"))
    return f"{head}://{place}{question_mark}{query}"


def _mask_option(pair: str) -> str:
    name, equals, _ = pair.partition("=")
    secret = any(word in name.lower() for word in ("password", "passwd", "secret", "token"))
    return f"{name}{equals}{MASK}" if secret and equals else pair


def _read_options(text: str, query: str, options: Mapping[str, Option]) -> dict[str, Any]:
    read = {name: option.default for name, option in options.items()}
    mistakes: list[str] = []
    seen: set[str] = set()
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in options:
            mistakes.append(_unknown(name, options))
        elif name in seen:
            mistakes.append(f"option {name!r} is given twice")
        else:
            try:
                read[name] = options[name].read(value)
            except ValueError as exc:
                shown = urlencode({name: value}) if len(value) <= 40 else f"{name}=..."
                mistakes.append(f"option {_mask_option(shown)}: {exc}")
        seen.add(name)
    if mistakes:
        raise UrlInvalid(f"{redact(text)!r} cannot be used: " + "; ".join(mistakes))
    return read


def _unknown(name: str, options: Mapping[str, Option]) -> str:
    if not options:
        return f"unknown option {name!r}: this backend takes none"
    close = difflib.get_close_matches(name, options, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(sorted(options))}"
    return f"unknown option {name!r}: {hint}"


# --- readers of options ----------------------------------------------------------------------------------


def seconds(low: float, high: float) -> Callable[[str], float]:
    """Reads a number of seconds from *low* to *high*."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"{text!r} is no number of seconds") from None
        if not low <= value <= high:  # also refuses NaN
            raise ValueError(f"must be from {low:g} to {high:g} seconds")
        return value

    return read


def choice(*words: str) -> Callable[[str], str]:
    """Reads one of *words*, in any case."""

    def read(text: str) -> str:
        if text.lower() not in words:
            raise ValueError(f"must be one of {', '.join(words)}")
        return text.lower()

    return read
