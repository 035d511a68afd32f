"""Parses the URLs of backends, checks their options, and masks their passwords."""

from __future__ import annotations

import difflib
import unicodedata
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import SplitResult, quote, unquote, urlsplit

import msgspec

from multiq.errors import UrlInvalid

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MASK = "***"
STORE = "store"
"""The option that names a store beside the backend. Each backend that needs a store beside it takes the option
``store`` (``multiq.backend.paired``)."""

_T = TypeVar("_T")

_SECRET = ("pass", "pwd", "secret", "token", "auth", "credential")  # parts of the names of masked options
_SHOWN_AT_MOST = 200  # the most characters of a URL in an error message
_QUOTING = "in a password or an option, write / ? # @ : % as %2F %3F %23 %40 %3A %25"


class Option(NamedTuple):
    """One option of a driver's URLs. ``read`` raises ``ValueError`` for invalid text."""

    read: Callable[[str], Any]
    default: Any
    meaning: str


class BackendUrl(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """A parsed URL. ``str()`` masks the password. The attribute ``text`` is the original URL, which only the driver may
    use."""

    scheme: str
    """The full scheme, such as ``redis+sentinel``. ``driver`` is the part before the plus sign."""
    host: str | None = None
    port: int | None = None
    hosts: tuple[tuple[str, int | None], ...] = ()
    """All hosts with their ports, for drivers that accept several hosts. ``host`` and ``port`` are the values of the
    first host."""
    username: str | None = None
    password: str | None = None
    path: str = ""
    options: dict[str, Any]
    text: str
    create: bool = True
    """Whether the driver creates a missing file or table. With False, the driver raises ``BackendError`` if the file or
    table is missing."""

    @property
    def driver(self) -> str:
        return self.scheme.partition("+")[0]

    def __str__(self) -> str:
        return redact(self.text)

    def __repr__(self) -> str:
        return f"BackendUrl({str(self)!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """Mask the password, which ``rich`` would show without this method."""
        return [("text", str(self))]


def parse_url(text: str, options: Mapping[str, Option], *, create: bool = True) -> BackendUrl:
    """Parse a URL, and check its query string against a driver's *options*. A missing option gets its default.

    *create* is stored in the result. Raises ``UrlInvalid`` with all mistakes.
    """
    parts = split(text)
    hosts = _hosts(parts, text)
    host, port = hosts[0] if hosts else (None, None)
    return BackendUrl(
        scheme=parts.scheme,
        host=host or None,
        port=port,
        hosts=hosts,
        username=_unquote(parts.username, text) if parts.username is not None else None,
        password=_unquote(parts.password, text) if parts.password is not None else None,
        path=_path(parts.path, text),
        options=_read_options(text, parts.query, options),
        text=text,
        create=create,
    )


def split(text: str) -> SplitResult:
    """Split a URL as ``urlsplit`` does. Raises ``UrlInvalid`` for line ends, a fragment or a missing scheme."""
    _check_characters(text)
    parts = _without_a_trace(lambda: urlsplit(text))
    if parts is None:
        raise _invalid(text, f"its host is malformed (IPv6 goes in brackets); {_QUOTING}")
    if not parts.scheme or not text.lower().startswith(f"{parts.scheme}://"):
        raise UrlInvalid(f"a backend's URL must be like 'sqlite:///jobs.db' or 'redis://localhost', got {_shown(text)}")
    if parts.netloc and "@" in parts.path:  # ``urlsplit`` reads a password after its first '/' as the path
        raise _invalid(text, f"there is an '@' after the '/'; {_QUOTING}")
    if "#" in text:
        raise _invalid(text, "it has a '#': write %23")
    return parts


def first_host(text: str) -> tuple[str | None, int | None]:
    """Return the first host of a URL, and the port of this host. A missing host or port is None."""
    hosts = _hosts(split(text), text)
    return (hosts[0][0] or None, hosts[0][1]) if hosts else (None, None)


def _hosts(parts: SplitResult, text: str) -> tuple[tuple[str, int | None], ...]:
    """Return the hosts with their ports. Commas separate the hosts in the URL."""
    credentials, at, places = parts.netloc.rpartition("@")
    hosts = []
    for place in places.split(",") if places else ():
        one = parts._replace(netloc=f"{credentials}{at}{place}")
        both = _without_a_trace(lambda one=one: (one.hostname, one.port))  # type: ignore[misc]
        if both is None:  # the text in the position of the port may be part of a password
            raise _invalid(text, f"the port must be a number from 0 to 65535; {_QUOTING}")
        host, port = both
        if host is None and "," in places:
            raise _invalid(text, "one of its hosts is empty: there is a comma too many")
        if host is not None or port is not None:
            hosts.append((host or "", port))
    return tuple(hosts)


def redact(text: str) -> str:
    """Mask the password and all secret options in *text*.

    *text* may be a malformed URL. If the position of the password is unclear, more text than the password is masked.
    """
    head, scheme_end, rest = text.partition("://")
    if not scheme_end:
        head, rest = "", text  # the text is not a URL, and may still contain a password
    place, question_mark, query = rest.partition("?")
    if "@" in query and ":" in place:  # the password has a '?', or an option has an '@', which should be %40
        place, question_mark, query = f"{place.partition(':')[0]}:{MASK}", "", ""
    elif "@" in place:
        # The password may contain '/', '#' or '@'. Everything before the last '@' is the user name and the password.
        credentials, _, address = place.rpartition("@")
        user, colon, _ = credentials.partition(":")
        place = f"{user}{colon}{MASK if colon else ''}@{address if colon else _mask_port(address)}"
    elif scheme_end:
        place = _mask_port(place)
    before, store_begin, rest = query.partition(f"{STORE}=")
    if "@" in rest:  # the URL of a store is not percent-encoded, and its password may contain '&'
        query = f"{before}{store_begin}{MASK}"
    query = "&".join(map(_mask_option, query.split("&")))
    return f"{head}{scheme_end}{place}{question_mark}{query}"


def has_store(text: str) -> bool:
    """Whether a URL has the option ``store``."""
    return any(pair.partition("=")[0] == STORE for pair in text.partition("?")[2].split("&"))


def without_store(text: str, default: str | None = None) -> tuple[str, str]:
    """Return a URL without its option ``store``, and the decoded value of this option, or *default*.

    Raises ``UrlInvalid`` if the option is given twice, or has no value and no default.
    """
    place, question_mark, query = text.partition("?")
    pairs = query.split("&") if question_mark else []
    values = [pair.partition("=")[2] for pair in pairs if pair.partition("=")[0] == STORE]
    if len(values) > 1:
        raise _invalid(text, f"option {STORE!r} is given twice")
    value = _unquote(values[0], text) if values else default
    if not value and default is None:
        raise _invalid(text, f"option {STORE} must be a URL, percent-encoded, or the name of a configured connection")
    others = "&".join(pair for pair in pairs if pair.partition("=")[0] != STORE)
    return f"{place}?{others}" if others else place, value or ""


def with_store(text: str, store: str) -> str:
    """Return a URL with the option ``store``. An existing option ``store`` is replaced."""
    place = without_store(text, "")[0]
    return f"{place}{'&' if '?' in place else '?'}{STORE}={quote(store, safe='')}"


def _mask_port(place: str) -> str:
    """Mask the port in ``host:port`` if the port is not a number. The text may be ``user:password``, without a host."""
    end = min(place.index(mark) if mark in place else len(place) for mark in "/#")
    host, colon, port = place[:end].rpartition(":")
    if not colon or not port or port.isdigit() or (place.startswith("[") and port.endswith("]")):
        return place
    return f"{host.partition(':')[0]}:{MASK}{place[end:]}"


def _mask_option(pair: str) -> str:
    name, equals, value = pair.partition("=")
    if name == STORE and "%" in value:  # the value is a URL, which may have a password
        return f"{name}{equals}{quote(redact(unquote(value)), safe='*')}"
    return f"{name}{equals}{MASK}" if equals and _is_secret(name) else pair


def _is_secret(name: str) -> bool:
    plain = unquote(name).lower()
    return any(word in plain for word in _SECRET)


def _without_a_trace(call: Callable[[], _T]) -> _T | None:
    """Return the result of *call*, or None if *call* raises ``ValueError``.

    The text of the ``ValueError`` may contain a password. An error that is raised in an ``except ValueError`` block has
    the ``ValueError`` as its ``__context__``, even with ``from None``. To hide the password, callers raise their errors
    outside of an ``except ValueError`` block.
    """
    try:
        return call()
    except ValueError:
        return None


def _invalid(text: str, why: str) -> UrlInvalid:
    return UrlInvalid(f"{_shown(text)} cannot be used: {why}")


def _shown(text: str) -> str:
    masked = redact(text)
    return repr(masked if len(masked) <= _SHOWN_AT_MOST else masked[: _SHOWN_AT_MOST - 3] + "...")


def _check_characters(text: str) -> None:
    if text != text.strip():
        raise _invalid(text, "it begins or ends with a space or a line end")
    if any(unicodedata.category(c) == "Cc" for c in text):
        raise _invalid(text, "it has a control character, like a tab or a line end")
    if any(unicodedata.category(c) == "Cs" for c in text):
        raise _invalid(text, "it is not UTF-8")


def _unquote(part: str, text: str) -> str:
    unquoted = _without_a_trace(lambda: unquote(part, errors="strict"))
    if unquoted is None:
        raise _invalid(text, "its percent-encoded bytes (%..) are not UTF-8")
    return unquoted


def _path(quoted: str, text: str) -> str:
    path = _unquote(quoted, text)
    if any(unicodedata.category(c) == "Cc" for c in path):
        raise _invalid(text, "its path has a control character")
    return path


def _read_options(text: str, query: str, options: Mapping[str, Option]) -> dict[str, Any]:
    if "@" in query:
        raise _invalid(text, f"there is an '@' after the '?'; {_QUOTING}")
    read = {name: option.default for name, option in options.items()}
    mistakes: list[str] = []
    seen: set[str] = set()
    for quoted_name, _, quoted_value in (pair.partition("=") for pair in query.split("&") if pair):
        name, value = (_unquote(part.replace("+", " "), text) for part in (quoted_name, quoted_value))
        if name not in options:
            mistakes.append(_unknown(name, options))
        elif name in seen:
            mistakes.append(f"option {name!r} is given twice")
        else:
            try:
                read[name] = options[name].read(value)
            except ValueError as exc:
                mistakes.append(_unreadable(name, value, exc))
        seen.add(name)
    if mistakes:
        raise _invalid(text, "; ".join(mistakes))
    return read


def _unreadable(name: str, value: str, error: ValueError) -> str:
    if _is_secret(name):
        return f"option {name}={MASK} cannot be read"
    return f"option {name}={value if len(value) <= 40 else '...'}: {error}"


def _unknown(name: str, options: Mapping[str, Option]) -> str:
    if not options:
        return f"unknown option {name[:40]!r}: this backend takes none"
    close = difflib.get_close_matches(name, options, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(sorted(options))}"
    return f"unknown option {name[:40]!r}: {hint}"


# --- readers of options ----------------------------------------------------------------------------------


def seconds(low: float, high: float) -> Callable[[str], float]:
    """Return a reader for a number of seconds from *low* to *high*."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"must be a number of seconds, got {text!r}") from None
        if not low <= value <= high:  # also refuses NaN
            raise ValueError(f"must be from {low:g} to {high:g} seconds")
        return value

    return read


def choice(*words: str) -> Callable[[str], str]:
    """Return a reader for one of *words*, in upper or lower case."""

    def read(text: str) -> str:
        if text.lower() not in words:
            raise ValueError(f"must be one of {', '.join(words)}")
        return text.lower()

    return read
