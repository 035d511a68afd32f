"""What a test requires. Its decorators declare which paragraphs of the contract it checks, and which capabilities it
requires. A test whose capability the backend lacks is skipped.

A power in the code is a capability that a backend either has or lacks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from multiq.backend.capabilities import POWERS, Gap

from .paragraphs import PARAGRAPHS

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from multiq.backend.capabilities import Capabilities

F = TypeVar("F", bound="Callable[..., Any]")  # a test, or the class of a topic

PROMISES = "__multiq_promises__"
REQUIRES = "__multiq_requires__"
WITHOUT = "__multiq_without__"
REFUSED = "multiq.refused"  # the next three names are pytest user properties of a test, which the report reads
DOES_NOT_APPLY = "multiq.meaningless"
NOT_TRIED = "multiq.not-tried"
_WORDS = {DOES_NOT_APPLY: "does not apply", NOT_TRIED: "not tried"}


class NotTriedError(Exception):
    """The harness lacks a method that a test needs. The report shows the test as *not tried*, with the error's
    message."""


def promise(*paragraphs: str) -> Callable[[F], F]:
    """Declare the paragraphs of ``docs/contract.md`` that a test checks."""
    return _declare(PROMISES, paragraphs, PARAGRAPHS)


def requires(*powers: str) -> Callable[[F], F]:
    """Declare the capabilities that a test, or each test of a topic, needs.

    If the backend lacks one of the capabilities, the test counts as refused, with the reason.
    """
    return _declare(REQUIRES, powers, POWERS)


def without(*powers: str) -> Callable[[F], F]:
    """Declare capabilities that a backend must lack for the test to run."""
    return _declare(WITHOUT, powers, POWERS)


def declared(function: object, name: str) -> tuple[str, ...]:
    """The value that a decorator of this module has set for a test. *name*: the attribute that the decorator sets."""
    value: tuple[str, ...] = getattr(function, name, ())
    return value


def check(test: pytest.Item, can: Capabilities, topic: type, function: object) -> None:
    """Skip a test if the backend lacks a capability that the test or its topic requires, or has one that the test
    excludes."""
    for power in (*declared(topic, REQUIRES), *declared(function, REQUIRES)):
        need(test, can, power)
    for power in declared(function, WITHOUT):
        if can.claim(power):
            skip(test, DOES_NOT_APPLY, f"this backend has {power}")


def need(test: pytest.Item, can: Capabilities, power: str) -> None:
    """Skip a test, with the result *refused*, if the backend lacks the capability *power*."""
    gap = can.claim(power)
    if isinstance(gap, Gap):
        import pytest  # a harness without tests needs no pytest

        # Plain strings, because pytest-xdist sends test properties between processes.
        test.user_properties.append((REFUSED, [power, gap.kind, gap.reason]))
        pytest.skip(f"refused for lack of {power}: {gap.kind}: {gap.reason}")


def skip(test: pytest.Item, result: str, why: str) -> NoReturn:
    """Skip a test. *result*: ``DOES_NOT_APPLY`` or ``NOT_TRIED``."""
    import pytest

    test.user_properties.append((result, why))
    pytest.skip(f"{_WORDS[result]}: {why}")


def _declare(name: str, words: tuple[str, ...], known: Any) -> Callable[[F], F]:
    unknown = sorted(set(words) - set(known))
    if unknown or not words:  # without this check, a misspelt name would have no effect
        problem = f"unknown: {', '.join(unknown)}" if unknown else "at least one name must be given"
        raise ValueError(f"{problem}; choose from: {', '.join(known)}")

    def decorate(function: F) -> F:
        setattr(function, name, words)
        return function

    return decorate
