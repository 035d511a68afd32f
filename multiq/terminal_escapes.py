"""Escapes characters that a terminal does not print, such as colour codes in the data of a queue."""

from __future__ import annotations


def safe(text: str, *, keep: str = "") -> str:
    """Escape the characters in *text* that a terminal does not print, such as colour codes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()
