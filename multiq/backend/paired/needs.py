"""What a store beside a backend adds. ``multiq.backend.base`` imports this module, so this module imports no
backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiq.backend.capabilities import Capabilities

NEEDED = ("outcomes", "memos", "holds", "notes")
"""The capabilities that a store must have. A backend with all of them needs no store."""

WITH_STORE = frozenset({"reasons", "memos", "outcomes", "holds", "notes", "limits"})
"""The capabilities for which a store helps. Limits are then kept by permits, which are notes in the store."""


def can_have_store(declared: Capabilities) -> bool:
    """Whether a backend lacks something that a store would add."""
    return not all(declared.claim(power) for power in NEEDED) and declared.shared is True
