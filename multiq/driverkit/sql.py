"""Reading a driver's ``.sql`` files, each with a comment at its head that explains the statement."""

from __future__ import annotations

import pkgutil


def statement(package: str, name: str) -> str:
    """The statement in ``sql/<name>.sql`` of *package* (pass ``__package__``), without comments and semicolon.

    Reads the file at each call, so drivers keep the result, with ``functools.cache``.
    """
    return "\n".join(file_lines(package, name)).strip().removesuffix(";")


def file_lines(package: str, name: str) -> list[str]:
    """The lines of ``sql/<name>.sql`` without comments and empty lines, for a file that holds several statements."""
    data = pkgutil.get_data(package, f"sql/{name}.sql")
    if data is None:  # pragma: no cover - only a loader that cannot read data returns None
        raise FileNotFoundError(f"sql/{name}.sql of {package}")
    return code_lines(data.decode())


def code_lines(text: str) -> list[str]:
    """The lines of *text* that are neither empty nor a comment. Only a whole line can be a comment."""
    return [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("--")]
