"""Checks whether a value is JSON, and names the place of the part that is not."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from .errors import PayloadInvalid

if TYPE_CHECKING:
    from collections.abc import Iterable

_MAX_DEPTH = 100
_PLAIN = frozenset({str, int, bool, type(None)})


def check_json(value: Any, path: str = "value") -> None:
    """Raise ``PayloadInvalid`` if JSON would change *value*, or cannot contain *value*. The error has the path of the
    wrong part.

    A tuple is allowed, although JSON turns a tuple into a list.
    """
    if type(value) not in _PLAIN:
        _check(value, path, 0)


def are_plain(values: Iterable[Any]) -> bool:
    """Return whether all values have simple types that JSON always supports. ``are_plain`` is faster than
    ``check_json``."""
    return _PLAIN.issuperset(map(type, values))


def shortened(path: str, most: int = 80) -> str:
    text = path.encode("utf-8", "backslashreplace").decode()  # a key may have characters that no terminal prints
    return text if len(text) <= most else text[: most - 3] + "..."


def _check(value: Any, path: str, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise PayloadInvalid(f"{shortened(path)} is nested more than {_MAX_DEPTH} deep, or contains itself")
    if type(value) in _PLAIN or isinstance(value, str | int):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise PayloadInvalid(f"{shortened(path)} is {value}, which JSON cannot hold: pass None or a string")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check(item, f"{path}[{index}]", depth + 1)
    elif isinstance(value, dict):
        _check_dict(value, path, depth)
    else:
        raise PayloadInvalid(
            f"{shortened(path)} is of type {type(value).__qualname__}, which is not JSON: "
            "pass strings, numbers, booleans, None, lists and dicts"
        )


def _check_dict(value: dict[Any, Any], path: str, depth: int) -> None:
    for key, item in value.items():
        if not isinstance(key, str):
            raise PayloadInvalid(f"{shortened(path)} has the key {key!r}: JSON's keys are strings")
        _check(item, f"{path}.{key}", depth + 1)
