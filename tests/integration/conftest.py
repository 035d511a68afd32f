"""What the tests of several parts share: a store on each backend, and a command line on one of SQLite."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from shell import Shell
from stores import NAMES, STORES
from worker_app import app

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(params=NAMES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty store on each backend, and the test app's producer side on it."""
    with STORES[request.param](tmp_path) as url:
        app.connect(url)
        yield url
        app.close()


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    """``multiq`` in a folder of its own, which is the current one, on a SQLite file there."""
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path)
    yield shell
    shell.app.close()
