"""What ``import multiq`` costs a program that only enqueues: no drivers, no client libraries, no worker."""

from __future__ import annotations

import subprocess
import sys

import pytest

import multiq

# modules that a producer must not import
HEAVY = [
    "multiq.worker", "multiq.cli", "multiq.backend.memory", "multiq.logging", "multiq.conformance", "multiq.bench",
    "multiq_sqlite", "sqlite3", "redis", "greenstalk", "pymysql",
    "click", "rich", "stevedore", "importlib.metadata", "asyncio", "concurrent.futures", "multiprocessing",
    "subprocess", "ssl", "hypothesis", "pytest",
]  # fmt: skip


def modules_after(code: str) -> set[str]:
    """Return the modules that a new interpreter has loaded after it has run this code."""
    code += "; import sys; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    return modules_after("import multiq")


@pytest.mark.parametrize("name", HEAVY)
def test_import_multiq_leaves_out(loaded: set[str], name: str) -> None:
    assert "multiq.app" in loaded  # the probe works
    assert name not in loaded


def test_an_app_with_tasks_and_a_url_still_loads_no_driver() -> None:
    loaded = modules_after("import multiq; app = multiq.App('sqlite:///x.db'); app.task(len)")
    assert "multiq.app" in loaded
    assert not loaded & {"multiq_sqlite", "sqlite3", "stevedore", "multiq.worker"}


def test_the_memory_backend_imports_no_other_driver() -> None:
    loaded = modules_after("import multiq; multiq.App('memory://').queue('q').enqueue(1)")
    assert "multiq.backend.memory" in loaded
    assert not loaded & {"multiq_sqlite", "sqlite3", "redis", "pymysql", "greenstalk", "asyncio", "multiq.worker"}


def test_the_worker_is_imported_when_its_name_is_used() -> None:
    loaded = modules_after("import multiq; multiq.Worker")
    assert "multiq.worker.worker" in loaded
    assert "click" not in loaded


@pytest.mark.parametrize("name", multiq.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(multiq, name) is not None


def test_an_unknown_name_is_an_attribute_error_like_any_other() -> None:
    with pytest.raises(AttributeError, match="module 'multiq' has no attribute 'Wroker'"):
        _ = multiq.Wroker
