"""Reads the queue names, their weights and the worker's policy from options and settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from multiq.errors import OptionInvalid
from multiq.formatting import shown
from multiq.validation import check_queue

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

POLICIES = ("strict", "weighted", "round-robin")
WEIGHT_MAX = 1000


def read_queues(queues: Mapping[str, int] | Iterable[str] | str) -> dict[str, int]:
    """Return the weight of each queue, in the given order.

    *queues* is a mapping of names to weights, or a list of texts like ``"low"`` and ``"high=3"``. The default weight is
    1. Raises ``NameInvalid`` or ``OptionInvalid``.
    """
    weights: dict[str, int] = {}
    for name, weight in _pairs(queues):
        if weights.setdefault(check_queue(name), weight) != weight:
            raise OptionInvalid(f"queue {name!r} must be named once, got it twice with different weights")
    if not weights:
        raise OptionInvalid("a worker must have at least one queue, like 'default', got none")
    return weights


def check_policy(policy: str, weights: Mapping[str, int]) -> str:
    """Return *policy* if it is one of ``POLICIES`` and fits *weights*. Raises ``OptionInvalid``."""
    if policy not in POLICIES:
        raise OptionInvalid(f"unknown policy {shown(policy)}: choose strict, weighted or round-robin")
    if policy != "weighted" and any(weight != 1 for weight in weights.values()):
        queue = next(queue for queue, weight in weights.items() if weight != 1)
        raise OptionInvalid(
            f"queue {queue!r} has a weight, which policy={policy!r} ignores: "
            "choose policy='weighted', or name the queues alone"
        )
    return policy


def shares(policy: str, weights: Mapping[str, int]) -> dict[str, int] | None:
    """Return the weight of each queue. None means that the worker always takes jobs of an earlier queue first."""
    if policy == "strict" or len(weights) == 1:
        return None
    return dict(weights)  # for round-robin, all weights are 1


def _pairs(queues: Mapping[str, int] | Iterable[str] | str) -> list[tuple[str, int]]:
    if isinstance(queues, str):
        return [_parsed(queues)]
    if hasattr(queues, "items"):
        return [(name, _checked(name, weight)) for name, weight in queues.items()]
    return [_parsed(name) for name in queues]


def _parsed(text: Any) -> tuple[str, int]:
    if not isinstance(text, str) or "=" not in text:
        return text, 1
    name, _, weight = text.partition("=")
    return name, _checked(name, int(weight) if weight.isascii() and weight.isdecimal() else weight)


def _checked(name: str, weight: Any) -> int:
    if type(weight) is not int or not 1 <= weight <= WEIGHT_MAX:
        raise OptionInvalid(
            f"the weight of queue {shown(name)} must be a whole number from 1 to {WEIGHT_MAX}, got {shown(weight)}"
        )
    return weight
