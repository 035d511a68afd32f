"""An ``id()`` is given to another object once its own is gone: nothing is known by it."""

from __future__ import annotations

import ast
from pathlib import Path

import multiq
import multiq_redis


def test_nothing_is_known_by_an_address_in_memory() -> None:
    core, drivers = Path(multiq.__file__).parent, Path(multiq_redis.__file__).parents[1]
    files = [*core.rglob("*.py"), *drivers.rglob("*.py")]
    assert len(files) > 100
    calls = [
        f"{file.name}:{node.lineno}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "id"
    ]
    assert calls == []
