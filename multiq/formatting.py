"""Formats durations, sizes and bodies for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .terminal_escapes import safe

if TYPE_CHECKING:
    from .job import JobInfo

_UNITS = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
_SIZES = ("bytes", "KB", "MB", "GB")

UNKNOWN = "?"
"""The text that is shown for a value that the backend cannot know."""


def shown(value: object) -> str:
    """Return a short, printable ``repr`` of *value* for an error message. Never raises an error, even if ``repr``
    raises an error."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - such as a broken __repr__, or an integer with too many digits
        text = f"a {type(value).__qualname__}"
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 60 else text[:57] + "..."


def duration(seconds: float) -> str:
    """Format a duration by its two largest units: ``0s``, ``350ms``, ``12s``, ``4m 58s``, ``3h 12m``, ``2d 4h``."""
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
    """Format a number as ``12,345``, and None as a question mark."""
    return UNKNOWN if number is None else f"{number:,}"


def many(number: int, thing: str) -> str:
    """Format a number of things: ``1 job``, ``3 jobs``."""
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


def size(number: int) -> str:
    """Format a number of bytes: ``17 bytes``, ``1.2 MB``."""
    value = float(number)
    for unit in _SIZES:
        if value < 1024 or unit == _SIZES[-1]:
            break
        value /= 1024
    return f"{number} bytes" if unit == "bytes" else f"{value:.1f} {unit}"


def shorten(text: str, room: int) -> str:
    """Cut *text* to at most *room* characters."""
    return text if len(text) <= room else text[: max(0, room - 1)] + "…"


def abridge(text: str, room: int) -> str:
    """Cut the middle out of *text*, so that about *room* characters are left.

    Three quarters of the remaining characters are from the end, because the end of a traceback is more useful than its
    beginning.
    """
    if len(text) <= room:
        return text
    head, tail = room // 4, room - room // 4
    return f"{text[:head]}\n[... {len(text) - room:,} characters ...]\n{text[-tail:]}"


def summary(job: JobInfo, room: int = 200) -> str:
    """Describe a job in one line that shows the call of its task, its JSON or its bytes."""
    value = job.value
    if isinstance(value, dict) and _is_sealed(value):
        steps = ", ".join(step for step in value["seal"] if isinstance(step, str))
        return shorten(safe(f"{job.task or 'a job'} (sealed: {steps})"), room)
    if job.task is not None and isinstance(value, dict):
        return shorten(safe(f"{job.task}({_arguments(value)})"), room)
    if isinstance(value, bytes):
        return shorten(repr(value[:room]), room)
    return shorten(safe(_json(value)), room)


def _is_sealed(value: dict[str, Any]) -> bool:
    """Whether the value has a seal that this program cannot open. A seal hides the value if it encrypts or compresses
    the value."""
    from .envelope import SEALED_VERSION  # imported late, because envelope imports this module

    return value.get("multiq") == SEALED_VERSION and isinstance(value.get("seal"), list)


def _arguments(envelope: dict[str, Any]) -> str:
    args, kwargs = envelope.get("args", []), envelope.get("kwargs", {})
    parts = [_json(value) for value in args] if isinstance(args, list) else []
    if isinstance(kwargs, dict):
        parts += [f"{name}={_json(value)}" for name, value in kwargs.items()]
    return ", ".join(parts)


def _json(value: Any) -> str:
    import json  # imported late, so that producers need not import json

    return json.dumps(value, ensure_ascii=False)
