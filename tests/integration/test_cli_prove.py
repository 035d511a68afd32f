"""``multiq backends`` and ``multiq conformance``."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from shell import Shell

from multiq.capabilities import MEASURES, POWERS
from multiq.memory import MemoryBackend

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path(__file__).parents[2] / "docs" / "backends.md"


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path)
    yield shell
    shell.app.close()


def test_backends_lists_what_is_installed_with_every_capability(shell: Shell) -> None:
    out = shell("backends").out
    head, *rows = (line.split() for line in out.split("\n\n")[0].splitlines())
    assert {"memory", "sqlite"} <= set(head)
    assert [row[0] for row in rows] == [*MEASURES, *POWERS]
    column = head.index("memory")
    assert {row[0]: row[column] for row in rows if row[0] in {"shared", "give_back"}} == {
        "shared": "no",
        "give_back": "yes",
    }


def test_every_gap_has_its_reason(shell: Shell) -> None:
    out = shell("backends", "memory").out
    for power, gap in MemoryBackend.declared.gaps():
        assert f"memory: {power}" in out
        assert f"{gap.kind}: {gap.reason}" in out


def test_a_named_backend_shows_the_options_of_its_urls(shell: Shell) -> None:
    assert "sqlite://...?OPTION" in shell("backends", "sqlite").out
    assert "(takes none)" in shell("backends", "memory").out


def test_backends_as_json_has_the_documented_keys(shell: Shell) -> None:
    backends = {backend["name"]: backend for backend in shell("backends", "--json").json["backends"]}
    sqlite = backends["sqlite"]
    assert set(sqlite) == {"name", "error", "measures", "powers", "options"}
    assert set(sqlite["powers"]) == set(POWERS)
    assert sqlite["powers"]["shared"] == {"has": True, "gap": None, "reason": None}
    assert sqlite["powers"]["disconnect_ends_lease"]["gap"] == "never"
    assert set(sqlite["options"]["timeout"]) == {"default", "meaning"}
    assert backends["memory"]["measures"]["max_body"] is None


def test_a_driver_that_cannot_be_imported_is_shown_with_its_error(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = shell.folder / "broken-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[multiq.backends]\nbroken = no_such_client.backend:Backend\n")
    done = shell.run("backends", PYTHONPATH=str(shell.folder))
    assert done.code == 0
    assert "broken" in done.out
    assert "cannot be used: the broken backend cannot be imported" in done.out
    (broken,) = [
        backend
        for backend in shell.run("backends", "--json", PYTHONPATH=str(shell.folder)).json["backends"]
        if backend["name"] == "broken"
    ]
    assert broken["powers"] is None
    assert "no_such_client" in broken["error"]


def test_a_backend_that_is_not_installed_is_an_error(shell: Shell) -> None:
    done = shell("backends", "kafka")
    assert (done.code, done.out) == (2, "")
    assert "no backend 'kafka' is installed" in done.err


def test_the_page_about_backends_is_up_to_date(shell: Shell) -> None:
    match = re.search(r"<!-- made by: multiq (.*?) -->\n\n(.*?)\n\n<!-- end -->", PAGE.read_text("utf-8"), re.DOTALL)
    assert match is not None
    assert match[2] + "\n" == shell(*match[1].split()).out, f"run `multiq {match[1]}` and paste its output"


def test_the_page_about_backends_has_all_of_our_own() -> None:

    project = tomllib.loads((PAGE.parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    names = project["entry-points"]["multiq.backends"]
    assert [name for name in names if f"### {name}\n" not in PAGE.read_text("utf-8")] == []
