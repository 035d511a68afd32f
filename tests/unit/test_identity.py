"""No code identifies an object by its ``id()``, because a later object can have the same ``id()``."""

from __future__ import annotations

import ast
from pathlib import Path

import multiq
import multiq_redis


def test_no_code_identifies_an_object_by_its_id() -> None:
    core, drivers = Path(multiq.__file__).parent, Path(multiq_redis.__file__).parents[1]
    files = [*core.rglob("*.py"), *drivers.rglob("*.py")]
    assert len(files) > 100
    texts = {file: text for file in files if "id(" in (text := file.read_text())}
    calls = [
        f"{file.name}:{node.lineno}"
        for file, text in texts.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "id"
    ]
    assert calls == []
