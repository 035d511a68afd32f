"""Plant a bug: every process of a soak with a mutant imports this module first."""

from __future__ import annotations

from soak import mutants

mutants.apply()
