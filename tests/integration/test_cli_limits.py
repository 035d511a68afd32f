"""``multiq limits``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from shell import Shell

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path)


def test_a_limit_is_set_and_listed_as_json(shell: Shell) -> None:
    done = shell.run("limits", "set", "mail", "smtp", "--rate", "5", "--per", "1m", "-c", "memory://", "--json")
    assert done.code == 0
    assert done.json == {
        "queue": "mail", "name": "smtp", "slots": None, "rate": 5.0, "per": 60.0, "burst": 1, "fair": False,
        "pinned": True, "keys": 0, "running": 0, "parked": 0, "top": [],
    }  # fmt: skip
    assert shell.run("limits", "list", "-c", "memory://", "--json").json == {"queues": {}}
    removed = shell.run("limits", "remove", "mail", "smtp", "-c", "memory://", "--json")
    assert (removed.code, removed.json) == (0, {"queue": "mail", "removed": None})


def test_a_limit_without_numbers_is_refused(shell: Shell) -> None:
    done = shell.run("limits", "set", "mail", "smtp", "--slots", "none", "-c", "memory://")
    assert done.code == 2
    assert "must have slots, a rate or fair" in done.err
    done = shell.run("limits", "set", "mail", "smtp", "--slots", "many", "-c", "memory://")
    assert done.code == 2
    assert "must be a number, or none, got 'many'" in done.err


def test_a_backend_without_limits_is_refused_with_its_reason(shell: Shell) -> None:
    done = shell.run("limits", "set", "mail", "smtp", "--slots", "1", "-c", "beanstalk://127.0.0.1:1")
    assert done.code != 0
    assert "limits" in done.err
    assert "memory" in done.err


@pytest.mark.long
def test_a_limit_of_the_whole_app_is_set_listed_and_removed(shell: Shell) -> None:
    url = "sqlite:///jobs.db"
    done = shell.run("limits", "set", "@app", "provider", "--slots", "3", "-c", url)
    assert (done.code, done.out) == (0, "limit provider of the app is 3 at a time\n")
    shell.run("limits", "set", "@app", "provider", "--rate", "5", "-c", url)
    listed = shell.run("limits", "list", "-c", url, "--json").json["queues"]
    assert [(state["name"], state["slots"], state["rate"], state["pinned"]) for state in listed["@app"]] == [
        ("provider", 3, 5.0, True)
    ]
    assert "@app" in shell.run("limits", "list", "@app", "-c", url).out
    # a name with a typo is told apart from a limit that was removed
    assert shell.run("limits", "remove", "@app", "provder", "-c", url).out == "the app has no limit provder\n"
    assert shell.run("limits", "remove", "@app", "provider", "-c", url).out == "removed limit provider of the app\n"
    assert shell.run("limits", "list", "@app", "-c", url).out == "the app has no limits\n"
    done = shell.run("limits", "set", "@app", "provider", "--fair", "-c", url)
    assert done.code == 5
    assert "fair" in done.err
    assert shell.run("limits", "set", "@other", "provider", "--slots", "1", "-c", url).code == 2


def test_a_limit_of_a_missing_file_is_not_said_to_be_missing(shell: Shell, tmp_path: Path) -> None:
    done = shell.run("limits", "remove", "mail", "smtp", "-c", "sqlite:///elsewhere.db")
    assert done.code != 0
    assert "elsewhere.db" in done.err
    assert not (tmp_path / "elsewhere.db").exists()
