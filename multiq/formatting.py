"""Values as people read them: durations, sizes, bodies. Data from a queue is always escaped before it is printed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .job import JobInfo

_UNITS = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
_SIZES = ("bytes", "KB", "MB", "GB")

UNKNOWN = "?"
"""Shown for what the backend cannot know."""


def shown(value: object) -> str:
    """*value* as an error message shows it: short and printable. Never raises, even if ``repr`` does."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a broken __repr__, or a number of more digits than Python converts
        text = f"a {type(value).__qualname__}"
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 60 else text[:57] + "..."


def safe(text: str, *, keep: str = "") -> str:
    """*text*, with escapes for characters that a terminal would not print but act on: to move, colour or hide text."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else _escape(c) for c in text)


def duration(seconds: float) -> str:
    """``0s``, ``350ms``, ``12s``, ``4m 58s``, ``3h 12m``, ``2d 4h``: the two largest units."""
    if 0 < seconds < 1:
        return f"{max(1, int(seconds * 1000))}ms"
    left = round(seconds)
    for index, (unit, length) in enumerate(_UNITS):
        if left >= length:
            count, rest = divmod(left, length)
            smaller = _UNITS[index + 1 : index + 2]
            second = rest // smaller[0][1] if smaller else 0
            return f"{count}{unit} {second}{smaller[0][0]}" if second else f"{count}{unit}"
    return "0s"


def count(number: int | None) -> str:
    """``12,345``, or a question mark for what the backend cannot know."""
    return UNKNOWN if number is None else f"{number:,}"


def many(number: int, thing: str) -> str:
    """``1 job``, ``3 jobs``."""
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


def size(number: int) -> str:
    """``17 bytes``, ``1.2 MB``."""
    value = float(number)
    for unit in _SIZES:
        if value < 1024 or unit == _SIZES[-1]:
            break
        value /= 1024
    return f"{number} bytes" if unit == "bytes" else f"{value:.1f} {unit}"


def shorten(text: str, room: int) -> str:
    """*text* in at most *room* characters."""
    return text if len(text) <= room else text[: max(0, room - 1)] + "…"


def abridge(text: str, room: int) -> str:
    """*text*, cut to about *room* characters: its beginning and its end, because the end of a traceback says most."""
    if len(text) <= room:
        return text
    head, tail = room // 4, room - room // 4
    return f"{text[:head]}\n[... {len(text) - room:,} characters ...]\n{text[-tail:]}"


def summary(job: JobInfo, room: int = 200) -> str:
    """A job in one line: the call of a task, else its JSON, else its bytes."""
    value = job.value
    if job.task is not None and isinstance(value, dict):
        return shorten(safe(f"{job.task}({_arguments(value)})"), room)
    if isinstance(value, bytes):
        return shorten(repr(value[:room]), room)
    return shorten(safe(_json(value)), room)


def _arguments(envelope: dict[str, Any]) -> str:
    args, kwargs = envelope.get("args", []), envelope.get("kwargs", {})
    parts = [_json(value) for value in args] if isinstance(args, list) else []
    if isinstance(kwargs, dict):
        parts += [f"{name}={_json(value)}" for name, value in kwargs.items()]
    return ", ".join(parts)


def _json(value: Any) -> str:
    import json  # producers need ``shown`` only, and do not import it

    return json.dumps(value, ensure_ascii=False)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()
