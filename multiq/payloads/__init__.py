"""Payloads: signs, encrypts and compresses the bytes of jobs, outcomes and memos before they are stored, and reverses
this when they are read."""

from .config import Payloads
from .keys import Key

__all__ = ["Key", "Payloads"]
