"""Imported first by every process of a soak that has a bug planted: plants it."""

from __future__ import annotations

from soak import mutants

mutants.apply()
