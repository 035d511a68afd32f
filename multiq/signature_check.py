"""Checks the arguments of a call against the signature of a task's function."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from .errors import ArgumentsInvalid

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class ArgumentCheck:
    """Which arguments one function takes."""

    def __init__(self, signature: inspect.Signature) -> None:
        self._signature = signature
        self._keywords = _keywords_of(signature)
        plain = [count for count, (_, required) in enumerate(self._keywords) if not required]
        # an empty range if no number of positional arguments suffices
        self.fewest, self.most = (plain[0], plain[-1]) if plain else (1, 0)
        """A call with at least *fewest* and at most *most* positional arguments, and no other, needs no further
        check."""

    def check(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise ``ArgumentsInvalid`` if the function does not take the given arguments. *name*: the task's name."""
        if len(args) < len(self._keywords):  # a tenth of the time of Signature.bind
            allowed, required = self._keywords[len(args)]
            if allowed.issuperset(kwargs) and required.issubset(kwargs):
                return
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as exc:
            raise ArgumentsInvalid(
                f"task {name} cannot be called like this: {exc}; it is {name}{self._signature}"
            ) from exc


def _keywords_of(signature: inspect.Signature) -> list[tuple[frozenset[str], frozenset[str]]]:
    """Return, for each number of positional arguments, the names that may be given by keyword, and those that must be
    given. The list is empty if the function takes any number of arguments."""
    parameters = list(signature.parameters.values())
    if any(p.kind in {p.VAR_POSITIONAL, p.VAR_KEYWORD} for p in parameters):
        return []
    found = []
    for count in range(sum(p.kind in _POSITIONAL for p in parameters) + 1):
        left = parameters[count:]
        allowed = frozenset(p.name for p in left if p.kind is not p.POSITIONAL_ONLY)
        found.append((allowed, frozenset(p.name for p in left if p.default is p.empty)))
    return found
