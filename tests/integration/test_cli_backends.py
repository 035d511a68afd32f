"""``multiq backends`` and ``multiq conformance``."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from multiq.backend.capabilities import MEASURES, POWERS
from multiq.backend.memory import MemoryBackend

if TYPE_CHECKING:
    from shell import Shell

PAGE = Path(__file__).parents[2] / "docs" / "backends.md"


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
    assert set(sqlite) == {"name", "error", "measures", "powers", "limits_kept_by", "options"}
    assert set(sqlite["powers"]) == set(POWERS)
    assert sqlite["powers"]["shared"] == {"has": True, "gap": None, "reason": None}
    assert sqlite["powers"]["disconnect_ends_lease"]["gap"] == "never"
    assert set(sqlite["options"]["timeout"]) == {"default", "meaning"}
    assert backends["memory"]["measures"]["max_body"] is None


@pytest.mark.long
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


# --- conformance -----------------------------------------------------------------------------------------

BROKEN = """
import msgspec
from multiq.backend.memory import MemoryBackend

class Broken(MemoryBackend):
    declared = msgspec.structs.replace(MemoryBackend.declared, backend="broken")

    def queues(self):
        return []
"""


@pytest.fixture
def with_broken_driver(shell: Shell) -> str:
    """A folder for PYTHONPATH with a driver that forgets its queues, at ``broken://``."""
    folder = shell.folder / "site"
    info = folder / "broken-1.dist-info"
    info.mkdir(parents=True)
    (folder / "broken_driver.py").write_text(BROKEN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[multiq.backends]\nbroken = broken_driver:Broken\n")
    return str(folder)


@pytest.mark.long
def test_conformance_prints_the_promises_that_are_kept(shell: Shell) -> None:
    done = shell.run("conformance", "memory://", "-k", "9.4,8.4")
    assert done.code == 0
    verdicts = dict(re.findall(r"^ *([\d.]+)  .*?  +(kept|refused|broken)", done.out, re.MULTILINE))
    assert {"9.4", "8.4"} <= set(verdicts)
    assert set(verdicts.values()) == {"kept"}
    assert "0 broken" in done.out.splitlines()[-1]
    assert "only the whole suite" in done.err


@pytest.mark.long
def test_conformance_leaves_nothing_behind(shell: Shell) -> None:
    shell.app.queue("mail").enqueue("mine")
    before = shell.everything()
    files = set(shell.folder.rglob("*"))
    assert shell.run("conformance", shell.url, "-k", "9.4").code == 0
    assert shell.everything() == before
    assert set(shell.folder.rglob("*")) == files


@pytest.mark.long
def test_conformance_names_what_is_refused_and_why(shell: Shell) -> None:
    done = shell.run("conformance", "memory://", "-k", "11.7")
    assert "never: the jobs end with the process" in done.out


HARNESS = """
from multiq.conformance import UrlHarness
from multiq.conformance.planted import PlantedBug
from multiq.conformance.memory_server import WiredBackend

wired = PlantedBug("wired", "nothing wrong", "", WiredBackend).harness()

class Mine(UrlHarness):
    def proxied(self):
        return self.wired.proxied()

    def open(self):
        return self.wired.open()

    def __init__(self, url):
        super().__init__(url)
        self.wired = wired()
"""


@pytest.mark.long
def test_a_promise_without_a_hook_is_not_tried_and_not_broken(shell: Shell) -> None:
    done = shell.run("conformance", "memory://", "-k", "a_pause_and_a_resume_whose")
    assert done.code == 0
    assert "there is no proxy between the backend and its server" in " ".join(done.out.split())
    assert "1 not tried" in done.out.splitlines()[-1]
    # the harness in this file has the hook
    (shell.folder / "mine.py").write_text(HARNESS)
    done = shell.run("conformance", "memory://", "-k", "a_pause_and_a_resume_whose", "--harness", "mine:Mine")
    assert (done.code, "1 kept" in done.out, "not tried" in done.out.splitlines()[-1]) == (0, True, False), done.out


def test_a_broken_promise_ends_with_6_and_is_shown(shell: Shell, with_broken_driver: str) -> None:
    done = shell.run("conformance", "broken://", "-k", "9.4", PYTHONPATH=with_broken_driver)
    assert done.code == 6
    assert re.search(r"^ *9\.4 .* broken ", done.out, re.MULTILINE)
    assert re.search(r"^broken \(9\.4.*\) after [\d.]+ s: Queues", done.out, re.MULTILINE)
    assert "Traceback" not in done.err


@pytest.mark.long
def test_conformance_as_json_and_as_markdown(shell: Shell, with_broken_driver: str) -> None:
    done = shell.run("conformance", "broken://", "-k", "9.4", "--json", PYTHONPATH=with_broken_driver)
    assert done.code == 6
    assert (done.json["backend"], done.json["ok"], done.json["is_whole"]) == ("broken", False, False)
    assert {paragraph["number"]: paragraph["verdict"] for paragraph in done.json["paragraphs"]}["9.4"] == "broken"
    markdown = shell.run("conformance", "memory://", "-k", "9.4", "--markdown")
    assert markdown.code == 0
    assert markdown.out.startswith("| paragraph | promise | verdict | tests |\n")


@pytest.mark.long
def test_a_configured_connection_can_be_proved_by_its_name(shell: Shell) -> None:
    (shell.folder / "multiq.toml").write_text('[connections]\nspare = "memory://"')
    assert shell.run("conformance", "spare", "-k", "10.3").code == 0


@pytest.mark.long
@pytest.mark.one_row
@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["memory://", "-k", "zebra"], 2, "matches no test"),
        (["memory://", "--walks", "-1"], 2, "walks must be 0 or more, got -1"),
        (["nowhere"], 2, "neither a URL"),
        (["kafka://x"], 2, "no backend 'kafka' is installed"),
        (["sqlite:///no/such/folder/x.db"], 2, "no/such/folder"),
        (["memory://", "--json", "--markdown"], 2, "choose one"),
        (["memory://", "--harness", "nowhere:Mine"], 2, "must be MODULE:CLASS, got 'nowhere:Mine'"),
        (
            ["memory://", "--harness", "multiq.backend.memory:MemoryBackend"],
            2,
            "must name a subclass of multiq.conformance",
        ),
        ([], 2, "missing argument 'URL|NAME'"),
    ],
)
def test_a_backend_that_cannot_be_tested_is_reported_once(
    shell: Shell, arguments: list[str], code: int, says: str
) -> None:
    done = shell.run("conformance", *arguments)
    assert (done.code, done.out) == (code, "")
    message = done.err if "--json" not in arguments else done.error["message"]
    assert says in message
    assert len(message.splitlines()) <= 3


def test_a_missing_extra_is_reported_with_the_command_that_installs_it(shell: Shell) -> None:
    (shell.folder / "site").mkdir()
    (shell.folder / "site" / "pytest.py").write_text("raise ModuleNotFoundError('gone', name='pytest')")
    done = shell.run("conformance", "memory://", PYTHONPATH=str(shell.folder / "site"))
    assert (done.code, done.out) == (2, "")
    assert "pip install 'multiq[conformance]'" in done.err
    assert "Traceback" not in done.err
