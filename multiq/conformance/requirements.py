"""The decorators that tie a test to the contract and to the powers that it is about."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from multiq.backend.capabilities import POWERS

from .contract import PARAGRAPHS

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., None]")

PROMISES = "__multiq_promises__"
REQUIRES = "__multiq_requires__"
WITHOUT = "__multiq_without__"
REFUSED = "multiq.refused"  # names of the properties that a report reads off a test
MEANINGLESS = "multiq.meaningless"
NOT_TRIED = "multiq.not-tried"


class NotTriedError(Exception):
    """Raised by a hook that a harness lacks: the test that needs it is told as not tried, with this reason."""


def promise(*paragraphs: str) -> Callable[[F], F]:
    """The paragraphs of ``docs/contract.md`` that a test proves."""
    return _note(PROMISES, paragraphs, PARAGRAPHS)


def requires(*powers: str) -> Callable[[F], F]:
    """The powers that a test is about. A backend that lacks one refuses the test, and says why."""
    return _note(REQUIRES, powers, POWERS)


def without(*powers: str) -> Callable[[F], F]:
    """The counterpart: what holds where these powers are missing."""
    return _note(WITHOUT, powers, POWERS)


def noted(function: object, name: str) -> tuple[str, ...]:
    """What a decorator of this module left on a test."""
    value: tuple[str, ...] = getattr(function, name, ())
    return value


def _note(name: str, words: tuple[str, ...], known: Any) -> Callable[[F], F]:
    unknown = sorted(set(words) - set(known))
    if unknown or not words:  # a misspelt word would silently prove nothing
        raise ValueError(f"unknown: {', '.join(unknown) or 'nothing is named'}; there are: {', '.join(known)}")

    def decorate(function: F) -> F:
        setattr(function, name, words)
        return function

    return decorate
