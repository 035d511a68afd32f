"""Reads a driver's ``.sql`` files. Each file has a statement, and comments that explain it."""

from __future__ import annotations

import pkgutil


def statement(package: str, name: str) -> str:
    """Return the statement in ``sql/<name>.sql`` of *package* (pass ``__package__``), without comments and semicolon.

    This function reads the file at each call. So drivers should cache the result, for example with ``functools.cache``.
    """
    return "\n".join(file_lines(package, name)).strip().removesuffix(";")


def file_lines(package: str, name: str) -> list[str]:
    """Return the lines of ``sql/<name>.sql`` without comments and empty lines, for a file with several statements."""
    data = pkgutil.get_data(package, f"sql/{name}.sql")
    if data is None:  # pragma: no cover - only a loader that cannot read data returns None
        raise FileNotFoundError(f"sql/{name}.sql of {package}")
    return code_lines(data.decode())


def code_lines(text: str) -> list[str]:
    """Return the lines of *text* that are neither empty nor a comment. A comment must be a whole line."""
    return [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("--")]
