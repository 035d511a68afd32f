"""Django's own tests of tasks, on multiq's backend, in an environment with the newest Django."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pythons import python_of_django_6
from stores import STORES

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]

#: the tests that do not apply, with the capability or the rule that refuses them
REFUSED = {
    "ImmediateBackendTestCase.test_cannot_get_result": "the capability outcomes: results can be got",
    "ImmediateBackendTestCase.test_cannot_refresh_result": "the capability outcomes: results can be refreshed",
    "ImmediateBackendTestCase.test_cannot_pass_run_after": "delays, which every backend has: run_after is supported",
    "ImmediateBackendTestCase.test_throws_keyboard_interrupt": "a worker runs the task, so the enqueue raises nothing",
    "ImmediateBackendTransactionTestCase.test_doesnt_wait_until_transaction_commit_by_default": "decision 67: it waits",
    "DummyBackendTransactionTestCase.test_doesnt_wait_until_transaction_commit_by_default": "decision 67: it waits",
    "DummyBackendTestCase.test_refresh_result": "it changes the list of DummyBackend, where multiq has a store",
    "DummyBackendTestCase.test_refresh_result_async": "it changes the list of DummyBackend, where multiq has a store",
}

_SETTINGS = """
SECRET_KEY = "only for tests"
USE_TZ = True
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
INSTALLED_APPS = ["multiq.contrib.django", "tasks"]
"""

_RESULT = re.compile(r"^(?:ERROR|FAIL): \w+ \(tasks\.\w+\.(\w+\.\w+)\)", re.MULTILINE)


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with an environment, and with Django's tests of tasks, in which multiq replaces Django's backends."""
    folder = tmp_path_factory.mktemp("suite")
    subprocess.run([python_of_django_6(), "-m", "venv", folder / "venv"], check=True)
    pip: list[Path | str] = [folder / "venv/bin/python", "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "install", f"multiq[redis] @ file://{ROOT}", "django>=6.0"], check=True)
    code = "import django; print(django.__version__)"
    version = subprocess.check_output([folder / "venv/bin/python", "-c", code], text=True).strip()
    source = [*pip, "download", "--no-deps", "--no-binary", "django", "-d", folder, f"django=={version}"]
    subprocess.run(source, check=True)
    with tarfile.open(folder / f"django-{version}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    shutil.copytree(folder / f"django-{version}/tests/tasks", folder / "tasks")
    for path in (folder / "tasks").glob("*.py"):
        text = path.read_text("utf-8")
        for name in ("Dummy", "Immediate"):
            module = f"django.tasks.backends.{name.lower()}"
            text = text.replace(f"{module}.{name}Backend", f"django_suite_backends.{name}")
            text = text.replace(f"from {module} import", f"from django_suite_backends import {name} as")
        path.write_text(text, "utf-8")
    shutil.copy(Path(__file__).with_name("django_suite_backends.py"), folder)
    (folder / "suite_settings.py").write_text(_SETTINGS)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("store", [pytest.param("sqlite", marks=pytest.mark.exhaustive), "redis"])
def test_django_s_own_tests_pass_or_are_refused_with_a_reason(suite: Path, store: str, tmp_path: Path) -> None:
    # given Django's tests of its backends for tests, and of tasks, with multiq in place of the backends
    for name in ("dummy", "immediate"):
        assert "django_suite_backends" in (suite / f"tasks/test_{name}_backend.py").read_text()

    # when they run on a store
    with STORES[store](tmp_path) as url:
        mine = {name: value for name, value in os.environ.items() if not name.startswith(("MULTIQ_", "PYTHON"))}
        done = subprocess.run(
            [suite / "venv/bin/python", "-m", "django", "test", "tasks"],
            cwd=suite,
            env={**mine, "PYTHONPATH": ".", "DJANGO_SETTINGS_MODULE": "suite_settings", "DJANGO_SUITE_URL": url},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    # then exactly the tests fail that do not apply
    found = re.search(r"^Ran (\d+) tests", done.stderr, re.MULTILINE)
    assert found is not None, done.stderr
    assert int(found[1]) > 80
    assert set(_RESULT.findall(done.stderr)) == set(REFUSED), done.stderr
